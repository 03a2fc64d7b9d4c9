"""Chunks of prompts that were drawn from a dataloader before it was known whether they are needed."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

from tensordict import TensorDict


@dataclass(frozen=True)
class _Chunk:
    """What was drawn, and the state of the dataloader before."""

    prompts: TensorDict
    state: dict[str, Any]


class PushBack:
    """Draws ahead of a training; what turns out not to be needed is handed out again before the dataloader is asked."""

    def __init__(self) -> None:
        self._waiting: deque[_Chunk] = deque()
        self._drawn: list[_Chunk] = []

    def next(self) -> TensorDict | None:
        """The first chunk that was put back; None if the dataloader is to be asked."""
        return self._waiting.popleft().prompts if self._waiting else None

    def draw(self, fetch: Callable[[], TensorDict], state: Callable[[], dict[str, Any]]) -> TensorDict:
        """One more chunk, which may still be put back. ``state`` tells where the dataloader stands."""
        if self._waiting:
            chunk = self._waiting.popleft()
        else:
            before = state()
            chunk = _Chunk(fetch(), before)
        self._drawn.append(chunk)
        return chunk.prompts

    def put_back(self) -> int:
        """Put back all that was drawn; returns how many prompts those were."""
        self._waiting.extendleft(reversed(self._drawn))
        count = sum(len(chunk.prompts) for chunk in self._drawn)
        self._drawn.clear()
        return count

    def keep(self) -> list[TensorDict]:
        """What was drawn is needed; returns it."""
        kept, self._drawn = self._drawn, []
        return [chunk.prompts for chunk in kept]

    @contextmanager
    def undrawn(self, dataloader: Any) -> Iterator[None]:
        """Meanwhile the dataloader says that it stands before what was put back, so that a checkpoint, which does not
        contain that, loses none of it."""
        if not self._waiting:
            yield
            return
        state = self._waiting[0].state
        dataloader.state_dict = lambda: state
        try:
            yield
        finally:
            del dataloader.state_dict
