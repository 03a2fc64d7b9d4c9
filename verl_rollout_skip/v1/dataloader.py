"""Chunks of prompts that were drawn from a dataloader before it was known whether they are needed."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable

from tensordict import TensorDict


class PushBack:
    """Draws ahead of a training; what turns out not to be needed is handed out again before the dataloader is asked."""

    def __init__(self) -> None:
        self._waiting: deque[TensorDict] = deque()
        self._drawn: list[TensorDict] = []

    def next(self) -> TensorDict | None:
        """The first chunk that was put back; None if the dataloader is to be asked."""
        return self._waiting.popleft() if self._waiting else None

    def draw(self, fetch: Callable[[], TensorDict]) -> TensorDict:
        """One more chunk, which may still be put back."""
        chunk = self.next()
        self._drawn.append(fetch() if chunk is None else chunk)
        return self._drawn[-1]

    def put_back(self) -> int:
        """Put back all that was drawn; returns how many prompts those were."""
        self._waiting.extendleft(reversed(self._drawn))
        count = sum(len(chunk) for chunk in self._drawn)
        self._drawn.clear()
        return count

    def keep(self) -> list[TensorDict]:
        """What was drawn is needed; returns it."""
        kept, self._drawn = self._drawn, []
        return kept
