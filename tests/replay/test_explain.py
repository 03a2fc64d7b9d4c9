"""A missing step is an error that says what is recorded instead, and the likely cause."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from tests.trainings import Engine, Training, inputs_of, never
from verl_rollout_skip import RolloutKey, RolloutStore
from verl_rollout_skip.errors import EntryNotFoundError
from verl_rollout_skip.replay.steps import Checkpoint, TrainingSteps, check_steps

K1, K2, K3, K4 = (RolloutKey(step) for step in range(1, 5))
LIMIT = "made with rollout_skip.max_dump_steps"


@pytest.fixture
def training(tmp_path: Path) -> Training:
    return Training(tmp_path)


def remove(training: Training, *keys: RolloutKey) -> None:
    store = RolloutStore(training.variants()[0])
    for key in keys:
        store.delete(key)


def replay_error(training: Training, last: int) -> str:
    """Why a replay of steps 1 to ``last`` cannot start."""
    with training.open("replay") as replay, pytest.raises(EntryNotFoundError) as caught:
        check_steps(replay, TrainingSteps(last))
    return str(caught.value)


@pytest.mark.parametrize("mode", ["replay", "repeat"])
def test_a_recording_that_is_removed_during_a_training_is_reported_as_empty(training: Training, mode: str) -> None:
    training.record(K1)
    with training.open(mode) as skip:
        remove(training, K1)
        with pytest.raises(EntryNotFoundError, match=r"step 2, .* is not recorded in .*\. Recorded steps: none\. "):
            skip.step(K2, inputs_of(K2), never)


def test_a_replay_after_a_checkpoint_without_a_complete_step_says_that_none_is_recorded(training: Training) -> None:
    training.record(K1, K2)
    checkpoint = Checkpoint("/checkpoints/global_step_2", 2, "auto", is_own=True)
    with training.open("replay") as replay:
        with pytest.raises(EntryNotFoundError, match=r"starts at step 3, but the recorded steps are none \("):
            check_steps(replay, TrainingSteps(4, checkpoint), gen_batches=2)


@pytest.mark.parametrize("pruned", [[], [K1], [K1, K2]], ids=lambda keys: f"{len(keys)} steps pruned")
def test_a_step_beyond_max_dump_steps_is_explained_by_it(training: Training, pruned: list[RolloutKey]) -> None:
    with training.open("cache", {"max_dump_steps": 3}) as skip:
        for key in (K1, K2, K3, K4):
            skip.step(key, inputs_of(key), Engine())
    remove(training, *pruned)
    with training.open("replay") as replay, pytest.raises(EntryNotFoundError, match=f"{LIMIT}=3"):
        replay.step(K4, inputs_of(K4), never)


def test_a_training_that_ended_before_max_dump_steps_is_not_blamed_on_it(training: Training) -> None:
    training.record(K1, K2, skip={"max_dump_steps": 10})
    message = replay_error(training, last=4)
    assert LIMIT not in message
    assert "the recorded training ended earlier" in message


def test_a_pruned_step_is_not_blamed_on_max_dump_steps(training: Training) -> None:
    training.record(K1, K2, skip={"max_dump_steps": 2})
    remove(training, K2)
    message = replay_error(training, last=2)
    assert LIMIT not in message
    assert "were pruned" in message


def test_a_step_after_the_end_of_the_recorded_training_is_not_blamed_on_max_dump_steps(training: Training) -> None:
    changes: dict[str, Any] = {"trainer__total_training_steps": 2}
    training.record(K1, K2, skip={"max_dump_steps": 2}, **changes)
    message = replay_error(training, last=3)
    assert LIMIT not in message
    assert "The recorded training had 2 steps" in message


def test_steps_that_were_set_aside_are_called_unreadable(training: Training) -> None:
    """An entry of another format version is set aside too, and it is not damaged."""
    training.record(K1)
    assert "were set aside as unreadable (*.corrupt)" in replay_error(training, last=2)
