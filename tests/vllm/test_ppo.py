"""``SkipPPOTrainer`` with vLLM: recorded once, then continued, replayed, and rejected with other settings."""

from __future__ import annotations

import shutil
from dataclasses import replace
from pathlib import Path

import pytest

from recipes.cpu.assets import make_assets
from tests.e2e.training import PPO, Finished, Trainings, assert_same_results, assert_same_weights, skip, variant_in
from tests.vllm.checks import assert_engine_ran, assert_no_engine, assert_weights_arrived
from verl_rollout_skip import RolloutKey, RolloutStore

STEPS = 3
GRPO = (f"trainer.total_training_steps={STEPS}", f"trainer.save_freq={STEPS}")
# Settings for the memory and speed of the engine that differ from those of the recording.
OTHER_MEMORY = (
    "actor_rollout_ref.rollout.max_num_seqs=16",
    "actor_rollout_ref.rollout.max_num_batched_tokens=1024",
    "actor_rollout_ref.rollout.engine_kwargs.vllm.kv_cache_memory_bytes=33554432",
    "+actor_rollout_ref.rollout.engine_kwargs.vllm.async_scheduling=False",
)


@pytest.fixture(scope="module")
def recorded(trainings: Trainings, dumps: Path) -> Finished:
    return trainings.run(PPO, "record", *GRPO, *skip("record", dumps))


def test_a_longer_training_loads_what_is_recorded_and_generates_the_rest_with_the_weights_of_its_time(
    trainings: Trainings, recorded: Finished, dumps: Path, tmp_path: Path
) -> None:
    assert len(recorded.trace("sync")) == STEPS + 1
    assert_weights_arrived(recorded, STEPS)
    own = shutil.copytree(dumps, tmp_path / "dumps")
    longer = trainings.run(PPO, "longer", "trainer.total_training_steps=5", *skip("cache", own), *OTHER_MEMORY)
    assert longer.hits() == [1, 2, 3]
    assert_same_results(recorded, longer, steps=[1, 2, 3])
    assert_weights_arrived(longer, 5)
    assert len(longer.trace("sync")) == 2
    assert "2 weight syncs, 4 skipped" in longer.summary
    assert RolloutStore(variant_in(own)).keys() == [RolloutKey(step) for step in range(1, 6)]


def test_a_replay_starts_no_engine_and_is_the_recorded_training_to_the_last_bit(
    trainings: Trainings, recorded: Finished, dumps: Path
) -> None:
    replayed = trainings.run(PPO, "replay", *GRPO, *skip("replay", dumps))
    assert_engine_ran(recorded)
    assert_no_engine(replayed)
    assert replayed.hits() == [1, 2, 3]
    assert_same_results(recorded, replayed)
    assert_same_weights(recorded, replayed, STEPS)


def test_a_recording_replays_where_vllm_is_not_installed(
    trainings: Trainings, recorded: Finished, dumps: Path, plain_python: str
) -> None:
    plain = replace(PPO, python=plain_python)
    replayed = trainings.run(plain, "plain", *GRPO, *skip("replay", dumps))
    assert_no_engine(replayed)
    assert_same_results(recorded, replayed)
    assert_same_weights(recorded, replayed, STEPS)


def test_another_temperature_is_a_miss_that_is_named(
    trainings: Trainings, recorded: Finished, dumps: Path, tmp_path: Path
) -> None:
    own = shutil.copytree(dumps, tmp_path / "dumps")
    warmer = trainings.run(
        PPO,
        "warmer",
        "trainer.total_training_steps=1",
        "actor_rollout_ref.rollout.temperature=0.5",
        *skip("cache", own),
    )
    assert warmer.hits() == []
    assert len(list(own.glob("*/*/manifest.json"))) == 2
    assert "actor_rollout_ref.rollout.temperature: 1.0 → 0.5" in "\n".join(warmer.messages)
    assert warmer.rollout_data()["1"] != recorded.rollout_data()["1"]


def test_other_weights_are_refused_before_a_worker_starts(
    trainings: Trainings, recorded: Finished, dumps: Path, plain_python: str, tmp_path: Path
) -> None:
    other = make_assets(tmp_path / "other-model", seed=5, data_seed=0).folder
    refused = trainings.run(
        replace(PPO, python=plain_python),
        "other-weights",
        *GRPO,
        f"actor_rollout_ref.model.path={other}/model",
        *skip("replay", dumps),
        fails=True,
    )
    assert "actor_rollout_ref.model.path" in "\n".join(refused.messages) + refused.log
    assert "WorkerDict" not in refused.actors
    assert refused.metrics() == {}
