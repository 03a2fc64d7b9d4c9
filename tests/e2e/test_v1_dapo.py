"""DAPO in V1: ``algorithm.filter_groups`` with verl's entry point; a step draws more prompts than it keeps."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest

from tests.e2e.training import (
    TWO_AGENT_LOOPS,
    VERL_V1,
    Finished,
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
def recorded(trainings: Trainings, dumps: Path) -> Finished:
    return trainings.run(VERL_V1, "record", *DAPO, *skip_v1("record", dumps))


def test_recording_changes_nothing(trainings: Trainings, recorded: Finished) -> None:
    """verl's own trainer computes the same results, even if responses finish in a different order."""
    plain = trainings.run(VERL_V1, "verl", *DAPO, TWO_AGENT_LOOPS)
    assert sorted(recorded.trace("generate")) == sorted(plain.trace("generate"))
    assert len(recorded.trace("generate")) > STEPS * PROMPTS * SAMPLES, "no group was filtered and replaced"
    assert_same_results(plain, recorded)
    assert_same_weights(plain, recorded, STEPS)


def test_a_replay_trains_on_the_kept_groups_and_reports_the_filtered_ones(
    trainings: Trainings, recorded: Finished, dumps: Path
) -> None:
    replayed = trainings.run(VERL_V1, "replay", *DAPO, *skip_v1("replay", dumps))
    assert replayed.trace("generate") == replayed.trace("sync") == []
    assert_proved(replayed, STEPS)
    assert_same_results(recorded, replayed)
    assert_same_weights(recorded, replayed, STEPS)
    evicted = "training/filter_groups/evicted_samples"
    assert any(metrics.get(evicted) for metrics in replayed.results().values())


def test_a_missing_step_is_generated_from_its_own_prompts_with_the_right_weights(
    trainings: Trainings, recorded: Finished, dumps: Path, tmp_path: Path
) -> None:
    own = shutil.copytree(dumps, tmp_path / "dumps")
    RolloutStore(variant_in(own)).delete(RolloutKey(2))
    partial = trainings.run(VERL_V1, "partial", *DAPO, *skip_v1("cache", own))
    assert partial.hits() == [1, 3]
    assert partial.trace("sync") == [1]
    assert partial.trace("generate") == [version for version in recorded.trace("generate") if version == 1]
    assert_same_results(recorded, partial)
    assert_same_weights(recorded, partial, STEPS)
