"""Asynchronous V1 trainings: a replay samples the recorded batches, which several versions of weights generated."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from tests.e2e.training import (
    VERL_V1,
    Trainings,
    assert_proved,
    assert_same_results,
    assert_same_weights,
    skip_v1,
    variant_in,
)
from verl_rollout_skip import RolloutKey, RolloutStore

pytestmark = pytest.mark.slow

STEPS = 3
# verl's replay buffer instead of the one in recipes/cpu: trajectories are sampled as they finish.
OWN_BUFFER = "trainer.v1.sampler.custom_sampler.path=null"
# Ray tasks move the samples, in many parts.
TASKS = ("+rollout_skip.tasks=on", "+rollout_skip.part_bytes=4000")
COMMON = (f"trainer.total_training_steps={STEPS}", "trainer.save_freq=1", OWN_BUFFER, *TASKS)
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
# At a lower log level, one of verl 0.9.1's own log messages fails if there are no hybrid replicas.
QUIET_V1 = replace(VERL_V1, env={"VERL_LOGGING_LEVEL": "WARNING"})


@pytest.mark.parametrize(
    ("mode", "settings", "gpus", "updates", "start"),
    [("skip_colocate_async", COLOCATE, 1, 1, 2), ("skip_separate_async", SEPARATE, 2, 2, 1)],
    ids=["colocate, with critic and reference, from a checkpoint", "separate"],
)
def test_a_replay_without_servers_is_the_recorded_training_to_the_last_bit(
    trainings: Trainings, tmp_path: Path, mode: str, settings: tuple[str, ...], gpus: int, updates: int, start: int
) -> None:
    recorded = trainings.run(
        QUIET_V1,
        f"{mode}-record",
        *COMMON,
        *settings,
        *skip_v1("record", tmp_path, mode),
        f"ray_kwargs.ray_init.num_gpus={gpus}",
    )
    keys = RolloutStore(variant_in(tmp_path)).keys()
    assert keys == [RolloutKey(step, update) for step in range(1, STEPS + 1) for update in range(updates)]
    assert all(len(RolloutStore(variant_in(tmp_path)).record(key).parts) > 2 for key in keys)
    staleness = "training/off_policy/trajectory_staleness/max"
    assert [recorded.results()[step][staleness] for step in range(1, STEPS + 1)] == [0, 1, 1]
    resume = f"trainer.resume_from_path={recorded.folder}/checkpoints/global_step_{start - 1}"
    replayed = trainings.run(
        QUIET_V1,
        f"{mode}-replay",
        *COMMON,
        *settings,
        *skip_v1("replay", tmp_path, mode),
        "ray_kwargs.ray_init.num_gpus=1",  # no GPU is left for separate servers
        *(("trainer.resume_mode=resume_path", resume) if start > 1 else ()),
    )
    steps = list(range(start, STEPS + 1))
    assert replayed.hits() == steps
    assert_proved(replayed, len(steps))
    assert replayed.trace("generate") == replayed.trace("sync") == []
    assert_same_results(recorded, replayed, steps)
    assert_same_weights(recorded, replayed, STEPS)
    if settings is COLOCATE:
        assert_same_weights(recorded, replayed, STEPS, role="critic")
        assert {"critic/vf_loss", "actor/kl_loss"} <= set(replayed.results()[STEPS])
