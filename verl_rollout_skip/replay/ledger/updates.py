"""``UpdateSlice``: the rows that the update of the actor or the critic receives, as the trainers pass them on."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Any, Protocol

from verl_rollout_skip.replay.ledger.figures import FiguresOfRows

ACTOR, CRITIC = "actor", "critic"


@dataclass(frozen=True)
class UpdateSlice:
    """Consecutive rows of an update, which starts at row 0, and their tensors by name.

    ``rows`` identifies the rows: the batch itself (V0), or the keys of the trajectories in TransferQueue (V1).
    ``figures`` replaces the tensors if another process has read them.
    """

    start: int
    tensors: Mapping[str, Any]
    rows: Any
    figures: Mapping[str, FiguresOfRows] | None = None


Slices = Callable[[], Iterable[UpdateSlice]]
"""Reads the slices of an update. Called on another thread, while the update runs."""


class Sink(Protocol):
    """Receives one update on another thread: ``add`` for each slice, then ``finish``, or ``fail`` if reading fails."""

    def add(self, part: UpdateSlice) -> None: ...

    def finish(self) -> None: ...

    def fail(self, error: Exception) -> None: ...


Consumer = Callable[[int, str], Sink | None]
"""Called with the step and the role of each update; None if it is of no interest."""
