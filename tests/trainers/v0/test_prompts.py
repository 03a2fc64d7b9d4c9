"""A recorded rollout is never paired with other prompts; ``prompts: recorded`` trains on the recorded batch."""

from __future__ import annotations

import pytest

from tests.trainers.v0.training import Trainings, assert_same_batches, assert_same_training
from verl_rollout_skip.errors import MismatchError

IN_ORDER = list(range(16))
BACKWARDS = IN_ORDER[::-1]


def test_changed_data_is_a_miss_and_the_difference_is_shown(trainings: Trainings) -> None:
    trainings.run("record", train_sampler=IN_ORDER)
    backwards = trainings.run(None, train_sampler=BACKWARDS)
    missed = trainings.run("cache", train_sampler=BACKWARDS)
    assert missed.hits == [0.0, 0.0, 0.0]
    assert missed.said("a miss: step 1, generation batch 0 is recorded with a different input: 8 of 8 rows differ")
    assert_same_training(backwards, missed)


def test_the_same_data_in_a_different_order_is_reported_as_such(trainings: Trainings) -> None:
    trainings.run("record", train_sampler=IN_ORDER)
    swapped = trainings.run("cache", train_sampler=[1, 0, *IN_ORDER[2:]])
    assert swapped.hits == [0.0, 1.0, 1.0]
    assert swapped.said("they are the same prompts in a different order")


def test_a_replay_with_other_data_is_an_error(trainings: Trainings) -> None:
    trainings.run("record", train_sampler=IN_ORDER)
    failed = trainings.run("replay", train_sampler=BACKWARDS, fails=True)
    assert isinstance(failed.error, MismatchError)
    assert "rollout_skip.prompts=recorded" in str(failed.error)
    assert failed.trained == []


@pytest.mark.parametrize("mode", ["cache", "replay"])
def test_the_recorded_batch_replaces_the_current_one_whole(trainings: Trainings, mode: str) -> None:
    recording = trainings.run("record", train_sampler=IN_ORDER)
    replayed = trainings.run(mode, "rollout_skip.prompts=recorded", train_sampler=BACKWARDS)
    assert replayed.generated == 0
    answers = [row["ground_truth"] for row in replayed.trained[0].non_tensor_batch["reward_model"]]
    assert sorted(set(answers)) == ["0", "1", "2", "3"]  # 0+0= to 0+3=, the first four rows of the data
    assert_same_batches(recording.trained, replayed.trained)
    assert_same_training(recording, replayed)


def test_steps_that_are_not_recorded_continue_with_the_current_data(trainings: Trainings) -> None:
    recording = trainings.run("record", train_sampler=IN_ORDER)
    trainings.forget((3, 0))
    mixed = trainings.run("cache", "rollout_skip.prompts=recorded", train_sampler=BACKWARDS)
    assert mixed.hits == [1.0, 1.0, 0.0]
    assert_same_batches(recording.trained[:2], mixed.trained[:2])
    indices = {info["index"] for info in mixed.trained[2].non_tensor_batch["extra_info"]}
    assert indices == {4, 5, 6, 7}


def test_the_groups_of_a_replaced_batch_are_those_of_its_prompts(trainings: Trainings) -> None:
    trainings.run("record", train_sampler=IN_ORDER)
    replayed = trainings.run("cache", "rollout_skip.prompts=recorded", train_sampler=BACKWARDS)
    for batch in replayed.trained:
        uids, prompts = batch.non_tensor_batch["uid"], batch.batch["prompts"].tolist()
        groups = {(uid, str(prompt)) for uid, prompt in zip(uids, prompts, strict=True)}
        assert len(groups) == len(set(uids)) == 4


def test_a_different_number_of_samples_is_a_different_recording(trainings: Trainings) -> None:
    trainings.run("record", train_sampler=IN_ORDER)
    more = trainings.run("cache", "rollout_skip.prompts=recorded", "actor_rollout_ref.rollout.n=3")
    assert more.hits == [0.0, 0.0, 0.0]
