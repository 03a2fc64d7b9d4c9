"""Prompts that were finished before a training died: the next training puts them back and generates only the others."""

from __future__ import annotations

import logging
import time
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pandas
import pytest
from tensordict import TensorDict

from tests.trainers.v1.training import Engine, SyncTrainer, Trainings, hits, transfer_queue
from verl_rollout_skip import RolloutKey, RolloutStore
from verl_rollout_skip.runs.paths import PARTIAL
from verl_rollout_skip.store.record import EntryRecord, record_bytes
from verl_rollout_skip.trainers.v1.transfer import partial, tasks

PROMPTS = 6
SETTINGS = ("+rollout_skip.partial_every=0.1", f"data.train_batch_size={PROMPTS}", "trainer.total_training_steps=3")
TASKS = ("+rollout_skip.tasks=on", "+rollout_skip.part_bytes=1500")


@pytest.fixture(scope="module", autouse=True)
def queue() -> Iterator[None]:
    with transfer_queue():
        yield


@pytest.fixture(autouse=True)
def messages(caplog: pytest.LogCaptureFixture) -> None:
    """Capture this package's messages, which a training does not pass on to other loggers."""
    logger = logging.getLogger("verl_rollout_skip")
    logger.setLevel(logging.INFO)
    logger.addHandler(caplog.handler)  # removed again by tests/conftest.py


@pytest.fixture
def trainings(tmp_path: Path) -> Trainings:
    return Trainings(tmp_path)


class Dies(Exception):
    """The training ends in the middle of a rollout step."""


class DiesEarly(Engine):
    """An engine that dies in the step with ``version`` after ``finished`` prompts, once they are recorded."""

    def __init__(self, trainings: Trainings, finished: int, version: int = 0) -> None:
        super().__init__()
        self._trainings, self._finished, self._dies_at = trainings, finished, version

    def generate_sequences(self, batch: TensorDict) -> None:
        if self.version != self._dies_at:
            super().generate_sequences(batch)
            return
        before = partial_record(self._trainings, RolloutKey(self.version + 1))
        self._before = 0 if before is None else len(before.info[partial._GROUPS]["prompts"])
        if self._finished:
            super().generate_sequences(batch[list(range(self._finished))])
            key = RolloutKey(self.version + 1)
            whole = [prompt for prompt in self.prompts[-self._finished :] if prompt % 7]
            wait_for_partial(self._trainings, key, self._before + len(whole))
        raise Dies


def partial_record(trainings: Trainings, key: RolloutKey) -> EntryRecord | None:
    for manifest in trainings.dumps.glob("*/*/manifest.json"):
        store = RolloutStore(manifest.parent / PARTIAL)
        if key in store:
            return store.record(key)
    return None


def wait_for_partial(trainings: Trainings, key: RolloutKey, prompts: int) -> None:
    """Wait until this many prompts of a step are recorded."""
    deadline = time.monotonic() + 60
    while prompts:
        record = partial_record(trainings, key)
        if record is not None and len(record.info[partial._GROUPS]["prompts"]) == prompts:
            return
        assert time.monotonic() < deadline, record
        time.sleep(0.02)


def train_and_die(trainings: Trainings, *overrides: str, finished: int, version: int = 0, mode: str = "cache") -> Any:
    engine = DiesEarly(trainings, finished, version)
    with pytest.raises(Dies):
        trainings.train(mode, *SETTINGS, *overrides, engine=engine)
    return engine


def check_pairs(trainer: Any, step: int = 1) -> None:
    """Check that each row of a step has the prompt that its response was generated for."""
    seen = trainer.trained[step - 1]
    engine = Engine(version=step - 1)
    assert seen["index"]
    for row, (_, session, output) in enumerate(seen["keys"]):
        index = int(seen["index"][row])
        expected = engine._session({"index": index}, int(session))[int(output)]
        assert seen["responses"][row][1] == expected["responses"].tolist()
        assert f"{index}+1=" in seen["raw_prompt"][row]


