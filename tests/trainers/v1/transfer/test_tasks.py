"""Samples that Ray tasks move between TransferQueue and the store, so that the rows never pass through the driver."""

from __future__ import annotations

import logging
import os
import signal
import threading
from collections.abc import Callable, Iterator
from fractions import Fraction
from pathlib import Path
from typing import Any

import pandas
import pytest
import torch
import transfer_queue as tq
from tensordict import TensorDict
from transfer_queue import KVBatchMeta
from verl.trainer.ppo.v1 import PPOTrainerColocateAsync, PPOTrainerSync

from tests.trainers.v1 import training
from tests.trainers.v1.test_async import KINDS
from tests.trainers.v1.training import (
    PARTITION,
    PROMPTS,
    ColocateTrainer,
    Engine,
    SyncTrainer,
    Trainings,
    WithoutWorkers,
    hits,
    results,
    transfer_queue,
)
from verl_rollout_skip import RolloutKey, RolloutStore
from verl_rollout_skip.errors import CorruptEntryError
from verl_rollout_skip.replay.lineage import LINEAGE, ROLLOUT_DIGEST, extend, rollout_digest
from verl_rollout_skip.store import committed
from verl_rollout_skip.trainers.v1 import compat
from verl_rollout_skip.trainers.v1.mixin import RolloutSkipMixin
from verl_rollout_skip.trainers.v1.trainers import SkipPPOTrainerSync
from verl_rollout_skip.trainers.v1.transfer import rows, tasks
from verl_rollout_skip.trainers.v1.transfer.pool import TaskPool
from verl_rollout_skip.trainers.v1.transfer.slices import cut

STEPS = [1, 2, 3]
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
    """Nothing is recorded yet."""
    return Trainings(tmp_path)


@pytest.fixture(scope="module")
def recording(queue: None, tmp_path_factory: pytest.TempPathFactory) -> tuple[Trainings, Any]:
    trainings = Trainings(tmp_path_factory.mktemp("recording"))
    return trainings, trainings.train("record", *TASKS)


@pytest.fixture
def recorded(recording: tuple[Trainings, Any]) -> Any:
    """The trainer that made the recording in ``after_recording``."""
    return recording[1]


@pytest.fixture
def after_recording(recording: tuple[Trainings, Any], tmp_path: Path) -> Trainings:
    """Three steps recorded by tasks, in a copy that a test may change."""
    return recording[0].copied(tmp_path)


@pytest.fixture
def driver_never_holds_rows(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: Any, **__: Any) -> None:
        raise AssertionError("the driver fetched or put rows")

    for name in ("fetch_rows", "put_rows"):
        monkeypatch.setattr(rows, name, refuse)


def test_a_sample_recorded_by_tasks_has_several_parts_and_the_digest_that_the_driver_computes(
    after_recording: Trainings,
) -> None:
    store = RolloutStore(after_recording.variant())
    assert store.keys() == [RolloutKey(step) for step in STEPS]
    for key in store:
        record = store.verify(key)
        assert len(record.parts) > 2
        assert record.info[ROLLOUT_DIGEST] == rollout_digest(store.get(key))
        assert record.response_tokens == sum(len(row) for row in store.get(key)["responses"].unbind())


@pytest.mark.parametrize("overrides", [TASKS, ()], ids=["tasks", "driver"])
@pytest.mark.parametrize("mode", ["cache", "replay"])
def test_a_sample_recorded_by_tasks_is_loaded_bit_for_bit_by_tasks_and_by_the_driver(
    after_recording: Trainings, recorded: Any, mode: str, overrides: tuple[str, ...]
) -> None:
    again = after_recording.train(mode, *overrides)
    assert again.trained == recorded.trained
    assert results(again) == results(recorded)
    assert hits(again) == STEPS
    assert again.engine.prompts == []
    assert again.left_over == []


def test_a_sample_recorded_by_the_driver_is_loaded_by_tasks(trainings: Trainings) -> None:
    recorded = trainings.train("record")
    again = trainings.train("replay", *TASKS)
    assert again.trained == recorded.trained
    assert again.left_over == []


