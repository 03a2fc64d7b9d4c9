"""What a recipe does before Ray starts when it trains with verl's V1 trainers."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from omegaconf import DictConfig

from tests.trainers.v1.training import Trainings
from verl_rollout_skip.trainers import runner

COMPLETE = (
    "actor_rollout_ref.actor.ppo_mini_batch_size=4",
    "actor_rollout_ref.actor.use_dynamic_bsz=True",
    "actor_rollout_ref.rollout.log_prob_use_dynamic_bsz=True",
)


@pytest.fixture
def started(monkeypatch: pytest.MonkeyPatch) -> list[DictConfig]:
    """The configurations that verl would have started Ray with."""
    found: list[Any] = []
    monkeypatch.setattr(runner, "run_ppo", lambda config, task_runner_class: found.append(config))
    return found


def test_the_trainer_with_recorded_rollouts_is_started(started: list[DictConfig], tmp_path: Path) -> None:
    runner.train(Trainings(tmp_path).config("trainer.v1.trainer_mode=sync", *COMPLETE))
    assert [config.trainer.v1.trainer_mode for config in started] == ["skip_sync"]


def test_settings_that_verls_entry_point_rejects_are_rejected_before_anything_starts(
    started: list[DictConfig], tmp_path: Path
) -> None:
    unsure = ("actor_rollout_ref.rollout.temperature=0.0", "actor_rollout_ref.rollout.val_kwargs.do_sample=True")
    wrong = Trainings(tmp_path).config(*COMPLETE, *unsure)
    with pytest.raises(AssertionError, match="validation gen temperature"):
        runner.train(wrong)
    assert started == []
