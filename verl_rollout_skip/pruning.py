"""What of a recording may go, and its removal: planned first, then done step by step.

A step goes as a whole, for half of its generation batches can be replayed by nobody. It goes only if every condition
that was given allows it, and never while it is pinned: pins are looked up again just before each removal. Nothing goes
that was not in the plan: a variant into which something was recorded meanwhile stays.
"""

from __future__ import annotations

import contextlib
import itertools
import os
import re
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from datetime import datetime, timezone

from verl_rollout_skip import pins
from verl_rollout_skip.config import Steps
from verl_rollout_skip.errors import EntryNotFoundError, ManifestError
from verl_rollout_skip.key import RolloutKey
from verl_rollout_skip.manifest import NAME as MANIFEST
from verl_rollout_skip.manifest import TRAININGS, read_manifest
from verl_rollout_skip.store import commit, committed, leftovers, names
from verl_rollout_skip.store.reader import StoreReader, Unreadable
from verl_rollout_skip.store.storage import HERE, FileInfo, Storage
from verl_rollout_skip.store.storage.local import LocalStorage
from verl_rollout_skip.tokenizer import FOLDER as TOKENIZER

_UNITS = {"s": 1, "m": 60, "h": 3600, "d": 86400, "w": 7 * 86400}


@dataclass(frozen=True)
class Conditions:
    """What may go: only if all of them allow it. ``max_size`` removes the oldest, and no more than needed."""

    steps: Steps
    older_than_s: float | None = None
    keep_last: int | None = None
    max_size: int | None = None
    whole_variants: bool = False


@dataclass(frozen=True)
class RecordedStep:
    """One step of a variant: its entries, what they take on disk, and when the last of them was recorded."""

    step: int
    keys: tuple[RolloutKey, ...]
    bytes: int
    recorded: float


@dataclass(frozen=True)
class File:
    """A file that nobody needs: left by a writer that died, or set aside because it could not be read."""

    folder: str
    name: str
    bytes: int


@dataclass
class VariantPlan:
    """What of one variant is to go. ``pinned`` would go as well if it were not pinned, or its variant with it.

    ``recorded`` is when something was last recorded into it, or when it was begun if it holds no step yet.
    """

    path: str
    run_path: str
    storage: Storage
    held: list[RecordedStep]
    recorded: float
    steps: list[RecordedStep] = field(default_factory=list)
    pinned: list[RecordedStep] = field(default_factory=list)
    files: list[File] = field(default_factory=list)
    whole: bool = False

    @property
    def bytes(self) -> int:
        return sum(step.bytes for step in self.steps) + sum(file.bytes for file in self.files)


@dataclass
class Stayed:
    """What of a plan was not carried out because of what happened since it was made.

    ``steps`` are those that were pinned meanwhile. ``reasons`` say why a variant was not removed as a whole.
    """

    steps: list[RecordedStep] = field(default_factory=list)
    reasons: list[str] = field(default_factory=list)


def parse_age(text: str) -> float:
    """Seconds from ``30d``, ``12h``, ``2w``, ``90m`` or ``45s``."""
    match = re.fullmatch(r"\s*(\d+(?:\.\d+)?)\s*([smhdw])\s*", text)
    if match is None:
        raise ValueError(f"{text!r} is no age; give a number with s, m, h, d or w, such as 30d or 12h.")
    return float(match[1]) * _UNITS[match[2]]


def look_at(path: str, run_path: str, storage: Storage) -> VariantPlan:
    """A variant and all its steps, nothing of it to go yet."""
    held = _held(StoreReader(storage))
    recorded = max((step.recorded for step in held), default=None)
    return VariantPlan(path, run_path, storage, held, _begun(storage) if recorded is None else recorded)


