"""The ledger of a training with its own loop, and the files of ledgers in the tools."""

from __future__ import annotations

import logging
import subprocess
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from tests.disks import mount
from tests.trainings import Engine, Training, inputs_of, never
from verl_rollout_skip import RolloutKey, RolloutSkip
from verl_rollout_skip.cli.program import main
from verl_rollout_skip.replay.ledger.figures import figures_of
from verl_rollout_skip.replay.ledger.file import Ledger, ledger_names, read_ledger
from verl_rollout_skip.replay.ledger.updates import ACTOR, CRITIC, UpdateSlice
from verl_rollout_skip.store.storage import open_storage

STEPS = (1, 2, 3)


@pytest.fixture
def training(tmp_path: Path) -> Training:
    return Training(tmp_path)


def train(training: Training, mode: str, steps: tuple[int, ...] = STEPS, loss: float = 0.5, **skip: Any) -> RolloutSkip:
    """A loop that logs a loss, which depends on the rollout."""
    with training.open(mode, skip) as current:
        for step in steps:
            key = RolloutKey(step)
            rollout = current.step(key, inputs_of(key), Engine(seed=step) if mode != "replay" else never)
            responses = rollout.batch.batch["responses"]
            current.ledger.observe_update(ACTOR, lambda rows=responses: [UpdateSlice(0, {"responses": rows}, None)])
            current.ledger.wait()
            current.ledger.observe_metrics(step, {"loss": loss * step, "timing_s/step": 3.0, "note": "text"})
    return current


def ledgers(training: Training) -> list[Ledger]:
    (variant,) = training.variants()
    storage = open_storage(str(variant))
    return [read_ledger(storage, name) for name in ledger_names(storage)]


def test_an_own_loop_that_passes_its_metrics_has_a_ledger_and_is_compared(training: Training) -> None:
    train(training, "record")
    again = train(training, "replay")
    assert "identical to the recording in all 3 steps" in again.summary()
    one, other = ledgers(training)
    assert one.steps[1].metrics == {"loss": 1.0}
    assert one.steps[1].tensors.keys() == {"responses"}
    assert [rollout.recorded_by for rollout in other.steps[0].rollouts] == [one.header.training]
    assert (one.end, other.end) == ("finished", "finished")


def test_the_training_has_the_same_name_in_all_its_files(training: Training) -> None:
    current = train(training, "record")
    (variant,) = training.variants()
    assert [path.stem for path in (variant / "trainings").iterdir()] == [current.ledger.training]
    assert [path.stem for path in (variant / "ledgers").iterdir()] == [current.ledger.training]


def test_an_own_loop_without_metrics_has_no_ledger(training: Training) -> None:
    training.record(RolloutKey(1))
    (variant,) = training.variants()
    assert not (variant / "ledgers").exists()


def test_metrics_that_are_logged_in_several_calls_belong_to_one_step(training: Training) -> None:
    with training.open("record") as current:
        for step in (1, 2):
            current.step(RolloutKey(step), inputs_of(RolloutKey(step)), Engine(seed=step))
            current.ledger.observe_metrics(step, {"first": 1.0})
            current.ledger.observe_metrics(step, {"second": np.float32(2.5), "third": torch.tensor(3)})
    (ledger,) = ledgers(training)
    assert [dict(line.metrics) for line in ledger.steps] == [{"first": 1.0, "second": 2.5, "third": 3.0}] * 2


def test_a_step_is_on_disk_as_soon_as_the_next_one_begins(training: Training) -> None:
    with training.open("record") as current:
        current.step(RolloutKey(1), inputs_of(RolloutKey(1)), Engine())
        current.ledger.observe_metrics(1, {"loss": 1.0})

        def killed(inputs: Any) -> Any:
            while not any(path.read_bytes().endswith(b"\n") for path in training.dumps.rglob("*.jsonl")):
                time.sleep(0.01)
            (ledger,) = ledgers(training)
            assert ([line.step for line in ledger.steps], ledger.end) == ([1], None)
            return Engine(seed=7)(inputs)

        current.step(RolloutKey(2), inputs_of(RolloutKey(2)), killed)


def test_each_update_of_a_step_and_each_slice_of_an_update_counts(training: Training) -> None:
    rows = torch.arange(20.0).view(10, 2)

    def slices(end: int) -> Iterator[UpdateSlice]:
        for start in range(0, end, 4):
            part = {"values": rows[start : min(start + 4, end)]}
            yield UpdateSlice(start, part | ({"partial": part["values"]} if start else {}), None)

    with training.open("record") as current:
        current.step(RolloutKey(1), inputs_of(RolloutKey(1)), Engine())
        for role, end in ((CRITIC, 10), (ACTOR, 6), (ACTOR, 10)):
            current.ledger.observe_update(role, lambda end=end: slices(end))
        current.ledger.observe_metrics(1, {"loss": 1.0})
    line = ledgers(training)[0].steps[0]
    assert line.tensors == {"values": figures_of(rows[:6]), "values#2": figures_of(rows)}
    assert line.critic_tensors == {"values": figures_of(rows)}


