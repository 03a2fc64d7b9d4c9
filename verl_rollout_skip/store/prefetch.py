"""Loads one entry in advance: while the current step trains, or while the workers of a training start."""

from __future__ import annotations

import atexit
import logging
import threading
import time
import weakref
from collections.abc import Callable
from concurrent.futures import Future, wait
from typing import Any, Generic, TypeVar

from verl_rollout_skip.key import RolloutKey
from verl_rollout_skip.store.threads import start_thread

logger = logging.getLogger(__name__)

Loaded = TypeVar("Loaded")

_EXIT_SECONDS = 10.0
# `Thread.start` waits until the new thread runs, and gets the interpreter lock back when that thread releases it:
# immediately if it sleeps first, after 5 ms if it runs Python code.
_YIELD_SECONDS = 0.001


class Prefetcher(Generic[Loaded]):
    """Keeps at most one entry. Starting to load another one drops it."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._current: tuple[RolloutKey, Future[Loaded]] | None = None

    def start(self, key: RolloutKey, load: Callable[[], Loaded]) -> None:
        """Start loading an entry, unless it is already being loaded."""

        def run() -> Loaded:
            time.sleep(_YIELD_SECONDS)
            return load()

        with self._lock:
            if self._current is None or self._current[0] != key:
                self._current = key, start_thread(run, "rollout-skip-prefetch")
                _running.add(self._current[1])

    def take(self, key: RolloutKey) -> Loaded | None:
        """Wait for the entry, return it and forget it; None if it was not started or failed."""
        with self._lock:
            current, self._current = self._current, None
        if current is None or current[0] != key:
            return None
        error = current[1].exception()
        if error is not None:
            # The caller loads the entry itself, and gets the error or an entry recorded in the meantime.
            logger.debug("%s could not be prefetched: %s", key, error)
            return None
        return current[1].result()

    def drop(self, key: RolloutKey | None = None) -> None:
        """Forget the entry; if ``key`` is given, only if it is the entry of that key."""
        with self._lock:
            if self._current is not None and key in (None, self._current[0]):
                self._current = None


_running: weakref.WeakSet[Future[Any]] = weakref.WeakSet()


@atexit.register
def _wait_at_exit() -> None:
    """Wait, because a thread that still decodes while the interpreter shuts down can crash the process."""
    wait(list(_running), timeout=_EXIT_SECONDS)
