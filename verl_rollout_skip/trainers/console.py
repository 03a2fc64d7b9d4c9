"""``show_messages``: shows this package's log messages on the console. In a separate module, so that importing it is
fast."""

from __future__ import annotations

import logging

_PACKAGE = "verl_rollout_skip"


def show_messages() -> None:
    """Show messages of level INFO and above with a prefix, unless the user has configured the logger."""
    logger = logging.getLogger(_PACKAGE)
    if logger.level == logging.NOTSET:
        logger.setLevel(logging.INFO)
    if not logger.handlers:
        handler = logging.StreamHandler()
        handler.setFormatter(logging.Formatter("[rollout_skip] %(levelname)s: %(message)s"))
        logger.addHandler(handler)
        logger.propagate = False  # verl's root handler would show each message again, without the prefix