@pytest.mark.parametrize("overrides", [(), TASKS], ids=["driver", "tasks"])
@pytest.mark.parametrize("finished", [1, 3, PROMPTS])
def test_only_the_prompts_that_were_not_finished_are_generated(
    trainings: Trainings, finished: int, overrides: tuple[str, ...], caplog: pytest.LogCaptureFixture
) -> None:
    died = train_and_die(trainings, *overrides, finished=finished)
    whole = {prompt for prompt in died.prompts if prompt % 7}
    again = trainings.train("cache", *SETTINGS, *overrides)
    assert whole.isdisjoint(again.engine.asked(0))
    assert len(again.engine.asked(0)) == PROMPTS - len(whole)
    assert hits(again) == []
    assert f"{len(whole)} of {PROMPTS} prompts were generated before" in caplog.text
    check_pairs(again)
    assert again.left_over == []
    store = RolloutStore(trainings.variant())
    assert store.keys() == [RolloutKey(step) for step in (1, 2, 3)]
    assert RolloutStore(trainings.variant() / PARTIAL).keys() == []
    assert list((trainings.variant() / PARTIAL).rglob("*.parquet")) == []
    replayed = trainings.train("replay", *SETTINGS, *overrides)
    assert replayed.trained == again.trained


def test_a_later_step_continues_after_the_loaded_ones(trainings: Trainings) -> None:
    died = train_and_die(trainings, finished=2, version=2)
    again = trainings.train("cache", *SETTINGS)
    assert hits(again) == [1, 2]
    whole = {prompt for prompt in died.asked(2) if prompt % 7}
    assert whole
    assert whole.isdisjoint(again.engine.asked(2))
    check_pairs(again, step=3)


def test_a_step_continues_after_several_crashes(trainings: Trainings) -> None:
    first = train_and_die(trainings, finished=2)
    second = train_and_die(trainings, finished=2)
    third = trainings.train("cache", *SETTINGS)
    asked = [set(engine.asked(0)) for engine in (first, second, third.engine)]
    whole = [{prompt for prompt in prompts if prompt % 7} for prompts in asked]
    assert not whole[0] & whole[1]
    assert not (whole[0] | whole[1]) & whole[2]
    check_pairs(third)


def test_a_changed_prompt_is_never_paired_with_the_response_to_another(
    trainings: Trainings, caplog: pytest.LogCaptureFixture
) -> None:
    train_and_die(trainings, finished=4)
    file = trainings.folder / "inputs" / "train.parquet"
    rows = pandas.read_parquet(file)
    rows["data_source"] = "subtraction"
    rows.to_parquet(file)
    again = trainings.train("cache", *SETTINGS, "+rollout_skip.on_mismatch=reuse")
    assert len(again.engine.asked(0)) == PROMPTS


def test_prompts_in_another_order_are_generated_and_the_log_says_why(
    trainings: Trainings, caplog: pytest.LogCaptureFixture
) -> None:
    train_and_die(trainings, finished=4)
    again = trainings.train("cache", *SETTINGS, kind=Reversed)
    assert len(again.engine.asked(0)) == PROMPTS
    assert "of the step has changed. They are kept as" in caplog.text
    (kept,) = (trainings.variant() / PARTIAL / "step_000001").glob("gen_000.json.*.corrupt")
    assert kept.exists()
    check_pairs(again)


class Reversed(SyncTrainer):
    """A training that draws the same prompts in another order."""

    def _fetch_from_dataloader(self) -> TensorDict:
        batch = super()._fetch_from_dataloader()
        return batch[list(reversed(range(len(batch))))]


def test_another_learning_rate_generates_all_prompts_of_a_later_step(
    trainings: Trainings, caplog: pytest.LogCaptureFixture
) -> None:
    train_and_die(trainings, finished=2, version=2)
    again = trainings.train("cache", *SETTINGS, "actor_rollout_ref.actor.optim.lr=0.5")
    assert len(again.engine.asked(2)) == PROMPTS
    assert "because that training had different settings" in caplog.text


