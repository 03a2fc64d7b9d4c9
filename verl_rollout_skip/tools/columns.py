"""Reads the training columns of one update, without torch, and what was recorded for the trajectories of its rows."""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np

from verl_rollout_skip.errors import CorruptEntryError, RolloutSkipError, StoreError
from verl_rollout_skip.key import RolloutKey
from verl_rollout_skip.runs.columns import ACTOR, GEN_BATCH, ROLE, ROW
from verl_rollout_skip.store.reader import EntryReader, StoreReader

Place = tuple[int, int]
"""The generation batch of a trajectory and its row in the recorded rollout; (-1, -1) if it is not a recorded one."""
NOWHERE: Place = (-1, -1)
MASK = "response_mask"


@dataclass
class Update:
    """The tensors of one update that have one value per token, by name: one array per row."""

    key: RolloutKey
    places: list[Place]
    entry: EntryReader
    _rows: dict[str, list[np.ndarray] | None] = field(default_factory=dict)

    @property
    def names(self) -> list[str]:
        """The tensors that have one value per token."""
        names = [name for name in self.entry.tensors() if name not in (GEN_BATCH, ROW)]
        return [name for name in names if self.rows(name) is not None]

    def rows(self, name: str) -> list[np.ndarray] | None:
        """A tensor, row by row; None if the update does not have it, or if it does not have one value per token."""
        if name not in self._rows:
            found = self.entry.tokens(name)
            if found is not None and len(found) != len(self.places):
                raise CorruptEntryError(f"The columns of {self.key} have {len(found)} rows of {name!r}.")
            self._rows[name] = found
        return self._rows[name]


def read_update(entries: StoreReader, key: RolloutKey) -> Update:
    """Open the columns of an update."""
    entry = entries.entry(key)
    gen_batches, rows = entry.numbers(GEN_BATCH), entry.numbers(ROW)
    if gen_batches is None or rows is None:
        raise StoreError(f"{entries.storage.where()} does not contain training columns, but rollouts.")
    return Update(key, list(zip(gen_batches.tolist(), rows.tolist(), strict=True)), entry)


def actor_updates(entries: StoreReader) -> list[RolloutKey]:
    """The updates of the actor, in order. Unreadable ones are included, so that reading them reports why."""
    keys = []
    for key in entries:
        try:
            role = entries.record(key).info.get(ROLE, ACTOR)
        except (RolloutSkipError, OSError):
            role = ACTOR
        if role == ACTOR:
            keys.append(key)
    return keys


class RecordedRows:
    """The recorded trajectories of one step: what its entries contain for the rows of an update."""

    def __init__(self, entries: StoreReader, step: int) -> None:
        self._entries, self._step = entries, step
        self._open: dict[int, EntryReader | None] = {}

    def tokens(self, name: str, place: Place) -> np.ndarray | None:
        """A tensor of one trajectory, without padding; None if it is not recorded, or no longer."""
        gen_batch, row = place
        if place == NOWHERE:
            return None
        if gen_batch not in self._open:
            try:
                self._open[gen_batch] = self._entries.entry(RolloutKey(self._step, gen_batch))
            except (RolloutSkipError, OSError):
                self._open[gen_batch] = None
        entry = self._open[gen_batch]
        rows = None if entry is None else entry.tokens(name)
        return None if rows is None or row >= len(rows) else rows[row]