@pytest.mark.usefixtures("driver_never_holds_rows")
def test_the_rows_never_reach_the_driver(trainings: Trainings) -> None:
    trainings.train("record", *TASKS)
    assert hits(trainings.train("replay", *TASKS)) == STEPS


@pytest.mark.parametrize("name", KINDS)
def test_tasks_move_the_samples_of_asynchronous_trainings(trainings: Trainings, name: str) -> None:
    kind, overrides = KINDS[name]
    recorded = trainings.train("record", *TASKS, *overrides, kind=kind)
    again = trainings.train("replay", *TASKS, *overrides, kind=kind)
    assert again.trained == recorded.trained
    assert again.engine.prompts == []
    assert [key for key in again.left_over if "_" in key] == []  # prompts in flight are left, but no rows


class LooksAtCheckpoints(WithoutWorkers):
    """A training that counts the trajectories in TransferQueue when verl saves its checkpoint."""

    def _save_checkpoint(self) -> None:
        listed = tq.kv_list(PARTITION)[PARTITION]
        uids = {key.rsplit("_", 2)[0] for key, tag in listed.items() if not tag.get("is_prompt")}
        self.in_checkpoints = [*getattr(self, "in_checkpoints", []), len(uids)]
        super()._save_checkpoint()  # type: ignore[misc]


class ColocateWithCheckpoints(RolloutSkipMixin, LooksAtCheckpoints, PPOTrainerColocateAsync):
    """An asynchronous trainer, whose checkpoints contain TransferQueue."""


def test_rows_that_are_put_ahead_are_not_in_the_checkpoints_of_an_asynchronous_replay(trainings: Trainings) -> None:
    settings = (*TASKS, "trainer.total_training_steps=4", "trainer.save_freq=1")
    recorded = trainings.train("record", *settings, kind=ColocateTrainer)
    again = trainings.train("replay", *settings, kind=ColocateWithCheckpoints)
    assert again.trained == recorded.trained
    assert again.in_checkpoints == [PROMPTS] * 4  # those of the step itself
    assert [key for key in again.left_over if "_" in key] == []


def test_tasks_move_the_refills_of_dapo(trainings: Trainings) -> None:
    dapo = ("algorithm.filter_groups.enable=True", "algorithm.filter_groups.metric=acc")
    recorded = trainings.train("record", *TASKS, *dapo)
    again = trainings.train("replay", *TASKS, *dapo)
    assert again.trained == recorded.trained
    assert again.left_over == []


class Moody(Engine):
    """An engine with a value that is a tensor in some rows and None in others."""

    def _session(self, prompt: dict[str, Any], session: int) -> list[dict[str, Any]]:
        outputs = super()._session(prompt, session)
        for number, output in enumerate(outputs):
            odd = (prompt["index"] + session + number) % 2
            output["sometimes_tensor"] = torch.tensor([prompt["index"]]) if odd else None
        return outputs


def test_a_field_that_is_a_tensor_in_some_slices_only_comes_back_in_every_row(trainings: Trainings) -> None:
    recorded = trainings.train("record", *TASKS, engine=Moody())
    for overrides in (TASKS, ()):
        assert trainings.train("replay", *overrides).trained == recorded.trained


def test_changed_prompts_are_a_miss_and_the_rows_that_were_put_ahead_are_removed(
    after_recording: Trainings, caplog: pytest.LogCaptureFixture
) -> None:
    file = after_recording.folder / "inputs" / "train.parquet"
    rows = pandas.read_parquet(file)
    rows["data_source"] = "subtraction"
    rows.to_parquet(file)
    again = after_recording.train("cache", *TASKS, "+rollout_skip.on_mismatch=reuse")
    assert hits(again) == []
    assert again.left_over == []
    assert "is recorded with a different input" in caplog.text
    assert "subtraction" in caplog.text


