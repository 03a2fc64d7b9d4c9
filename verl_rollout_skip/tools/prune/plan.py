"""Decides what to remove. Nothing is removed here.

A step is removed with all its generation batches, because it cannot be replayed with only some of them. It is removed
only if every given condition allows it and it is not pinned.
"""

from __future__ import annotations

import re
import time
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from datetime import datetime, timezone

from verl_rollout_skip.config.skip_config import Steps
from verl_rollout_skip.errors import ManifestError
from verl_rollout_skip.key import RolloutKey
from verl_rollout_skip.runs.columns import columns_folder, trainings_with_columns
from verl_rollout_skip.runs.manifest import read_manifest
from verl_rollout_skip.runs.pins import Pin, read_pins
from verl_rollout_skip.store import leftovers, names
from verl_rollout_skip.store.reader import StoreReader, Unreadable
from verl_rollout_skip.store.storage import HERE, FileInfo, Storage, open_storage

_UNITS = {"s": 1, "m": 60, "h": 3600, "d": 86400, "w": 7 * 86400}


@dataclass(frozen=True)
class Conditions:
    """The conditions for removal, all of which must be met. ``max_size`` removes only as many old steps as needed."""

    steps: Steps
    older_than_s: float | None = None
    keep_last: int | None = None
    max_size: int | None = None
    whole_variants: bool = False

    def allow_age(self, recorded: float) -> bool:
        return self.older_than_s is None or time.time() - recorded > self.older_than_s


@dataclass(frozen=True)
class RecordedStep:
    """One step of a variant: the record file of each entry, its other files, and when it was last recorded.

    ``columns`` are the training columns of the step, one for each training that has some.
    """

    step: int
    records: dict[RolloutKey, FileInfo]
    others: tuple[FileInfo, ...]
    recorded: float
    columns: tuple[ColumnsOfStep, ...] = ()

    @property
    def keys(self) -> tuple[RolloutKey, ...]:
        return tuple(self.records)

    @property
    def bytes(self) -> int:
        own = sum(file.size for file in (*self.records.values(), *self.others))
        return own + sum(columns.step.bytes for columns in self.columns)


@dataclass(frozen=True)
class ColumnsOfStep:
    """The training columns of one training in one step, and the storage that contains them."""

    storage: Storage
    step: RecordedStep


@dataclass(frozen=True)
class RecordedVariant:
    """A variant and its steps, or the training columns of one training.

    ``recorded`` is when something was last recorded, or when the variant was created. ``rollouts`` is the storage of
    the variant that training columns belong to, whose pins protect them too. ``other_columns`` are those of steps that
    the variant does not contain.
    """

    path: str
    run_path: str
    storage: Storage
    steps: tuple[RecordedStep, ...]
    recorded: float
    rollouts: Storage | None = None
    other_columns: tuple[ColumnsOfStep, ...] = ()

    @property
    def bytes(self) -> int:
        return sum(step.bytes for step in self.steps) + sum(columns.step.bytes for columns in self.other_columns)

    @property
    def pins(self) -> list[Pin]:
        """The pins that protect the steps."""
        return read_pins(self.rollouts or self.storage)


@dataclass(frozen=True)
class UnusedFile:
    """A file that is no longer needed: left by a crashed writer, or set aside because it could not be read."""

    folder: str
    seen: FileInfo

    @property
    def name(self) -> str:
        return self.seen.name

    @property
    def bytes(self) -> int:
        return self.seen.size


@dataclass(frozen=True)
class Plan:
    """What to remove from a variant or from training columns: some ``steps`` and ``files``, or the ``whole`` variant.

    ``pinned`` are steps that meet the conditions but are kept, because they or their variant are pinned.
    """

    variant: RecordedVariant
    steps: tuple[RecordedStep, ...] = ()
    pinned: tuple[RecordedStep, ...] = ()
    files: tuple[UnusedFile, ...] = ()
    whole: bool = False

    @property
    def bytes(self) -> int:
        others = self.variant.other_columns if self.whole else ()
        steps = [*self.steps, *(columns.step for columns in others)]
        return sum(step.bytes for step in steps) + sum(file.bytes for file in self.files)


