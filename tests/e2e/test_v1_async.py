"""Asynchronous V1 trainings: what was sampled, with weights of several ages, is sampled again in a replay."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.e2e.training import assert_same_results, assert_same_weights, variant_in
from tests.e2e.v1 import OWN_BUFFER, V1Trainings, skip
from verl_rollout_skip import RolloutKey, RolloutStore

STEPS = 3
COMMON = (f"trainer.total_training_steps={STEPS}", "trainer.save_freq=1", OWN_BUFFER)
COLOCATE = (
    "algorithm.adv_estimator=gae",
    "algorithm.use_kl_in_reward=True",
    "actor_rollout_ref.actor.use_kl_loss=True",
)
SEPARATE = (
    "actor_rollout_ref.hybrid_engine=False",
    "actor_rollout_ref.rollout.nnodes=1",
    "actor_rollout_ref.rollout.n_gpus_per_node=1",
    "actor_rollout_ref.actor.ppo_mini_batch_size=4",
    "trainer.v1.separate_async.parameter_sync_step=2",
    "actor_rollout_ref.rollout.checkpoint_engine.backend=file",
    "actor_rollout_ref.rollout.checkpoint_engine.custom_backend_module=tests.e2e.weights_by_file",
)
# With a lower level verl 0.9.1 stumbles over one of its own messages where there are no hybrid replicas.
QUIET = {"VERL_LOGGING_LEVEL": "WARNING"}


@pytest.fixture(scope="module")
def trainings(tmp_path_factory: pytest.TempPathFactory, assets: Path) -> V1Trainings:
    return V1Trainings(tmp_path_factory.mktemp("trainings"), assets)


@pytest.mark.parametrize(
    ("mode", "settings", "gpus", "updates", "start"),
    [("skip_colocate_async", COLOCATE, 1, 1, 2), ("skip_separate_async", SEPARATE, 2, 2, 1)],
    ids=["colocate with critic and reference from a checkpoint on", "separate"],
)
def test_a_replay_without_servers_is_the_recorded_training_to_the_last_bit(
    trainings: V1Trainings, tmp_path: Path, mode: str, settings: tuple[str, ...], gpus: int, updates: int, start: int
) -> None:
    recorded = trainings.run(
        f"{mode}-record",
        *COMMON,
        *settings,
        *skip("record", tmp_path, mode),
        f"ray_kwargs.ray_init.num_gpus={gpus}",
        env=QUIET,
    )
    keys = RolloutStore(variant_in(tmp_path)).keys()
    assert keys == [RolloutKey(step, update) for step in range(1, STEPS + 1) for update in range(updates)]
    staleness = "training/off_policy/trajectory_staleness/max"
    assert [recorded.results()[step][staleness] for step in range(1, STEPS + 1)] == [0, 1, 1]
    resume = f"trainer.resume_from_path={recorded.folder}/checkpoints/global_step_{start - 1}"
    replayed = trainings.run(
        f"{mode}-replay",
        *COMMON,
        *settings,
        *skip("replay", tmp_path, mode),
        "ray_kwargs.ray_init.num_gpus=1",  # none is left for servers of their own
        *(("trainer.resume_mode=resume_path", resume) if start > 1 else ()),
        env=QUIET,
    )
    steps = list(range(start, STEPS + 1))
    assert replayed.hits() == steps
    assert replayed.trace("generate") == replayed.trace("sync") == []
    assert_same_results(recorded, replayed, steps)
    assert_same_weights(recorded, replayed, STEPS)
    if settings is COLOCATE:
        assert_same_weights(recorded, replayed, STEPS, role="critic")
        assert {"critic/vf_loss", "actor/kl_loss"} <= set(replayed.results()[STEPS])
