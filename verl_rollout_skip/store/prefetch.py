"""Loads one entry in advance, while the current step trains or while the workers of a training start."""

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

_EXIT_TIMEOUT_SECONDS = 10.0
# `Thread.start` waits until the new thread runs, and continues when that thread releases the GIL: immediately if the
# thread sleeps first, but only after 5 ms if it runs Python code.
_YIELD_SECONDS = 0.001


class Prefetcher(Generic[Loaded]):
    """Holds at most one entry. Starting to load another one drops it."""

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
        """Wait for the entry, return it and release it. Returns None if it is not being loaded or failed to load."""
        with self._lock:
            current, self._current = self._current, None
        if current is None or current[0] != key:
            return None
        error = current[1].exception()
        if error is not None:
            # The caller then loads the entry, and gets the same error or an entry that was recorded in the meantime.
            logger.debug("%s could not be prefetched: %s", key, error)
            return None
        return current[1].result()

    def drop(self, key: RolloutKey | None = None) -> None:
        """Release the entry. With a ``key``, release it only if it is the entry of that key."""
        with self._lock:
            if self._current is not None and key in (None, self._current[0]):
                self._current = None


_running: weakref.WeakSet[Future[Any]] = weakref.WeakSet()


@atexit.register
def _wait_at_exit() -> None:
    """Wait for running loads: a thread that decodes while the interpreter shuts down can crash the process."""
    wait(list(_running), timeout=_EXIT_TIMEOUT_SECONDS)