def parse_age(text: str) -> float:
    """Seconds from ``30d``, ``12h``, ``2w``, ``90m`` or ``45s``."""
    match = re.fullmatch(r"\s*(\d+(?:\.\d+)?)\s*([smhdw])\s*", text)
    if match is None:
        raise ValueError(f"{text!r} is not an age. Use a number with s, m, h, d or w, such as 30d or 12h.")
    return float(match[1]) * _UNITS[match[2]]


def inspect_variant(path: str, run_path: str, storage: Storage) -> RecordedVariant:
    """Find out what is recorded in a variant."""
    steps = tuple(_recorded_steps(StoreReader(storage)))
    recorded = max((step.recorded for step in steps), default=None)
    columns = [ColumnsOfStep(found.storage, step) for found in inspect_columns(path, storage) for step in found.steps]
    numbers = {step.step for step in steps}
    return RecordedVariant(
        path,
        run_path,
        storage,
        tuple(replace(step, columns=tuple(c for c in columns if c.step.step == step.step)) for step in steps),
        _created(storage) if recorded is None else recorded,
        other_columns=tuple(c for c in columns if c.step.step not in numbers),
    )


def inspect_columns(path: str, rollouts: Storage) -> list[RecordedVariant]:
    """Find out which training columns are in a variant folder, one item for each training."""
    found = []
    for training in trainings_with_columns(path):
        folder = columns_folder(path, training)
        storage = open_storage(folder)
        steps = tuple(_recorded_steps(StoreReader(storage)))
        recorded = max((step.recorded for step in steps), default=0.0)
        found.append(RecordedVariant(folder, path, storage, steps, recorded, rollouts))
    return found


def make_plans(
    variants: Sequence[RecordedVariant],
    conditions: Conditions | None,
    leftovers_older_than_s: float | None = None,
    set_aside: bool = False,
) -> list[Plan]:
    """A plan for each variant: steps or whole variants that meet the conditions, and files that are not needed.

    Without ``conditions``, no steps. Leftover files are included from a given age on, and ``set_aside`` entries if
    asked for.
    """
    if conditions is None:
        plans = [Plan(variant) for variant in variants]
    elif conditions.whole_variants:
        plans = _plan_whole_variants(variants, conditions)
    else:
        plans = [_plan_steps(variant, conditions) for variant in variants]
        if conditions.max_size is not None:
            plans = _oldest_steps(plans, sum(variant.bytes for variant in variants) - conditions.max_size)
    return [replace(plan, files=_files(plan.variant.storage, leftovers_older_than_s, set_aside)) for plan in plans]


def find_set_aside(storage: Storage) -> list[UnusedFile]:
    """Entries that were set aside because they could not be read."""
    return [
        UnusedFile(folder, file)
        for folder in sorted(storage.folders())
        for file in storage.files(folder)
        if names.parse_folder(folder) is not None and names.is_set_aside(file.name)
    ]


def to_timestamp(seconds: float) -> str:
    """Format a Unix time the way records do."""
    return datetime.fromtimestamp(seconds, timezone.utc).isoformat(timespec="seconds")


def _files(storage: Storage, leftovers_older_than_s: float | None, set_aside: bool) -> tuple[UnusedFile, ...]:
    left = [] if leftovers_older_than_s is None else _find_leftovers(storage, leftovers_older_than_s)
    return (*left, *(find_set_aside(storage) if set_aside else ()))


def _find_leftovers(storage: Storage, older_than_s: float) -> list[UnusedFile]:
    """Temporary files and parts that crashed writers left behind."""
    return [
        UnusedFile(folder, file)
        for folder in [HERE, *sorted(storage.folders())]
        for file in leftovers.find_leftovers(storage, folder, older_than_s)
    ]


