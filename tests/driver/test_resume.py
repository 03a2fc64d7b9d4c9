"""A training that goes on from a checkpoint finds its steps again."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.driver.training import Trainings, assert_same_training
from verl_rollout_skip.errors import EntryNotFoundError

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
def test_a_recording_goes_on_after_a_checkpoint(trainings: Trainings, step: int) -> None:
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
    with pytest.raises(EntryNotFoundError, match="would replay steps 2 to 3, and 2 is not recorded"):
        trainings.make("replay", *checkpoint(trainings, 1, 1))


def test_the_latest_checkpoint_is_found_by_itself(trainings: Trainings) -> None:
    plain = trainings.run("record", SAVE)
    trainings.forget((1, 0))
    folder = trainings.folder / "run-1" / "checkpoints"
    (folder / "latest_checkpointed_iteration.txt").write_text("1")
    resumed = trainings.run("replay", f"trainer.default_local_dir={folder}")
    assert sorted(resumed.metrics) == [2, 3]
    assert_same_training(plain, resumed, steps=[2, 3])


@pytest.mark.parametrize("mode", ["cache", "replay"])
def test_a_finished_training_that_is_started_again_ends_at_once(trainings: Trainings, mode: str) -> None:
    finished = ("trainer.total_training_steps=null", SAVE)
    trainings.run("record", *finished)
    again = trainings.run(mode, *finished, *checkpoint(trainings, 1, 4))
    assert again.metrics == {}
    assert again.trained == []


def test_a_tracker_whose_checkpoint_is_gone_begins_anew(trainings: Trainings, tmp_path: Path) -> None:
    plain = trainings.run("record")
    (tmp_path / "latest_checkpointed_iteration.txt").write_text("2")
    again = trainings.run("replay", f"trainer.default_local_dir={tmp_path}")
    assert_same_training(plain, again)
