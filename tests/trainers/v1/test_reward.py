"""``reward: recompute`` in V1, for each way to score the recording and the replay. The reward workers run on Ray."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import ray
import torch
import transfer_queue as tq
from tensordict import TensorDict
from transfer_queue import KVBatchMeta
from verl.trainer.ppo.v1 import PPOTrainerSync

from tests.trainers.v1.training import Engine, Rewards, SyncTrainer, Trainings, WithoutWorkers, hits
from verl_rollout_skip.errors import UnsupportedBatchError
from verl_rollout_skip.v1 import RolloutSkipMixin

pytestmark = pytest.mark.usefixtures("queue")

RECOMPUTE = ("+rollout_skip.reward=recompute", "trainer.total_training_steps=1")
ONE_STEP = "trainer.total_training_steps=1"


class Scorer:
    """Replaces verl's reward worker: the reward is the number of response tokens of a session's last output."""

    def compute_score(self, data: Any) -> dict[str, Any]:
        reward = float(data.non_tensor_batch["response_len"][-1])
        return {"reward_score": reward, "reward_extra_info": {"tokens": reward}}


class WithFunction(WithoutWorkers):
    """A rule scores the replay."""

    def _setup(self) -> None:
        super()._setup()
        workers = [ray.remote(Scorer).options(num_cpus=0).remote() for _ in range(2)]
        self.reward_loop_manager = SimpleNamespace(reward_loop_worker_handles=workers)


class WithModel(WithoutWorkers):
    """A colocated reward model scores the replay, after the sample."""

    def _setup(self) -> None:
        super()._setup()
        self.reward_loop_manager = SimpleNamespace(reward_loop_worker_handles=None)

    def _compute_reward_colocate(self, batch: KVBatchMeta, metrics: dict[str, Any] | None = None) -> KVBatchMeta:
        found = tq.kv_batch_get(keys=batch.keys, partition_id=batch.partition_id)
        self.found = list(found.keys())
        self.extra_fields = found.get("extra_fields").tolist()
        rewards = [torch.full((len(row),), 7.0) for row in found.get("responses").unbind()]
        scores = torch.nested.as_nested_tensor(rewards, layout=torch.jagged)
        fields = TensorDict({"rm_scores": scores}, batch_size=[len(batch.keys)])
        tq.kv_batch_put(keys=batch.keys, partition_id=batch.partition_id, fields=fields)
        return batch


class FunctionTrainer(RolloutSkipMixin, WithFunction, PPOTrainerSync):
    """The synchronous trainer with a rule."""


class ModelTrainer(RolloutSkipMixin, WithModel, PPOTrainerSync):
    """The synchronous trainer with a colocated reward model."""


def rewards(trainer: Any) -> list[float]:
    return [sum(row) for _, row in trainer.trained[0]["rm_scores"]]


@pytest.mark.parametrize("then", [Rewards.BY_FUNCTION, Rewards.LATER], ids=["function", "model"])
def test_a_function_scores_rollouts_that_a_function_or_a_model_scored_in_the_recording(
    trainings: Trainings, then: Rewards
) -> None:
    kind = ModelTrainer if then is Rewards.LATER else SyncTrainer
    recorded = trainings.train("record", ONE_STEP, kind=kind, engine=Engine(then))
    scored = trainings.train("replay", *RECOMPUTE, kind=FunctionTrainer)
    assert hits(scored) == [1]
    last: dict[Any, tuple[int, int]] = {}
    for (uid, session, index), (_, tokens) in zip(
        recorded.trained[0]["keys"], recorded.trained[0]["responses"], strict=True
    ):
        last[uid, session] = max(last.get((uid, session), (-1, 0)), (int(index), len(tokens)))
    expected = [float(last[uid, session][1]) for uid, session, _ in recorded.trained[0]["keys"]]
    assert rewards(scored) == expected
    extras = scored.trained[0]["extra_fields"]
    assert all(f"'tokens': {reward}" in extra for reward, extra in zip(expected, extras, strict=True))
    assert not any("'acc'" in extra for extra in extras)


@pytest.mark.parametrize("then", [Rewards.BY_FUNCTION, Rewards.LATER], ids=["function", "model"])
def test_a_colocated_model_gets_rollouts_without_the_recorded_rewards(trainings: Trainings, then: Rewards) -> None:
    trainings.train(
        "record", ONE_STEP, kind=ModelTrainer if then is Rewards.LATER else SyncTrainer, engine=Engine(then)
    )
    scored = trainings.train("replay", *RECOMPUTE, kind=ModelTrainer)
    assert hits(scored) == [1]
    assert "rm_scores" not in scored.found
    assert not any("reward_extra_info" in fields for fields in scored.extra_fields)
    assert set(scored.trained[0]["rm_scores"][0][1]) == {7.0}


@pytest.mark.parametrize("kind", [FunctionTrainer, ModelTrainer])
def test_rewards_from_the_agent_loop_are_never_recomputed(trainings: Trainings, kind: type) -> None:
    trainings.train("record", ONE_STEP, engine=Engine(Rewards.BY_LOOP))
    with pytest.raises(UnsupportedBatchError, match="got its reward from its agent loop"):
        trainings.train("replay", *RECOMPUTE, kind=kind)
