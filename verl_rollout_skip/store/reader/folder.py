"""The committed entries of a folder: lists them, reads their records, and opens entries."""

from __future__ import annotations

import mmap
import os
import re
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from typing import Any

from verl_rollout_skip.errors import CorruptEntryError, StoreError
from verl_rollout_skip.key import RolloutKey
from verl_rollout_skip.store import committed, names
from verl_rollout_skip.store.codec.part import PartFile, decoding
from verl_rollout_skip.store.reader.entry import EntryReader
from verl_rollout_skip.store.record import EntryRecord, RecordedPart
from verl_rollout_skip.store.storage import FileInfo, Storage, open_storage
from verl_rollout_skip.store.storage.local import LocalStorage

_READ_LIMIT = 16 << 30
_MAP_LIMIT = 1 << 50
_COLUMN_LIMIT = 4 << 30
_EXTENSION = r"(?:json|[0-9a-f]{32}\.parquet)"
_ENTRY_PATH = re.compile(rf"(?:(?P<folder>.+)/)?(?P<step>step_\d{{6,}})(?:/(?P<batch>gen_\d{{3,}})\.{_EXTENSION})?")

Stamp = tuple[tuple[str, int, float], ...]
"""The files of an entry with their sizes and modification times. If the stamp changes, the entry has been replaced."""


@dataclass(frozen=True)
class Unreadable:
    """A committed entry whose record cannot be read, and the reason."""

    key: RolloutKey
    error: str


@dataclass(frozen=True)
class StoreReader:
    """The entries of one folder. Iteration yields the committed keys in order."""

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
        return self.storage.info(names.folder_name(key), names.record_name(key)) is not None

    def has_steps(self) -> bool:
        """Whether there are any step folders, even empty ones."""
        return any(names.parse_folder(folder) is not None for folder in self.storage.folders())

    def record(self, key: RolloutKey) -> EntryRecord:
        """The record of one entry; its parts are not opened."""
        return committed.read_record(self.storage, key)

    def records(self, wanted: Callable[[RolloutKey], bool] = lambda key: True) -> Iterator[EntryRecord | Unreadable]:
        """The records of the wanted keys, in order. Each folder is listed only once."""
        for key, files in self._entries(wanted):
            try:
                yield committed.read_record(self.storage, key, files)
            except (StoreError, OSError) as error:
                yield Unreadable(key, str(error))

    def stamps(self, wanted: Callable[[RolloutKey], bool] = lambda key: True) -> dict[RolloutKey, Stamp]:
        """A stamp of each wanted entry, to detect new and replaced entries."""
        stamps = {}
        for key, files in self._entries(wanted):
            file_names = [name for name in files if key.gen_batch in (names.parse_record(name), names.parse_part(name))]
            stamps[key] = tuple((name, files[name].size, files[name].changed) for name in sorted(file_names))
        return stamps

    def entry(self, key: RolloutKey, check_digest: bool = False) -> EntryReader:
        """Open an entry.

        On a local disk, only the requested pages are read, and their checksums verified. With ``check_digest``, and
        always on an object store, each part is read completely and its digest is verified.
        """
        if isinstance(self.storage, LocalStorage) and not check_digest:
            entry = committed.load(self.storage, key, _MAP_LIMIT, _map_part)
        else:
            entry = committed.load(self.storage, key, _READ_LIMIT)
        parts = []
        for recorded, data in zip(entry.record.parts, entry.parts, strict=True):
            part = PartFile(data, _COLUMN_LIMIT, _damage_prefix(self.storage, key, recorded))
            if part.rows != recorded.rows:
                raise CorruptEntryError(
                    f"{part.error_prefix} It has {part.rows} rows, but its record says {recorded.rows}."
                )
            parts.append(part)
        return EntryReader(entry.record, parts)

    def _steps(self) -> list[tuple[int, str]]:
        steps = ((names.parse_folder(folder), folder) for folder in self.storage.folders())
        return sorted((step, folder) for step, folder in steps if step is not None)

    def _entries(self, wanted: Callable[[RolloutKey], bool]) -> Iterator[tuple[RolloutKey, dict[str, FileInfo]]]:
        """The wanted keys, each with the files in its step folder by name."""
        for step, folder in self._steps():
            files = {file.name: file for file in self.storage.files(folder)}
            for key in filter(wanted, _keys(step, files)):
                yield key, files


def split_path(path: str) -> tuple[str, int | None, int | None]:
    """Split a path into a folder of entries, a step and a generation batch.

    Step and generation batch are None if the path does not name them. Without a step, the folder is the whole path.
    """
    match = _ENTRY_PATH.fullmatch(path.rstrip("/"))
    step = names.parse_folder(match["step"]) if match else None
    if match is None or step is None:
        return path, None, None
    return match["folder"] or ".", step, names.parse_record(f"{match['batch']}.json") if match["batch"] else None


def _keys(step: int, files: Iterable[str]) -> list[RolloutKey]:
    numbers = (names.parse_record(name) for name in files)
    return [RolloutKey(step, number) for number in sorted(number for number in numbers if number is not None)]


def _damage_prefix(storage: Storage, key: RolloutKey, part: RecordedPart) -> str:
    return f"The entry of {key} is damaged: {storage.where(names.folder_name(key), part.file)}."


def _map_part(storage: Storage, key: RolloutKey, part: RecordedPart) -> Any:
    """Map a part on a local disk into memory, so that only the requested pages are read."""
    folder = names.folder_name(key)
    where = storage.where(folder, part.file)
    with decoding(_damage_prefix(storage, key, part)):
        storage.info(folder, part.file)  # rejects symbolic links
        try:
            fd = os.open(where, os.O_RDONLY | os.O_NOFOLLOW | os.O_CLOEXEC)
        except FileNotFoundError as error:
            raise CorruptEntryError("It is missing. Record the step again, or restore the file.") from error
        try:
            size = os.fstat(fd).st_size
            if size != part.bytes:
                raise CorruptEntryError(
                    f"It has {size} bytes, but its record says {part.bytes}. Record the step again, or restore it."
                )
            return mmap.mmap(fd, 0, access=mmap.ACCESS_READ)
        finally:
            os.close(fd)
