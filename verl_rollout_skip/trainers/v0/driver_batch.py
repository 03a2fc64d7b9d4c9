"""``DriverBatch``: the batch that ``fit`` keeps while its prompts are sent to the rollout step.

verl's ``fit`` splits a batch of one row per prompt: columns that the training needs later (answers, data source, etc.)
stay; the others are repeated ``n`` times and sent. Both parts are recorded, and replaced together.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from tensordict import TensorDict
from verl import DataProto

from verl_rollout_skip.errors import MismatchError
from verl_rollout_skip.replay.prompts import UID

# verl adds this column so that a batch always has a tensor.
_PLACEHOLDERS = {"dummy_tensor"}


class DriverBatch:
    """The two parts of the current step's batch, one row per prompt, and the number of samples per prompt."""

    def __init__(self, kept: DataProto, sent: DataProto, samples: int) -> None:
        self._kept = kept
        self._sent = sent
        self._samples = samples

    def complete(self, prompts: DataProto) -> DataProto:
        """The input of a rollout step together with the columns that ``fit`` keeps, row by row."""
        rows = self._rows(len(prompts))
        given = _columns(prompts)
        missing = {key: value for key, value in _columns(self._kept).items() if key not in given}
        if not missing:
            return prompts
        columns = {**given, **{key: value[rows] for key, value in missing.items()}}
        tensors = {key: value for key, value in columns.items() if not isinstance(value, np.ndarray)}
        whole = DataProto.from_dict(tensors=tensors) if tensors else DataProto()
        whole.non_tensor_batch = {key: value for key, value in columns.items() if isinstance(value, np.ndarray)}
        whole.meta_info = dict(prompts.meta_info)
        return whole

    def replace_with(self, recorded: DataProto, prompts: DataProto) -> None:
        """Replace the columns that ``fit`` keeps, and those that it has sent, with the recorded ones. The uids stay."""
        columns = _columns(recorded)
        missing = {*_columns(self._kept), *_columns(self._sent), *_columns(prompts)} - {UID, *columns}
        if missing:
            raise MismatchError(
                f"The recorded batch cannot replace the current one: {', '.join(sorted(missing))} of the current one "
                "is not recorded. Use rollout_skip.prompts=check, or record again (mode refresh)."
            )
        first = np.unique(self._rows(len(recorded)), return_index=True)[1]
        _replace(self._kept, columns, first)
        # REMAX makes its second request from these prompts.
        _replace(self._sent, columns, first)
        _replace(prompts, columns, np.arange(len(recorded)))

    def _rows(self, sent: int) -> np.ndarray:
        """For each row that was sent, the row of this batch: each prompt n times, and with REMAX all of them again."""
        own = np.arange(len(self._kept))
        repeated = np.repeat(own, self._samples)
        for rows in (repeated, np.concatenate([repeated, own]), own):
            if len(rows) == sent:
                return rows
        raise MismatchError(
            f"The trainer sends {sent} rows for {len(self._kept)} prompts with {self._samples} samples each, which is "
            "not supported: each prompt must be sent n times, and with REMAX once more."
        )


def _columns(batch: DataProto) -> dict[str, Any]:
    """The columns of a batch, tensors and others."""
    tensors = {} if batch.batch is None else dict(batch.batch.items())
    return {**{key: value for key, value in tensors.items() if key not in _PLACEHOLDERS}, **batch.non_tensor_batch}


def _replace(batch: DataProto, columns: dict[str, Any], rows: np.ndarray) -> None:
    for key in _columns(batch):
        if key == UID:
            continue
        if key in batch.non_tensor_batch:
            batch.non_tensor_batch[key] = columns[key][rows]
        else:
            tensors: TensorDict = batch.batch
            tensors[key] = columns[key][rows]
