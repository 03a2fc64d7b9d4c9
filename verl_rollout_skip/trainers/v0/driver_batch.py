"""The batch that a trainer keeps while its prompts are sent to the rollout step.

verl's ``fit`` splits a batch of one row for each prompt: what the training needs later (answers, data source …) stays,
the rest is repeated ``n`` times and sent to be generated. Both belong to what is recorded, and both are replaced
together.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from tensordict import TensorDict
from verl import DataProto

from verl_rollout_skip.errors import MismatchError
from verl_rollout_skip.prompts import UID

# verl puts it there so that a batch is never without tensors.
_PLACEHOLDERS = {"dummy_tensor"}


class DriverBatch:
    """The two parts of the current step's batch, with one row a prompt, and how often each is sampled."""

    def __init__(self, kept: DataProto, sent: DataProto, samples: int) -> None:
        self._kept = kept
        self._sent = sent
        self._samples = samples

    def complete(self, prompts: DataProto) -> DataProto:
        """The input of a rollout step together with what ``fit`` keeps of it, row by row."""
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

    @staticmethod
    def put_back(batch: DriverBatch | None, recorded: DataProto, prompts: DataProto) -> None:
        """Put the recorded prompts, answers … in the place of those that ``fit`` keeps and sent; the uids stay."""
        if batch is None:
            raise MismatchError(
                "The recorded batch cannot replace the current one, because this trainer does not make its input by "
                "_get_gen_batch. Use rollout_skip.prompts=check."
            )
        columns = _columns(recorded)
        missing = {*_columns(batch._kept), *_columns(batch._sent), *_columns(prompts)} - {UID, *columns}
        if missing:
            raise MismatchError(
                f"The recorded batch cannot replace the current one: {', '.join(sorted(missing))} of the current one "
                "is not recorded. Use rollout_skip.prompts=check, or record anew (mode refresh)."
            )
        first = np.unique(batch._rows(len(recorded)), return_index=True)[1]
        _replace(batch._kept, columns, first)
        # REMAX makes its second request of the same prompts from there.
        _replace(batch._sent, columns, first)
        _replace(prompts, columns, np.arange(len(recorded)))

    def _rows(self, sent: int) -> np.ndarray:
        """For each row that was sent the row of this batch: prompts n times, one after the other, and REMAX's once."""
        own = np.arange(len(self._kept))
        repeated = np.repeat(own, self._samples)
        for rows in (repeated, np.concatenate([repeated, own]), own):
            if len(rows) == sent:
                return rows
        raise MismatchError(
            f"{sent} rows are to be generated for {len(self._kept)} prompts with {self._samples} samples each: this "
            "trainer makes its rollouts in a way that is not known here."
        )


def _columns(batch: DataProto) -> dict[str, Any]:
    """The columns that a batch has, tensors and others."""
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
