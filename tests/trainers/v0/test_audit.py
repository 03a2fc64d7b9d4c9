"""``rollout-skip audit`` on the ledgers of V0 trainings: it agrees with what the trainings said as they ran."""

from __future__ import annotations

from typing import Any

import pytest

from tests.trainers.v0.stand_ins import VERL
from tests.trainers.v0.test_ledger import Perturbed
from tests.trainers.v0.training import Trainings
from verl_rollout_skip.cli import main


def audit(trainings: Trainings, capsys: Any, *options: str) -> tuple[int, str]:
    """The exit code and the output for the only variant."""
    (manifest,) = trainings.dumps.glob("*/*/manifest.json")
    capsys.readouterr()
    return main(["audit", str(manifest.parent), *options]), capsys.readouterr().out


def test_replays_with_and_without_an_engine_are_identical(trainings: Trainings, capsys: Any) -> None:
    trainings.run("record")
    trainings.run("cache")
    trainings.run("replay")
    code, printed = audit(trainings, capsys)
    assert code == 0, printed
    assert printed.count("identical in all 3 steps") == 2


@pytest.mark.skipif(VERL < (0, 7), reason="the driver of verl 0.6.1 updates the actor itself")
def test_one_changed_number_is_named_with_its_step_and_stage(
    trainings: Trainings, monkeypatch: pytest.MonkeyPatch, capsys: Any
) -> None:
    trainings.run("record", trainer=Perturbed)
    monkeypatch.setattr(Perturbed, "changes", "old_log_probs")
    trainings.run("replay", trainer=Perturbed)
    code, printed = audit(trainings, capsys)
    assert code == 1
    assert "different from step 2 on" in printed
    assert "first difference: step 2, old log-probs: old_log_probs/" in printed


def test_another_learning_rate_is_compared_up_to_the_first_update(trainings: Trainings, capsys: Any) -> None:
    trainings.run("record")
    trainings.run("replay", "actor_rollout_ref.actor.optim.lr=3e-6")
    code, printed = audit(trainings, capsys)
    assert code == 0, printed
    assert "step 1: compared only up to the update, because the settings of the training differ" in printed
    assert "steps 2-3: not compared, because the settings of the training differ" in printed
    assert "actor_rollout_ref.actor.optim.lr: 1e-06 → " in printed


def test_a_continued_recording_is_compared_with_both_of_its_trainings(trainings: Trainings, capsys: Any) -> None:
    trainings.run("record", "trainer.total_training_steps=2")
    trainings.run("cache", "trainer.total_training_steps=4")
    trainings.run("replay", "trainer.total_training_steps=4")
    code, printed = audit(trainings, capsys)
    assert code == 0, printed
    assert "the recording, by 2 trainings (record, cache, steps 1-4)" in printed
    assert "identical in all 4 steps" in printed


def test_repeated_steps_are_not_compared(trainings: Trainings, capsys: Any) -> None:
    trainings.run("record", "trainer.total_training_steps=1")
    trainings.run("repeat_last")
    code, printed = audit(trainings, capsys)
    assert code == 0, printed
    assert "identical, " in printed
    assert "steps 2-3: not compared, because " in printed