def test_a_damaged_part_is_set_aside_and_its_step_generated_again(after_recording: Trainings, recorded: Any) -> None:
    store = RolloutStore(after_recording.variant())
    part = after_recording.variant() / "step_000002" / store.record(RolloutKey(2)).parts[1].file
    part.write_bytes(part.read_bytes()[:-1] + b"x")
    with pytest.raises(CorruptEntryError, match=part.name):
        after_recording.train("replay", *TASKS)
    again = after_recording.train("cache", *TASKS)
    assert hits(again) == [1, 3]
    assert again.engine.asked(1) == recorded.engine.asked(1)
    assert again.left_over == []


def killed_once(marker: Path, function: Callable[..., Any]) -> Callable[..., Any]:
    """Wraps the function of a task; the first task that calls it kills its own process."""

    def task(*arguments: Any) -> Any:
        try:
            marker.touch(exist_ok=False)
        except FileExistsError:
            return function(*arguments)
        os.kill(os.getpid(), signal.SIGKILL)

    return task


@pytest.mark.parametrize("name", ["encode", "write", "put"])
def test_a_task_whose_process_dies_is_run_again(
    trainings: Trainings, monkeypatch: pytest.MonkeyPatch, tmp_path: Path, name: str
) -> None:
    marker = tmp_path / "killed"
    with monkeypatch.context() as patched:
        patched.setattr(tasks, name, killed_once(marker, getattr(tasks, name)))
        recorded = trainings.train("record", *TASKS)
        again = trainings.train("replay", *TASKS)
    assert marker.exists()
    assert recorded.rollout_skip.statistics.dump_failures == 0
    assert again.trained == recorded.trained
    assert again.left_over == []


def only_in_this_process(function: Callable[..., Any]) -> Callable[..., Any]:
    """Wraps the function of a task to fail in every process except the driver."""
    driver = os.getpid()

    def task(*arguments: Any) -> Any:
        if os.getpid() != driver:
            raise OSError(28, "No space left on device")
        return function(*arguments)

    return task


def test_a_part_that_was_written_on_another_disk_is_a_failed_dump_and_not_a_record_without_a_file(
    trainings: Trainings, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, tmp_path: Path
) -> None:
    write, elsewhere = tasks.write, tmp_path / "disk of another node"

    def write_elsewhere(folder: str, *arguments: Any) -> Any:
        return write(str(elsewhere), *arguments)

    monkeypatch.setattr(tasks, "write", write_elsewhere)
    trained = trainings.train("cache", *TASKS)
    assert trained.rollout_skip.statistics.dump_failures == len(STEPS)
    assert "Check that all nodes share this folder." in caplog.text
    assert RolloutStore(trainings.variant()).keys() == []


def reject_all() -> None:
    """Change the response masks of all rows in TransferQueue, as rejection sampling does."""
    keys = [key for key, tag in tq.kv_list(PARTITION)[PARTITION].items() if not tag.get("is_prompt")]
    masks = tq.kv_batch_get(keys=keys, partition_id=PARTITION, select_fields=["response_mask"])
    zeros = torch.nested.as_nested_tensor(
        [torch.zeros_like(row) for row in masks["response_mask"].unbind()], layout=torch.jagged
    )
    fields = TensorDict({"response_mask": zeros}, batch_size=[len(keys)])
    tq.kv_batch_put(keys=keys, partition_id=PARTITION, fields=fields)


class RejectsImmediately(SyncTrainer):
    """A training that changes rows as soon as it has sampled them, which verl's own never does."""

    def on_sample_end(self) -> None:
        super().on_sample_end()
        reject_all()


class Rejecting(WithoutWorkers):
    """A training that changes rows where verl does."""

    def _compute_advantage(self, batch: KVBatchMeta, metrics: dict[str, Any]) -> KVBatchMeta:
        reject_all()
        return batch


class RejectsLater(RolloutSkipMixin, Rejecting, PPOTrainerSync):
    """Its rows can be read while it computes log-probs."""

    keeps_sampled_rows = True


