"""The committed entries of a folder: which there are, what their records say, and how one is opened."""

from __future__ import annotations

import mmap
import os
import re
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from typing import Any

import xxhash

from verl_rollout_skip.errors import CorruptEntryError, StoreError
from verl_rollout_skip.key import RolloutKey
from verl_rollout_skip.store import commit, names
from verl_rollout_skip.store.reader.entry import EntryReader
from verl_rollout_skip.store.reader.part import PartReader, damaged
from verl_rollout_skip.store.record import EntryRecord
from verl_rollout_skip.store.storage import FileInfo, Storage, open_storage
from verl_rollout_skip.store.storage.local import LocalStorage

# Only an entry whose writer died before it named the record is read whole for its record.
_READ_LIMIT = 16 << 30
_STEP = re.compile(r"(?:(?P<folder>.+)/)?(?P<step>step_\d{6,})(?:/(?P<batch>gen_\d{3,})\.(?:parquet|json))?")

Stamp = tuple[tuple[str, int, float], ...]
"""The files of an entry with their sizes and times: another stamp means that the entry was replaced."""


@dataclass(frozen=True)
class Unreadable:
    """A committed entry whose record cannot be read, and why."""

    key: RolloutKey
    error: str


@dataclass(frozen=True)
class StoreReader:
    """The entries of one folder. Iterating gives the committed keys in order."""

    storage: Storage

    @classmethod
    def at(cls, path: str) -> StoreReader:
        """The entries at a path or URL."""
        return cls(open_storage(path))

    def keys(self) -> list[RolloutKey]:
        """The committed keys in order."""
        return [key for step, folder in self._steps() for key in _keys(step, self.storage.names(folder))]

    def __iter__(self) -> Iterator[RolloutKey]:
        return iter(self.keys())

    def __contains__(self, key: object) -> bool:
        if not isinstance(key, RolloutKey):
            return False
        return self.storage.info(names.folder_name(key), names.data_name(key)) is not None

    def has_steps(self) -> bool:
        """Whether there are folders of steps, whatever they hold."""
        return any(names.parse_folder(folder) is not None for folder in self.storage.folders())

    def record(self, key: RolloutKey) -> EntryRecord:
        """The record of one entry; its data is not opened unless its writer died before the last step."""
        return commit.read_record(self.storage, key, _READ_LIMIT)

    def records(self, wanted: Callable[[RolloutKey], bool] = lambda key: True) -> Iterator[EntryRecord | Unreadable]:
        """The records of the wanted keys in order; each folder is listed once."""
        for key, files in self._entries(wanted):
            try:
                yield commit.read_record(self.storage, key, _READ_LIMIT, files)
            except (StoreError, OSError) as error:
                yield Unreadable(key, str(error))

    def stamps(self, wanted: Callable[[RolloutKey], bool] = lambda key: True) -> dict[RolloutKey, Stamp]:
        """A stamp of each wanted entry, to notice that one is new or was replaced."""
        found = {}
        for key, files in self._entries(wanted):
            own = [files[name] for name in (names.data_name(key), names.record_name(key)) if name in files]
            found[key] = tuple((file.name, file.size, file.changed) for file in own)
        return found

    def entry(self, key: RolloutKey, check_digest: bool = False) -> EntryReader:
        """Open an entry. On a local disk only what is asked for is read, and each page is checked by its checksum;
        ``check_digest`` also compares all its bytes with the digest, as is always done with an object store.
        """
        where = self.storage.where(names.folder_name(key), names.data_name(key))
        if check_digest and isinstance(self.storage, LocalStorage):
            committed = commit.load(self.storage, key, _READ_LIMIT)
            record, data = committed.record, committed.data
        else:
            record = self.record(key)
            with damaged(key, where):
                data = _read(self.storage, record)
        return EntryReader(record, [PartReader(data, key, record.rows, where)])

    def _steps(self) -> list[tuple[int, str]]:
        steps = ((names.parse_folder(folder), folder) for folder in self.storage.folders())
        return sorted((step, folder) for step, folder in steps if step is not None)

    def _entries(self, wanted: Callable[[RolloutKey], bool]) -> Iterator[tuple[RolloutKey, dict[str, FileInfo]]]:
        """The wanted keys, each with the files of its step by name."""
        for step, folder in self._steps():
            files = {file.name: file for file in self.storage.files(folder)}
            for key in filter(wanted, _keys(step, files)):
                yield key, files


def split_path(path: str) -> tuple[str, int | None, int | None]:
    """The folder of entries that a path lies in, and the step and generation batch that it names; None for those that
    it does not name. A path that is not one of a step is the folder itself."""
    match = _STEP.fullmatch(path.rstrip("/"))
    step = names.parse_folder(match["step"]) if match else None
    if match is None or step is None:
        return path, None, None
    return match["folder"] or ".", step, names.parse_data(f"{match['batch']}.parquet") if match["batch"] else None


def _keys(step: int, files: Iterable[str]) -> list[RolloutKey]:
    numbers = (names.parse_data(name) for name in files)
    return [RolloutKey(step, number) for number in sorted(number for number in numbers if number is not None)]


def _read(storage: Storage, record: EntryRecord) -> Any:
    """The bytes of an entry: mapped from a local disk, or fetched and compared with their digest."""
    folder, name = names.folder_name(record.key), names.data_name(record.key)
    if not isinstance(storage, LocalStorage):
        data = storage.read(folder, name, max(record.bytes, 1))
        digest = xxhash.xxh3_128(data).hexdigest()
        if digest != record.digest:
            raise CorruptEntryError(f"It has digest {digest} and its record says {record.digest}.")
        return data
    storage.info(folder, name)  # refuses links
    fd = os.open(storage.where(folder, name), os.O_RDONLY | os.O_NOFOLLOW | os.O_CLOEXEC)
    try:
        size = os.fstat(fd).st_size
        if size != record.bytes:
            raise CorruptEntryError(f"It has {size} bytes and its record says {record.bytes}.")
        return mmap.mmap(fd, 0, access=mmap.ACCESS_READ)
    finally:
        os.close(fd)
