"""``PushBack``: chunks of prompts that are drawn from the dataloader before it is known whether they are needed."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

from tensordict import TensorDict


@dataclass(frozen=True)
class _Chunk:
    """A chunk that was drawn, and the state of the dataloader before it."""

    prompts: TensorDict
    state: dict[str, Any]


class PushBack:
    """Draws ahead of the training. Chunks that turn out not to be needed are put back; the next draws return them."""

    def __init__(self) -> None:
        self._waiting: deque[_Chunk] = deque()
        self._drawn: list[_Chunk] = []

    def next(self) -> TensorDict | None:
        """Take the first chunk that was put back; None if there is none."""
        return self._waiting.popleft().prompts if self._waiting else None

    def draw(self, fetch: Callable[[], TensorDict], state: Callable[[], dict[str, Any]]) -> TensorDict:
        """Draw another chunk, which can still be put back. ``state`` returns the state of the dataloader."""
        if self._waiting:
            chunk = self._waiting.popleft()
        else:
            before = state()
            chunk = _Chunk(fetch(), before)
        self._drawn.append(chunk)
        return chunk.prompts

    def put_back(self) -> int:
        """Put back every chunk that was drawn, and return the number of prompts."""
        self._waiting.extendleft(reversed(self._drawn))
        count = sum(len(chunk.prompts) for chunk in self._drawn)
        self._drawn.clear()
        return count

    def keep(self) -> list[TensorDict]:
        """Keep every chunk that was drawn, and return them."""
        kept, self._drawn = self._drawn, []
        return [chunk.prompts for chunk in kept]

    @contextmanager
    def rewound(self, dataloader: Any) -> Iterator[None]:
        """Make the dataloader report its state before the chunks that were put back. A checkpoint does not contain
        these chunks, so they have to be drawn again after a resume."""
        if not self._waiting:
            yield
            return
        state = self._waiting[0].state
        dataloader.state_dict = lambda: state
        try:
            yield
        finally:
            del dataloader.state_dict
