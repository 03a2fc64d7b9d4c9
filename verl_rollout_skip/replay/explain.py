"""Explains a missing rollout: what is recorded instead, the likely cause, and what to do."""

from __future__ import annotations

from collections.abc import Collection, Sequence

from verl_rollout_skip.config.modes import Mode
from verl_rollout_skip.config.skip_config import BLOCK, describe_steps, parse_steps
from verl_rollout_skip.errors import UnsafePathError
from verl_rollout_skip.key import RolloutKey
from verl_rollout_skip.runs.variants import Source
from verl_rollout_skip.store.reader import StoreReader


def folders_of(sources: Sequence[Source]) -> str:
    """The folders that are read."""
    return " and ".join(source.folder for source in sources)


def explain_steps(
    wanted: range, missing: list[int], keys: Collection[RolloutKey], gen_batches: int, sources: Sequence[Source]
) -> str:
    """Explain that some of the steps ``wanted`` by a replay, each with ``gen_batches`` batches, are missing."""
    first = missing[0]
    found = sum(key.step == first for key in keys)
    cause = _likely_cause(first, sources)
    if found:
        cause = (
            f"Step {first} has {found} of {gen_batches} generation batches: the recorded training ended "
            "during that step, or a dump failed or was removed."
        )
    whole = {key.step for key in keys} - set(missing)
    fewer = f"train fewer steps (trainer.total_training_steps={first - 1}), " if first > wanted[0] else ""
    return (
        f"The training would replay steps {wanted[0]} to {wanted[-1]}, but {describe_steps(missing)} "
        f"{'is' if len(missing) == 1 else 'are'} not recorded. Recorded steps: {describe_steps(whole) or 'none'} "
        f"({folders_of(sources)}). {cause} You can {fewer}record more (mode cache; asynchronous trainers: refresh), or "
        "use mode repeat (synchronous trainers)."
    )


def explain_key(key: RolloutKey, keys: Collection[RolloutKey], mode: Mode, sources: Sequence[Source]) -> str:
    """Explain that a key is not recorded, in a mode that does not generate."""
    batches = sum(other.step == key.step for other in keys)
    recorded = f"Recorded steps: {describe_steps({other.step for other in keys}) or 'none'}."
    cause = _likely_cause(key.step, sources)
    if batches:
        recorded = (
            f"Recorded generation batches of this step: {batches}; this training needs more than the recorded one."
        )
        cause = "A different reward or filter keeps fewer prompts, or the recorded training ended during the step."
    generates = "generates nothing"
    if mode is Mode.SHADOW:
        generates = "trains on recorded rollouts only, and generates others just to compare them"
    return (
        f"{key} is not recorded in {folders_of(sources)}. {recorded} {cause} Mode {mode.value!r} {generates}. "
        "Train fewer steps, record more (mode cache), or use mode repeat."
    )


def explain_taken(what: str, folder: str | None) -> str:
    """Explain that mode record found something already recorded."""
    return (
        f"{what} already recorded in {folder}, and mode 'record' never overwrites. Use mode 'cache' to continue the "
        "recording or mode 'refresh' to replace it."
    )


def _likely_cause(step: int, sources: Sequence[Source]) -> str:
    """Why the step is probably missing from the recording."""
    key = RolloutKey(step)
    for source in sources:
        reader = StoreReader.at(source.folder)
        try:
            if key in reader:
                continue
        except UnsafePathError as error:
            return str(error)
        trainer, block = (source.manifest.config.get(name) or {} for name in ("trainer", BLOCK))
        steps, limit, length = block.get("steps"), block.get("max_dump_steps"), trainer.get("total_training_steps")
        if step not in parse_steps(steps, f"{BLOCK}.steps"):
            return f"The recording was made with {BLOCK}.steps={steps}."
        if length and length < step:
            return f"The recorded training had {length} steps (trainer.total_training_steps)."
        if limit and len(dumped := _dumped_steps(source, reader)) >= limit and step not in dumped:
            return f"The recording was made with {BLOCK}.max_dump_steps={limit}."
    return (
        "Either the recorded training ended earlier, or dumps failed (see its log), were pruned, or were set aside as "
        "unreadable (*.corrupt)."
    )


def _dumped_steps(source: Source, reader: StoreReader) -> set[int]:
    """The steps that were ever dumped into a variant, including those that are no longer there."""
    listed = {step for training in source.manifest.trainings for step in training.get("steps", ())}
    return listed | {key.step for key in reader}
