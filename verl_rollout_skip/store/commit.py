"""How an entry becomes visible, and how it is read: whole or not at all, whoever dies or writes meanwhile.

An entry is two files, and no file system renames two files at once. So the record is written first, durably, under a
*pending* name that contains the digest of the Parquet file it belongs to; then the Parquet file is published, which
is the commit; then the record gets its own name. A reader digests the Parquet file and takes the record with that
digest: under its own name normally, under a pending name if the writer died, or is still on its way, before the last
step.

Nobody ever overwrites a record: whoever names his own first moves the one in place aside, to a pending name, and
deletes it only when he has seen that it describes another Parquet file than the one in place. So whichever of several
writers comes last with his Parquet file, its record is in the folder. ``prune`` removes what was left lying about.
"""

from __future__ import annotations

import contextlib
import logging
import secrets
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

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
from verl_rollout_skip.store import names
from verl_rollout_skip.store.record import (
    MAX_RECORD_BYTES,
    EntryRecord,
    make_record,
    parse_record,
    record_bytes,
)
from verl_rollout_skip.store.storage import FileInfo, Staged, Storage
from verl_rollout_skip.store.storage.local import is_own_leftover

if TYPE_CHECKING:
    from verl_rollout_skip.store import codec

logger = logging.getLogger(__name__)

_ATTEMPTS = 5
_PART_BYTES = 2 << 30


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
    limit: int = 1 << 40,
    admit: Callable[[int], None] = lambda size: None,
) -> EntryRecord:
    """Encode a rollout and commit it. ``admit`` is told the size before the commit and may raise.

    If the key is taken, the entry that is there stays: the same rollout is no error, another one is. To tell, it is
    read, but not if it has more than ``limit`` bytes.
    """
    from verl_rollout_skip.store import codec  # late: it needs torch, and those who only look at records do not

    started = time.perf_counter()
    with storage.stage(names.folder_name(key)) as staged:
        try:
            plan = codec.plan(prepared)
            (rows,) = plan.split(_PART_BYTES)
            plan.write(rows, staged.stream)
            summary = plan.summary()
        finally:
            prepared.raise_if_changed()  # also if it failed: a tensor that changes under the encoder may be the reason
        staged.stream.close()
        record = make_record(key, summary, staged.digest, staged.size, time.perf_counter() - started, info)
        return _publish(storage, staged, record, record_bytes(record), replace, limit, admit)


def commit_copy(storage: Storage, key: RolloutKey, record: bytes, data: Any, limit: int = 1 << 40) -> EntryRecord:
    """Commit an entry that is recorded elsewhere, it and its record byte for byte. A taken key is as in ``commit``."""
    parsed = parse_record(record, key)
    with storage.stage(names.folder_name(key)) as staged:
        staged.write(data)
        if (staged.digest, staged.size) != (parsed.digest, parsed.bytes):
            raise CorruptEntryError(
                f"The entry of {key} was not copied: {staged.size} bytes with digest {staged.digest} arrived, and its "
                f"record says {parsed.bytes} bytes with digest {parsed.digest}."
            )
        return _publish(storage, staged, parsed, record, replace=False, limit=limit)


def _publish(
    storage: Storage,
    staged: Staged,
    record: EntryRecord,
    record_data: bytes,
    replace: bool,
    limit: int,
    admit: Callable[[int], None] = lambda size: None,
) -> EntryRecord:
    key, folder = record.key, names.folder_name(record.key)
    if replace or storage.info(folder, names.data_name(key)) is None:
        admit(staged.size + len(record_data))
    pending = f"{names.pending_prefix(key, record.digest)}{secrets.token_hex(6)}.json"
    _put(storage, folder, pending, record_data)
    try:
        storage.publish(staged, names.data_name(key), replace)
    except FileExistsError:
        # Unless a put was sent twice because its answer was lost: then our bytes are in place, without a record.
        if not _is_in_place(storage, key, record) or _is_named(storage, key, record.digest):
            storage.delete(folder, pending)
            return _same_or_error(storage, key, record, limit)
    except BaseException:
        # The deed may be done all the same, and then the pending record is the only one.
        with contextlib.suppress(OSError, StoreError):
            if not _is_in_place(storage, key, record):
                storage.delete(folder, pending)
        raise
    _name_record(storage, record, record_data, pending)
    return record


