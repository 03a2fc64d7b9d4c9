"""Copies of recordings between folders and object stores: byte for byte, checked by digest, to be resumed at any time.

Each entry is committed at its destination as if it were recorded there, so an interrupted copy leaves only whole
entries. What describes a variant comes before its entries: a copy that was cut short is a variant with fewer steps.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterable
from concurrent.futures import FIRST_EXCEPTION, Future, ThreadPoolExecutor, wait
from dataclasses import dataclass, field
from enum import Enum

from verl_rollout_skip import pins
from verl_rollout_skip.errors import (
    EntryExistsError,
    EntryNotFoundError,
    ManifestError,
    StoreError,
    UnreadableEntryError,
)
from verl_rollout_skip.key import RolloutKey
from verl_rollout_skip.manifest import NAME as MANIFEST
from verl_rollout_skip.manifest import TRAININGS, read_manifest
from verl_rollout_skip.store import commit, committed, names
from verl_rollout_skip.store.record import EntryRecord
from verl_rollout_skip.store.storage import HERE, Storage
from verl_rollout_skip.tokenizer import FOLDER as TOKENIZER

_FILE_LIMIT = 1 << 40


class Outcome(str, Enum):
    """What became of an entry."""

    COPIED = "copied"
    """It is at the destination now."""
    PRESENT = "present"
    """The same rollout was there already."""
    CONFLICT = "conflict"
    """Another rollout has its key there; that one was kept."""
    DAMAGED = "damaged"
    """It cannot be trusted, at its source or at the destination; nothing was overwritten."""
    GONE = "gone"
    """It was removed at its source since the copy began."""


@dataclass(frozen=True)
class CopiedEntry:
    """An entry, what became of it, its size, and why if it was not copied."""

    key: RolloutKey
    outcome: Outcome
    bytes: int = 0
    error: str | None = None


@dataclass
class Copied:
    """What became of all entries so far."""

    entries: list[CopiedEntry] = field(default_factory=list)

    def count(self, outcome: Outcome) -> int:
        return sum(entry.outcome is outcome for entry in self.entries)


def copy_description(source: Storage, target: Storage) -> None:
    """Copy what describes a variant: manifest, trainings, tokenizer, pins. Another manifest there is an error."""
    _copy_manifest(source, target)
    for folder in (TRAININGS, TOKENIZER, pins.FOLDER):
        present = {file.name: file.size for file in target.files(folder)}
        for file in source.files(folder):
            if file.name.startswith("."):
                continue  # somebody is writing it
            changes = folder == TRAININGS
            if file.name not in present or (changes and present[file.name] != file.size):
                _put(target, folder, file.name, source.read(folder, file.name, _FILE_LIMIT), replace=changes)


def copy_entries(
    source: Storage,
    target: Storage,
    keys: Iterable[RolloutKey],
    *,
    jobs: int = 4,
    read_back: bool = False,
    done: Callable[[CopiedEntry], None] = lambda entry: None,
) -> Copied:
    """Copy entries, a few at a time. Damaged and conflicting ones are listed; a storage that fails ends the copy.

    ``read_back`` reads each entry again at its destination, also one that was there already, and compares the digest.
    """
    copied = Copied()

    def one(key: RolloutKey) -> None:
        entry = copy_entry(source, target, key, read_back)
        copied.entries.append(entry)
        done(entry)

    with ThreadPoolExecutor(jobs) as pool:
        futures: list[Future[None]] = [pool.submit(one, key) for key in keys]
        try:
            failed = [future for future in wait(futures, return_when=FIRST_EXCEPTION).done if future.exception()]
        finally:
            pool.shutdown(wait=True, cancel_futures=True)
    if failed:
        error = failed[0].exception()
        raise StoreError(
            f"The copy to {target.where()} ended early ({error}). {copied.count(Outcome.COPIED)} entries were copied "
            "and are whole; the same command goes on where this one stopped."
        ) from error
    copied.entries.sort(key=lambda entry: entry.key)
    return copied


def copy_entry(source: Storage, target: Storage, key: RolloutKey, read_back: bool = False) -> CopiedEntry:
    """Copy one entry unless the same rollout is there already."""
    try:
        record = committed.read_record(source, key)
        if _is_there(target, record):
            return _present(target, record, read_back)
        found = committed.load(source, key, _FILE_LIMIT)
    except EntryNotFoundError as error:
        return CopiedEntry(key, Outcome.GONE, error=str(error))
    except UnreadableEntryError as error:
        return CopiedEntry(key, Outcome.DAMAGED, error=str(error))
    try:
        made = commit.commit_copy(target, key, found.record_data, found.parts)
        if read_back:
            committed.load(target, key, _FILE_LIMIT)
    except EntryExistsError as error:
        return CopiedEntry(key, Outcome.CONFLICT, error=str(error))
    except UnreadableEntryError as error:
        return CopiedEntry(key, Outcome.DAMAGED, error=f"At the destination: {error}")
    same = made.parts == found.record.parts
    return CopiedEntry(key, Outcome.COPIED if same else Outcome.PRESENT, found.record.bytes)


def _present(target: Storage, record: EntryRecord, read_back: bool) -> CopiedEntry:
    """An entry that is there already, whose bytes are looked at if they are to be."""
    try:
        if read_back:
            committed.load(target, record.key, _FILE_LIMIT)
    except (UnreadableEntryError, EntryNotFoundError) as error:
        return CopiedEntry(record.key, Outcome.DAMAGED, error=f"At the destination: {error}")
    return CopiedEntry(record.key, Outcome.PRESENT, record.bytes)


def _is_there(target: Storage, record: EntryRecord) -> bool:
    """Whether the destination has this very entry, by its record and the sizes of its parts."""
    files = {file.name: file for file in target.files(names.folder_name(record.key))}
    try:
        return committed.read_record(target, record.key, files).parts == record.parts
    except (EntryNotFoundError, UnreadableEntryError):
        return False


def _copy_manifest(source: Storage, target: Storage) -> None:
    manifest = read_manifest(source)
    if manifest is None:
        return
    with contextlib.suppress(FileExistsError):
        _put(target, HERE, MANIFEST, source.read(HERE, MANIFEST, _FILE_LIMIT), replace=False)
    found = read_manifest(target)
    if found is None or found.fingerprint != manifest.fingerprint:
        raise ManifestError(
            f"{target.where(HERE, MANIFEST)} belongs to rollouts made with other settings than {manifest.path}. "
            "Nothing was copied beside it: give another destination."
        )


def _put(storage: Storage, folder: str, name: str, data: bytes, replace: bool) -> None:
    with storage.stage(folder) as staged, contextlib.suppress(FileExistsError):
        staged.write(data)
        storage.publish(staged, name, replace)
