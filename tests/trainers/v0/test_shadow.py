"""Mode shadow in verl's V0 loop: each step is generated, compared with the recording, and trained as recorded."""

from __future__ import annotations

from typing import Any

import pytest

from tests.trainers.v0.stand_ins import SYNCS_BY_ITSELF, VERL, Engine
from tests.trainers.v0.test_dapo import FILTER, SkipDapo
from tests.trainers.v0.training import Finished, Trainings, assert_same_batches, assert_same_training
from verl_rollout_skip.errors import EntryNotFoundError, MismatchError, ShadowError

STEP = ["generate", "sleep", "update"]
BACKWARDS = list(range(16))[::-1]


def shadow_metric(training: Finished, name: str) -> list[float]:
    return [metrics[f"timing_s/rollout_skip/shadow/{name}"] for _, metrics in sorted(training.metrics.items())]


def warnings(training: Finished) -> list[str]:
    return [message for message in training.messages if "differ from the recording" in message]


@pytest.fixture
def one_weight_sync(monkeypatch: pytest.MonkeyPatch) -> None:
    """A weight sync that is broken on purpose: the engine keeps the first weights that it got."""
    take_weights = Engine.take_weights

    def take_once(engine: Engine) -> None:
        if engine.weights < 0:
            take_weights(engine)

    monkeypatch.setattr(Engine, "take_weights", take_once)


def test_every_row_of_a_correct_engine_matches_and_the_training_is_the_recorded_one(trainings: Trainings) -> None:
    recording = trainings.run("record")
    shadowed = trainings.run("shadow")
    assert shadowed.generated == 3
    assert shadowed.hits == [1.0, 1.0, 1.0]
    assert shadow_metric(shadowed, "match_ratio") == [1.0, 1.0, 1.0]
    assert shadow_metric(shadowed, "rows") == [8.0, 8.0, 8.0]
    assert warnings(shadowed) == []
    assert shadowed.said("shadow: all 24 rows of 3 steps are identical to the recording")
    assert_same_training(recording, shadowed)


@pytest.mark.skipif(SYNCS_BY_ITSELF, reason="verl 0.6.1 syncs weights as part of each generation")
def test_weights_are_sent_at_every_step_as_without_this_package(trainings: Trainings) -> None:
    recording, shadowed = trainings.run("record"), trainings.run("shadow")
    assert shadowed.events == recording.events
    assert shadowed.events == ["sleep", "sync 0", *STEP, "sync 1", *STEP, "sync 2", *STEP, "sync 3"]


def test_a_broken_weight_sync_is_found_in_the_first_step_after_an_update(
    trainings: Trainings, request: pytest.FixtureRequest
) -> None:
    recording = trainings.run("record")
    request.getfixturevalue("one_weight_sync")
    shadowed = trainings.run("shadow")
    ratios = shadow_metric(shadowed, "match_ratio")
    assert ratios[0] == 1.0
    assert max(ratios[1:]) < 1.0
    (warning,) = warnings(shadowed)
    assert "step 2, generation batch 0" in warning
    assert "The most likely cause is the weight sync" in warning
    assert "recorded  '" in warning, "the rows are not shown as text"
    assert shadowed.said("1 of 3 steps match completely, step 2 is the first that does not")
    assert_same_training(recording, shadowed)


def test_a_broken_weight_sync_stops_a_training_that_requires_a_match(
    trainings: Trainings, request: pytest.FixtureRequest
) -> None:
    trainings.run("record")
    assert trainings.run("shadow", "rollout_skip.shadow_min_match=1").hits == [1.0, 1.0, 1.0]
    request.getfixturevalue("one_weight_sync")
    failed = trainings.run("shadow", "rollout_skip.shadow_min_match=1", fails=True)
    assert isinstance(failed.error, ShadowError)
    assert "step 2, generation batch 0" in str(failed.error)
    assert len(failed.trained) == 1, "it trained on the step"


def test_a_step_that_is_not_recorded_is_rejected_before_the_training_starts(trainings: Trainings) -> None:
    trainings.run("record")
    trainings.forget((2, 0))
    with pytest.raises(EntryNotFoundError, match=r"steps 1 to 3, but 2 is not recorded"):
        trainings.make("shadow")


def test_other_prompts_are_an_error_unless_the_recorded_ones_replace_them(trainings: Trainings) -> None:
    recording = trainings.run("record")
    failed = trainings.run("shadow", train_sampler=BACKWARDS, fails=True)
    assert isinstance(failed.error, MismatchError)
    replaced = trainings.run("shadow", "rollout_skip.prompts=recorded", train_sampler=BACKWARDS)
    assert replaced.generated == 3
    assert shadow_metric(replaced, "match_ratio") == [1.0, 1.0, 1.0]
    assert_same_batches(recording.trained, replaced.trained)


def test_only_the_selected_steps_are_compared_and_the_others_generated(trainings: Trainings) -> None:
    recording = trainings.run("record")
    shadowed = trainings.run("shadow", "rollout_skip.steps=[1,2]")
    compared: dict[int, Any] = {
        step: metrics.get("timing_s/rollout_skip/shadow/rows") for step, metrics in shadowed.metrics.items()
    }
    assert compared == {1: 8.0, 2: 8.0, 3: None}
    assert_same_training(recording, shadowed)


@pytest.mark.skipif(VERL < (0, 7), reason="SkipDAPOTrainer needs rollouts that come with their rewards")
def test_all_generation_batches_of_a_dapo_step_are_compared(trainings: Trainings) -> None:
    recording = trainings.run("record", *FILTER, trainer=SkipDapo)
    batches = [metrics["train/num_gen_batches"] for _, metrics in sorted(recording.metrics.items())]
    assert max(batches) > 1
    shadowed = trainings.run("shadow", *FILTER, trainer=SkipDapo)
    assert shadow_metric(shadowed, "match_ratio") == [1.0] * len(batches)
    assert shadow_metric(shadowed, "rows") == [8.0 * count for count in batches]
    assert shadowed.generated == recording.generated
    assert_same_training(recording, shadowed)


@pytest.mark.skipif(VERL < (0, 7), reason="the settings of a REMAX training differ in verl 0.6.1")
def test_the_greedy_baseline_of_remax_is_compared_too(trainings: Trainings) -> None:
    remax = "algorithm.adv_estimator=remax"
    recording = trainings.run("record", remax)
    shadowed = trainings.run("shadow", remax)
    assert shadow_metric(shadowed, "match_ratio") == [1.0, 1.0, 1.0]
    assert shadow_metric(shadowed, "rows") == [12.0, 12.0, 12.0]
    assert_same_training(recording, shadowed)