def load(storage: Storage, key: RolloutKey, limit: int) -> Committed:
    """Read an entry and prove that its bytes are those that were committed."""
    folder = names.folder_name(key)
    where = storage.where(folder, names.data_name(key))
    seen: bytes | None = None
    for attempt in range(_ATTEMPTS):
        record_data = _read_record(storage, folder, names.record_name(key))
        if attempt and record_data is not None and record_data == seen:
            break
        seen = record_data
        try:
            data = storage.read(folder, names.data_name(key), limit)
        except FileNotFoundError:
            raise _not_found(storage, key) from None
        except EntryTooLargeError as error:
            raise _too_large(storage, key, record_data, error) from error
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
        # Another process may have replaced the entry between the two reads, or be about to name its record.
        time.sleep(0.01)
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


def read_record(
    storage: Storage, key: RolloutKey, limit: int, files: Mapping[str, FileInfo] | None = None
) -> EntryRecord:
    """The record of a committed entry, without reading the Parquet file where that is possible.

    ``files`` are those of the step's folder by name, if the caller has listed it.
    """
    folder = names.folder_name(key)
    if files is None:
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
    folder, token = names.folder_name(key), secrets.token_hex(3)
    record = _read_record(storage, folder, names.record_name(key))
    aside = f"{names.data_name(key)}.{token}.corrupt"
    try:
        storage.rename(folder, names.data_name(key), aside)
    except FileNotFoundError:
        raise _not_found(storage, key) from None
    _remove_record(storage, key, record, f"{names.record_name(key)}.{token}.corrupt")
    return storage.where(folder, aside)


def delete(storage: Storage, key: RolloutKey) -> None:
    """Remove an entry. The Parquet file goes first: without it there is no entry."""
    folder = names.folder_name(key)
    if storage.info(folder, names.data_name(key)) is None:
        raise _not_found(storage, key)
    record = _read_record(storage, folder, names.record_name(key))
    storage.delete(folder, names.data_name(key))
    _remove_record(storage, key, record)


def _put(storage: Storage, folder: str, name: str, data: bytes, replace: bool = True) -> None:
    with storage.stage(folder) as staged:
        staged.write(data)
        storage.publish(staged, name, replace)


def _name_record(storage: Storage, record: EntryRecord, record_data: bytes, pending: str) -> None:
    key, folder, name = record.key, names.folder_name(record.key), names.record_name(record.key)
    try:
        aside = _move_aside(storage, key)
        try:
            _put(storage, folder, name, record_data, replace=False)
        except FileExistsError:
            return  # another writer was quicker; ours stays pending
        if aside is None:
            storage.delete(folder, pending)
        elif _is_in_place(storage, key, record):
            storage.delete(folder, pending)
            storage.delete(folder, aside)
    except OSError as error:
        logger.warning("%s is committed; its record keeps the name %s (%s)", key, pending, error)


def _move_aside(storage: Storage, key: RolloutKey) -> str | None:
    """Give the record in place a pending name, under which readers still find it; None if there is none."""
    folder, aside = names.folder_name(key), f"{names.pending_prefix(key, '0' * 32)}{secrets.token_hex(6)}.json"
    if storage.info(folder, names.record_name(key)) is None:
        return None
    try:
        storage.rename(folder, names.record_name(key), aside)
    except FileNotFoundError:
        return None
    return aside


