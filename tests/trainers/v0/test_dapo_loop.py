"""Loops with several generation batches per step, like DAPO's: each batch is recorded under its own key."""

from __future__ import annotations

from typing import Any

import pytest

from tests.trainers.v0.dapo_loop import DapoLoop
from tests.trainers.v0.test_remax import only_score
from tests.trainers.v0.test_resume import checkpoint
from tests.trainers.v0.training import Finished, Trainings, assert_same_training
from verl_rollout_skip import RolloutSkipMixin
from verl_rollout_skip.errors import EntryNotFoundError

FILTER = (
    "algorithm.filter_groups.enable=True",
    "algorithm.filter_groups.metric=seq_reward",
    "algorithm.filter_groups.max_num_gen_batches=0",
    "trainer.total_epochs=5",
)


class SkipLoop(RolloutSkipMixin, DapoLoop):
    pass


def run(trainings: Trainings, mode: str | None, *overrides: str, **arguments: Any) -> Finished:
    return trainings.run(mode, *FILTER, *overrides, trainer=DapoLoop if mode is None else SkipLoop, **arguments)


def keys_of(training: Finished) -> list[tuple[int, int]]:
    """One key for each generation batch that a training needed."""
    return [
        (step, batch)
        for step, metrics in sorted(training.metrics.items())
        for batch in range(metrics["train/num_gen_batches"])
    ]


def test_every_generation_batch_of_a_step_is_recorded_and_loaded(trainings: Trainings) -> None:
    plain = run(trainings, None)
    recording = run(trainings, "record")
    cached = run(trainings, "cache")
    replayed = run(trainings, "replay")
    assert len(keys_of(plain)) > 3, "some steps must need several"
    assert trainings.recorded_keys == keys_of(plain)
    assert recording.generated == plain.generated == len(keys_of(plain))
    assert cached.generated == replayed.generated == 0
    for training in (recording, cached, replayed):
        assert_same_training(plain, training)


def test_a_recording_that_ended_within_a_step_is_completed(trainings: Trainings) -> None:
    plain = run(trainings, None)
    run(trainings, "record")
    ended = next(key for key in keys_of(plain) if key[1] == 1)
    missing = [key for key in keys_of(plain) if key >= ended]
    trainings.forget(*missing)
    continued = run(trainings, "cache")
    assert continued.generated == len(missing)
    assert trainings.recorded_keys == keys_of(plain)
    assert_same_training(plain, continued)


@pytest.mark.parametrize("step", [1, 2])
def test_keys_stay_aligned_after_a_checkpoint(trainings: Trainings, step: int) -> None:
    """The loop's own counter restarts after a checkpoint; keys count within their step."""
    recording = run(trainings, "record", "trainer.save_freq=1")
    resumed = run(trainings, "replay", *checkpoint(trainings, 1, step))
    assert keys_of(resumed) == [key for key in keys_of(recording) if key[0] > step]
    assert_same_training(recording, resumed, steps=list(range(step + 1, 4)))


def test_both_requests_of_remax_have_a_key(trainings: Trainings) -> None:
    remax = "algorithm.adv_estimator=remax"
    plain = run(trainings, None, remax, score=only_score)
    run(trainings, "record", remax, score=only_score)
    assert trainings.recorded_keys == [
        (step, 2 * batch + request) for step, batch in keys_of(plain) for request in (0, 1)
    ]
    cached = run(trainings, "cache", remax, score=only_score)
    assert cached.generated == 0
    assert_same_training(plain, cached)


def test_the_limit_of_generation_batches_applies_to_loaded_ones_too(trainings: Trainings) -> None:
    limit = "algorithm.filter_groups.max_num_gen_batches=2"
    failed = run(trainings, "record", limit, score=_always_the_same, fails=True)
    assert trainings.recorded_keys == [(1, 0), (1, 1)]
    again = run(trainings, "cache", limit, score=_always_the_same, fails=True)
    assert again.generated == 0
    assert str(again.error) == str(failed.error) == "gen_batches=2 >= max_num_gen_batches=2. Generated too many."


def test_a_replay_that_needs_another_generation_batch_is_an_error_that_says_so(trainings: Trainings) -> None:
    plain = run(trainings, "record")
    last = next(key for key in keys_of(plain) if key[1] == 1)
    trainings.forget(last)
    failed = run(trainings, "replay", fails=True)
    assert isinstance(failed.error, EntryNotFoundError)
    assert f"step {last[0]}, generation batch {last[1]} is not recorded" in str(failed.error)


def test_recorded_prompts_replace_those_of_each_generation_batch(trainings: Trainings) -> None:
    recording = run(trainings, "record", train_sampler=list(range(16)))
    replayed = run(trainings, "replay", "rollout_skip.prompts=recorded", train_sampler=list(range(15, -1, -1)))
    assert_same_training(recording, replayed)


def test_a_recording_that_used_up_its_data_can_be_replayed(trainings: Trainings) -> None:
    """It has fewer steps than the data has batches, which is fine."""
    used_up = ("trainer.total_epochs=1", "trainer.total_training_steps=null")
    recording = run(trainings, "record", *used_up)
    assert 0 < len(recording.metrics) < 4
    assert_same_training(recording, run(trainings, "replay", *used_up))


def _always_the_same(response: str, answer: str) -> dict[str, float]:
    return {"score": 1.0, "acc": 1.0}
