"""The committed entries of a variant for those who only look: keys, records and single columns, without torch."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING

from verl_rollout_skip.config import Steps
from verl_rollout_skip.entry_columns import EntryColumns
from verl_rollout_skip.errors import StoreError
from verl_rollout_skip.key import RolloutKey
from verl_rollout_skip.store import commit, names
from verl_rollout_skip.store.record import EntryRecord
from verl_rollout_skip.store.storage import Storage
from verl_rollout_skip.store.storage.locations import open_storage

if TYPE_CHECKING:
    from verl_rollout_skip.store.store import RolloutStore

# Only an entry whose writer died before it named the record is read whole for its record.
_RECOVERY_BYTES = 1 << 40


@dataclass(frozen=True)
class Unreadable:
    """A committed entry whose record cannot be had, and why."""

    key: RolloutKey
    error: str


@dataclass(frozen=True)
class Entries:
    """The entries of one variant. A ``RolloutStore`` writes them; this reads what can be known without decoding."""

    storage: Storage

    @classmethod
    def at(cls, path: str) -> Entries:
        return cls(open_storage(path))

    @classmethod
    def of(cls, source: Entries | RolloutStore) -> Entries:
        """The entries of a store; entries stay what they are."""
        return source if isinstance(source, Entries) else cls(source._storage)

    def keys(self) -> list[RolloutKey]:
        """The committed keys in order."""
        return [key for step, folder in self._steps() for key in _keys(step, self.storage.names(folder))]

    def __iter__(self) -> Iterator[RolloutKey]:
        return iter(self.keys())

    def record(self, key: RolloutKey) -> EntryRecord:
        """The record of one entry; its Parquet file is not opened unless its writer died before the last step."""
        return commit.read_record(self.storage, key, _RECOVERY_BYTES)

    def records(self, wanted: Callable[[RolloutKey], bool] = lambda key: True) -> Iterator[EntryRecord | Unreadable]:
        """The records of the wanted keys in their order; each folder is listed once."""
        for step, folder in self._steps():
            files = {file.name: file for file in self.storage.files(folder)}
            for key in filter(wanted, _keys(step, files)):
                try:
                    yield commit.read_record(self.storage, key, _RECOVERY_BYTES, files)
                except (StoreError, OSError) as error:
                    yield Unreadable(key, str(error))

    def columns(self, key: RolloutKey) -> EntryColumns:
        """The columns of one entry."""
        return EntryColumns(self.storage, self.record(key))

    def _steps(self) -> list[tuple[int, str]]:
        steps = ((names.parse_folder(folder), folder) for folder in self.storage.folders())
        return sorted((step, folder) for step, folder in steps if step is not None)


def _keys(step: int, files: Iterable[str]) -> list[RolloutKey]:
    numbers = (names.parse_data(name) for name in files)
    return [RolloutKey(step, number) for number in sorted(number for number in numbers if number is not None)]


def describe_steps(steps: Iterable[int]) -> str:
    """Steps in ranges: ``1-3, 7``."""
    ranges: list[tuple[int, int]] = []
    for step in sorted(steps):
        if ranges and step == ranges[-1][1] + 1:
            ranges[-1] = (ranges[-1][0], step)
        else:
            ranges.append((step, step))
    return str(Steps(tuple(ranges)))
