"""``reward: recompute``: scores recorded responses with the current reward function, through the trainer's own API."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import numpy as np
from verl import DataProto

from verl_rollout_skip.errors import UnsupportedTrainerError
from verl_rollout_skip.replay.prompts import UID

SCORES = "rm_scores"
EXTRA_KEYS = "reward_extra_keys"
# The same extras again, as one dict per row.
_EXTRAS = "reward_extra_info"
# Columns of a rollout that are not fields of its agent loop.
_NOT_LOOP_FIELDS = {_EXTRAS, UID, "__num_turns__", "__do_sample__", "multi_modal_inputs"}


def recompute_rewards(batch: DataProto, inputs: DataProto, trainer: Any) -> None:
    """Replace the rewards of a loaded rollout. One without rewards is left alone: the trainer scores it itself."""
    if SCORES not in batch.batch.keys():  # noqa: SIM118 - a TensorDict is not a dict
        return
    scored = _reward_manager(trainer)(_unscored(batch, inputs))
    for key in batch.meta_info.get(EXTRA_KEYS, []):
        batch.non_tensor_batch.pop(key, None)
    batch.batch[SCORES] = scored.batch[SCORES]
    extras = scored.non_tensor_batch
    batch.non_tensor_batch.update(extras)
    batch.meta_info[EXTRA_KEYS] = list(scored.meta_info[EXTRA_KEYS])
    if _EXTRAS in batch.non_tensor_batch:
        rows = np.empty(len(batch), dtype=object)
        rows[:] = [{key: values[row] for key, values in extras.items()} for row in range(len(batch))]
        batch.non_tensor_batch[_EXTRAS] = rows


def _unscored(batch: DataProto, inputs: DataProto) -> DataProto:
    """The batch as an agent loop sends it for scoring: with all columns except the recorded rewards."""
    scores = {SCORES, _EXTRAS, *batch.meta_info.get(EXTRA_KEYS, [])}
    tensors = {key: value for key, value in batch.batch.items() if key not in scores}
    columns = {**inputs.non_tensor_batch, **batch.non_tensor_batch}
    given = DataProto.from_dict(tensors=tensors)
    given.non_tensor_batch = {key: value for key, value in columns.items() if key not in scores}
    loop_fields = batch.non_tensor_batch.keys() - scores - _NOT_LOOP_FIELDS - inputs.non_tensor_batch.keys()
    fields = np.empty(len(batch), dtype=object)
    fields[:] = [_fields_of_row(batch, loop_fields, row) for row in range(len(batch))]
    width = batch.batch["prompts"].shape[1]
    mask = batch.batch["attention_mask"]
    given.non_tensor_batch |= {
        "tool_extra_fields": fields,
        "prompt_len": mask[:, :width].sum(dim=1).numpy(),
        "response_len": mask[:, width:].sum(dim=1).numpy(),
    }
    given.meta_info = {"global_steps": inputs.meta_info.get("global_steps")}
    return given


def _fields_of_row(batch: DataProto, names: Iterable[str], row: int) -> dict[str, Any]:
    """The agent loop's fields of a row, such as turn_scores. Fields that only other rows have are None in the batch."""
    fields = {name: batch.non_tensor_batch[name][row] for name in sorted(names)}
    return {name: value for name, value in fields.items() if value is not None}


def _reward_manager(trainer: Any) -> Callable[[DataProto], DataProto]:
    manager = getattr(trainer, "reward_loop_manager", None)
    if manager is None:
        raise UnsupportedTrainerError(
            f"rollout_skip.reward is 'recompute', but {type(trainer).__name__} has no reward_loop_manager to score "
            "recorded responses with. Use rollout_skip.reward=recorded or verl 0.9.1."
        )
    compute: Callable[[DataProto], DataProto] = manager.compute_rm_score
    return compute