def _recorded_steps(entries: StoreReader) -> Iterable[RecordedStep]:
    recorded: dict[int, float] = {}
    for found in entries.records():
        if not isinstance(found, Unreadable):
            moment = datetime.fromisoformat(found.created_at).timestamp()
            recorded[found.key.step] = max(recorded.get(found.key.step, 0.0), moment)
    steps = ((step, folder) for folder in entries.storage.folders() if (step := names.parse_folder(folder)) is not None)
    for step, folder in sorted(steps):
        files = entries.storage.files(folder)
        by_number = {number: file for file in files if (number := names.parse_record(file.name)) is not None}
        if by_number:
            records = {RolloutKey(step, number): by_number[number] for number in sorted(by_number)}
            others = tuple(
                file for file in files if names.parse_part(file.name) in by_number or names.is_old_part(file.name)
            )
            # Without a readable record, use the modification time of the files.
            when = recorded.get(step) or max(file.changed for file in (*records.values(), *others))
            yield RecordedStep(step, records, others, when)


def _created(storage: Storage) -> float:
    """When a variant without steps was created, or last written to by a training that is about to record."""
    times = [file.changed for folder in [HERE, *storage.folders()] for file in storage.files(folder)]
    try:
        manifest = read_manifest(storage)
        times += [] if manifest is None else [datetime.fromisoformat(manifest.created_at).timestamp()]
    except (ManifestError, ValueError):
        pass  # use the modification time of the file
    # An empty folder may have just been created.
    return max(times, default=time.time())


def _plan_steps(variant: RecordedVariant, conditions: Conditions) -> Plan:
    steps = [step for step in variant.steps if step.step in conditions.steps and conditions.allow_age(step.recorded)]
    if conditions.keep_last is not None:
        last = variant.steps[len(variant.steps) - conditions.keep_last :]
        steps = [step for step in steps if step not in last]
    pinned = _pinned_steps(variant, variant.pins)
    return Plan(
        variant,
        steps=tuple(step for step in steps if step not in pinned),
        pinned=tuple(step for step in steps if step in pinned),
    )


def _oldest_steps(plans: Sequence[Plan], excess: int) -> list[Plan]:
    """Reduce the plans to the oldest steps that free at least ``excess`` bytes."""
    candidates = [(step.recorded, plan.variant.path, step.step, step) for plan in plans for step in plan.steps]
    chosen: set[tuple[str, int]] = set()
    for _, path, number, step in sorted(candidates, key=lambda candidate: candidate[:3]):
        if excess <= 0:
            break
        chosen.add((path, number))
        excess -= step.bytes
    return [
        replace(plan, steps=tuple(step for step in plan.steps if (plan.variant.path, step.step) in chosen))
        for plan in plans
    ]


def _plan_whole_variants(variants: Sequence[RecordedVariant], conditions: Conditions) -> list[Plan]:
    candidates = _older_variants(variants, conditions)
    pins = {variant.path: variant.pins for variant in candidates}
    unpinned = [variant for variant in candidates if not pins[variant.path]]
    if conditions.max_size is not None:
        unpinned = _oldest_variants(unpinned, sum(variant.bytes for variant in variants) - conditions.max_size)
    removed = {variant.path for variant in unpinned}
    return [
        Plan(
            variant,
            steps=variant.steps if variant.path in removed else (),
            pinned=tuple(_pinned_steps(variant, pins.get(variant.path, []))),
            whole=variant.path in removed,
        )
        for variant in variants
    ]


def _older_variants(variants: Sequence[RecordedVariant], conditions: Conditions) -> list[RecordedVariant]:
    """The variants that are old enough, except the newest ``keep_last`` of each run."""
    by_run: dict[str, list[RecordedVariant]] = {}
    for variant in sorted(variants, key=lambda variant: variant.recorded):
        by_run.setdefault(variant.run_path, []).append(variant)
    return [
        variant
        for run in by_run.values()
        for variant in run[: max(len(run) - (conditions.keep_last or 0), 0)]
        if conditions.allow_age(variant.recorded)
    ]


def _oldest_variants(variants: Iterable[RecordedVariant], excess: int) -> list[RecordedVariant]:
    """The oldest variants that free at least ``excess`` bytes."""
    chosen = []
    for variant in sorted(variants, key=lambda variant: variant.recorded):
        if excess <= 0:
            break
        if variant.bytes:  # a variant without steps frees nothing
            chosen.append(variant)
            excess -= variant.bytes
    return chosen


def _pinned_steps(variant: RecordedVariant, pins: Sequence[Pin]) -> list[RecordedStep]:
    pinned = {pin.step for pin in pins}
    return [step for step in variant.steps if None in pinned or step.step in pinned]
