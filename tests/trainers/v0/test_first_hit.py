"""The first rollout of a training is loaded while its workers start, so its hit is as fast as the others."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.loaded_ahead import damage, wait_for_prefetch
from tests.trainers.v0.training import SkipTrainer, Trainings, assert_same_training


class Starting(SkipTrainer):
    """A training whose first rollout becomes unreadable while its workers start."""

    first_step = 1

    def init_workers(self) -> None:
        super().init_workers()
        wait_for_prefetch()
        (source,) = self.rollout_skip.sources
        damage(Path(source.folder), self.first_step)


class StartingAtThree(Starting):
    first_step = 3


@pytest.mark.parametrize("mode", ["replay", "cache", "repeat"])
@pytest.mark.parametrize("prompts", ["check", "recorded"])
def test_the_first_rollout_is_in_memory_before_the_first_step_requests_it(
    trainings: Trainings, mode: str, prompts: str
) -> None:
    recorded = trainings.run("record")
    again = trainings.run(mode, f"rollout_skip.prompts={prompts}", trainer=Starting)
    assert again.hits == [1.0, 1.0, 1.0]
    assert_same_training(recorded, again)


def test_after_a_checkpoint_the_first_remaining_rollout_is_prefetched(trainings: Trainings) -> None:
    recorded = trainings.run("record", "trainer.save_freq=1")
    checkpoint = trainings.folder / "run-1" / "checkpoints" / "global_step_2"
    resume = ["trainer.resume_mode=resume_path", f"trainer.resume_from_path={checkpoint}"]
    resumed = trainings.run("replay", *resume, trainer=StartingAtThree)
    assert_same_training(recorded, resumed, steps=[3])


def test_a_damaged_first_rollout_is_generated_again_and_the_workers_still_start(trainings: Trainings) -> None:
    recorded = trainings.run("record")
    damage(Path(trainings.store.path), 1)
    again = trainings.run("cache")
    assert again.hits == [0.0, 1.0, 1.0]
    assert again.said("is generated again, because its dump cannot be used")
    assert_same_training(recorded, again)
