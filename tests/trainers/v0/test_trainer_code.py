"""The code of a trainer is compared by content; after a change, rollouts are off-policy."""

from __future__ import annotations

import importlib
import sys
from pathlib import Path

import pytest

from tests.trainers.v0.training import Finished, SkipTrainer, Trainings, captured_messages
from verl_rollout_skip.cli.commands.resume import command
from verl_rollout_skip.errors import UnsupportedTrainerError

OWN = """
from signs import SIGN
from tests.trainers.v0.training import SkipTrainer


class OwnTrainer(SkipTrainer):
    def _update_actor(self, batch):
        batch.batch["advantages"] *= SIGN
        return super()._update_actor(batch)


class Other(OwnTrainer):
    def _update_critic(self, batch):
        return super()._update_critic(batch)


class Bare(OwnTrainer):
    pass
"""
resume = command.callback
MESSAGE = "the training differs from the one that recorded"


@pytest.fixture
def project(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A user's own trainer, and a module that it imports."""
    folder = tmp_path / "project"
    folder.mkdir()
    (folder / "own_trainer.py").write_text(OWN)
    (folder / "signs.py").write_text("SIGN = 1\n")
    monkeypatch.syspath_prepend(str(folder))
    return folder


def trainer(module: str = "own_trainer", name: str = "OwnTrainer") -> type:
    """Import it as a new process would."""
    for stale in ("signs", "own_trainer", "moved"):
        sys.modules.pop(stale, None)
    importlib.invalidate_caches()
    sys.dont_write_bytecode = True  # two versions of a file within a second would be one
    return getattr(importlib.import_module(module), name)


def off_policy(training: Finished) -> list[float]:
    return [metrics["timing_s/rollout_skip/off_policy"] for _, metrics in sorted(training.metrics.items())]


def test_a_subclass_with_negated_advantages_is_off_policy_and_the_log_says_why(
    trainings: Trainings, project: Path
) -> None:
    trainings.run("record")
    (project / "signs.py").write_text("SIGN = -1\n")
    negated = trainings.run("replay", trainer=trainer())
    assert negated.hits == [1.0] * 3, "the rollouts are still used"
    assert off_policy(negated) == [0.0, 1.0, 1.0]
    (warning,) = [message for message in negated.messages if MESSAGE in message]
    assert "code of the trainer class: " in warning
    assert "OwnTrainer" in warning


@pytest.mark.parametrize("name", ["own_trainer.py", "signs.py"])
def test_a_change_in_the_trainer_or_in_what_it_imports_is_noticed(
    trainings: Trainings, project: Path, name: str
) -> None:
    trainings.run("record", trainer=trainer())
    same = trainings.run("replay", trainer=trainer())
    assert off_policy(same) == [0.0, 0.0, 0.0]
    assert not same.said(MESSAGE)
    with open(project / name, "a") as file:
        file.write("ANOTHER = 1\n")
    changed = trainings.run("replay", trainer=trainer())
    assert off_policy(changed) == [0.0, 1.0, 1.0]
    assert changed.said(MESSAGE)


def test_a_change_to_another_class_in_the_same_file_is_noticed(trainings: Trainings, project: Path) -> None:
    trainings.run("record", trainer=trainer())
    other = trainings.run("replay", trainer=trainer(name="Other"))
    assert off_policy(other) == [0.0, 1.0, 1.0]


def test_a_moved_file_and_a_class_that_adds_nothing_are_the_same_trainer(trainings: Trainings, project: Path) -> None:
    trainings.run("record", trainer=trainer())
    assert off_policy(trainings.run("replay", trainer=trainer(name="Bare"))) == [0.0, 0.0, 0.0]
    (project / "own_trainer.py").rename(project / "moved.py")
    moved = trainings.run("replay", trainer=trainer("moved"))
    assert off_policy(moved) == [0.0, 0.0, 0.0]
    assert not moved.said(MESSAGE)


def test_an_empty_subclass_counts_as_the_built_in_trainer(trainings: Trainings) -> None:
    trainings.run("record")
    bare = trainings.run("replay", trainer=type("Bare", (SkipTrainer,), {}))
    assert off_policy(bare) == [0.0, 0.0, 0.0]


def test_a_class_whose_source_cannot_be_read_is_reported(trainings: Trainings) -> None:
    scope: dict[str, type] = {"SkipTrainer": SkipTrainer, "__name__": "__main__"}
    exec(compile("class Cell(SkipTrainer):\n    def own(self): pass", "<a cell of a notebook>", "exec"), scope)
    recorded = trainings.run("record", trainer=scope["Cell"])
    assert recorded.said("code of the trainer class: Cell (content not readable from here)")
    assert recorded.said("a change to its content will not be noticed")


def test_resume_imports_the_same_trainer_class_again(trainings: Trainings, project: Path) -> None:
    trainings.run("record", trainer=trainer())
    with captured_messages() as messages:
        resume(trainings.store.path, overrides=(), dry_run=True)
    assert not any(MESSAGE in message for message in messages)
    (project / "own_trainer.py").unlink()
    sys.modules.pop("own_trainer")
    with pytest.raises(UnsupportedTrainerError, match=r"own_trainer\.OwnTrainer cannot be imported here"):
        resume(trainings.store.path, overrides=(), dry_run=True)