def _same_or_error(storage: Storage, key: RolloutKey, record: EntryRecord, limit: int) -> EntryRecord:
    try:
        present = load(storage, key, limit).record
    except EntryNotFoundError:
        raise EntryExistsError(
            f"{key} was recorded by another process when this rollout was to be written, and deleted since. Nothing "
            "was written: put it again."
        ) from None
    if present.content == record.content:
        return present
    raise EntryExistsError(
        f"{key} is already recorded with another rollout ({present.rows} rows, recorded {present.created_at}) in "
        f"{storage.where(names.folder_name(key), names.data_name(key))}. It was kept and the new one was not written. "
        "Replace it on purpose (mode refresh; put with replace=True), or record into another folder."
    )


def _is_in_place(storage: Storage, key: RolloutKey, record: EntryRecord) -> bool:
    """Whether the Parquet file under this key is the one that the record describes."""
    folder, name = names.folder_name(key), names.data_name(key)
    found = storage.info(folder, name)
    if found is None or found.size != record.bytes:
        return False
    try:
        return xxhash.xxh3_128(storage.read(folder, name, record.bytes)).hexdigest() == record.digest
    except (FileNotFoundError, EntryTooLargeError):
        return False  # replaced since we asked for its size


def _is_named(storage: Storage, key: RolloutKey, digest: str) -> bool:
    """Whether the record under its own name belongs to the Parquet file with this digest."""
    found = _read_record(storage, names.folder_name(key), names.record_name(key))
    try:
        return found is not None and parse_record(found, key).digest == digest
    except UnreadableEntryError:
        return False


def is_leftover(storage: Storage, folder: str, file: FileInfo, older_than_s: float) -> bool:
    """Whether a writer that died left this file behind: temporary, or a pending record that no entry needs."""
    old = time.time() - file.changed > older_than_s
    if file.name.startswith(names.TEMPORARY):
        return old or bool(is_own_leftover(file.name))
    gen_batch, step = names.parse_pending(file.name), names.parse_folder(folder)
    if gen_batch is None or step is None or not old:
        return False
    return not _is_pending_needed(storage, folder, RolloutKey(step, gen_batch), file.name)


def _is_pending_needed(storage: Storage, folder: str, key: RolloutKey, pending: str) -> bool:
    """Whether an entry has no other record than this pending one."""
    data = _read_record(storage, folder, pending)
    try:
        if data is None or not _is_in_place(storage, key, parse_record(data, key)):
            return False
    except UnreadableEntryError:
        return False  # a pending record that cannot be read serves nobody
    return not _is_named(storage, key, parse_record(data, key).digest)


def _remove_record(storage: Storage, key: RolloutKey, expected: bytes | None, name: str | None = None) -> None:
    """Delete the record of an entry that was removed, or rename it to ``name``, unless it is another one by now.

    Another process may have recorded the key anew meanwhile, and its record must stay.
    """
    folder = names.folder_name(key)
    aside = None if expected is None else _move_aside(storage, key)
    if aside is None:
        return
    found = _read_record(storage, folder, aside)
    if found is not None and found != expected:
        with contextlib.suppress(FileExistsError):
            _put(storage, folder, names.record_name(key), found, replace=False)
    elif name is not None:
        storage.rename(folder, aside, name)
        return
    storage.delete(folder, aside)


def _pending_record(storage: Storage, key: RolloutKey, digest: str) -> EntryRecord | None:
    folder = names.folder_name(key)
    for name in storage.names(folder):
        if names.parse_pending(name) == key.gen_batch:
            data = _read_record(storage, folder, name)
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


def _too_large(storage: Storage, key: RolloutKey, record: bytes | None, error: EntryTooLargeError) -> StoreError:
    """A file that is too large to be read: by its record it is, or it is not the file that was committed."""
    found = storage.info(names.folder_name(key), names.data_name(key))
    with contextlib.suppress(UnreadableEntryError):
        if record is not None and found is not None and parse_record(record, key).bytes == found.size:
            return error
    return CorruptEntryError(f"The entry of {key} is damaged: its record does not speak of a file this large. {error}")


def _not_found(storage: Storage, key: RolloutKey) -> EntryNotFoundError:
    return EntryNotFoundError(f"{key} is not recorded in {storage.where()}.")
