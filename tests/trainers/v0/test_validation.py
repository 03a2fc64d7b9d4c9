"""Validation is always generated, never loaded."""

from __future__ import annotations

import pytest

from tests.trainers.v0.training import Trainings, assert_same_training
from verl_rollout_skip.errors import ConfigError

VALIDATION = ("trainer.val_before_train=True", "trainer.test_freq=1")


def test_validation_is_generated_in_a_training_that_loads_everything_else(trainings: Trainings) -> None:
    plain = trainings.run(None, *VALIDATION)
    trainings.run("record", *VALIDATION)
    cached = trainings.run("cache", *VALIDATION)
    assert cached.generated == 0
    validations, others = (
        [(call.rows, call.weights) for call in training.trainer.workers.engine.calls if call.validate]
        for training in (cached, plain)
    )
    assert validations == others == [(3, 0), (3, 1), (3, 2), (3, 3)]
    assert_same_training(plain, cached)
    assert trainings.recorded_keys == [(1, 0), (2, 0), (3, 0)]


def test_a_batch_as_large_as_the_validation_set_is_not_mistaken_for_validation(trainings: Trainings) -> None:
    trainings.write_data("val", 8)
    plain = trainings.run(None, *VALIDATION)
    trainings.run("record", *VALIDATION)
    assert_same_training(plain, trainings.run("cache", *VALIDATION))


def test_a_replay_without_an_engine_skips_validation_and_says_so(trainings: Trainings) -> None:
    plain = trainings.run(None)
    trainings.run("record", *VALIDATION)
    replayed = trainings.run("replay", *VALIDATION)
    assert replayed.trainer.workers.engine.calls == []
    assert replayed.said("validation is skipped: it generates, but no inference engine is started")
    assert_same_training(plain, replayed)


def test_a_replay_with_an_engine_validates(trainings: Trainings) -> None:
    plain = trainings.run(None, *VALIDATION)
    trainings.run("record", *VALIDATION)
    replayed = trainings.run("replay", "rollout_skip.engine=on", *VALIDATION)
    assert replayed.generated == 0
    assert_same_training(plain, replayed)


def test_a_training_that_only_validates_is_not_affected(trainings: Trainings) -> None:
    trainings.run("record", *VALIDATION)
    only = trainings.run("cache", *VALIDATION, "trainer.val_only=True")
    assert list(only.metrics) == [0]
    with pytest.raises(ConfigError, match=r"trainer\.val_only is True: validation generates"):
        trainings.make("replay", *VALIDATION, "trainer.val_only=True")