def test_a_training_that_learned_from_other_rollouts_generates_all_prompts(
    trainings: Trainings, caplog: pytest.LogCaptureFixture
) -> None:
    train_and_die(trainings, finished=2, version=2)
    RolloutStore(trainings.variant()).delete(RolloutKey(1))
    again = trainings.train("cache", *SETTINGS)
    assert len(again.engine.asked(2)) == PROMPTS
    assert "because that training had learned from different rollouts" in caplog.text


def test_a_damaged_part_is_set_aside_and_all_prompts_are_generated(
    trainings: Trainings, caplog: pytest.LogCaptureFixture
) -> None:
    train_and_die(trainings, finished=3)
    for part in (trainings.variant() / PARTIAL).rglob("*.parquet"):
        part.write_bytes(part.read_bytes()[:-1] + b"x")
    again = trainings.train("cache", *SETTINGS)
    assert len(again.engine.asked(0)) == PROMPTS
    assert "it cannot be read" in caplog.text
    assert again.left_over == []
    check_pairs(again)


@pytest.mark.parametrize("described", [None, {}, {"positions": [[9]], "starts": [0], "prompts": {}}, {"positions": 3}])
def test_a_hostile_description_is_set_aside(trainings: Trainings, described: Any) -> None:
    train_and_die(trainings, finished=3)
    store = RolloutStore(trainings.variant() / PARTIAL)
    record = store.record(RolloutKey(1))
    changed = replace(record, info={**record.info, partial._GROUPS: described})
    (store_file,) = (trainings.variant() / PARTIAL).rglob("gen_000.json")
    store_file.write_bytes(record_bytes(changed))
    again = trainings.train("cache", *SETTINGS)
    assert len(again.engine.asked(0)) == PROMPTS
    check_pairs(again)


def test_refills_of_dapo_are_put_back_when_they_are_drawn_again(trainings: Trainings) -> None:
    dapo = ("algorithm.filter_groups.enable=True", "algorithm.filter_groups.metric=acc")
    whole = trainings.copied(trainings.folder / "whole").train("cache", *SETTINGS, *dapo)
    assert len(whole.engine.asked(0)) > PROMPTS
    train_and_die(trainings, *dapo, finished=PROMPTS)
    again = trainings.train("cache", *SETTINGS, *dapo)
    assert set(again.engine.asked(0)) < set(whole.engine.asked(0))
    check_pairs(again)


def test_record_and_refresh_generate_every_prompt(trainings: Trainings) -> None:
    train_and_die(trainings, finished=3, mode="record")
    for mode in ("record", "refresh"):
        again = trainings.copied(trainings.folder / mode).train(mode, *SETTINGS)
        assert len(again.engine.asked(0)) == PROMPTS


def test_partial_every_null_records_no_finished_prompts(trainings: Trainings) -> None:
    with pytest.raises(Dies):
        trainings.train("cache", *SETTINGS, "rollout_skip.partial_every=null", engine=DiesEarly(trainings, 0))
    assert not list(trainings.dumps.rglob(PARTIAL))


def test_a_short_step_writes_nothing(trainings: Trainings) -> None:
    trainings.train("cache", *SETTINGS, "rollout_skip.partial_every=30")
    assert not list(trainings.dumps.rglob(PARTIAL))


def test_a_folder_that_cannot_be_written_is_reported_once_and_the_training_continues(
    trainings: Trainings, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def fail(*_: Any, **__: Any) -> None:
        raise OSError(28, "No space left on device")

    class Slow(Engine):
        def generate_sequences(self, batch: TensorDict) -> None:
            super().generate_sequences(batch)
            time.sleep(0.5)

    monkeypatch.setattr(tasks, "write", fail)
    trained = trainings.train("cache", *SETTINGS, engine=Slow())
    assert len(trained.trained) == 3
    reported = {id(record) for record in caplog.records if "finished prompts were not recorded" in record.getMessage()}
    assert len(reported) == 1
    assert "No space left on device" in caplog.text
