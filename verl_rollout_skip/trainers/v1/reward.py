"""``reward: recompute`` in V1: the reward workers score recorded responses as they score generated ones.

verl scores a session when it ends, all of its outputs at once. A colocated reward model scores after the sample; in
that case, the recorded rewards are only removed here.
"""

from __future__ import annotations

import itertools
from typing import TYPE_CHECKING, Any

import numpy as np
import ray
import torch
from omegaconf import DictConfig, OmegaConf
from tensordict import TensorDict
from torch.nn.utils.rnn import pad_sequence

from verl_rollout_skip.config.modes import Reward
from verl_rollout_skip.config.skip_config import BLOCK, SkipConfig
from verl_rollout_skip.errors import ConfigError, UnsupportedBatchError
from verl_rollout_skip.trainers.v1.transfer.rows import INDEX, SESSION, stack

if TYPE_CHECKING:
    from verl import DataProto

SCORES, EXTRA_FIELDS, EXTRAS = "rm_scores", "extra_fields", "reward_extra_info"
# The metric of an agent loop that says how long the reward function took.
_TIMING = "compute_score"
_FILTER = "algorithm.filter_groups.enable"
# The columns that verl passes to an agent loop in addition to those of the data.
_SESSION_COLUMNS = ("session_id", "global_steps")


def check_settings(settings: SkipConfig, config: DictConfig) -> None:
    """Reject ``recompute`` with a group filter: the recorded groups were selected by their recorded rewards."""
    if settings.reward is Reward.RECOMPUTE and OmegaConf.select(config, _FILTER):
        raise ConfigError(
            f"{BLOCK}.reward is 'recompute' and {_FILTER} is True: only groups that were kept because of their rewards "
            f"are recorded, and the current reward function might have kept others. Use {BLOCK}.reward=recorded, or "
            "record again."
        )


def recompute_rewards(batch: TensorDict, inputs: TensorDict, trainer: Any) -> None:
    """Replace the rewards of a loaded rollout. verl computes those of a colocated reward model after the sample."""
    rows = _Rows(batch, inputs)
    sessions = list(rows.sessions().values())
    if SCORES in batch.keys():  # noqa: SIM118 - a TensorDict is not a dict
        _check_scored_by_function(rows, sessions)
    workers = trainer.get_reward_handles()
    if workers is None:
        _remove_rewards(batch, rows)
        return
    calls = zip(itertools.cycle(workers), sessions, strict=False)
    results = ray.get([worker.compute_score.remote(rows.of(session)) for worker, session in calls])
    scores: list[torch.Tensor] = [torch.empty(0)] * len(batch)
    extra_fields = rows.column(EXTRA_FIELDS)
    for session, result in zip(sessions, results, strict=True):
        for row in session:
            scores[row] = torch.zeros_like(rows.column("response_mask")[row], dtype=torch.float32)
            scores[row][-1] = result["reward_score"]
            extra_fields[row] = {**extra_fields[row], EXTRAS: result[EXTRAS]}
    batch.set(SCORES, torch.nested.as_nested_tensor(scores, layout=torch.jagged))
    batch.set(EXTRA_FIELDS, stack(extra_fields))


def _remove_rewards(batch: TensorDict, rows: _Rows) -> None:
    """Turn a rollout into one whose rewards have not been computed yet."""
    if SCORES in batch.keys():  # noqa: SIM118
        del batch[SCORES]
    batch.set(EXTRA_FIELDS, stack([_without_extras(fields) for fields in rows.column(EXTRA_FIELDS)]))


def _check_scored_by_function(rows: _Rows, sessions: list[list[int]]) -> None:
    """Raise if an agent loop scored a session itself. Otherwise verl scored its last output, and recorded the time."""
    for session in sessions:
        if _TIMING not in rows.column("metrics")[session[-1]]:
            raise UnsupportedBatchError(
                f"{BLOCK}.reward is 'recompute', but row {session[-1]} got its reward from its agent loop, not from a "
                f"reward function (its metrics have no {_TIMING!r}), so it cannot be computed from the response. Use "
                f"{BLOCK}.reward=recorded."
            )


def _without_extras(fields: dict[str, Any]) -> dict[str, Any]:
    return {name: value for name, value in fields.items() if name != EXTRAS}


class _Rows:
    """The rows of a recorded batch, in the form in which an agent loop sends them for scoring."""

    def __init__(self, batch: TensorDict, inputs: TensorDict) -> None:
        self._batch = batch
        self._columns: dict[str, list[Any]] = {}
        self._given = [name for name in inputs.keys() if name in batch.keys()]  # noqa: SIM118

    def column(self, name: str) -> list[Any]:
        if name not in self._columns:
            column = self._batch.get(name)
            self._columns[name] = list(column.unbind()) if isinstance(column, torch.Tensor) else column.tolist()
        return self._columns[name]

    def sessions(self) -> dict[tuple[str, int], list[int]]:
        """The rows of each session, in the order of its outputs."""
        found: dict[tuple[str, int], list[int]] = {}
        indexes = self._batch[INDEX].tolist()
        for row in sorted(range(len(indexes)), key=lambda row: indexes[row]):
            found.setdefault((self.column("uid")[row], self.column(SESSION)[row].item()), []).append(row)
        return found

    def of(self, session: list[int]) -> DataProto:
        """One session, in the form in which ``AgentLoopWorker._compute_score`` sends it for scoring."""
        from verl import DataProto

        tokens = {name: [self.column(name)[row] for row in session] for name in ("prompts", "responses", "input_ids")}
        tokens["position_ids"] = [self.column("position_ids")[row] for row in session]
        tokens["attention_mask"] = [torch.ones_like(ids) for ids in tokens["input_ids"]]
        padded = {name: pad_sequence(rows, batch_first=True, padding_value=0) for name, rows in tokens.items()}
        last, count = session[-1], len(session)
        names = [*self._given, *(name for name in _SESSION_COLUMNS if name in self._batch.keys())]  # noqa: SIM118
        extras = [_without_extras(self.column(EXTRA_FIELDS)[row]) for row in session]
        return DataProto(
            batch=TensorDict(padded, batch_size=count),
            non_tensor_batch={
                **{name: np.array([self.column(name)[last]] * count) for name in names},
                "__num_turns__": np.array([self.column("num_turns")[row] for row in session]),
                "tool_extra_fields": np.array(extras, dtype=object),
                "prompt_len": np.array([len(ids) for ids in tokens["prompts"]]),
                "response_len": np.array([len(ids) for ids in tokens["responses"]]),
            },
        )
