"""Shows this package's log messages in a training, with a prefix that tells them apart."""

from __future__ import annotations

import logging

PACKAGE = "verl_rollout_skip"


def show_messages() -> None:
    """Show messages of level INFO and above with a prefix, unless the user has configured the logger."""
    logger = logging.getLogger(PACKAGE)
    if logger.level == logging.NOTSET:
        logger.setLevel(logging.INFO)
    if not logger.handlers:
        handler = logging.StreamHandler()
        handler.setFormatter(logging.Formatter("[rollout_skip] %(levelname)s: %(message)s"))
        logger.addHandler(handler)
        logger.propagate = False  # verl's root handler would show each message again, without the prefix
