"""Reading what was committed: a record, then the parts that it lists; each is checked. See ``commit.py``."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from verl_rollout_skip.errors import (
    CorruptEntryError,
    EntryNotFoundError,
    EntryTooLargeError,
    UnreadableEntryError,
)
from verl_rollout_skip.key import RolloutKey
from verl_rollout_skip.store import names
from verl_rollout_skip.store.record import MAX_RECORD_BYTES, EntryRecord, RecordedPart, parse_record
from verl_rollout_skip.store.storage import FileInfo, Storage
from verl_rollout_skip.store.storage.contract import digest_of, too_large

ReadPart = Callable[[Storage, RolloutKey, RecordedPart], Any]


@dataclass(frozen=True)
class Committed:
    """An entry as it was committed: its record, the record's own bytes, and the bytes of its parts in order."""

    record: EntryRecord
    record_data: bytes
    parts: tuple[Any, ...]


def load(storage: Storage, key: RolloutKey, limit: int, read: ReadPart | None = None) -> Committed:
    """Read an entry and prove that its bytes are those that were committed.

    ``read`` can get the parts in another way than ``read_part``, which reads and checks all of their bytes.
    """
    while True:
        data = read_record_data(storage, key)
        record = _parse(storage, key, data)
        if record.bytes > limit:
            raise EntryTooLargeError(too_large(f"The entry of {where(storage, key)}", record.bytes, limit))
        try:
            found = {part.file: (read or read_part)(storage, key, part) for part in record.parts}
            return Committed(record, data, tuple(found[part.file] for part in record.parts))
        except CorruptEntryError:
            if read_record_data(storage, key) == data:
                raise


def read_part(storage: Storage, key: RolloutKey, part: RecordedPart) -> Any:
    """The bytes of a part, which are those that were committed."""
    folder = names.folder_name(key)
    damaged = f"The entry of {key} is damaged: {storage.where(folder, part.file)}"
    remedy = "Record the step again, or restore the file."
    try:
        data = storage.read(folder, part.file, part.bytes)
    except FileNotFoundError as error:
        raise CorruptEntryError(f"{damaged} is missing. {remedy}") from error
    except EntryTooLargeError as error:
        raise CorruptEntryError(f"{damaged} is larger than the {part.bytes} bytes of its record. {remedy}") from error
    digest = digest_of(data)
    if (len(data), digest) != (part.bytes, part.digest):
        raise CorruptEntryError(
            f"{damaged} has {len(data)} bytes with digest {digest}, and its record says {part.bytes} bytes with digest "
            f"{part.digest}. It was truncated or changed after it was written. {remedy}"
        )
    return data


def read_record(storage: Storage, key: RolloutKey, files: Mapping[str, FileInfo] | None = None) -> EntryRecord:
    """The record of a committed entry.

    Its parts are not opened. If the caller has listed the folder, ``files`` by name, they must be there in full.
    """
    record = _parse(storage, key, read_record_data(storage, key))
    if files is not None and any(
        part.file not in files or files[part.file].size != part.bytes for part in record.parts
    ):
        return load(storage, key, 1 << 40).record  # it was replaced since it was listed, or it is damaged
    return record


def listed_parts(storage: Storage, key: RolloutKey) -> set[str] | None:
    """The parts that the record of a key lists: none if there is no record, and None if it cannot be read."""
    try:
        return {part.file for part in read_record(storage, key).parts}
    except EntryNotFoundError:
        return set()
    except UnreadableEntryError:
        return None


def _parse(storage: Storage, key: RolloutKey, data: bytes) -> EntryRecord:
    try:
        return parse_record(data, key)
    except UnreadableEntryError as error:
        raise type(error)(f"The record of {key} cannot be used: {where(storage, key)}. {error}") from error


def read_record_data(storage: Storage, key: RolloutKey) -> bytes:
    try:
        return bytes(storage.read(names.folder_name(key), names.record_name(key), MAX_RECORD_BYTES))
    except FileNotFoundError:
        raise not_found(storage, key) from None
    except EntryTooLargeError as error:
        raise CorruptEntryError(f"The record of {key} cannot be used: it is too large. {error}") from error


def peek(storage: Storage, folder: str, name: str) -> bytes | None:
    """The bytes of a record, or None if it is not there or too large to be one."""
    with contextlib.suppress(FileNotFoundError, EntryTooLargeError):
        return bytes(storage.read(folder, name, MAX_RECORD_BYTES))
    return None


def where(storage: Storage, key: RolloutKey) -> str:
    return storage.where(names.folder_name(key), names.record_name(key))


def not_found(storage: Storage, key: RolloutKey) -> EntryNotFoundError:
    return EntryNotFoundError(f"{key} is not recorded in {storage.where()}.")
