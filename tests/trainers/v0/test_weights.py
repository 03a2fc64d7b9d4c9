"""While steps are loaded, the engine sleeps and gets no weights; before it generates, it gets the right ones."""

from __future__ import annotations

import pytest

from tests.trainers.v0.stand_ins import SYNCS_BY_ITSELF, VERL
from tests.trainers.v0.training import Trainings, assert_same_training

pytestmark = pytest.mark.skipif(SYNCS_BY_ITSELF, reason="verl 0.6.1 syncs weights as part of each generation")

STEP = ["generate", "sleep", "update"]


def test_a_recording_syncs_as_verl_does(trainings: Trainings) -> None:
    plain, recording = trainings.run(None), trainings.run("record")
    assert recording.events == plain.events
    assert recording.events == ["sleep", "sync 0", *STEP, "sync 1", *STEP, "sync 2", *STEP, "sync 3"]


def test_nothing_is_synced_between_hits(trainings: Trainings) -> None:
    trainings.run("record")
    cached = trainings.run("cache")
    assert cached.events == ["sleep", "update", "update", "update"]
    assert cached.said("0 weight syncs, 4 skipped")


def test_a_generated_step_uses_the_weights_of_the_previous_step(trainings: Trainings) -> None:
    plain = trainings.run(None, "trainer.total_training_steps=4")
    trainings.run("record", "trainer.total_training_steps=4")
    trainings.forget((3, 0))
    cached = trainings.run("cache", "trainer.total_training_steps=4")
    assert cached.events == ["sleep", "update", "update", "sync 2", *STEP, "update"]
    assert [call.weights for call in cached.trainer.workers.engine.calls] == [2]
    assert cached.said("1 weight syncs, 4 skipped")
    assert_same_training(plain, cached)


def test_the_first_steps_can_be_generated_and_later_ones_loaded(trainings: Trainings) -> None:
    plain = trainings.run(None)
    trainings.run("record")
    trainings.forget((1, 0), (2, 0))
    cached = trainings.run("cache")
    assert cached.events == ["sleep", "sync 0", *STEP, "sync 1", *STEP, "update"]
    assert_same_training(plain, cached)


def test_validation_uses_the_current_weights_and_the_engine_sleeps_again_afterwards(trainings: Trainings) -> None:
    validation = ("trainer.val_before_train=True", "trainer.test_freq=2")
    plain = trainings.run(None, *validation)
    trainings.run("record", *validation)
    cached = trainings.run("cache", *validation)
    assert cached.events == [
        *("sleep", "sync 0", "validate"),
        *("sleep", "update"),
        *("update", "sync 2", "validate"),
        *("sleep", "update", "sync 3", "validate"),
    ]
    assert_same_training(plain, cached)


def test_a_replay_syncs_nothing_and_has_no_engine_to_put_to_sleep(trainings: Trainings) -> None:
    trainings.run("record")
    replayed = trainings.run("replay")
    assert [event for event in replayed.events if event != "update"] in ([], ["sleep"])
    assert "sync" not in " ".join(replayed.events)


def test_critic_warm_up_keeps_the_engine_asleep_too(trainings: Trainings) -> None:
    warm_up = ("algorithm.adv_estimator=gae", "trainer.critic_warmup=3")
    plain = trainings.run(None, *warm_up)
    trainings.run("record", *warm_up)
    trainings.forget((3, 0))
    cached = trainings.run("cache", *warm_up)
    # verl 0.7.1 does not sync what has not changed.
    assert cached.events == ["sleep", "sync 2" if VERL >= (0, 8) else "sync 0", *STEP]
    assert_same_training(plain, cached)
