"""DAPO on V1: ``algorithm.filter_groups`` with verl's own entry point; a step draws more prompts than it keeps."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest

from tests.e2e.training import Finished, assert_same_results, assert_same_weights, variant_in
from tests.e2e.v1 import V1Trainings, skip
from verl_rollout_skip import RolloutKey, RolloutStore

STEPS = 3
PROMPTS, SAMPLES = 4, 4
DAPO = (
    f"trainer.total_training_steps={STEPS}",
    f"trainer.save_freq={STEPS}",
    f"data.train_batch_size={PROMPTS}",
    f"actor_rollout_ref.rollout.n={SAMPLES}",
    "algorithm.filter_groups.enable=True",
    "algorithm.filter_groups.metric=acc",
)


@pytest.fixture(scope="module")
def trainings(tmp_path_factory: pytest.TempPathFactory, assets: Path) -> V1Trainings:
    return V1Trainings(tmp_path_factory.mktemp("trainings"), assets)


@pytest.fixture(scope="module")
def unskipped(trainings: V1Trainings) -> Finished:
    return trainings.run("off", *DAPO)


@pytest.fixture(scope="module")
def dumps(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("dumps")


@pytest.fixture(scope="module")
def recorded(trainings: V1Trainings, dumps: Path) -> Finished:
    return trainings.run("record", *DAPO, *skip("record", dumps))


def test_recording_changes_nothing(unskipped: Finished, recorded: Finished) -> None:
    assert_same_results(unskipped, recorded)
    assert_same_weights(unskipped, recorded, STEPS)
    assert recorded.trace("generate") == unskipped.trace("generate")
    assert len(recorded.trace("generate")) > STEPS * PROMPTS * SAMPLES, "no group was filtered and replaced"


def test_a_replay_repeats_what_was_kept_and_reports_what_was_filtered(
    trainings: V1Trainings, recorded: Finished, dumps: Path
) -> None:
    replayed = trainings.run("replay", *DAPO, *skip("replay", dumps))
    assert replayed.trace("generate") == replayed.trace("sync") == []
    assert_same_results(recorded, replayed)
    assert_same_weights(recorded, replayed, STEPS)
    evicted = "training/filter_groups/evicted_samples"
    assert any(metrics.get(evicted) for metrics in replayed.results().values())


def test_a_missing_step_is_generated_from_the_prompts_and_weights_of_its_time(
    trainings: V1Trainings, unskipped: Finished, recorded: Finished, dumps: Path, tmp_path: Path
) -> None:
    own = shutil.copytree(dumps, tmp_path / "dumps")
    RolloutStore(variant_in(own)).delete(RolloutKey(2))
    partial = trainings.run("partial", *DAPO, *skip("cache", own))
    assert partial.hits() == [1, 3]
    assert partial.trace("sync") == [1]
    assert partial.trace("generate") == [version for version in unskipped.trace("generate") if version == 1]
    assert_same_results(unskipped, partial)
    assert_same_weights(unskipped, partial, STEPS)
