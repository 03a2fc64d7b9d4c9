"""Data that a sampler returns with the rows, fields read from TransferQueue, and a TransferQueue that fails."""

from __future__ import annotations

import copy
import logging
import time
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import transfer_queue as tq
from transfer_queue import KVBatchMeta

from tests.trainers.v1.training import SyncTrainer, Trainings, hits
from verl_rollout_skip import RolloutKey, RolloutStore
from verl_rollout_skip.errors import QueueError, UnsupportedBatchError
from verl_rollout_skip.replay.lineage import LEARNED_FROM, LINEAGE, UNKNOWN
from verl_rollout_skip.trainers.v1.transfer import rows

pytestmark = pytest.mark.usefixtures("queue")

SAMPLER = """
import numpy as np
import torch
from transfer_queue import KVBatchMeta
from verl.trainer.ppo.v1.replay_buffer import ReplayBuffer


class Sampler(ReplayBuffer):
    def sample(self, global_steps, partition_id, batch_size):
        batch, metrics = super().sample(global_steps, partition_id, batch_size)
        rows = len(batch.keys)
        made = KVBatchMeta(
            keys=batch.keys, tags=batch.tags, partition_id=batch.partition_id, fields=FIELDS, extra_info=EXTRA_INFO
        )
        return made, metrics
"""
EXTRA_INFO = """{
    "weights": torch.arange(rows, dtype=torch.bfloat16) / global_steps,
    "curriculum": {"level": np.float32(global_steps), "kinds": ("easy", None)},
    "temperature": 0.5,
}"""


@pytest.fixture
def log(caplog: pytest.LogCaptureFixture) -> pytest.LogCaptureFixture:
    """The messages of this package."""
    logging.getLogger("verl_rollout_skip").addHandler(caplog.handler)
    return caplog


@pytest.fixture
def sampler(tmp_path: Path) -> Callable[..., tuple[str, str]]:
    """Settings for a custom sampler that adds data to the batch."""

    def write(extra_info: str, fields: str = "None") -> tuple[str, str]:
        file = tmp_path / "sampler.py"
        file.write_text(SAMPLER.replace("EXTRA_INFO", extra_info).replace("FIELDS", fields))
        setting = "+trainer.v1.sampler.custom_sampler"
        return f"{setting}.path={file}", f"{setting}.name=Sampler"

    return write


class Inspecting(SyncTrainer):
    """Keeps the data of each batch other than its rows."""

    def _balance_batch(self, batch: KVBatchMeta, metrics: dict[str, Any]) -> KVBatchMeta:
        extra_info = {
            name: (str(value.dtype), value.tolist()) if isinstance(value, torch.Tensor) else repr(value)
            for name, value in batch.extra_info.items()
        }
        self.__dict__.setdefault("inspected", []).append((extra_info, copy.copy(batch.fields), batch.partition_id))
        return super()._balance_batch(batch, metrics)


@pytest.mark.parametrize("mode", ["cache", "replay"])
def test_data_that_a_sampler_adds_to_a_batch_comes_back_with_it(trainings: Trainings, sampler: Any, mode: str) -> None:
    settings = sampler(EXTRA_INFO, "['responses', 'response_mask']")
    recorded = trainings.train("record", *settings, kind=Inspecting)
    (first, fields, partition), *_ = recorded.inspected
    assert first["weights"][0] == "torch.bfloat16"
    assert first["curriculum"] == "{'level': np.float32(1.0), 'kinds': ('easy', None)}"
    assert first["temperature"] == "1.0", "verl sets it after the sample"
    assert (fields, partition) == (["responses", "response_mask"], "train")
    again = trainings.train(mode, *settings, kind=Inspecting)
    assert hits(again) == [1, 2, 3]
    assert again.inspected == recorded.inspected
    assert again.trained == recorded.trained


