"""The commit protocol: an entry appears whole or not at all, even if writers crash or race.

An entry is a record, ``gen_NNN.json``, and the parts it lists. **The record is the commit.** To commit:

1. Open a temporary file for the record. While it exists, other processes can see that a commit is in progress.
2. Write each part to a temporary file, sync it, and rename it to the name given by its digest. Parts contain a random
   token: no two commits write the same part, but copies of one entry do.
3. Publish the record: exclusively, so that the first writer wins, or by atomically replacing the existing one.
4. Delete the parts of the key that no record lists (``leftovers.py``). After a crash, the next commit of the key or
   ``prune`` deletes them and the temporary files. ``delete`` removes the record, then its parts; ``set_aside`` renames
   them.

A reader (``committed.py``) reads the record, then its parts. If a part is missing or damaged and the record has changed
in the meantime, the entry was replaced, and the reader starts over.
"""

from __future__ import annotations

import contextlib
import logging
import secrets
import time
from collections.abc import Callable, Collection, Sequence
from functools import partial
from operator import methodcaller
from typing import TYPE_CHECKING, Any

from verl_rollout_skip.errors import (
    CorruptEntryError,
    EntryExistsError,
    EntryNotFoundError,
    NewerFormatError,
    OldFormatError,
    StoreError,
    UnreadableEntryError,
)
from verl_rollout_skip.key import RolloutKey
from verl_rollout_skip.store import committed, names
from verl_rollout_skip.store.leftovers import unlisted_parts
from verl_rollout_skip.store.record import EntryRecord, RecordedPart, make_record, parse_record, record_bytes
from verl_rollout_skip.store.storage import FileInfo, Storage

if TYPE_CHECKING:
    from verl_rollout_skip.store import codec
    from verl_rollout_skip.store.codec.encoder import Summary

logger = logging.getLogger(__name__)

PART_BYTES = 2 << 30


def commit(
    storage: Storage,
    key: RolloutKey,
    prepared: codec.Prepared,
    info: dict[str, Any],
    replace: bool = False,
    limit: int = 1 << 40,
    part_bytes: int = PART_BYTES,
    admit: Callable[[int], None] = lambda size: None,
) -> EntryRecord:
    """Encode a rollout and commit it. ``admit`` is called with the size of each file and may raise.

    Without ``replace``, an existing entry is kept: committing the same rollout again is fine, a different one is an
    error. To compare them, the existing entry is read, unless it has more than ``limit`` bytes.
    """
    from verl_rollout_skip.store import codec  # imports torch, which is not needed to read records

    started = time.perf_counter()
    with _Commit(storage, key, replace, limit, admit) as under_way:
        try:
            plan = codec.Plan(prepared)
            parts = [
                under_way.write(rows.stop - rows.start, partial(plan.write, rows)) for rows in plan.split(part_bytes)
            ]
            summary = plan.summary()
        finally:
            prepared.raise_if_changed()  # even on failure: a tensor that changed during encoding may be the cause
        record = make_record(key, summary, parts, time.perf_counter() - started, info)
        return under_way.publish(record, record_bytes(record))


def commit_parts(
    storage: Storage,
    key: RolloutKey,
    make: Callable[[], tuple[Summary, list[RecordedPart]]],
    info: dict[str, Any],
    replace: bool = False,
    limit: int = 1 << 40,
    admit: Callable[[int], None] = lambda size: None,
) -> EntryRecord:
    """Commit an entry whose parts are written by other processes with ``write_part``, while ``make`` runs.

    ``make`` returns the key figures of the entry and its parts in order.
    """
    started = time.perf_counter()
    with _Commit(storage, key, replace, limit, admit) as under_way:
        summary, parts = make()
        under_way.adopt(parts)
        record = make_record(key, summary, parts, time.perf_counter() - started, info)
        return under_way.publish(record, record_bytes(record))


def write_part(storage: Storage, key: RolloutKey, rows: int, data: Any) -> RecordedPart:
    """Write an encoded part for an entry that ``commit_parts`` is committing."""
    with storage.stage(names.folder_name(key)) as staged:
        staged.write(data)
        size, digest = staged.measure()
        part = RecordedPart(names.part_name(key, digest), rows, size, digest)
        storage.publish(staged, part.file, replace=True)
        return part


def commit_copy(storage: Storage, key: RolloutKey, record_data: bytes, parts: Sequence[Any]) -> EntryRecord:
    """Commit a byte-for-byte copy of an entry from another store. ``parts`` are in the order of its record."""
    record = parse_record(record_data, key)
    with _Commit(storage, key, is_copy=True) as under_way:
        for expected, data in zip(record.parts, parts, strict=True):
            arrived = under_way.write(expected.rows, methodcaller("write", data))
            if arrived != expected:
                raise CorruptEntryError(f"The entry of {key} was not copied: {arrived} arrived instead of {expected}.")
        made = under_way.publish(record, record_data)
        # Before the record was published, a cleanup could mistake the parts for those of an interrupted copy.
        for expected, data in zip(record.parts, parts, strict=True):
            if made.parts == record.parts and storage.info(names.folder_name(key), expected.file) is None:
                under_way.write(expected.rows, methodcaller("write", data))
        return made


