"""How an entry becomes visible, and how it is read: whole or not at all, whoever dies or writes meanwhile.

An entry is two files, and no file system renames two files at once. So the record is written first, durably, under a
*pending* name that contains the digest of the Parquet file it belongs to; then the Parquet file is published, which
is the commit; then the record gets its own name. A reader digests the Parquet file and takes the record with that
digest: under its own name normally, under a pending name if the writer died, or is still on its way, before the last
step.

Writers that replace one entry at the same time can give their records the name in another order than their Parquet
files. So a replacing writer leaves its pending record where it is: whichever Parquet file stays, its record is there.
``prune`` removes such records when they are old and not needed.
"""

from __future__ import annotations

import contextlib
import logging
import secrets
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import xxhash

from verl_rollout_skip.errors import (
    CorruptEntryError,
    EntryExistsError,
    EntryNotFoundError,
    EntryTooLargeError,
    StoreError,
    UnreadableEntryError,
)
from verl_rollout_skip.key import RolloutKey
from verl_rollout_skip.store import codec, names
from verl_rollout_skip.store.entry import (
    MAX_RECORD_BYTES,
    EntryRecord,
    make_record,
    parse_record,
    record_bytes,
)
from verl_rollout_skip.store.storage import Storage

logger = logging.getLogger(__name__)

_ATTEMPTS = 5


@dataclass(frozen=True)
class Committed:
    """The bytes of an entry that were found to be those that were committed, and its record."""

    record: EntryRecord
    data: Any


def commit(
    storage: Storage,
    key: RolloutKey,
    prepared: codec.Prepared,
    info: dict[str, Any],
    replace: bool = False,
    admit: Callable[[int], None] = lambda size: None,
) -> EntryRecord:
    """Encode a rollout and commit it. ``admit`` is told the size before the commit and may raise.

    If the key is taken, the entry that is there stays: the same rollout is no error, another one is.
    """
    folder = names.folder_name(key)
    started = time.perf_counter()
    with storage.stage(folder) as staged:
        summary = codec.write(prepared, key, staged.stream)
        staged.stream.close()
        record = make_record(key, summary, staged.digest, staged.size, time.perf_counter() - started, info)
        admit(staged.size)
        pending = f"{names.pending_prefix(key, record.digest)}{secrets.token_hex(6)}.json"
        _put(storage, folder, pending, record_bytes(record))
        try:
            storage.publish(staged, names.data_name(key), replace)
        except BaseException as error:
            # A put that was retried by the client, or a failure after the deed: our bytes may be in place all the same.
            if not _is_in_place(storage, key, record.digest):
                storage.delete(folder, pending)
                if isinstance(error, FileExistsError):
                    return _same_or_error(storage, key, record)
                raise
        _name_record(storage, key, record, pending, replace)
    return record


def load(storage: Storage, key: RolloutKey, limit: int) -> Committed:
    """Read an entry and prove that its bytes are those that were committed."""
    folder = names.folder_name(key)
    where = storage.where(folder, names.data_name(key))
    seen: bytes | None = None
    for attempt in range(_ATTEMPTS):
        record_data = _read_record(storage, folder, names.record_name(key))
        if attempt and record_data == seen:
            break
        seen = record_data
        try:
            data = storage.read(folder, names.data_name(key), limit)
        except FileNotFoundError:
            raise _not_found(storage, key) from None
        digest = xxhash.xxh3_128(data).hexdigest()
        problem: UnreadableEntryError | None = None
        try:
            record = None if record_data is None else parse_record(record_data, key)
        except UnreadableEntryError as error:
            record, problem = None, error
        if record is not None and record.digest == digest:
            return Committed(record, data)
        record = _pending_record(storage, key, digest)
        if record is not None:
            return Committed(record, data)
        # Another process may have replaced the entry between the two reads; then the record has changed by now.
    record_path = storage.where(folder, names.record_name(key))
    if problem is not None:
        raise type(problem)(f"The record of {key} cannot be used: {record_path}. {problem}") from problem
    if seen is None:
        raise CorruptEntryError(f"The record of {key} is missing: {record_path}. Without it {where} cannot be trusted.")
    raise CorruptEntryError(
        f"The entry of {key} is damaged: {where} has {len(data)} bytes with digest {digest}, and its record says "
        f"{parse_record(seen, key).bytes} bytes with digest {parse_record(seen, key).digest}. It was truncated or "
        "changed after it was written. Record the step again, or restore the file."
    )