@pytest.mark.parametrize(
    ("extra_info", "words"),
    [
        ('{"seen": {1, 2}}', "extra_info of the sampled KVBatchMeta.*seen.*set"),
        ('{"order": {key: row for row, key in enumerate(batch.keys)}}', "names the prompt .* new in every run"),
    ],
)
def test_sampler_data_that_cannot_be_restored_is_a_failed_dump_that_names_it(
    trainings: Trainings, sampler: Any, extra_info: str, words: str
) -> None:
    settings = sampler(extra_info)
    trained = trainings.train("cache", *settings)
    assert trained.logged[3]["rollout_skip/dump_failures"] == 3
    with pytest.raises(UnsupportedBatchError, match=words):
        trainings.train("record", *settings)


def test_a_kind_of_batch_that_a_replay_could_not_create_is_a_failed_dump(trainings: Trainings, sampler: Any) -> None:
    for change, words in (
        ("made.weights = [1.0] * rows", "returned a KVBatchMeta with weights"),
        ("made.__class__ = type('Weighted', (KVBatchMeta,), {})", "returned a Weighted"),
    ):
        settings = sampler("{}")
        file = trainings.folder / "sampler.py"
        file.write_text(file.read_text().replace("return made", f"{change}\n        return made"))
        with pytest.raises(UnsupportedBatchError, match=words):
            trainings.train("record", *settings)


class Queue(SimpleNamespace):
    """The part of TransferQueue that recordings use: lists the fields that are read, and fails at the given reads."""

    def __init__(self, **failing: int) -> None:
        super().__init__(**{name: getattr(tq, name) for name in ("kv_batch_put", "kv_clear", "get_client")})
        self.read: list[list[str]] = []
        self._failing = failing
        self._calls = {"kv_batch_get": 0, "kv_list": 0}

    def kv_batch_get(self, **asked: Any) -> Any:
        self.read.append(sorted(asked["select_fields"]))
        self._count("kv_batch_get")
        return tq.kv_batch_get(**asked)

    def kv_list(self, partition: str) -> Any:
        self._count("kv_list")
        return tq.kv_list(partition)

    def _count(self, call: str) -> None:
        self._calls[call] += 1
        if self._failing.get(call) == self._calls[call]:
            raise RuntimeError("storage unit 3 does not answer")


READS = ["kv_batch_get", "kv_list"]


def use(queue: Queue, monkeypatch: pytest.MonkeyPatch) -> Queue:
    monkeypatch.setattr(rows, "tq", queue)
    return queue


def lineage(trainings: Trainings) -> dict[int, str]:
    store = RolloutStore(trainings.variant())
    return {key.step: store.record(key).info[LINEAGE] for key in store}


@pytest.mark.parametrize("read", READS)
def test_a_failed_read_is_a_failed_dump_and_the_lineage_of_later_steps_is_unknown(
    trainings: Trainings, monkeypatch: pytest.MonkeyPatch, read: str, log: pytest.LogCaptureFixture
) -> None:
    use(Queue(**{read: 2}), monkeypatch)
    trained = trainings.train("cache")
    assert list(trained.logged) == [1, 2, 3]
    assert trained.logged[3]["rollout_skip/dump_failures"] == 1
    assert "storage unit 3 does not answer" in log.text
    assert "the rollout of step 2, generation batch 0 could not be read" in log.text
    assert RolloutStore(trainings.variant()).keys() == [RolloutKey(1), RolloutKey(3)]
    assert lineage(trainings) == {1: "start", 3: UNKNOWN}
    monkeypatch.undo()
    again = trainings.train("cache")
    assert hits(again) == [1, 3]
    assert [again.logged[step]["rollout_skip/off_policy"] for step in (1, 3)] == [0, 1]
    assert "one of the recorded training's rollouts could not be read" in log.text


def test_a_loaded_step_after_one_that_could_not_be_read_counts_as_off_policy(
    trainings: Trainings, monkeypatch: pytest.MonkeyPatch, log: pytest.LogCaptureFixture
) -> None:
    trainings.train("record")
    RolloutStore(trainings.variant()).delete(RolloutKey(2))
    use(Queue(kv_batch_get=1), monkeypatch)
    again = trainings.train("cache")
    assert hits(again) == [1, 3]
    assert again.logged[3]["rollout_skip/off_policy"] == 1
    assert "one of this training's rollouts could not be read" in log.text


