"""REMAX also needs a greedy response to each prompt, from a second request or from additional rows."""

from __future__ import annotations

import pytest

from tests.trainers.v0.stand_ins import VERL
from tests.trainers.v0.training import Trainings, assert_same_batches, assert_same_training, score_answer

REMAX = "algorithm.adv_estimator=remax"
TWO_REQUESTS = VERL < (0, 8)
IN_ORDER = list(range(16))


def only_score(response: str, answer: str) -> dict[str, float]:
    """verl 0.7.1 cannot train REMAX with a reward function that returns more than the score."""
    return {"score": score_answer(response, answer)["score"]}


def test_both_kinds_of_responses_are_recorded_and_loaded(trainings: Trainings) -> None:
    plain = trainings.run(None, REMAX, score=only_score)
    trainings.run("record", REMAX, score=only_score)
    cached = trainings.run("cache", REMAX, score=only_score)
    requests = [0, 1] if TWO_REQUESTS else [0]
    assert trainings.recorded_keys == [(step, request) for step in (1, 2, 3) for request in requests]
    assert cached.generated == 0
    assert_same_training(plain, cached)
    assert_same_training(plain, trainings.run("replay", REMAX, score=only_score))


@pytest.mark.skipif(not TWO_REQUESTS, reason="from verl 0.8.0 on there is one request")
def test_an_unrecorded_second_request_uses_the_prompts_of_the_first(trainings: Trainings) -> None:
    """Even if these were recorded ones: a baseline for other prompts would be silently wrong."""
    recording = trainings.run("record", REMAX, score=only_score, train_sampler=IN_ORDER)
    trainings.forget((1, 1))
    mixed = trainings.run(
        "cache", REMAX, "rollout_skip.prompts=recorded", score=only_score, train_sampler=IN_ORDER[::-1]
    )
    assert mixed.generated == 1
    assert_same_batches(recording.trained, mixed.trained)


@pytest.mark.skipif(not TWO_REQUESTS, reason="from verl 0.8.0 on there is one request")
def test_weights_are_sent_before_a_second_request_even_if_the_first_was_loaded(trainings: Trainings) -> None:
    plain = trainings.run(None, REMAX, score=only_score)
    trainings.run("record", REMAX, score=only_score)
    trainings.forget((2, 1))
    cached = trainings.run("cache", REMAX, score=only_score)
    assert [call.weights for call in cached.trainer.workers.engine.calls] == [1]
    assert "generate asleep" not in cached.events
    assert_same_training(plain, cached)
