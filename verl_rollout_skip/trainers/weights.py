"""``DeferredWeightSync``: sends weights to the inference engine only before it generates.

A step whose rollout is loaded needs no engine, so the weights that verl would send after each update wait until the
next generation. The engine then has exactly the same weights as without deferral.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from verl_rollout_skip.trainers.compat import check_weight_sync


class DeferredWeightSync:
    """Replaces two methods of a trainer's ``checkpoint_manager``, which wakes the engine when it sends weights.

    Create it right after verl has set up its workers: at that point, the engine is asleep.
    """

    def __init__(self, manager: Any) -> None:
        check_weight_sync(manager)
        self._update = manager.update_weights
        self._sleep = manager.sleep_replicas
        self._waiting: tuple[tuple[Any, ...], dict[str, Any]] | None = None
        self._asleep = True
        self._suspended = False
        self.syncs = 0
        self.skipped = 0
        manager.update_weights = self.defer
        manager.sleep_replicas = self.sleep

    def defer(self, *args: Any, **kwargs: Any) -> Any:
        """Replaces ``update_weights``. A later sync replaces one that is still waiting."""
        if self._suspended:
            return self._send(*args, **kwargs)
        if self._waiting is not None:
            self.skipped += 1
        self._waiting = (args, kwargs)
        return {}

    def sleep(self) -> None:
        """Replaces ``sleep_replicas``: an engine that is already asleep is left alone."""
        if not self._asleep:
            self._sleep()
            self._asleep = True

    def catch_up(self) -> None:
        """Send waiting weights. Call this before anything is generated."""
        if self._waiting is None:
            return
        args, kwargs = self._waiting
        self._send(*args, **kwargs)
        self._waiting = None

    @contextmanager
    def suspended(self) -> Iterator[None]:
        """Send waiting weights, and defer nothing inside this context. For code that generates and controls the engine
        itself."""
        self.catch_up()
        self._suspended = True
        try:
            yield
        finally:
            self._suspended = False

    def describe(self) -> str:
        """The number of weight syncs, for the summary."""
        skipped = self.skipped + (self._waiting is not None)
        return f"{self.syncs} weight syncs, {skipped} skipped"

    def _send(self, *args: Any, **kwargs: Any) -> Any:
        sent = self._update(*args, **kwargs)
        self._asleep = False
        self.syncs += 1
        return sent
