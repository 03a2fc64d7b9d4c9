"""How an entry becomes visible, and how it is read: whole or not at all, whoever dies or writes meanwhile.

An entry is a record and the parts that it lists. Parts are immutable, and no two commits write the same one: each
holds a random token, and is named after its content. **The record is the commit.**

1. Open a temporary file for the record. While it is there, the folder shows that a commit is under way.
2. Write each part to a temporary file and rename that to the part's name.
3. Publish the record as ``gen_NNN.json``: exclusively, so that the first writer wins, or atomically replacing.
4. Clean up: delete the parts of the key that no record lists. So do ``delete``, which removes the record first, and
   ``prune``; ``set_aside`` renames record and parts instead. A crash leaves at most such parts and temporary files.

A reader reads the record, then its parts, and checks them. If one is missing or damaged and the record is another one
by then, the entry was replaced meanwhile, and the reader starts over.

Cleaning up takes no lock; its order makes it safe: (a) list the parts, (b) list the temporary files, (c) read the
record; a part of (a) that (c) does not list goes unless (b) shows a writer. The one commit that wrote it before (a) is
either still under way at (b), and shows; or it is over, and then (c) lists the part, or nothing ever will. A part of a
record that was replaced or deleted goes in any case. Object stores show no writers: there other parts go after a day.
"""

from __future__ import annotations

import contextlib
import logging
import secrets
import time
from collections.abc import Callable, Collection, Iterable
from functools import partial
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
from verl_rollout_skip.store.record import EntryRecord, RecordedPart, make_record, parse_record, record_bytes
from verl_rollout_skip.store.storage import FileInfo, Storage
from verl_rollout_skip.store.storage.local import is_own_leftover

if TYPE_CHECKING:
    from types import TracebackType

    from verl_rollout_skip.store import codec

logger = logging.getLogger(__name__)

PART_BYTES = 2 << 30
DAY = 86400.0


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
            parts = [under_way.write(rows, plan.write) for rows in plan.split(part_bytes)]
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
            arrived = under_way.write(slice(0, expected.rows), partial(_write_all, data))
            if arrived != expected:
                raise CorruptEntryError(f"The entry of {key} was not copied: {arrived} arrived instead of {expected}.")
        return under_way.publish(record, record_data)


def _write_all(data: Any, rows: slice, stream: Any) -> None:
    stream.write(data)


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

    def write(self, rows: slice, write: Callable[[slice, Any], Any]) -> RecordedPart:
        """Write one part. If the key is taken it is only measured, because the entry that is there stays."""
        with self._storage.stage(self._folder) as staged:
            write(rows, staged.stream)
            size, digest = staged.measure()
            part = RecordedPart(names.part_name(self._key, digest), rows.stop - rows.start, size, digest)
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
    try:
        storage.rename(folder, name, name + ending)
    except FileNotFoundError:
        raise committed.not_found(storage, key) from None
    found = committed.peek(storage, folder, name + ending)
    if found is not None and found != seen:
        with storage.stage(folder) as staged:
            staged.write(found)
            storage.publish(staged, name)
        storage.delete(folder, name + ending)
        raise StoreError(f"The entry of {key} was not set aside: another process has recorded it again.")
    for part in _unused(storage, folder, key.gen_batch, listed):
        storage.rename(folder, part.name, part.name + ending)
    return storage.where(folder, name + ending)


def leftovers(storage: Storage, folder: str, older_than_s: float = DAY) -> list[FileInfo]:
    """What writers that died left in a folder: temporary files, and parts that no record lists."""
    parts = [] if names.parse_folder(folder) is None else _unused(storage, folder, older_than_s=older_than_s)
    temporary = [file for file in storage.files(folder) if file.name.startswith(names.TEMPORARY)]
    return [*parts, *(file for file in temporary if not is_being_written(file, older_than_s))]


def is_being_written(file: FileInfo, older_than_s: float = DAY) -> bool:
    """Whether it is a temporary file whose writer may be alive."""
    is_young = time.time() - file.changed <= older_than_s
    return file.name.startswith(names.TEMPORARY) and is_young and is_own_leftover(file.name) is not True


def _clean_up(storage: Storage, key: RolloutKey, unneeded: Collection[str]) -> None:
    for part in _unused(storage, names.folder_name(key), key.gen_batch, unneeded):
        storage.delete(names.folder_name(key), part.name)


def _unused(
    storage: Storage,
    folder: str,
    gen_batch: int | None = None,
    unneeded: Collection[str] = (),
    older_than_s: float = DAY,
) -> list[FileInfo]:
    """Parts of a generation batch, or of all, that no record lists and no commit under way can list.

    Why that is so is in the module's docstring. ``unneeded`` are parts of commits that are over.
    """
    found = [(names.parse_part(file.name), file) for file in storage.files(folder)]
    parts = [(number, file) for number, file in found if number is not None and gen_batch in (None, number)]
    if not parts:
        return []
    quiet = storage.shows_writers and not any(is_being_written(file, older_than_s) for file in storage.files(folder))
    step = names.parse_folder(folder) or 0
    listed = {number: committed.listed_parts(storage, RolloutKey(step, number)) for number, _ in parts}
    return [
        file
        for number, file in parts
        if (known := listed[number]) is not None and file.name not in known
        if file.name in unneeded or quiet or time.time() - file.changed > older_than_s
    ]
