"""Weight syncs to the inference engine that are put off while nothing is generated.

A step whose rollout is loaded needs no engine, so the weights that verl would send after each update are sent only
before the next real generation. The engine then has exactly the weights that it would have had.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any


class DeferredWeightSync:
    """Stands between a trainer and its ``checkpoint_manager``, which wakes the engine when it sends weights.

    The engine sleeps when this begins: verl puts it to sleep at the end of ``init_workers``.
    """

    def __init__(self, manager: Any) -> None:
        self._update = manager.update_weights
        self._sleep = manager.sleep_replicas
        self._waiting: tuple[tuple[Any, ...], dict[str, Any]] | None = None
        self._asleep = True
        self._suspended = False
        self.syncs = 0
        self.held_back = 0
        manager.update_weights = self.defer
        manager.sleep_replicas = self.sleep

    def defer(self, *args: Any, **kwargs: Any) -> Any:
        """In the place of ``update_weights``. A later sync takes the place of one that is still waiting."""
        if self._suspended:
            return self._send(*args, **kwargs)
        if self._waiting is not None:
            self.held_back += 1
        self._waiting = (args, kwargs)
        return {}

    def sleep(self) -> None:
        """In the place of ``sleep_replicas``: an engine that has not been woken is left alone."""
        if not self._asleep:
            self._sleep()
            self._asleep = True

    def catch_up(self) -> None:
        """Send the weights that wait. To be called before anything is generated."""
        if self._waiting is None:
            return
        args, kwargs = self._waiting
        self._send(*args, **kwargs)
        self._waiting = None

    @contextmanager
    def suspended(self) -> Iterator[None]:
        """Send the weights that wait, and put nothing off meanwhile: for code that generates, lets the engine sleep,
        and wakes it again as it likes."""
        self.catch_up()
        self._suspended = True
        try:
            yield
        finally:
            self._suspended = False

    def describe(self) -> str:
        """For the summary at the end."""
        held_back = self.held_back + (self._waiting is not None)
        return f"{self.syncs} weight syncs, {held_back} spared"

    def _send(self, *args: Any, **kwargs: Any) -> Any:
        sent = self._update(*args, **kwargs)
        self._asleep = False
        self.syncs += 1
        return sent
