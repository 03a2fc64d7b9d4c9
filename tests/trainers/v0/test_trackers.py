"""What a training logs to TensorBoard and wandb, with the real libraries."""

from __future__ import annotations

import html
import json
import struct
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.trainers.v0.training import Trainings
from verl_rollout_skip import RolloutKey
from verl_rollout_skip.store.reader import StoreReader
from verl_rollout_skip.tools.trajectories import read_trajectories
from verl_rollout_skip.trainers.samples import NAME

STEPS = [1, 2, 3]
HIT = "timing_s/rollout_skip/hit"
_BLOCK, _WHOLE, _LAST = 1 << 15, 1, 4


@pytest.fixture(autouse=True)
def rollouts_with_scores(trainings: Trainings) -> None:
    if trainings.rollout_mode == "sync":
        pytest.skip("where the workers of verl 0.6.1 generate, the driver scores after the rollout")


def expected_rows(trainings: Trainings, step: int) -> list[list[Any]]:
    """Prompt, response and score of every other of the eight recorded rows."""
    found = read_trajectories(StoreReader.at(trainings.store.path).entry(RolloutKey(step)), [0, 2, 4, 6])
    decode = trainings.tokenizer.decode
    return [[decode(row.prompt), decode(row.response), row.score] for row in found]


def in_tensorboard(folder: Path) -> tuple[dict[int, float], dict[int, str]]:
    """The hits and the sample rows by step."""
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    events = EventAccumulator(str(folder), size_guidance={"tensors": 0, "scalars": 0})
    events.Reload()
    texts = {event.step: event.tensor_proto.string_val[0].decode() for event in events.Tensors(f"{NAME}/text_summary")}
    return {event.step: event.value for event in events.Scalars(HIT)}, texts


def in_wandb(folder: Path) -> tuple[dict[int, float], dict[int, list[list[Any]]]]:
    """The hits and the sample rows by step, from the file of an offline wandb run."""
    from wandb.proto import wandb_internal_pb2

    (run,) = folder.glob("wandb/offline-run-*")
    (path,) = run.glob("*.wandb")
    hits, tables = {}, {}
    for data in log_records(path.read_bytes()):
        record = wandb_internal_pb2.Record()
        record.ParseFromString(data)
        items = {".".join(item.nested_key) or item.key: json.loads(item.value_json) for item in record.history.item}
        if HIT in items:
            hits[items["_step"]] = items[HIT]
        if NAME in items or f"{NAME}.path" in items:
            place = items[f"{NAME}.path"] if NAME not in items else items[NAME]["path"]
            tables[items["_step"]] = json.loads((run / "files" / place).read_text())["data"]
    return hits, tables


def log_records(data: bytes) -> Iterator[bytes]:
    """The records in a wandb file: a header of seven bytes, then the format of LevelDB's logs."""
    place, parts = 7, b""
    while place < len(data):
        left = _BLOCK - place % _BLOCK
        if left < 7:
            place += left
            continue
        _, length, kind = struct.unpack_from("<IHB", data, place)
        parts += data[place + 7 : place + 7 + length]
        place += 7 + length
        if kind in (_WHOLE, _LAST):
            yield parts
            parts = b""


def test_the_trainer_logs_its_numbers_and_sample_rows_to_tensorboard_and_wandb(
    trainings: Trainings, monkeypatch: pytest.MonkeyPatch
) -> None:
    wandb = pytest.importorskip("wandb")
    pytest.importorskip("tensorboard")
    trainings.run("record")
    boards = trainings.folder / "boards"
    boards.mkdir()
    for name, value in (("TENSORBOARD_DIR", boards), ("WANDB_DIR", boards), ("WANDB_MODE", "offline")):
        monkeypatch.setenv(name, str(value))
    monkeypatch.setenv("WANDB_SILENT", "true")
    monkeypatch.chdir(trainings.folder)
    wandb.teardown()  # it reads the environment once in a process, and another test may have used it
    try:
        training = trainings.run("cache", "trainer.logger=[file,tensorboard,wandb]")
    finally:
        wandb.finish()
        wandb.teardown()
    assert training.hits == [1.0, 1.0, 1.0]
    hits, texts = in_tensorboard(boards)
    assert hits == dict.fromkeys(STEPS, 1.0)
    assert sorted(texts) == STEPS
    for step in STEPS:
        lines = texts[step].splitlines()[2:]
        rows = [[html.unescape(cell.strip()) for cell in line.strip("|").split(" | ")] for line in lines]
        shown = [
            [prompt.replace("\n", "↵ ").strip(), response.strip(), f"{score:g}"]
            for prompt, response, score in expected_rows(trainings, step)
        ]
        assert [[cell.strip() for cell in row] for row in rows] == shown
    hits, tables = in_wandb(boards)
    assert hits == dict.fromkeys(STEPS, 1.0)
    assert tables == {step: expected_rows(trainings, step) for step in STEPS}


def fails(*args: Any, **kwargs: Any) -> str:
    raise RuntimeError("no such token")


def test_a_training_continues_if_its_rows_cannot_be_shown(
    trainings: Trainings, monkeypatch: pytest.MonkeyPatch
) -> None:
    pytest.importorskip("tensorboard")
    trainings.run("record")
    monkeypatch.setenv("TENSORBOARD_DIR", str(trainings.folder / "boards"))
    monkeypatch.setattr(trainings.tokenizer, "decode", fails)
    training = trainings.run("replay", "trainer.logger=[file,tensorboard]")
    assert training.hits == [1.0, 1.0, 1.0]
    warnings = [message for message in training.messages if "cannot log sample rows" in message]
    assert len(warnings) == 1
    assert "RuntimeError: no such token" in warnings[0]
