"""The dumps of a training are complete when its ``fit`` ends, regardless of which class or object defines it."""

from __future__ import annotations

import subprocess
import sys
import textwrap
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from verl.trainer.ppo.ray_trainer import RayPPOTrainer

from tests.trainers.v0.training import SkipTrainer, Trainings, captured_messages
from verl_rollout_skip import RolloutStore
from verl_rollout_skip.errors import UnsupportedTrainerError

NO_LOGGER = "trainer.logger=[]"
ALL = [(1, 0), (2, 0), (3, 0)]


def own_loop(trainer: Any) -> str:
    """A loop like in recipes that copy verl's: it never calls the inherited ``fit`` of the mixin."""
    RayPPOTrainer.fit(trainer)
    return "the result"


class OwnFit(SkipTrainer):
    fit = own_loop


class OwnFitAgain(OwnFit):
    """A subclass with code before and after the inherited ``fit``."""

    def fit(self) -> str:
        assert self.rollout_skip.statistics.misses == 0
        result = super().fit()
        assert self.rollout_skip.statistics.misses == 3
        return f"{result}, again"


class PatchedClass(SkipTrainer):
    """Its ``fit`` is assigned after the class is defined."""


PatchedClass.fit = own_loop  # type: ignore[method-assign, assignment]


class Failing(SkipTrainer):
    def fit(self) -> None:
        RayPPOTrainer.fit(self)
        raise ZeroDivisionError("after the last step")


@pytest.fixture(autouse=True)
def slow_disk(monkeypatch: pytest.MonkeyPatch) -> None:
    write = RolloutStore._write

    def write_slowly(*arguments: Any) -> None:
        time.sleep(0.3)
        write(*arguments)

    monkeypatch.setattr(RolloutStore, "_write", write_slowly)


@pytest.mark.parametrize(
    ("kind", "result"), [(OwnFit, "the result"), (OwnFitAgain, "the result, again"), (PatchedClass, "the result")]
)
def test_a_custom_fit_waits_for_the_dumps(trainings: Trainings, kind: type, result: str) -> None:
    assert trainings.make("record", NO_LOGGER, trainer=kind).fit() == result
    assert trainings.recorded_keys == ALL


def test_a_fit_assigned_to_the_trainer_waits_for_the_dumps(trainings: Trainings) -> None:
    trainer = trainings.make("record", NO_LOGGER)
    trainer.fit = lambda: own_loop(trainer)
    assert trainer.fit() == "the result"
    assert trainings.recorded_keys == ALL


def test_a_custom_fit_that_fails_waits_for_the_dumps_and_keeps_its_error(trainings: Trainings) -> None:
    trainer = trainings.make("record", NO_LOGGER, trainer=Failing)
    with pytest.raises(ZeroDivisionError, match="after the last step"):
        trainer.fit()
    assert trainings.recorded_keys == ALL


def test_the_summary_is_logged_once_even_if_several_fits_call_each_other(trainings: Trainings) -> None:
    trained = trainings.run("record", trainer=OwnFitAgain)
    assert len([message for message in trained.messages if "3 rollout steps" in message]) == 1


def test_a_loop_that_is_not_fit_is_warned_to_close_the_recording(trainings: Trainings) -> None:
    def loop(trainer: Any) -> None:
        RayPPOTrainer.fit(trainer)
        trainer.rollout_skip.close()

    with captured_messages() as messages:
        loop(trainings.make("record", NO_LOGGER))
    (warning,) = [message for message in messages if "outside of fit" in message]
    assert "call trainer.rollout_skip.close() at the end of the loop" in warning
    assert trainings.recorded_keys == ALL


def test_a_fit_that_is_a_generator_is_rejected(trainings: Trainings) -> None:
    class Stepwise(SkipTrainer):
        def fit(self) -> Iterator[int]:
            yield 1

    with pytest.raises(UnsupportedTrainerError, match="its fit is a generator"):
        trainings.make("record", trainer=Stepwise)


SCRIPT = """
    import sys, time
    from pathlib import Path

    import pytest
    import ray

    ray.init(address="local", num_cpus=1, include_dashboard=False, log_to_driver=False)


    @ray.remote
    class TaskRunner:
        def run(self, folder):
            from tests.trainers.v0.test_own_fit import OwnFit, Failing
            from tests.trainers.v0.training import ROLLOUT_MODES, Trainings
            from verl_rollout_skip import RolloutStore

            write = RolloutStore._write
            RolloutStore._write = lambda *arguments: (time.sleep(1), write(*arguments))
            trainings = Trainings(Path(folder), ROLLOUT_MODES[0], pytest.MonkeyPatch())
            trainings.make("record", "trainer.logger=[]", trainer={kind}).fit()


    ray.get(TaskRunner.remote().run.remote({folder!r}))
"""


@pytest.mark.parametrize(("kind", "code"), [("OwnFit", 0), ("Failing", 1)])
def test_a_script_that_ends_right_after_its_training_loses_nothing(tmp_path: Path, kind: str, code: int) -> None:
    """Ray ends the process of a task runner without waiting for its threads."""
    script = textwrap.dedent(SCRIPT).format(kind=kind, folder=str(tmp_path))
    ended = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True)
    assert ended.returncode == code, ended.stderr
    (manifest,) = tmp_path.glob("dumps/*/*/manifest.json")
    assert [(key.step, key.gen_batch) for key in RolloutStore(manifest.parent)] == ALL