def test_a_tensor_that_cannot_be_read_is_reported_once_and_the_rest_is_kept(
    training: Training, caplog: pytest.LogCaptureFixture
) -> None:
    def broken() -> list[UpdateSlice]:
        raise OSError("TransferQueue is gone")

    with training.open("record") as current:
        for step in STEPS:
            current.step(RolloutKey(step), inputs_of(RolloutKey(step)), Engine(seed=step))
            current.ledger.observe_update(ACTOR, broken)
            current.ledger.observe_metrics(step, {"loss": 1.0})
    assert "the ledger is incomplete (3 failures)" in current.summary()
    assert sum("TransferQueue is gone" in message for message in caplog.messages) == 1
    assert [line.step for line in ledgers(training)[0].steps] == [1, 2, 3]


def test_the_update_is_read_on_another_thread(training: Training) -> None:
    threads = []

    def slices() -> list[UpdateSlice]:
        threads.append(threading.current_thread())
        return []

    with training.open("record") as current:
        current.step(RolloutKey(1), inputs_of(RolloutKey(1)), Engine())
        current.ledger.observe_update(ACTOR, slices)
        current.ledger.wait()
    assert threads
    assert threads[0] is not threading.current_thread()


class Rows:
    """Collects the updates that it sees: step, role and the first rows of their slices."""

    def __init__(self) -> None:
        self.seen: list[tuple[int, str, list[int]]] = []

    def __call__(self, step: int, role: str) -> Rows:
        self.seen.append((step, role, []))
        return self

    def add(self, part: UpdateSlice) -> None:
        self.seen[-1][2].append(part.start)

    def finish(self) -> None:
        pass

    def fail(self, error: Exception) -> None:
        raise error


def test_consumers_see_each_update_even_without_a_ledger(training: Training) -> None:
    rows = Rows()
    with training.open("record", {"audit": "off"}) as current:
        current.ledger.consumers.append(rows)
        current.step(RolloutKey(1), inputs_of(RolloutKey(1)), Engine())
        current.ledger.observe_update(ACTOR, lambda: [UpdateSlice(0, {}, None), UpdateSlice(8, {}, None)])
    assert rows.seen == [(1, "actor", [0, 8])]
    (variant,) = training.variants()
    assert not (variant / "ledgers").exists()


def test_steps_recorded_by_several_trainings_are_compared_with_their_own_recordings(training: Training) -> None:
    train(training, "record", (1, 2))
    train(training, "cache")
    again = train(training, "replay")
    assert "identical to the recording in all 3 steps" in again.summary()
    first, second, third = ledgers(training)
    recorders = [line.rollouts[0].recorded_by for line in third.steps]
    assert recorders == [first.header.training, first.header.training, second.header.training]


def test_a_continued_recording_counts_only_what_it_loaded(training: Training) -> None:
    train(training, "record", (1, 2))
    continued = train(training, "cache")
    assert "identical to the recording in all 2 loaded steps" in continued.summary()


def test_a_source_that_cannot_be_written_is_still_compared(
    training: Training, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO, logger="verl_rollout_skip")
    train(training, "record")
    (variant,) = training.variants()
    if mount("--bind", str(variant), str(variant)):
        try:
            assert mount("-o", "remount,ro,bind", str(variant))
            again = train(training, "replay")
        finally:
            subprocess.run(["umount", "-l", str(variant)], check=True)
    else:  # a file where the new ledger would go fails in the same way
        moved = (variant / "ledgers").rename(variant / "moved")
        (variant / "ledgers").symlink_to(moved)
        again = train(training, "replay")
    assert any("this training writes no ledger" in message for message in caplog.messages)
    assert "the ledger is incomplete" not in again.summary()


def test_a_copy_has_the_ledgers_and_a_training_that_replays_it_is_compared(training: Training, tmp_path: Path) -> None:
    train(training, "record")
    assert main(["copy", str(training.dumps), str(tmp_path / "copied")]) == 0
    again = train(training, "replay", dump_dir=str(tmp_path / "copied"))
    assert "identical to the recording in all 3 steps" in again.summary()


def test_removing_a_whole_variant_removes_its_ledgers(training: Training) -> None:
    train(training, "record")
    assert main(["prune", str(training.dumps), "--variants", "--older-than", "0s", "--yes"]) == 0
    assert not list(training.dumps.rglob("*.jsonl"))