class _Commit:
    """A commit in progress. When it ends, parts that no record lists are removed."""

    def __init__(
        self,
        storage: Storage,
        key: RolloutKey,
        replace: bool = False,
        limit: int = 1 << 40,
        admit: Callable[[int], None] = lambda size: None,
        is_copy: bool = False,
    ) -> None:
        self._storage, self._key, self._folder = storage, key, names.folder_name(key)
        self._replace, self._limit, self._admit, self._is_copy = replace, limit, admit, is_copy
        self._taken = not replace and storage.info(self._folder, names.record_name(key)) is not None
        if replace:
            _parts_to_replace(storage, key)  # raises before anything is encoded
        self._unneeded: set[str] = set()
        self._record = storage.stage(self._folder)

    def write(self, rows: int, write: Callable[[Any], Any]) -> RecordedPart:
        """Write one part. If the key is taken, only measure it."""
        with self._storage.stage(self._folder) as staged:
            write(staged.stream)
            size, digest = staged.measure()
            part = RecordedPart(names.part_name(self._key, digest), rows, size, digest)
            if not self._taken:
                self._admit(size)
                if not self._is_copy:  # another copy of the same entry may be in progress
                    self._unneeded.add(part.file)
                self._storage.publish(staged, part.file, replace=True)
            return part

    def adopt(self, parts: Collection[RecordedPart]) -> None:
        """Take over parts that other processes have written. They are removed if the record is not published."""
        self._unneeded.update(part.file for part in parts)
        for part in parts:
            found = self._storage.info(self._folder, part.file)
            if found is None or found.size != part.bytes:
                where = self._storage.where(self._folder, part.file)
                raise StoreError(
                    f"{self._key} was not recorded: another process wrote {where}, but it is not here, or not whole. "
                    "Do all nodes share this folder?"
                )
        if not self._taken:
            self._admit(sum(part.bytes for part in parts))

    def publish(self, record: EntryRecord, data: bytes) -> EntryRecord:
        """Publish the record, and return the one that is now committed."""
        if not self._taken:
            self._admit(len(data))
            self._record.write(data)
            written, self._unneeded = self._unneeded, _parts_to_replace(self._storage, self._key)
            try:
                self._storage.publish(self._record, names.record_name(self._key), self._replace)
                return record
            except FileExistsError:  # from another process, or from this request if it was retried
                self._unneeded = written
        try:
            present = committed.load(self._storage, self._key, self._limit).record
        except EntryNotFoundError:
            raise EntryExistsError(
                f"{self._key} was recorded and deleted by other processes while this rollout was being written. "
                "Nothing was written. Call put again."
            ) from None
        if present.content == record.content:
            return present
        raise EntryExistsError(
            f"{self._key} is already recorded with a different rollout ({present.rows} rows, recorded "
            f"{present.created_at}) in {committed.where(self._storage, self._key)}. It was kept, and the new one was "
            "not written. To replace it, use mode refresh or put with replace=True, or record into another folder."
        )

    def __enter__(self) -> _Commit:
        return self

    def __exit__(self, kind: object, error: object, trace: object) -> None:
        self._record.discard()
        try:
            _clean_up(self._storage, self._key, self._unneeded)
        except (OSError, StoreError) as failed:
            if error is None:
                logger.warning("%s is committed, but replaced parts may be left over: %s", self._key, failed)


def delete(storage: Storage, key: RolloutKey, seen: FileInfo | None = None) -> bool:
    """Remove an entry, its record first. Returns whether it was removed: an entry that was replaced since ``seen``
    stays."""
    folder, name = names.folder_name(key), names.record_name(key)
    if storage.info(folder, name) is None:
        raise committed.not_found(storage, key)
    listed = committed.listed_parts(storage, key) or set()
    removed = storage.delete(folder, seen or name)
    if removed:
        _clean_up(storage, key, listed)
    return removed


def set_aside(storage: Storage, key: RolloutKey, check: Callable[[], Any] | None) -> str:
    """Rename the files of an unreadable entry, and return the new path of its record.

    ``check`` raises if the entry cannot be read. If it does not raise, or if the entry has been replaced in the
    meantime, the entry stays and a ``StoreError`` is raised. Without ``check``, readable entries are renamed too.
    """
    folder, name, token = names.folder_name(key), names.record_name(key), secrets.token_hex(3)
    seen, listed = storage.info(folder, name), committed.listed_parts(storage, key) or set()
    if seen is None:
        raise committed.not_found(storage, key)
    if check is not None:
        with contextlib.suppress(UnreadableEntryError):
            check()
            raise StoreError(f"The entry of {key} was not set aside: it is complete and readable.")
    with storage.stage(folder):  # tells other processes that a writer is active
        if not storage.rename(folder, seen, names.set_aside_name(name, token)):
            if storage.info(folder, name) is None:
                raise committed.not_found(storage, key)
            raise StoreError(f"The entry of {key} was not set aside: another process has recorded it again.")
    for part in unlisted_parts(storage, folder, key.gen_batch, listed):
        storage.rename(folder, part, names.set_aside_name(part.name, token))
    return storage.where(folder, names.set_aside_name(name, token))


def _parts_to_replace(storage: Storage, key: RolloutKey) -> set[str]:
    """The parts of the entry that a new record replaces. Raises if another version of this package wrote the entry."""
    try:
        return {part.file for part in committed.read_record(storage, key).parts}
    except (NewerFormatError, OldFormatError) as error:
        raise type(error)(f"{error} It was kept, and the new one was not written.") from error
    except (EntryNotFoundError, UnreadableEntryError):
        return set()


def _clean_up(storage: Storage, key: RolloutKey, unneeded: Collection[str]) -> None:
    for part in unlisted_parts(storage, names.folder_name(key), key.gen_batch, unneeded):
        storage.delete(names.folder_name(key), part)
