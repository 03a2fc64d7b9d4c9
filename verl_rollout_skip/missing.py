"""Says of a rollout that is not recorded what is, why it may not be there, and what can be done."""

from __future__ import annotations

from collections.abc import Collection, Sequence

from verl_rollout_skip.config import BLOCK, parse_steps
from verl_rollout_skip.entries import describe_steps
from verl_rollout_skip.errors import UnsafePathError
from verl_rollout_skip.key import RolloutKey
from verl_rollout_skip.modes import Mode
from verl_rollout_skip.store import names
from verl_rollout_skip.store.storage.locations import open_storage
from verl_rollout_skip.variants import Source


def places(sources: Sequence[Source]) -> str:
    """The folders that are read."""
    return " and ".join(source.folder for source in sources)


def explain_steps(
    wanted: range, missing: list[int], keys: Collection[RolloutKey], gen_batches: int, sources: Sequence[Source]
) -> str:
    """A training would replay the steps ``wanted`` with so many generation batches each, and some are missing."""
    first = missing[0]
    found = sum(key.step == first for key in keys)
    cause = _likely_cause(first, sources)
    if found:
        cause = (
            f"Of step {first} {found} of {gen_batches} generation batches are there: the recorded training ended "
            "within it, or a dump failed or was removed."
        )
    whole = {key.step for key in keys} - set(missing)
    fewer = f"train fewer steps (trainer.total_training_steps={first - 1}), " if first > wanted[0] else ""
    return (
        f"The training would replay steps {wanted[0]} to {wanted[-1]}, and {describe_steps(missing)} "
        f"{'is' if len(missing) == 1 else 'are'} not recorded; recorded are {describe_steps(whole) or 'none'} "
        f"({places(sources)}). {cause} You can {fewer}record more (mode cache; asynchronous trainers: refresh), or use "
        "mode repeat (synchronous ones)."
    )


def explain_key(key: RolloutKey, keys: Collection[RolloutKey], mode: Mode, sources: Sequence[Source]) -> str:
    """A training asks for a key that is not recorded, in a mode that does not generate."""
    batches = sum(other.step == key.step for other in keys)
    held, cause = f"steps {describe_steps({other.step for other in keys})}", _likely_cause(key.step, sources)
    if batches:
        held = f"{batches} generation batches of this step: today's run asks for more than the recorded one"
        cause = "Another reward or another filter keeps fewer prompts, or the recorded training ended within the step."
    return (
        f"{key} is not recorded in {places(sources)}, which holds {held}. {cause} In mode {mode.value!r} nothing is "
        "generated. Train fewer steps, record more (mode cache), or use mode repeat."
    )


def explain_taken(what: str, folder: str | None) -> str:
    """Mode record, and something is there."""
    return (
        f"{what} already recorded in {folder}, and mode 'record' never overwrites. Mode 'cache' continues a recording, "
        "mode 'refresh' replaces it."
    )


def _likely_cause(step: int, sources: Sequence[Source]) -> str:
    """What the recorded training was told, or what happened to it."""
    key = RolloutKey(step)
    for source in sources:
        try:
            open_storage(source.folder).info(names.folder_name(key), names.data_name(key))
        except UnsafePathError as error:
            return str(error)
        trainer, block = (source.manifest.config.get(name) or {} for name in ("trainer", BLOCK))
        steps, limit, length = block.get("steps"), block.get("max_dump_steps"), trainer.get("total_training_steps")
        if step not in parse_steps(steps, f"{BLOCK}.steps"):
            return f"The recording was made with {BLOCK}.steps={steps}."
        if limit:
            return f"The recording was made with {BLOCK}.max_dump_steps={limit}."
        if length and length < step:
            return f"The recorded training was one of {length} steps (trainer.total_training_steps)."
    return (
        "Either the recorded training ended earlier, or dumps failed (its log says so), were pruned, or were set aside "
        "as damaged (*.corrupt)."
    )
