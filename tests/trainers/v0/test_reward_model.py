"""A reward model on the actor's devices: verl's agent loops then echo all columns of their input, uids included."""

from __future__ import annotations

import pytest

from tests.trainers.v0.stand_ins import VERL
from tests.trainers.v0.training import Trainings, assert_same_training

pytestmark = pytest.mark.skipif(VERL < (0, 7), reason="the agent loops of verl 0.6.1 echo nothing")

REWARD_MODEL = "reward.reward_model.enable=True"


def test_echoed_columns_do_not_collide_with_the_current_ones(trainings: Trainings) -> None:
    plain = trainings.run(None, REWARD_MODEL)
    recording = trainings.run("record", REWARD_MODEL)
    (key, *_) = sorted(trainings.store.keys())
    assert {"uid", "raw_prompt", "reward_model"} <= set(trainings.store.get(key).non_tensor_batch)
    cached = trainings.run("cache", REWARD_MODEL)
    assert cached.generated == 0
    assert_same_training(plain, recording)
    assert_same_training(plain, cached)
    assert cached.events.count("reward") == 3


def test_echoed_columns_of_recorded_prompts_replace_the_current_ones(trainings: Trainings) -> None:
    recording = trainings.run("record", REWARD_MODEL, train_sampler=list(range(16)))
    replayed = trainings.run(
        "replay", REWARD_MODEL, "rollout_skip.prompts=recorded", train_sampler=list(range(15, -1, -1))
    )
    assert_same_training(recording, replayed)


def test_validation_with_a_reward_model_wakes_and_syncs_the_engine_as_verl_does(trainings: Trainings) -> None:
    validation = ("trainer.val_before_train=True", "trainer.test_freq=2")
    plain = trainings.run(None, REWARD_MODEL, *validation)
    trainings.run("record", REWARD_MODEL, *validation)
    assert_same_training(plain, trainings.run("cache", REWARD_MODEL, *validation))


@pytest.mark.skipif(VERL < (0, 9), reason="which settings turn it off is known of verl 0.9.1")
def test_a_replay_does_not_start_a_reward_model_whose_scores_are_recorded(trainings: Trainings) -> None:
    on_its_own = (REWARD_MODEL, "reward.reward_model.enable_resource_pool=True")
    recording = trainings.run("record", *on_its_own)
    assert recording.trainer.use_rm
    replayed = trainings.run("replay", *on_its_own)
    assert not replayed.trainer.use_rm
    assert replayed.said("the reward model is not started: its scores are recorded")
    assert_same_training(recording, replayed)
    assert trainings.make("replay", *on_its_own, "rollout_skip.reward=recompute").use_rm
    assert trainings.make("cache", *on_its_own).use_rm


def test_a_replay_starts_a_reward_model_that_scores_after_the_rollout(trainings: Trainings) -> None:
    recording = trainings.run("record", REWARD_MODEL)
    replayed = trainings.run("replay", REWARD_MODEL)
    assert replayed.trainer.use_rm
    assert_same_training(recording, replayed)
