"""How an entry is committed: it appears whole or not at all, even if writers crash or race.

An entry is a record and the parts it lists. Parts are immutable files named after their content, which includes a
random token: no two commits write the same part. **The record is the commit.**

1. Open a temporary file for the record. While it exists, the folder shows that a commit is under way.
2. Write each part to a temporary file and rename it to its name.
3. Publish the record as ``gen_NNN.json``: exclusively, so that the first writer wins, or atomically replacing.
4. Delete the parts of the key that no record lists. ``delete`` removes the record and then does the same, ``set_aside``
   renames both. A crash leaves at most unlisted parts and temporary files, for the next commit of the key or ``prune``.

A reader (``committed.py``) reads the record, then its parts. If a part is missing or damaged and the record has changed
by then, the entry was replaced and the reader starts over.

Deleting unlisted parts needs no lock, because of its order: (a) list the parts, (b) list the temporary files, (c) read
the record; delete a part of (a) that (c) does not list, unless (b) shows a writer. The commit that wrote the part is
either under way at (b), and shows; or it is over, and then (c) lists the part or no record ever will. Object stores
show no writers: there a part goes with the record that listed it, or when it is a day old. Only copies share parts with
another commit, that of the original; a copy that loses one to a clean-up at that moment is found to be damaged.
"""

from __future__ import annotations

import contextlib
import logging
import secrets
import time
from collections.abc import Callable, Collection, Iterable
from functools import partial
from operator import methodcaller
from typing import TYPE_CHECKING, Any

from verl_rollout_skip.errors import (
    CorruptEntryError,
    EntryExistsError,
    EntryNotFoundError,
    StoreError,
    UnreadableEntryError,
)
from verl_rollout_skip.key import RolloutKey
from verl_rollout_skip.store import committed, names
from verl_rollout_skip.store.leftovers import unlisted_parts
from verl_rollout_skip.store.record import EntryRecord, RecordedPart, make_record, parse_record, record_bytes
from verl_rollout_skip.store.storage import Storage

