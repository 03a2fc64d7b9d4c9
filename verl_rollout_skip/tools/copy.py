"""Copies recordings between folders and object stores: byte for byte, checked by digest, and resumable.

Each entry is committed at the destination as if it were recorded there, so an interrupted copy leaves only complete
entries. Manifest, tokenizer and pins are copied first, so a partial copy is a usable variant with fewer steps.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor, as_completed
from dataclasses import dataclass
from enum import Enum

from verl_rollout_skip.errors import (
    EntryExistsError,
    EntryNotFoundError,
    ManifestError,
    StoreError,
    UnreadableEntryError,
)
from verl_rollout_skip.key import RolloutKey
from verl_rollout_skip.runs.columns import columns_folder, columns_of, trainings_with_columns
from verl_rollout_skip.runs.manifest import read_manifest
from verl_rollout_skip.runs.paths import LEDGERS, MANIFEST, PINS, TOKENIZER, TRAININGS
from verl_rollout_skip.store import commit, committed, names
from verl_rollout_skip.store.new_files import publish
from verl_rollout_skip.store.record import EntryRecord
from verl_rollout_skip.store.storage import HERE, Storage, open_storage

_FILE_LIMIT = 1 << 40


class Outcome(str, Enum):
    """The outcome of copying an entry."""

    COPIED = "copied"
    """It is now at the destination."""
    PRESENT = "present"
    """The same rollout was already there."""
    CONFLICT = "conflict"
    """A different rollout has its key there and was kept."""
    DAMAGED = "damaged"
    """It is damaged at the source or at the destination. Nothing was overwritten."""
    GONE = "gone"
    """It was removed at the source while the copy was running."""


@dataclass(frozen=True)
class CopiedEntry:
    """An entry, the outcome, its size, and the reason if it was not copied."""

    key: RolloutKey
    outcome: Outcome
    bytes: int = 0
    error: str | None = None


def copy_metadata(source: Storage, target: Storage) -> None:
    """Copy everything in a variant but its entries. A different manifest at the target is an error."""
    _copy_manifest(source, target)
    for folder in (TRAININGS, LEDGERS, TOKENIZER, PINS):
        present = {file.name: file.size for file in target.files(folder)}
        for file in source.files(folder):
            if file.name.startswith("."):
                continue  # still being written
            changes = folder in (TRAININGS, LEDGERS)
            if file.name not in present or (changes and present[file.name] != file.size):
                with contextlib.suppress(FileExistsError):
                    publish(target, folder, file.name, source.read(folder, file.name, _FILE_LIMIT), replace=changes)


def copy_entries(
    source: Storage, target: Storage, keys: Iterable[RolloutKey], *, jobs: int = 4, read_back: bool = False
) -> Iterator[CopiedEntry]:
    """Copy entries, several at a time, and yield each when it is done.

    Damaged and conflicting entries are outcomes; a storage that fails ends the copy. ``read_back`` reads each entry
    again at the destination, even if it was already there, and checks its digest.
    """
    with ThreadPoolExecutor(jobs) as pool:
        futures = [pool.submit(copy_entry, source, target, key, read_back) for key in keys]
        try:
            for future in as_completed(futures):
                yield future.result()
        except Exception as error:
            pool.shutdown(wait=True, cancel_futures=True)
            raise StoreError(
                f"The copy to {target.where()} ended early ({error}). {_count_copied(futures)} entries were copied "
                "completely. Run the same command again to continue."
            ) from error
        finally:
            pool.shutdown(wait=True, cancel_futures=True)


def copy_columns(
    source: str, target: str, wanted: Callable[[RolloutKey], bool], *, jobs: int = 4, read_back: bool = False
) -> Iterator[CopiedEntry]:
    """Copy the training columns of the wanted steps from one variant folder to another."""
    for training in trainings_with_columns(source):
        keys = [key for key in columns_of(source, training) if wanted(key)]
        there = open_storage(columns_folder(target, training))
        yield from copy_entries(columns_of(source, training).storage, there, keys, jobs=jobs, read_back=read_back)


def _count_copied(futures: Iterable[Future[CopiedEntry]]) -> int:
    finished = [future for future in futures if not future.cancelled() and future.exception() is None]
    return sum(future.result().outcome is Outcome.COPIED for future in finished)


def copy_entry(source: Storage, target: Storage, key: RolloutKey, read_back: bool = False) -> CopiedEntry:
    """Copy one entry, unless the same rollout is already there."""
    try:
        record = committed.read_record(source, key)
        if _is_present(target, record):
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
    """The outcome for an entry that is already there; with ``read_back``, after checking its bytes."""
    try:
        if read_back:
            committed.load(target, record.key, _FILE_LIMIT)
    except (UnreadableEntryError, EntryNotFoundError) as error:
        return CopiedEntry(record.key, Outcome.DAMAGED, error=f"At the destination: {error}")
    return CopiedEntry(record.key, Outcome.PRESENT, record.bytes)


def _is_present(target: Storage, record: EntryRecord) -> bool:
    """Whether the destination has exactly this entry, according to its record and the sizes of its parts."""
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
        publish(target, HERE, MANIFEST, source.read(HERE, MANIFEST, _FILE_LIMIT))
    found = read_manifest(target)
    if found is None or found.fingerprint != manifest.fingerprint:
        raise ManifestError(
            f"{target.where(HERE, MANIFEST)} belongs to rollouts with different settings than {manifest.path}. "
            "Nothing was copied there. Choose another destination."
        )