def choose_steps(variants: Sequence[VariantPlan], conditions: Conditions) -> None:
    """Enter into each plan which steps go, or which variants as a whole."""
    if conditions.whole_variants:
        _choose_variants(variants, conditions)
        return
    for variant in variants:
        steps = [s for s in variant.held if s.step in conditions.steps and _is_old_enough(conditions, s.recorded)]
        if conditions.keep_last is not None:
            kept = {step.step for step in variant.held[len(variant.held) - conditions.keep_last :]}
            steps = [step for step in steps if step.step not in kept]
        pinned = {step.step for step in _pinned_steps(variant, pins.read_pins(variant.storage))}
        variant.steps = [step for step in steps if step.step not in pinned]
        variant.pinned = [step for step in steps if step.step in pinned]
    if conditions.max_size is not None:
        _only_to_fit(variants, conditions.max_size)


def find_leftovers(storage: Storage, older_than_s: float) -> list[File]:
    """Temporary files and parts that writers left behind."""
    return [
        File(folder, file.name, file.size)
        for folder in [HERE, *sorted(storage.folders())]
        for file in leftovers.find_leftovers(storage, folder, older_than_s)
    ]


def _is_listed(storage: Storage, file: File) -> bool:
    """Whether it is a part that a record lists."""
    step, gen_batch = names.parse_folder(file.folder), names.parse_part(file.name)
    if step is None or gen_batch is None:
        return False
    return file.name in (committed.listed_parts(storage, RolloutKey(step, gen_batch)) or ())


def find_set_aside(storage: Storage) -> list[File]:
    """Entries that were set aside because they could not be read."""
    return [
        File(folder, file.name, file.size)
        for folder in sorted(storage.folders())
        for file in storage.files(folder)
        if names.parse_folder(folder) is not None and names.is_set_aside(file.name)
    ]


def carry_out(plan: VariantPlan, done: Callable[[], None] = lambda: None) -> Stayed:
    """Remove what a plan says; returns what stayed because of pins and recordings that have come meanwhile."""
    stayed = Stayed()
    for step in plan.steps:
        # One pin keeps a whole variant, as it does when the plan is made.
        if pins.read_pins(plan.storage) if plan.whole else pins.is_pinned(plan.storage, step.step):
            stayed.steps.append(step)
        else:
            for key in step.keys:
                with contextlib.suppress(EntryNotFoundError):  # somebody else was quicker
                    commit.delete(plan.storage, key)
            _remove_empty(plan.storage, names.folder_name(step.keys[0]))
        done()
    for file in plan.files:
        if _is_listed(plan.storage, file):
            continue  # an interrupted copy of the same entry has been completed since
        plan.storage.delete(file.folder, file.name)
        if file.folder != HERE:
            _remove_empty(plan.storage, file.folder)
    if plan.whole:
        stayed.reasons = _new_since(plan.storage)
        if not stayed.reasons:
            _remove_rest(plan)
    return stayed


def _held(entries: StoreReader) -> list[RecordedStep]:
    recorded: dict[int, float] = {}
    for found in entries.records():
        if not isinstance(found, Unreadable):
            moment = datetime.fromisoformat(found.created_at).timestamp()
            recorded[found.key.step] = max(recorded.get(found.key.step, 0.0), moment)
    steps = []
    for step, stamped in itertools.groupby(entries.stamps().items(), key=lambda item: item[0].step):
        keys, stamps = zip(*stamped, strict=True)
        files = [file for stamp in stamps for file in stamp]
        # Without a record that can be read, the files say when.
        when = recorded.get(step) or max(changed for _, _, changed in files)
        steps.append(RecordedStep(step, keys, sum(size for _, size, _ in files), when))
    return steps


def _begun(storage: Storage) -> float:
    """When a variant without steps was begun, or last written to by a training that is about to record."""
    times = [file.changed for folder in [HERE, *storage.folders()] for file in storage.files(folder)]
    try:
        manifest = read_manifest(storage)
        times += [] if manifest is None else [datetime.fromisoformat(manifest.created_at).timestamp()]
    except (ManifestError, ValueError):
        pass  # its file has a time too
    # A folder that was only just made has no files at all, and nobody knows its age.
    return max(times, default=time.time())


def _is_old_enough(conditions: Conditions, recorded: float) -> bool:
    return conditions.older_than_s is None or time.time() - recorded > conditions.older_than_s


