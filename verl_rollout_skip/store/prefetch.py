"""Loading one entry ahead while the current step trains."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Generic, TypeVar

from verl_rollout_skip.key import RolloutKey

Loaded = TypeVar("Loaded")


class Prefetcher(Generic[Loaded]):
    """Holds at most one entry: asking for another one drops it."""

    def __init__(self, load: Callable[[RolloutKey], Loaded]) -> None:
        self._load = load
        self._lock = threading.Lock()
        self._current: _Ahead[Loaded] | None = None

    def start(self, key: RolloutKey) -> None:
        """Begin to load an entry; nothing happens if it is already on its way."""
        with self._lock:
            if self._current is None or self._current.key != key:
                self._current = _Ahead(key, self._load)

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
    def __init__(self, key: RolloutKey, load: Callable[[RolloutKey], Loaded]) -> None:
        self.key = key
        self._loaded: Loaded | None = None
        self._thread = threading.Thread(target=self._run, args=(load,), name="rollout-skip-prefetch", daemon=True)
        self._thread.start()

    def _run(self, load: Callable[[RolloutKey], Loaded]) -> None:
        try:
            self._loaded = load(self.key)
        except Exception:
            # Whoever asks for the entry loads it again and gets the error then, or the entry if it has come since.
            self._loaded = None

    def result(self) -> Loaded | None:
        self._thread.join()
        return self._loaded
