"""Executes a plan. Anything pinned or recorded after the plan was made is kept."""

from __future__ import annotations

import contextlib
import os
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

from verl_rollout_skip.errors import EntryNotFoundError
from verl_rollout_skip.key import RolloutKey
from verl_rollout_skip.runs import pins
from verl_rollout_skip.runs.columns import columns_folder
from verl_rollout_skip.runs.paths import COLUMNS, LEDGERS, MANIFEST, PARTIAL, TOKENIZER, TRAININGS
from verl_rollout_skip.store import commit, committed, leftovers, names
from verl_rollout_skip.store.reader import StoreReader
from verl_rollout_skip.store.storage import HERE, FileInfo, Storage
from verl_rollout_skip.store.storage.local import LocalStorage
from verl_rollout_skip.store.storage.locations import join, open_storage
from verl_rollout_skip.tools.prune.plan import Plan, RecordedStep, RecordedVariant, UnusedFile


@dataclass(frozen=True)
class Kept:
    """What was not removed because of something that happened after the plan was made.

    ``pinned`` and ``recorded_again`` are steps. ``reasons`` say why a whole variant was not removed.
    """

    pinned: list[RecordedStep] = field(default_factory=list)
    recorded_again: list[RecordedStep] = field(default_factory=list)
    reasons: list[str] = field(default_factory=list)

    @property
    def steps(self) -> list[RecordedStep]:
        return [*self.pinned, *self.recorded_again]


def execute(plan: Plan, on_step: Callable[[], None] = lambda: None) -> Kept:
    """Remove what a plan says, except what was pinned or recorded since then; return what was kept.

    ``on_step`` is called after each step, to show progress.
    """
    storage = plan.variant.storage
    pinned, recorded_again = [], []
    rollouts = plan.variant.rollouts or storage
    for step in plan.steps:
        # A single pin keeps a whole variant, as in the plan.
        if pins.read_pins(rollouts) if plan.whole else pins.is_pinned(rollouts, step.step):
            pinned.append(step)
        elif not _remove_step(storage, step):
            recorded_again.append(step)
        else:
            for columns in step.columns:
                _remove_step(columns.storage, columns.step)
        on_step()
    _remove_empty_columns(plan.variant)
    for file in plan.files:
        if not _is_listed(storage, file):  # unless the entry was recorded or copied again since then
            storage.delete(file.folder, file.seen)
            _remove_if_empty(storage, file.folder)
    reasons = []
    if plan.whole:
        rest = _all_files(storage)
        reasons = _reasons_to_keep(plan.variant, rest)
        if not reasons:
            _remove_rest(plan.variant, rest)
    return Kept(pinned, recorded_again, reasons)


def _remove_step(storage: Storage, step: RecordedStep) -> bool:
    """Remove a step unless it was recorded again after the plan was made. Returns whether it was removed."""
    folder = names.folder_name(step.keys[0])
    found = [(storage.info(folder, planned.name), planned) for planned in step.records.values()]
    if any(now is not None and now.version != planned.version for now, planned in found):
        return False
    removed = True
    for key, planned in step.records.items():
        with contextlib.suppress(EntryNotFoundError):  # another process removed it first
            removed &= commit.delete(storage, key, planned)
    for file in step.others if removed else ():
        if names.is_old_part(file.name):
            storage.delete(folder, file)
    _remove_if_empty(storage, folder)
    return removed


def _is_listed(storage: Storage, file: UnusedFile) -> bool:
    """Whether a file is a part that a record lists."""
    step, gen_batch = names.parse_folder(file.folder), names.parse_part(file.name)
    if step is None or gen_batch is None:
        return False
    return file.name in (committed.listed_parts(storage, RolloutKey(step, gen_batch)) or ())


def _all_files(storage: Storage) -> dict[str, list[FileInfo]]:
    return {folder: storage.files(folder) for folder in [HERE, *storage.folders()]}


