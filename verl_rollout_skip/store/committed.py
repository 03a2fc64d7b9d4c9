"""Reads and checks committed entries: first the record, then the parts that it lists. See ``commit.py``."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from verl_rollout_skip.errors import (
    CorruptEntryError,
    EntryNotFoundError,
    EntryTooLargeError,
    StoreError,
    UnreadableEntryError,
)
from verl_rollout_skip.key import RolloutKey
from verl_rollout_skip.store import names
from verl_rollout_skip.store.record import MAX_RECORD_BYTES, EntryRecord, RecordedPart, parse_record
from verl_rollout_skip.store.storage import FileInfo, Storage
from verl_rollout_skip.store.storage.contract import digest_of, too_large

ReadPart = Callable[[Storage, RolloutKey, RecordedPart], Any]


@dataclass(frozen=True)
class CommittedEntry:
    """A committed entry: its record, parsed and as bytes, and the bytes of its parts in order."""

    record: EntryRecord
    record_data: bytes
    parts: tuple[Any, ...]


def read_part(storage: Storage, key: RolloutKey, part: RecordedPart) -> Any:
    """Read a part and check its size and digest."""
    folder = names.folder_name(key)
    damaged = f"The entry of {key} is damaged: {storage.where(folder, part.file)}"
    remedy = "Record the step again, or restore the file."
    try:
        data = storage.read(folder, part.file, part.bytes)
    except FileNotFoundError as error:
        raise CorruptEntryError(f"{damaged} is missing. {remedy}") from error
    except EntryTooLargeError as error:
        raise CorruptEntryError(f"{damaged} is larger than the {part.bytes} bytes in its record. {remedy}") from error
    digest = digest_of(data)
    if (len(data), digest) != (part.bytes, part.digest):
        raise CorruptEntryError(
            f"{damaged} has {len(data)} bytes with digest {digest}, but its record says {part.bytes} bytes with digest "
            f"{part.digest}. It was truncated or changed after it was written. {remedy}"
        )
    return data


def load(storage: Storage, key: RolloutKey, limit: int, read: ReadPart = read_part) -> CommittedEntry:
    """Read an entry and verify that its bytes are the committed ones. ``read`` reads and checks one part."""
    while True:
        data, record = _read(storage, key)
        if record.bytes > limit:
            raise EntryTooLargeError(too_large(f"The entry of {where(storage, key)}", record.bytes, limit))
        try:
            contents = {part.file: read(storage, key, part) for part in record.parts}
            return CommittedEntry(record, data, tuple(contents[part.file] for part in record.parts))
        except CorruptEntryError:
            if _read(storage, key)[0] == data:
                raise


def read_record(storage: Storage, key: RolloutKey, files: Mapping[str, FileInfo] | None = None) -> EntryRecord:
    """Read the record of a committed entry without opening its parts.

    A caller that has listed the folder passes its ``files`` by name. Then the existence and the size of each part are
    checked, too.
    """
    record = _read(storage, key)[1]
    if files is not None and any(
        part.file not in files or files[part.file].size != part.bytes for part in record.parts
    ):
        return load(storage, key, 1 << 40).record  # replaced since the folder was listed, or damaged
    return record


def listed_parts(storage: Storage, key: RolloutKey) -> set[str] | None:
    """The file names of the parts in the record of a key: empty without a record, None if it cannot be read."""
    try:
        return {part.file for part in read_record(storage, key).parts}
    except EntryNotFoundError:
        return set()
    except UnreadableEntryError:
        return None


def where(storage: Storage, key: RolloutKey) -> str:
    return storage.where(names.folder_name(key), names.record_name(key))


def not_found(storage: Storage, key: RolloutKey) -> EntryNotFoundError:
    return EntryNotFoundError(f"{key} is not recorded in {storage.where()}.")


def _read(storage: Storage, key: RolloutKey) -> tuple[bytes, EntryRecord]:
    try:
        data = bytes(storage.read(names.folder_name(key), names.record_name(key), MAX_RECORD_BYTES))
    except FileNotFoundError:
        raise not_found(storage, key) from None
    except EntryTooLargeError as error:
        raise CorruptEntryError(f"The record of {key} cannot be used: it is too large. {error}") from error
    try:
        return data, parse_record(data, key)
    except StoreError as error:
        raise type(error)(f"The record of {key} cannot be used: {where(storage, key)}. {error}") from error
