"""Loading one entry ahead: while the current step trains, or while the workers of a training start."""

from __future__ import annotations

import atexit
import logging
import threading
import time
import weakref
from collections.abc import Callable
from typing import Generic, TypeVar

from verl_rollout_skip.key import RolloutKey

logger = logging.getLogger(__name__)

Loaded = TypeVar("Loaded")

_EXIT_SECONDS = 10.0
# `Thread.start` waits until the new thread runs, and gets the interpreter lock back when that lets go of it: at once if
# it sleeps first, after 5 ms if it goes on in Python.
_LET_GO_SECONDS = 0.001


class Prefetcher(Generic[Loaded]):
    """Holds at most one entry: asking for another one drops it."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._current: _Ahead[Loaded] | None = None

    def start(self, key: RolloutKey, load: Callable[[], Loaded]) -> None:
        """Begin to load an entry; nothing happens if it is already on its way."""
        with self._lock:
            if self._current is None or self._current.key != key:
                self._current = _Ahead(key, load)

    def take(self, key: RolloutKey) -> Loaded | None:
        """The entry if it was started, waiting for it if need be, and only once; None if it was not or failed."""
        with self._lock:
            ahead, self._current = self._current, None
        return ahead.result() if ahead is not None and ahead.key == key else None

    def drop(self, key: RolloutKey | None = None) -> None:
        """Forget what was loaded ahead: of one key, or whatever it is."""
        with self._lock:
            if self._current is not None and key in (None, self._current.key):
                self._current = None


class _Ahead(Generic[Loaded]):
    def __init__(self, key: RolloutKey, load: Callable[[], Loaded]) -> None:
        self.key = key
        self._loaded: Loaded | None = None
        self._thread = threading.Thread(target=self._run, args=(load,), name="rollout-skip-prefetch", daemon=True)
        _running.add(self._thread)
        self._thread.start()

    def _run(self, load: Callable[[], Loaded]) -> None:
        time.sleep(_LET_GO_SECONDS)
        try:
            self._loaded = load()
        except Exception as error:
            # Whoever asks for the entry loads it again and gets the error then, or the entry if it has come since.
            logger.debug("%s could not be loaded ahead: %s", self.key, error)

    def result(self) -> Loaded | None:
        self._thread.join()
        return self._loaded


_running: weakref.WeakSet[threading.Thread] = weakref.WeakSet()


@atexit.register
def _wait_at_exit() -> None:
    """A thread that is still decoding while the interpreter shuts down can crash the process."""
    for thread in list(_running):
        thread.join(_EXIT_SECONDS)
