"""The commit protocol: an entry becomes visible completely or not at all, even if writers crash or race.

An entry consists of a record, ``gen_NNN.json``, and the parts that it lists. **The record is the commit.** To commit:

1. Open a temporary file for the record. While it exists, other processes can see that a commit is in progress.
2. Write each part to a temporary file, sync it, and rename it to a name that contains its digest. Parts contain a
   random token, so no two commits write the same part. Only copies of an entry share part names with the original.
3. Publish the record: exclusively, so that the first writer wins, or by atomically replacing the existing one.
4. Delete the parts of the key that no record lists (``leftovers.py``). After a crash, the next commit of the same key
   deletes such parts, and ``prune`` also deletes temporary files.

``delete`` removes the record and then its parts; ``set_aside`` renames all of them. A reader (``committed.py``) reads
the record and then its parts. If a part is missing or damaged, and the record has changed in the meantime, then the
entry has been replaced, and the reader starts over.
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
    load_limit: int = 1 << 40,
    part_bytes: int = PART_BYTES,
    admit: Callable[[int], None] = lambda size: None,
) -> EntryRecord:
    """Encode a rollout and commit it.

    Without ``replace``, an existing entry is kept: committing the same rollout again does nothing, and committing a
    different one raises an error. To compare the two, the existing entry is loaded, which raises
    ``EntryTooLargeError`` if it is larger than ``load_limit`` bytes. ``admit`` is called with the size of each file
    before the file is published, and may raise.
    """
    from verl_rollout_skip.store import codec  # imports torch, which is not needed to read records

    started = time.perf_counter()
    with _PendingCommit(storage, key, replace, load_limit, admit) as pending:
        try:
            plan = codec.Plan(prepared)
            parts = [
                pending.write(rows.stop - rows.start, partial(plan.write, rows)) for rows in plan.split(part_bytes)
            ]
            summary = plan.summary()
        finally:
            prepared.raise_if_changed()  # even after a failure, which a changed tensor may have caused
        record = make_record(key, summary, parts, time.perf_counter() - started, info)
        return pending.publish(record, record_bytes(record))


def commit_parts(
    storage: Storage,
    key: RolloutKey,
    write_parts: Callable[[], tuple[Summary, list[RecordedPart]]],
    info: dict[str, Any],
    replace: bool = False,
    load_limit: int = 1 << 40,
    admit: Callable[[int], None] = lambda size: None,
) -> EntryRecord:
    """Commit an entry whose parts other processes write with ``write_part`` while ``write_parts`` runs.

    ``write_parts`` returns the summary of the entry, and its parts in order.
    """
    started = time.perf_counter()
    with _PendingCommit(storage, key, replace, load_limit, admit) as pending:
        summary, parts = write_parts()
        pending.adopt(parts)
        record = make_record(key, summary, parts, time.perf_counter() - started, info)
        return pending.publish(record, record_bytes(record))


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
    with _PendingCommit(storage, key, is_copy=True) as pending:
        for expected, data in zip(record.parts, parts, strict=True):
            copied = pending.write(expected.rows, methodcaller("write", data))
            if copied != expected:
                raise CorruptEntryError(
                    f"The entry of {key} was not copied: the copy of a part is "
                    f"{copied}, but its record says {expected}. Copy it again."
                )
        committed_record = pending.publish(record, record_data)
        # Before the record was published, a cleanup could mistake the parts for those of an interrupted copy.
        for expected, data in zip(record.parts, parts, strict=True):
            if committed_record.parts == record.parts and storage.info(names.folder_name(key), expected.file) is None:
                pending.write(expected.rows, methodcaller("write", data))
        return committed_record


class _PendingCommit:
    """A commit in progress. On exit, it deletes the parts of the key that no record lists."""

    def __init__(
        self,
        storage: Storage,
        key: RolloutKey,
        replace: bool = False,
        load_limit: int = 1 << 40,
        admit: Callable[[int], None] = lambda size: None,
        is_copy: bool = False,
    ) -> None:
        self._storage, self._key, self._folder = storage, key, names.folder_name(key)
        self._replace, self._load_limit, self._admit, self._is_copy = replace, load_limit, admit, is_copy
        self._is_taken = not replace and storage.info(self._folder, names.record_name(key)) is not None
        if replace:
            _parts_to_replace(storage, key)  # raise before anything is encoded
        self._obsolete: set[str] = set()
        self._record = storage.stage(self._folder)

    def write(self, rows: int, write: Callable[[Any], Any]) -> RecordedPart:
        """Write one part. If the key is taken, only compute its size and digest."""
        with self._storage.stage(self._folder) as staged:
            write(staged.stream)
            size, digest = staged.measure()
            part = RecordedPart(names.part_name(self._key, digest), rows, size, digest)
            if not self._is_taken:
                self._admit(size)
                if not self._is_copy:  # another process may be copying the same entry
                    self._obsolete.add(part.file)
                self._storage.publish(staged, part.file, replace=True)
            return part

    def adopt(self, parts: Collection[RecordedPart]) -> None:
        """Take ownership of parts written by other processes. They are deleted if the record is not published."""
        self._obsolete.update(part.file for part in parts)
        for part in parts:
            info = self._storage.info(self._folder, part.file)
            if info is None or info.size != part.bytes:
                where = self._storage.where(self._folder, part.file)
                raise StoreError(
                    f"{self._key} was not recorded: another process wrote {where}, but this process finds no such "
                    "file, or one of a different size. Check that all nodes share this folder."
                )
        if not self._is_taken:
            self._admit(sum(part.bytes for part in parts))

    def publish(self, record: EntryRecord, data: bytes) -> EntryRecord:
        """Publish the record, and return the record that is committed now: this one, or an equal existing one."""
        if not self._is_taken:
            self._admit(len(data))
            self._record.write(data)
            written, self._obsolete = self._obsolete, _parts_to_replace(self._storage, self._key)
            try:
                self._storage.publish(self._record, names.record_name(self._key), self._replace)
                return record
            except FileExistsError:  # by another process, or by this request if it was retried
                self._obsolete = written
        try:
            existing = committed.load(self._storage, self._key, self._load_limit).record
        except EntryNotFoundError:
            raise EntryExistsError(
                f"{self._key} was recorded and deleted by other processes while this rollout was being written. "
                "Nothing was recorded. Call put again."
            ) from None
        if existing.content == record.content:
            return existing
        raise EntryExistsError(
            f"{self._key} is already recorded with a different rollout ({existing.rows} rows, recorded "
            f"{existing.created_at}) in {committed.where(self._storage, self._key)}. It was kept, and the new one was "
            "not written. To replace it, use mode refresh or put with replace=True, or record into another folder."
        )

    def __enter__(self) -> _PendingCommit:
        return self

    def __exit__(self, error_type: object, error: object, traceback: object) -> None:
        self._record.discard()
        try:
            _delete_unlisted_parts(self._storage, self._key, self._obsolete)
        except (OSError, StoreError) as cleanup_error:
            if error is None:
                logger.warning(
                    "%s is committed, but files of the replaced entry may be left over: %s", self._key, cleanup_error
                )


def delete(storage: Storage, key: RolloutKey, seen: FileInfo | None = None) -> bool:
    """Delete an entry, its record first. Returns whether it was deleted.

    With ``seen``, an entry that has been replaced since then is kept.
    """
    folder, name = names.folder_name(key), names.record_name(key)
    if storage.info(folder, name) is None:
        raise committed.not_found(storage, key)
    part_names = committed.listed_parts(storage, key) or set()
    deleted = storage.delete(folder, seen or name)
    if deleted:
        _delete_unlisted_parts(storage, key, part_names)
    return deleted


def set_aside(storage: Storage, key: RolloutKey, check: Callable[[], Any] | None) -> str:
    """Rename the files of an unreadable entry, and return the new path of its record.

    ``check`` raises if the entry cannot be read. If it succeeds, or if another process has replaced the entry in the
    meantime, nothing is renamed and a ``StoreError`` is raised. Without ``check``, readable entries are renamed too.
    """
    folder, name, token = names.folder_name(key), names.record_name(key), secrets.token_hex(3)
    seen, part_names = storage.info(folder, name), committed.listed_parts(storage, key) or set()
    if seen is None:
        raise committed.not_found(storage, key)
    if check is not None:
        with contextlib.suppress(UnreadableEntryError):
            check()
            raise StoreError(
                f"The entry of {key} was not set aside: it is complete and readable. To free its key, delete it."
            )
    with storage.stage(folder):  # shows other processes that a writer is active
        if not storage.rename(folder, seen, names.set_aside_name(name, token)):
            if storage.info(folder, name) is None:
                raise committed.not_found(storage, key)
            raise StoreError(f"The entry of {key} was not set aside: another process has recorded it again.")
    for part in unlisted_parts(storage, folder, key.gen_batch, part_names):
        storage.rename(folder, part, names.set_aside_name(part.name, token))
    return storage.where(folder, names.set_aside_name(name, token))


def _parts_to_replace(storage: Storage, key: RolloutKey) -> set[str]:
    """The parts of the entry that is about to be replaced. Raises if the entry has a different format version."""
    try:
        return {part.file for part in committed.read_record(storage, key).parts}
    except (NewerFormatError, OldFormatError) as error:
        raise type(error)(f"{error} It was kept, and the new one was not written.") from error
    except (EntryNotFoundError, UnreadableEntryError):
        return set()


def _delete_unlisted_parts(storage: Storage, key: RolloutKey, obsolete: Collection[str]) -> None:
    for part in unlisted_parts(storage, names.folder_name(key), key.gen_batch, obsolete):
        storage.delete(names.folder_name(key), part)
