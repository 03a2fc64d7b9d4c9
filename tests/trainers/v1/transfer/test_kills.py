"""Drivers and tasks are killed at random moments of recording and loading. Nothing that was committed is lost."""

from __future__ import annotations

import contextlib
import multiprocessing
import random
import threading
import time
from pathlib import Path

import psutil
import pytest
from tensordict import TensorDict

from tests.trainers.v1.training import Trainings, hits, transfer_queue
from tests.trainers.v1.transfer.storms import LAST, SETTINGS, SlowEngine, committed
from verl_rollout_skip import RolloutKey

pytestmark = pytest.mark.slow


def train(folder: Path, started: Path) -> None:
    """Run a training with its own Ray instance. It creates ``started`` when its first step begins to generate."""

    class Reports(SlowEngine):
        def generate_sequences(self, batch: TensorDict) -> None:
            started.touch()
            super().generate_sequences(batch)

    with transfer_queue():
        Trainings(folder).train("cache", *SETTINGS, engine=Reports())


@pytest.mark.timeout(900)
def test_a_killed_driver_loses_nothing_that_was_committed(tmp_path: Path) -> None:
    rng, kills, finished = random.Random(16), 0, 0
    processes = multiprocessing.get_context("forkserver")
    processes.set_forkserver_preload([__name__])
    folder, before = tmp_path / "0", set[RolloutKey]()
    Trainings(folder)
    while kills < 20:
        started = tmp_path / f"started-{kills}"
        driver = processes.Process(target=train, args=(folder, started))
        driver.start()
        while driver.is_alive() and not started.exists():
            time.sleep(0.02)
        driver.join(rng.uniform(0, 4))
        driver.kill()
        driver.join()
        kills += 1
        after = committed(Trainings(folder))
        assert before <= after
        before = after
        if len(after) == LAST:
            finished += 1
            check_replay(Trainings(folder))
            folder, before = tmp_path / str(finished), set[RolloutKey]()
            Trainings(folder)
    with transfer_queue():
        again = Trainings(folder).train("cache", *SETTINGS)
        assert hits(again) == sorted(key.step for key in before)
        assert Trainings(folder).train("replay", *SETTINGS).trained == again.trained


def check_replay(trainings: Trainings) -> None:
    """Several killed trainings have together made a complete recording."""
    with transfer_queue():
        again = trainings.train("replay", *SETTINGS)
        assert hits(again) == list(range(1, LAST + 1))
        assert again.left_over == []


class Killer:
    """Kills child processes that run one of these tasks, at random moments, until it has killed ``count``."""

    def __init__(self, count: int, names: tuple[str, ...]) -> None:
        self.killed: list[str] = []
        self._count, self._names, self._rng = count, names, random.Random(16)
        self._stopped = threading.Event()
        self._thread = threading.Thread(target=self._run)

    def __enter__(self) -> Killer:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._stopped.set()
        self._thread.join()

    def _run(self) -> None:
        while len(self.killed) < self._count and not self._stopped.wait(self._rng.uniform(0.005, 0.05)):
            for process in psutil.Process().children(recursive=True):
                with contextlib.suppress(psutil.Error):
                    title = " ".join(process.cmdline())
                    if any(f"ray::{name}" in title for name in self._names) and self._rng.random() < 0.2:
                        process.kill()
                        self.killed.append(title)
                        break


@pytest.mark.timeout(900)
def test_killed_tasks_are_run_again(tmp_path: Path) -> None:
    killed: list[str] = []
    with transfer_queue():
        for attempt in range(20):
            trainings = Trainings(tmp_path / str(attempt))
            with Killer(3, ("encode", "write", "put")) as killer:
                recorded = trainings.train("cache", *SETTINGS, engine=SlowEngine())
            killed += killer.killed
            with Killer(3, ("put",)) as killer:
                again = trainings.train("cache", *SETTINGS)
            killed += killer.killed
            missing = recorded.rollout_skip.statistics.dump_failures
            assert len(committed(trainings)) == LAST
            assert len(hits(again)) == LAST - missing
            assert all(again.trained[step - 1] == recorded.trained[step - 1] for step in hits(again))
            assert again.left_over == recorded.left_over == []
            if len(killed) >= 25:
                break
    assert len(killed) >= 25