def _choose_variants(variants: Sequence[VariantPlan], conditions: Conditions) -> None:
    by_run: dict[str, list[VariantPlan]] = {}
    for variant in variants:
        by_run.setdefault(variant.run_path, []).append(variant)
    going = []
    for run in by_run.values():
        ordered = sorted(run, key=lambda variant: variant.recorded)
        going += ordered[: max(len(ordered) - (conditions.keep_last or 0), 0)]
    going = [variant for variant in going if _is_old_enough(conditions, variant.recorded)]
    free = []
    for variant in going:
        found = pins.read_pins(variant.storage)
        variant.pinned = _pinned_steps(variant, found)
        if not found:
            free.append(variant)
    if conditions.max_size is not None:
        free = _oldest_to_fit(free, sum(_size(variant) for variant in variants) - conditions.max_size)
    for variant in free:
        variant.steps, variant.whole = list(variant.held), True


def _oldest_to_fit(variants: Iterable[VariantPlan], excess: int) -> list[VariantPlan]:
    chosen = []
    for variant in sorted(variants, key=lambda variant: variant.recorded):
        if excess <= 0:
            break
        if _size(variant):  # without steps it frees nothing
            chosen.append(variant)
            excess -= _size(variant)
    return chosen


def _only_to_fit(variants: Sequence[VariantPlan], max_size: int) -> None:
    """Of the steps that may go keep all but the oldest ones that must."""
    excess = sum(_size(variant) for variant in variants) - max_size
    candidates = [(step.recorded, variant.path, step.step, step) for variant in variants for step in variant.steps]
    going: set[tuple[str, int]] = set()
    for _, path, number, step in sorted(candidates, key=lambda candidate: candidate[:3]):
        if excess <= 0:
            break
        going.add((path, number))
        excess -= step.bytes
    for variant in variants:
        variant.steps = [step for step in variant.steps if (variant.path, step.step) in going]


def _size(variant: VariantPlan) -> int:
    return sum(step.bytes for step in variant.held)


def _pinned_steps(variant: VariantPlan, found: Sequence[pins.Pin]) -> list[RecordedStep]:
    pinned = {pin.step for pin in found}
    return [step for step in variant.held if None in pinned or step.step in pinned]


def _new_since(storage: Storage) -> list[str]:
    """Why a variant whose planned steps were removed must stay: pins, entries and writers that have come meanwhile."""
    reasons = [f"{pin} was pinned meanwhile" for pin in pins.read_pins(storage)]
    reasons += [f"{key} was recorded meanwhile" for key in StoreReader(storage)]
    if any(leftovers.is_being_written(file) for _, file in _temporary(storage)):
        reasons.append("something is being written into it")
    return reasons


def _temporary(storage: Storage) -> list[tuple[str, FileInfo]]:
    return [
        (folder, file)
        for folder in [HERE, *storage.folders()]
        for file in storage.files(folder)
        if file.name.startswith(names.TEMPORARY)
    ]


def _remove_rest(plan: VariantPlan) -> None:
    """What this package has put into the variant folder beside entries and pins; the manifest last."""
    storage = plan.storage
    for folder, file in _temporary(storage):
        storage.delete(folder, file.name)
    for folder in sorted(storage.folders()):
        found = storage.names(folder)
        is_step = names.parse_folder(folder) is not None and not any(map(_is_record, found))
        for name in found:
            if folder in (TOKENIZER, TRAININGS) or (is_step and _is_own(name)):
                storage.delete(folder, name)
        _remove_empty(storage, folder)
    storage.delete(HERE, MANIFEST)
    for path in (plan.path, plan.run_path) if isinstance(storage, LocalStorage) else ():
        with contextlib.suppress(OSError):
            os.rmdir(path)


def _is_record(name: str) -> bool:
    return names.parse_record(name) is not None


def _is_own(name: str) -> bool:
    return names.parse_part(name) is not None or names.is_set_aside(name)


def _remove_empty(storage: Storage, folder: str) -> None:
    """Object stores have no folders; elsewhere one that is not empty stays."""
    if isinstance(storage, LocalStorage):
        with contextlib.suppress(OSError):
            os.rmdir(storage.root / folder)


def stamp(seconds: float) -> str:
    """A time as records have it."""
    return datetime.fromtimestamp(seconds, timezone.utc).isoformat(timespec="seconds")
