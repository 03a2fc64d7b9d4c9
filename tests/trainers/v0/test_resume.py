"""A training that resumes from a checkpoint finds its recorded steps."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.trainers.v0.training import Trainings, assert_same_training
from verl_rollout_skip.errors import ConfigError, EntryNotFoundError

SAVE = "trainer.save_freq=1"


def checkpoint(trainings: Trainings, run: int, step: int) -> list[str]:
    folder = trainings.folder / f"run-{run}" / "checkpoints" / f"global_step_{step}"
    assert folder.is_dir()
    return ["trainer.resume_mode=resume_path", f"trainer.resume_from_path={folder}"]


@pytest.mark.parametrize("step", [1, 2])
def test_recorded_steps_are_loaded_after_a_checkpoint(trainings: Trainings, step: int) -> None:
    plain = trainings.run("record", SAVE)
    resumed = trainings.run("cache", *checkpoint(trainings, 1, step))
    assert sorted(resumed.metrics) == list(range(step + 1, 4))
    assert set(resumed.hits) == {1.0}
    assert_same_training(plain, resumed, steps=list(range(step + 1, 4)))


@pytest.mark.parametrize("step", [1, 2])
def test_a_recording_continues_after_a_checkpoint(trainings: Trainings, step: int) -> None:
    plain = trainings.run(None, "trainer.total_training_steps=4")
    trainings.run("record", SAVE, f"trainer.total_training_steps={step}")
    resumed = trainings.run("cache", *checkpoint(trainings, 2, step), "trainer.total_training_steps=4")
    assert trainings.recorded_keys == [(1, 0), (2, 0), (3, 0), (4, 0)]
    assert set(resumed.hits) == {0.0}
    assert_same_training(plain, resumed, steps=list(range(step + 1, 5)))


def test_a_replay_needs_only_the_steps_after_its_checkpoint(trainings: Trainings) -> None:
    plain = trainings.run("record", SAVE)
    trainings.forget((1, 0), (2, 0))
    resumed = trainings.run("replay", *checkpoint(trainings, 1, 2))
    assert_same_training(plain, resumed, steps=[3])
    missing = "would replay steps 2 to 3, but 2 is not recorded.*global_step_1 .*trainer.resume_mode=disable"
    with pytest.raises(EntryNotFoundError, match=missing):
        trainings.make("replay", *checkpoint(trainings, 1, 1))


def test_the_latest_checkpoint_is_found_automatically(trainings: Trainings) -> None:
    plain = trainings.run("record", SAVE)
    trainings.forget((1, 0))
    folder = trainings.folder / "run-1" / "checkpoints"
    (folder / "latest_checkpointed_iteration.txt").write_text("1")
    resumed = trainings.run("replay", f"trainer.default_local_dir={folder}")
    assert sorted(resumed.metrics) == [2, 3]
    assert_same_training(plain, resumed, steps=[2, 3])


def own_checkpoints(trainings: Trainings, run: int) -> str:
    """verl's default, with which the same command resumes from the checkpoints of an earlier run."""
    return f"trainer.default_local_dir={trainings.folder}/run-{run}/checkpoints"


def test_running_a_finished_training_again_says_that_nothing_is_left_to_do(trainings: Trainings) -> None:
    finished = ("trainer.total_training_steps=null", SAVE)
    trainings.run("record", *finished)
    again = trainings.run("cache", *finished, own_checkpoints(trainings, 1))
    assert again.metrics == {}
    assert again.trained == []
    assert again.said("global_step_4 (trainer.resume_mode=auto), the last step of this training: nothing is left to do")
    assert again.said("Recorded steps 1-4 are not used")
    assert again.said("trainer.resume_mode=disable starts at step 1")


def test_running_the_same_command_again_says_which_checkpoint_it_resumes_from(trainings: Trainings) -> None:
    trainings.run("record", SAVE)
    again = trainings.run("cache", own_checkpoints(trainings, 1))
    assert sorted(again.metrics) == [4], "verl looks at its limit after a step"
    (warning,) = [message for message in again.messages if "trainer.resume_mode=auto" in message]
    assert f"{trainings.folder}/run-1/checkpoints/global_step_3" in warning
    assert "verl runs step 4 before it ends" in warning
    assert "Recorded steps 1-3 are not used" in warning
    whole = trainings.run("cache", own_checkpoints(trainings, 1), "trainer.resume_mode=disable")
    assert whole.hits == [1.0] * 3
    assert not whole.said("trainer.resume_mode")


@pytest.mark.parametrize("length", ["trainer.total_training_steps=3", "trainer.total_training_steps=null"])
def test_a_replay_that_would_resume_after_its_recording_is_an_error_that_names_the_setting(
    trainings: Trainings, length: str
) -> None:
    plain = trainings.run("record", SAVE, length)
    with pytest.raises(EntryNotFoundError, match="nothing to replay") as refused:
        trainings.make("replay", length, SAVE, own_checkpoints(trainings, 1))
    message = str(refused.value)
    last = len(plain.metrics)
    assert f"{trainings.folder}/run-1/checkpoints/global_step_{last} (trainer.resume_mode=auto)" in message
    assert f"starts at step {last + 1}" in message
    assert f"the recorded steps are 1-{last}" in message
    assert "trainer.resume_mode=disable starts at step 1" in message
    assert "another trainer.default_local_dir" in message
    whole = trainings.run("replay", length, own_checkpoints(trainings, 1), "trainer.resume_mode=disable")
    assert_same_training(plain, whole)


def test_a_replay_from_the_middle_says_which_steps_it_does_not_use(trainings: Trainings) -> None:
    trainings.run("record", SAVE)
    resumed = trainings.run("replay", *checkpoint(trainings, 1, 2))
    assert resumed.said("global_step_2 (trainer.resume_mode=resume_path), so the training starts at step 3")
    assert resumed.said("Recorded steps 1-2 are not used")


@pytest.mark.parametrize("mode", ["record", "cache", "refresh"])
def test_a_selection_without_a_step_of_the_training_is_rejected(trainings: Trainings, mode: str) -> None:
    message = r"rollout_skip.steps is 50, but the training runs steps 1 to 3.*nothing would be recorded or loaded"
    with pytest.raises(ConfigError, match=message):
        trainings.make(mode, "rollout_skip.steps=[50]")
    assert not trainings.dumps.exists()


def test_a_selection_of_steps_before_the_checkpoint_is_not_an_error(trainings: Trainings) -> None:
    trainings.run("record", SAVE, "rollout_skip.steps=[1]")
    resumed = trainings.run("cache", "rollout_skip.steps=[1]", *checkpoint(trainings, 1, 2))
    assert sorted(resumed.metrics) == [3]
    assert resumed.said("rollout_skip.steps is 1: none of the remaining steps is recorded or loaded")


def test_a_tracker_file_without_its_checkpoint_starts_at_step_1(trainings: Trainings, tmp_path: Path) -> None:
    plain = trainings.run("record")
    (tmp_path / "latest_checkpointed_iteration.txt").write_text("2")
    again = trainings.run("replay", f"trainer.default_local_dir={tmp_path}")
    assert_same_training(plain, again)
