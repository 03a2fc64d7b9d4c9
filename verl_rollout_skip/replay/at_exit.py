"""Closes a recording that is still open when the process exits."""

from __future__ import annotations

import atexit
import logging
import weakref
from typing import Protocol

logger = logging.getLogger(__name__)


class Closable(Protocol):
    is_closed: bool

    def close(self) -> None: ...


def close_at_exit(recording: Closable) -> None:
    """Register after the first dump: exit handlers run in reverse order, and ours must run before the writer's."""
    atexit.register(_close_forgotten, weakref.ref(recording))


def _close_forgotten(reference: weakref.ref[Closable]) -> None:
    recording = reference()
    if recording is None or recording.is_closed:
        return
    logger.warning(
        "the process is exiting, but RolloutSkip.close was not called: waiting for the dumps. Call it at the end of "
        "your loop, or use RolloutSkip as a context manager, because Ray ends a process without waiting"
    )
    try:
        recording.close()
    except Exception as error:
        logger.error("while waiting for the dumps: %s", error)