def read_record(storage: Storage, key: RolloutKey, limit: int) -> EntryRecord:
    """The record of a committed entry, without reading the Parquet file where that is possible."""
    folder = names.folder_name(key)
    files = {file.name: file for file in storage.files(folder)}
    data = files.get(names.data_name(key))
    pending = any(names.parse_pending(name) == key.gen_batch for name in files)
    if data is not None and not pending and names.record_name(key) in files:
        found = _read_record(storage, folder, names.record_name(key))
        if found is not None:
            with contextlib.suppress(UnreadableEntryError):
                record = parse_record(found, key)
                if record.bytes == data.size:
                    return record
    return load(storage, key, limit).record


def set_aside(storage: Storage, key: RolloutKey) -> str:
    """Take an unreadable entry out of the way without deleting it; returns where it is now."""
    folder = names.folder_name(key)
    if storage.info(folder, names.data_name(key)) is None:
        raise _not_found(storage, key)
    token = secrets.token_hex(3)
    for name in (names.data_name(key), names.record_name(key)):
        with contextlib.suppress(FileNotFoundError):
            storage.rename(folder, name, f"{name}.{token}.corrupt")
    return storage.where(folder, f"{names.data_name(key)}.{token}.corrupt")


def delete(storage: Storage, key: RolloutKey) -> None:
    """Remove an entry. The Parquet file goes first: without it there is no entry."""
    folder = names.folder_name(key)
    if storage.info(folder, names.data_name(key)) is None:
        raise _not_found(storage, key)
    storage.delete(folder, names.data_name(key))
    storage.delete(folder, names.record_name(key))


def _put(storage: Storage, folder: str, name: str, data: bytes) -> None:
    with storage.stage(folder) as staged:
        staged.write(data)
        storage.publish(staged, name, replace=True)


def _name_record(storage: Storage, key: RolloutKey, record: EntryRecord, pending: str, keep: bool) -> None:
    folder = names.folder_name(key)
    try:
        if not keep:
            with contextlib.suppress(FileNotFoundError):  # somebody pruned it meanwhile
                storage.rename(folder, pending, names.record_name(key))
                return
        _put(storage, folder, names.record_name(key), record_bytes(record))
    except OSError as error:
        logger.warning("%s is committed; its record keeps the name %s (%s)", key, pending, error)


def _same_or_error(storage: Storage, key: RolloutKey, record: EntryRecord) -> EntryRecord:
    present = load(storage, key, limit=1 << 62).record
    if present.content == record.content:
        return present
    raise EntryExistsError(
        f"{key} is already recorded with another rollout ({present.rows} rows, recorded {present.created_at}) in "
        f"{storage.where(names.folder_name(key), names.data_name(key))}. It was kept and the new one was not written. "
        "Replace it on purpose (mode refresh), or record into another folder."
    )


def _is_in_place(storage: Storage, key: RolloutKey, digest: str) -> bool:
    """Whether the Parquet file under this key has this digest; if that cannot be found out, it may have."""
    try:
        data = storage.read(names.folder_name(key), names.data_name(key), limit=1 << 62)
    except FileNotFoundError:
        return False
    except (OSError, StoreError):
        return True
    return xxhash.xxh3_128(data).hexdigest() == digest


def is_pending_needed(storage: Storage, folder: str, key: RolloutKey, pending: str) -> bool:
    """Whether an entry has no other record than this pending one."""
    try:
        data = storage.read(folder, names.data_name(key), limit=1 << 62)
    except FileNotFoundError:
        return False
    digest = xxhash.xxh3_128(data).hexdigest()
    if not pending.startswith(names.pending_prefix(key, digest)):
        return False
    found = _read_record(storage, folder, names.record_name(key))
    try:
        return found is None or parse_record(found, key).digest != digest
    except UnreadableEntryError:
        return True


def _pending_record(storage: Storage, key: RolloutKey, digest: str) -> EntryRecord | None:
    folder, prefix = names.folder_name(key), names.pending_prefix(key, digest)
    for file in storage.files(folder):
        if file.name.startswith(prefix):
            data = _read_record(storage, folder, file.name)
            if data is not None:
                with contextlib.suppress(UnreadableEntryError):
                    record = parse_record(data, key)
                    if record.digest == digest:
                        return record
    return None


def _read_record(storage: Storage, folder: str, name: str) -> bytes | None:
    try:
        return bytes(storage.read(folder, name, MAX_RECORD_BYTES))
    except FileNotFoundError:
        return None
    except EntryTooLargeError as error:
        raise CorruptEntryError(f"It is too large to be a record. {error}") from error


def _not_found(storage: Storage, key: RolloutKey) -> EntryNotFoundError:
    return EntryNotFoundError(f"{key} is not recorded in {storage.where()}.")