@pytest.mark.parametrize("read", READS)
def test_a_failed_read_stops_a_training_that_must_record_everything(
    trainings: Trainings, monkeypatch: pytest.MonkeyPatch, read: str
) -> None:
    use(Queue(**{read: 2}), monkeypatch)
    with pytest.raises(QueueError, match=r"step 2, .*: TransferQueue cannot be read: RuntimeError: storage unit 3"):
        trainings.train("record")


@pytest.mark.parametrize("read", READS)
def test_a_failed_read_does_not_stop_a_step_that_is_not_recorded(
    trainings: Trainings, monkeypatch: pytest.MonkeyPatch, read: str, log: pytest.LogCaptureFixture
) -> None:
    use(Queue(**{read: 2}), monkeypatch)
    trained = trainings.train("record", "+rollout_skip.steps=[1,3]")
    assert list(trained.logged) == [1, 2, 3]
    assert trained.logged[3]["rollout_skip/dump_failures"] == 0
    assert "the rollout of step 2, generation batch 0 could not be read" in log.text
    assert lineage(trainings) == {1: "start", 3: UNKNOWN}


@pytest.mark.parametrize(
    ("setting", "whole"), [("steps=[2]", [2]), ("max_dump_steps=1", [1]), ("steps=all", [1, 2, 3])]
)
def test_steps_that_are_not_recorded_are_read_only_for_the_lineage(
    trainings: Trainings, monkeypatch: pytest.MonkeyPatch, setting: str, whole: list[int]
) -> None:
    queue = use(Queue(), monkeypatch)
    trainings.train("cache", f"+rollout_skip.{setting}")
    read_whole = {step: names for step, names in enumerate(queue.read, start=1) if names != sorted(LEARNED_FROM)}
    assert list(read_whole) == whole
    assert all({"input_ids", "extra_fields", *LEARNED_FROM} < set(names) for names in read_whole.values())


def test_the_lineage_is_the_same_whether_or_not_earlier_steps_are_recorded(trainings: Trainings) -> None:
    trainings.train("record")
    whole = lineage(trainings)
    for step in (1, 2):
        RolloutStore(trainings.variant()).delete(RolloutKey(step))
    again = trainings.train("cache", "+rollout_skip.steps=[3]")
    assert hits(again) == [3]
    assert lineage(trainings) == {3: whole[3]}


def test_the_time_to_put_a_loaded_rollout_into_the_queue_counts_as_loading(
    trainings: Trainings, monkeypatch: pytest.MonkeyPatch
) -> None:
    trainings.train("record")
    passed = [0.0]
    clock, put = time.perf_counter, rows.put

    def slow_put(*args: Any) -> Any:
        passed[0] += 1000
        return put(*args)

    monkeypatch.setattr(time, "perf_counter", lambda: clock() + passed[0])
    monkeypatch.setattr(rows, "put", slow_put)
    again = trainings.train("replay")
    assert all(again.logged[step]["rollout_skip/load_s"] >= 1000 for step in (1, 2, 3))
    assert all(again.logged[step]["rollout_skip/saved_s"] == 0 for step in (1, 2, 3))
    assert again.rollout_skip.statistics.load_s >= 3000
    assert again.rollout_skip.statistics.saved_s == 0


@pytest.mark.parametrize("block", [(), ("+rollout_skip.mode=off",)])
def test_a_trainer_with_recorded_rollouts_says_so_if_nothing_is_recorded(
    trainings: Trainings, block: tuple[str, ...], log: pytest.LogCaptureFixture
) -> None:
    trainings.train(None, *block, "trainer.total_training_steps=1")
    reason = "rollout_skip.mode is off" if block else "the configuration has no block rollout_skip"
    assert f"SyncTrainer records and replays nothing, because {reason}" in log.text
