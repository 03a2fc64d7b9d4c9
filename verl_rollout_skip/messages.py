"""Makes what this package has to say visible in a training, and recognisable among what others say there."""

from __future__ import annotations

import logging

PACKAGE = "verl_rollout_skip"


def show_messages() -> None:
    """Show messages from INFO on with the package's name before them, unless the user has arranged it already."""
    logger = logging.getLogger(PACKAGE)
    if logger.level == logging.NOTSET:
        logger.setLevel(logging.INFO)
    if not logger.handlers:
        handler = logging.StreamHandler()
        handler.setFormatter(logging.Formatter("[rollout_skip] %(levelname)s: %(message)s"))
        logger.addHandler(handler)
        logger.propagate = False  # what verl has set up for the root logger would show it again, without a name