def _reasons_to_keep(variant: RecordedVariant, files: Mapping[str, list[FileInfo]]) -> list[str]:
    """Why a variant must be kept after its planned steps were removed: new pins, new entries, or a running writer."""
    storage = variant.storage
    reasons = [f"{pin} was pinned in the meantime" for pin in pins.read_pins(storage)]
    reasons += [f"{key} was recorded in the meantime" for key in StoreReader(storage)]
    if any(_may_be_written(storage, file) for found in files.values() for file in found):
        reasons.append("something is being written to it")
    columns = [(other, file) for other in _columns(variant) for found in _all_files(other).values() for file in found]
    if any(other.shows_writers and leftovers.is_being_written(file) for other, file in columns):
        reasons.append("training columns are being written to it")
    return reasons


def _may_be_written(storage: Storage, file: FileInfo) -> bool:
    """Whether a file may belong to a running commit. Object stores do not show writers, only recent parts."""
    if storage.shows_writers:
        return leftovers.is_being_written(file)
    return names.parse_part(file.name) is not None and time.time() - file.changed <= leftovers.DAY


def _remove_rest(variant: RecordedVariant, files: Mapping[str, list[FileInfo]]) -> None:
    """Remove the remaining files that this package wrote into the variant folder, the manifest last."""
    storage = variant.storage
    for folder, found in sorted(files.items()):
        is_own = folder in (LEDGERS, TOKENIZER, TRAININGS)
        is_step = names.parse_folder(folder) is not None and not any(_is_record(file.name) for file in found)
        for file in found:
            if is_own or file.name.startswith(names.TEMPORARY) or (is_step and _is_entry_file(file.name)):
                storage.delete(folder, file)
        _remove_if_empty(storage, folder)
    for other in (open_storage(f"{variant.path}/{PARTIAL}"), *_columns(variant)):
        _remove_entries(other)
    storage.delete(HERE, MANIFEST)
    emptied = (join(variant.path, COLUMNS), variant.path, variant.run_path)
    for path in emptied if isinstance(storage, LocalStorage) else ():
        with contextlib.suppress(OSError):  # not empty
            os.rmdir(path)


def _columns(variant: RecordedVariant) -> list[Storage]:
    """The storages of the training columns in a variant folder."""
    return [open_storage(columns_folder(variant.path, training)) for training in _column_folders(variant.path)]


def _column_folders(variant: str) -> list[str]:
    return sorted(open_storage(join(variant, COLUMNS)).folders())


def _remove_empty_columns(variant: RecordedVariant) -> None:
    """Remove the folders of training columns that are now empty."""
    rollouts = variant.path if variant.rollouts is None else variant.run_path
    for storage in map(open_storage, [columns_folder(rollouts, name) for name in _column_folders(rollouts)]):
        if isinstance(storage, LocalStorage):
            with contextlib.suppress(OSError):  # not empty
                os.rmdir(storage.root)
                os.rmdir(storage.root.parent)


def _remove_entries(storage: Storage) -> None:
    """Remove the entries of a store in a variant folder: of steps that are not complete, or of training columns."""
    for folder in [*storage.folders(), HERE]:
        for file in storage.files(folder):
            if _is_record(file.name) or _is_entry_file(file.name) or file.name.startswith(names.TEMPORARY):
                storage.delete(folder, file)
        _remove_if_empty(storage, folder)
    if isinstance(storage, LocalStorage):
        with contextlib.suppress(OSError):  # missing or not empty
            os.rmdir(storage.root)


def _is_record(name: str) -> bool:
    return names.parse_record(name) is not None


def _is_entry_file(name: str) -> bool:
    return names.parse_part(name) is not None or names.is_set_aside(name) or names.is_old_part(name)


def _remove_if_empty(storage: Storage, folder: str) -> None:
    """Remove a subfolder of a variant if it is empty. Object stores have no folders."""
    if isinstance(storage, LocalStorage) and folder != HERE:
        with contextlib.suppress(OSError):
            os.rmdir(storage.root / folder)