if TYPE_CHECKING:
    from types import TracebackType

    from verl_rollout_skip.store import codec

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

    If the key is taken, the entry that is there stays: the same rollout is not an error, another one is. To tell, it is
    read, but not if it has more than ``limit`` bytes.
    """
    from verl_rollout_skip.store import codec  # late: it needs torch, and those who only look at records do not

    started = time.perf_counter()
    with _Commit(storage, key, replace, limit, admit) as under_way:
        try:
            plan = codec.plan(prepared)
            parts = [
                under_way.write(rows.stop - rows.start, partial(plan.write, rows)) for rows in plan.split(part_bytes)
            ]
            summary = plan.summary()
        finally:
            prepared.raise_if_changed()  # also if it failed: a tensor that changes under the encoder may be the reason
        record = make_record(key, summary, parts, time.perf_counter() - started, info)
        return under_way.publish(record, record_bytes(record))


def commit_copy(storage: Storage, key: RolloutKey, record_data: bytes, parts: Iterable[Any]) -> EntryRecord:
    """Commit an entry that is recorded elsewhere, byte for byte. ``parts`` are those of its record in order."""
    record = parse_record(record_data, key)
    with _Commit(storage, key, is_copy=True) as under_way:
        for expected, data in zip(record.parts, parts, strict=True):
            arrived = under_way.write(expected.rows, methodcaller("write", data))
            if arrived != expected:
                raise CorruptEntryError(f"The entry of {key} was not copied: {arrived} arrived instead of {expected}.")
        return under_way.publish(record, record_data)


class _Commit:
    """A commit that is under way. However it ends, parts that no record lists are removed then."""

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
        self._unneeded: set[str] = set()
        self._record = storage.stage(self._folder)

    def write(self, rows: int, write: Callable[[Any], Any]) -> RecordedPart:
        """Write one part. If the key is taken it is only measured, because the entry that is there stays."""
        with self._storage.stage(self._folder) as staged:
            write(staged.stream)
            size, digest = staged.measure()
            part = RecordedPart(names.part_name(self._key, digest), rows, size, digest)
            if not self._taken:
                self._admit(size)
                if not self._is_copy:  # another copy of the same entry may be under way
                    self._unneeded.add(part.file)
                self._storage.publish(staged, part.file, replace=True)
            return part

    def publish(self, record: EntryRecord, data: bytes) -> EntryRecord:
        """Publish the record, which is the commit; returns the one that is there then."""
        name = names.record_name(self._key)
        if not self._taken:
            self._admit(len(data))
            self._record.write(data)
            written, self._unneeded = self._unneeded, committed.listed_parts(self._storage, self._key) or set()
            try:
                self._storage.publish(self._record, name, self._replace)
                return record
            except FileExistsError:
                # A request that was sent twice, because its answer was lost, finds the name taken by itself.
                if committed.peek(self._storage, self._folder, name) == data:
                    return record
                self._unneeded = written
        try:
            present = committed.load(self._storage, self._key, self._limit).record
        except EntryNotFoundError:
            raise EntryExistsError(
                f"{self._key} was recorded by another process when this rollout was to be written, and deleted since. "
                "Nothing was written: put it again."
            ) from None
        if present.content == record.content:
            return present
        raise EntryExistsError(
            f"{self._key} is already recorded with another rollout ({present.rows} rows, recorded "
            f"{present.created_at}) in {committed.where(self._storage, self._key)}. It was kept and the new one was "
            "not written. Replace it on purpose (mode refresh; put with replace=True), or record into another folder."
        )

    def __enter__(self) -> _Commit:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._record.discard()
        try:
            _clean_up(self._storage, self._key, self._unneeded)
        except (OSError, StoreError) as failed:
            if error is None:
                logger.warning("%s is committed; parts that it replaced may be left over: %s", self._key, failed)


def delete(storage: Storage, key: RolloutKey) -> None:
    """Remove an entry, its record first."""
    folder, name = names.folder_name(key), names.record_name(key)
    if storage.info(folder, name) is None:
        raise committed.not_found(storage, key)
    listed = committed.listed_parts(storage, key) or set()
    storage.delete(folder, name)
    _clean_up(storage, key, listed)


def set_aside(storage: Storage, key: RolloutKey, check: Callable[[], Any]) -> str:
    """Rename the files of an unreadable entry; returns where its record is now.

    ``check`` raises what is wrong with the entry. If it does not, or if the entry is another one by the time it is
    renamed, it is left alone with a ``StoreError``.
    """
    folder, name, ending = names.folder_name(key), names.record_name(key), f".{secrets.token_hex(3)}.corrupt"
    seen, listed = committed.peek(storage, folder, name), committed.listed_parts(storage, key) or set()
    with contextlib.suppress(UnreadableEntryError):
        check()
        raise StoreError(f"The entry of {key} was not set aside: it is whole and readable.")
    with storage.stage(folder) as staged:  # shows others that something is under way
        try:
            storage.rename(folder, name, name + ending)
        except FileNotFoundError:
            raise committed.not_found(storage, key) from None
        found = committed.peek(storage, folder, name + ending)
        if found is not None and found != seen:
            staged.write(found)
            storage.publish(staged, name)
            storage.delete(folder, name + ending)
            raise StoreError(f"The entry of {key} was not set aside: another process has recorded it again.")
    for part in unlisted_parts(storage, folder, key.gen_batch, listed):
        with contextlib.suppress(FileNotFoundError):  # another process has cleaned up
            storage.rename(folder, part.name, part.name + ending)
    return storage.where(folder, name + ending)


def _clean_up(storage: Storage, key: RolloutKey, unneeded: Collection[str]) -> None:
    for part in unlisted_parts(storage, names.folder_name(key), key.gen_batch, unneeded):
        storage.delete(names.folder_name(key), part.name)
