"""Asynchronous V1 trainings: what was sampled, with weights of several ages, is sampled again in a replay."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.e2e.training import assert_same_results, assert_same_weights, variant_in
from tests.e2e.v1 import OWN_BUFFER, V1Trainings, skip
from verl_rollout_skip import RolloutKey, RolloutStore

STEPS = 3
COMMON = (f"trainer.total_training_steps={STEPS}", f"trainer.save_freq={STEPS}", OWN_BUFFER)
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
    ("mode", "settings", "gpus", "updates"),
    [("skip_colocate_async", (), 1, 1), ("skip_separate_async", SEPARATE, 2, 2)],
    ids=["colocate", "separate"],
)
def test_a_replay_without_servers_is_the_recorded_training_to_the_last_bit(
    trainings: V1Trainings, tmp_path: Path, mode: str, settings: tuple[str, ...], gpus: int, updates: int
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
    replayed = trainings.run(
        f"{mode}-replay",
        *COMMON,
        *settings,
        *skip("replay", tmp_path, mode),
        "ray_kwargs.ray_init.num_gpus=1",  # none is left for servers of their own
        env=QUIET,
    )
    assert replayed.hits() == [1, 2, 3]
    assert replayed.trace("generate") == replayed.trace("sync") == []
    assert_same_results(recorded, replayed)
    assert_same_weights(recorded, replayed, STEPS)
