"""Numbering rollout steps: the training step and the generation batch within it."""

from __future__ import annotations

from verl_rollout_skip.key import RolloutKey
from verl_rollout_skip.trainers.base import KeyCounter


def test_generation_batches_are_counted_within_their_step() -> None:
    keys = KeyCounter()
    assert [keys.next_key(step) for step in (1, 1, 2, 3, 3)] == [
        RolloutKey(1, 0),
        RolloutKey(1, 1),
        RolloutKey(2, 0),
        RolloutKey(3, 0),
        RolloutKey(3, 1),
    ]
    assert 3 in keys
    assert 4 not in keys


def test_a_resumed_training_continues_with_the_keys_of_the_recorded_one() -> None:
    keys = KeyCounter(start=7)
    assert keys.next_key(8) == RolloutKey(8, 0)
    assert keys.first_without_rollout(end=9) is None


def test_a_step_without_a_rollout_step_is_found() -> None:
    keys = KeyCounter(start=0)
    for step in (1, 2, 4):
        keys.next_key(step)
    assert keys.first_without_rollout(end=5) == 3
    assert keys.first_without_rollout(end=3) is None, "step 3 has not ended yet"


def test_a_training_without_any_rollout_step_is_found() -> None:
    assert KeyCounter(start=7).first_without_rollout(end=10) == 8
    assert KeyCounter().first_without_rollout(end=3) == 1
    assert KeyCounter(start=7).first_without_rollout(end=8) is None, "nothing was left to do after the checkpoint"


def test_a_loop_that_sets_its_own_first_step_counts_from_there() -> None:
    keys = KeyCounter()
    for step in (100, 101):
        keys.next_key(step)
    assert keys.first_without_rollout(end=102) is None