@pytest.mark.parametrize("kind", [RejectsImmediately, RejectsLater])
def test_the_rows_are_recorded_as_they_were_sampled_although_the_training_changes_them(
    trainings: Trainings, kind: type
) -> None:
    trainings.train("record", *TASKS, kind=kind)
    store = RolloutStore(trainings.variant())
    assert store.keys() == [RolloutKey(step) for step in STEPS]
    for key in store:
        assert all(mask.all() for mask in store.get(key)["response_mask"].unbind())


def test_the_training_continues_while_a_sample_is_read(trainings: Trainings, monkeypatch: pytest.MonkeyPatch) -> None:
    class Continuing(RejectsLater):
        def _compute_old_log_prob(self, batch: KVBatchMeta, metrics: dict[str, Any]) -> KVBatchMeta:
            assert self._reader._read is not None
            reached.set()
            return super()._compute_old_log_prob(batch, metrics)

    def encode_later(*arguments: Any) -> Any:
        assert reached.wait(60)
        return encode(*arguments)

    reached, encode = threading.Event(), TaskPool.encode
    monkeypatch.setattr(TaskPool, "encode", encode_later)
    trained = trainings.train("record", *TASKS, "trainer.total_training_steps=1", kind=Continuing)
    assert trained.rollout_skip.statistics.dumped == 1
    assert trainings.train("replay", *TASKS, "trainer.total_training_steps=1").trained == trained.trained


@pytest.mark.parametrize("name", ["on_sample_end", "_balance_batch", "_compute_advantage"])
def test_a_trainer_with_its_own_methods_after_the_sample_is_not_expected_to_keep_rows(name: str) -> None:
    own = type("Own", (SkipPPOTrainerSync,), {name: lambda self, *_: None})
    assert compat.keeps_rows(SkipPPOTrainerSync)
    assert not compat.keeps_rows(own)


