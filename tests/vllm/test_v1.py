"""verl's default trainer with vLLM, started by verl's own entry point."""

from __future__ import annotations

import shutil
from dataclasses import replace
from pathlib import Path

import pytest

from tests.e2e.training import (
    VERL_V1,
    Finished,
    Trainings,
    assert_same_results,
    assert_same_weights,
    skip_v1,
    variant_in,
)
from tests.vllm.checks import assert_engine_ran, assert_no_engine, assert_weights_arrived
from verl_rollout_skip import RolloutKey, RolloutStore

STEPS = 3
GRPO = (f"trainer.total_training_steps={STEPS}", f"trainer.save_freq={STEPS}")


@pytest.fixture(scope="module")
def recorded(trainings: Trainings, dumps: Path) -> Finished:
    return trainings.run(VERL_V1, "record", *GRPO, *skip_v1("record", dumps))


def test_a_longer_training_loads_what_is_recorded_and_generates_the_rest_with_the_weights_of_its_time(
    trainings: Trainings, recorded: Finished, dumps: Path, tmp_path: Path
) -> None:
    assert len(recorded.trace("sync")) == STEPS + 1
    assert_weights_arrived(recorded, STEPS)
    own = shutil.copytree(dumps, tmp_path / "dumps")
    longer = trainings.run(VERL_V1, "longer", "trainer.total_training_steps=5", *skip_v1("cache", own))
    assert longer.hits() == [1, 2, 3]
    assert_same_results(recorded, longer, steps=[1, 2, 3])
    assert_weights_arrived(longer, 5)
    assert len(longer.trace("sync")) == 2
    assert RolloutStore(variant_in(own)).keys() == [RolloutKey(step) for step in range(1, 6)]


def test_a_replay_starts_no_engine_and_is_the_recorded_training_to_the_last_bit(
    trainings: Trainings, recorded: Finished, dumps: Path
) -> None:
    replayed = trainings.run(VERL_V1, "replay", *GRPO, *skip_v1("replay", dumps))
    assert_engine_ran(recorded)
    assert_no_engine(replayed)
    assert replayed.hits() == [1, 2, 3]
    assert_same_results(recorded, replayed)
    assert_same_weights(recorded, replayed, STEPS)


def test_a_recording_replays_where_vllm_is_not_installed(
    trainings: Trainings, recorded: Finished, dumps: Path, plain_python: str
) -> None:
    replayed = trainings.run(replace(VERL_V1, python=plain_python), "plain", *GRPO, *skip_v1("replay", dumps))
    assert_no_engine(replayed)
    assert_same_results(recorded, replayed)
    assert_same_weights(recorded, replayed, STEPS)