def test_an_untested_version_of_verl_is_not_expected_to_keep_rows(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("verl.__version__", "0.99.0")
    assert not compat.keeps_rows(SkipPPOTrainerSync)


class Digesting(SyncTrainer):
    """A training that keeps the digests of its samples."""

    def _balance_batch(self, batch: KVBatchMeta, metrics: dict[str, Any]) -> KVBatchMeta:
        self.digests = [*getattr(self, "digests", []), rollout_digest(rows.fetch(batch)[0])]
        return super()._balance_batch(batch, metrics)


def test_tasks_digest_a_step_that_is_not_recorded_because_later_steps_learn_from_it(trainings: Trainings) -> None:
    trained = trainings.train("record", *TASKS, "+rollout_skip.steps=[2,3]", kind=Digesting)
    store = RolloutStore(trainings.variant())
    assert store.keys() == [RolloutKey(2), RolloutKey(3)]
    assert store.record(RolloutKey(2)).info[LINEAGE] == extend("start", trained.digests[:1])


def test_a_part_that_no_task_can_write_is_written_by_the_driver(
    trainings: Trainings, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(tasks, "write", only_in_this_process(tasks.write))
    recorded = trainings.train("record", *TASKS)
    assert "no node could write a part, so the driver writes it" in caplog.text
    assert trainings.train("replay", *TASKS).trained == recorded.trained


def test_a_folder_that_only_the_driver_sees_is_read_and_written_by_the_driver(
    trainings: Trainings, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(TaskPool, "nodes", lambda *_: [])
    monkeypatch.setattr(committed, "read_part", only_in_this_process(committed.read_part))
    monkeypatch.setattr(tasks, "write", only_in_this_process(tasks.write))
    recorded = trainings.train("record", *TASKS)
    again = trainings.train("replay", *TASKS)
    assert again.trained == recorded.trained


def test_an_entry_that_no_task_can_load_is_loaded_by_the_driver(
    after_recording: Trainings, recorded: Any, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def fail(*_: Any) -> None:
        raise MemoryError("there is not enough memory on this node")

    monkeypatch.setattr(tasks, "put", fail)
    again = after_recording.train("replay", *TASKS)
    assert again.trained == recorded.trained
    assert again.left_over == []
    assert "step 1, generation batch 0 is loaded by the driver, because tasks could not load it" in caplog.text
    assert "there is not enough memory on this node" in caplog.text


def test_sample_rows_are_logged_although_the_driver_does_not_have_the_rows(
    after_recording: Trainings, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv("TENSORBOARD_DIR", str(tmp_path / "events"))
    after_recording.train("replay", *TASKS, "trainer.logger=[tensorboard]")
    (events,) = [file.read_bytes() for file in (tmp_path / "events").iterdir() if b"| prompt |" in file.read_bytes()]
    assert events.count(b"| prompt |") == len(STEPS)


class Unstorable(Engine):
    """An engine with a value that cannot be stored."""

    def _session(self, prompt: dict[str, Any], session: int) -> list[dict[str, Any]]:
        outputs = super()._session(prompt, session)
        for output in outputs:
            output["part"] = Fraction(1, 3)
        return outputs


def test_a_sample_that_cannot_be_stored_is_a_failed_dump_and_the_training_continues(
    trainings: Trainings, caplog: pytest.LogCaptureFixture
) -> None:
    trained = trainings.train("cache", *TASKS, engine=Unstorable())
    assert len(trained.trained) == len(STEPS)
    assert trained.rollout_skip.statistics.dump_failures == len(STEPS)
    assert "fractions.Fraction" in caplog.text
    assert list(trainings.dumps.rglob("*.parquet")) == []
    assert trained.left_over == []


class EndsEarly(SyncTrainer):
    """A training that stops in its second step, while the rows of the third one are being put."""

    def _update_actor(self, batch: Any, metrics: dict[str, Any]) -> Any:
        if self.global_steps == 2:
            raise RuntimeError("out of memory")
        return batch


def test_a_training_that_fails_leaves_only_the_rows_of_its_own_step(
    after_recording: Trainings, monkeypatch: pytest.MonkeyPatch
) -> None:
    left: list[str] = []
    clear = training.clear_queue

    def look_and_clear() -> None:
        left.extend(tq.kv_list(PARTITION).get(PARTITION, {}))
        clear()

    monkeypatch.setattr(training, "clear_queue", look_and_clear)
    with pytest.raises(RuntimeError, match="out of memory"):
        after_recording.train("replay", *TASKS, kind=EndsEarly)
    rows = RolloutStore(after_recording.variant()).record(RolloutKey(2)).rows
    assert len(left) == rows


def test_slices_are_cut_by_tokens() -> None:
    def slices(tags: list[dict[str, Any]], part_bytes: int) -> list[range]:
        keys = [f"uid_0_{row}" for row in range(len(tags))]
        batch = KVBatchMeta(partition_id=PARTITION, keys=keys, tags=tags)
        fields = rows.Fields(["responses"], {"rm_scores": [1, 3]})
        requests = cut(batch, list(range(len(tags))), fields, part_bytes)
        assert [key for request in requests for key in request.keys] == keys
        found = [request.rows[row] for request in requests for row in request.fields.partial["rm_scores"]]
        assert found == [row for row in (1, 3) if row < len(tags)]
        return [request.rows for request in requests]

    tags = [{"seq_len": length} for length in (10, 10, 30, 5, 5)]
    assert slices(tags, 20 * 56) == [range(0, 2), range(2, 3), range(3, 5)]
    assert slices(tags, 1) == [range(row, row + 1) for row in range(5)]
    assert slices([{}] * 3, 2 * 4096 * 56) == [range(0, 2), range(2, 3)]


def test_the_log_says_when_tasks_have_no_effect(after_recording: Trainings, caplog: pytest.LogCaptureFixture) -> None:
    again = after_recording.train("replay", *TASKS, "+rollout_skip.prompts=recorded")
    assert hits(again) == STEPS
    assert "the driver loads rollouts although rollout_skip.tasks is 'on'" in caplog.text
