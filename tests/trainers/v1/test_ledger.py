"""The ledger of a V1 training, whose rows are in TransferQueue, and the comparison with its recording."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch
import transfer_queue as tq
from pytest_mock import MockerFixture
from tensordict import TensorDict
from transfer_queue import KVBatchMeta

from tests.trainers.v0.training import captured_messages
from tests.trainers.v1.test_async import SEPARATE
from tests.trainers.v1.training import PROMPTS, SAMPLES, SeparateTrainer, SyncTrainer, Trainings
from verl_rollout_skip.replay.ledger.file import Ledger, ledger_names, read_ledger
from verl_rollout_skip.store.storage import open_storage
from verl_rollout_skip.trainers.v1.transfer.pool import TaskPool

pytestmark = pytest.mark.usefixtures("queue")


def ledgers(trainings: Trainings) -> list[Ledger]:
    """The ledgers of all trainings, oldest first."""
    storage = open_storage(str(trainings.variant()))
    return [read_ledger(storage, name) for name in ledger_names(storage)]


def summary(messages: list[str]) -> str:
    """The summary of the last training."""
    return [text for text in messages if "rollout steps:" in text][-1]


@pytest.fixture
def messages() -> Iterator[list[str]]:
    with captured_messages() as found:
        yield found


@pytest.mark.parametrize("tasks", ["off", "on"])
def test_the_ledger_has_the_rows_of_each_update(
    trainings: Trainings, messages: list[str], tasks: str, mocker: MockerFixture
) -> None:
    """However the rows are cut, and whether the driver or tasks read them."""
    by_tasks = mocker.spy(TaskPool, "figures")
    recorded = trainings.train("record", "+rollout_skip.tasks=off")
    trainings.train("replay", f"+rollout_skip.tasks={tasks}", "+rollout_skip.part_bytes=1500")
    one, other = ledgers(trainings)
    assert [line.step for line in one.steps] == [1, 2, 3]
    assert [line.tensors for line in one.steps] == [line.tensors for line in other.steps]
    for line, update in zip(one.steps, recorded.trained, strict=True):
        responses = line.tensors["responses"]
        assert responses.shape[0] == len(update["keys"])
        assert responses.count == sum(len(row) for _, row in update["responses"])
        assert {"prompts", "response_mask", "rollout_log_probs", "rm_scores", "old_log_probs"} <= line.tensors.keys()
    assert "identical to the recording in all 3 steps" in summary(messages)
    assert PROMPTS < responses.shape[0] <= 2 * PROMPTS * SAMPLES
    assert by_tasks.call_count == (3 if tasks == "on" else 0)
    if tasks == "on":
        assert len(by_tasks.call_args.args[1]) > 1, "one slice only"


@pytest.mark.parametrize("mode", ["cache", "replay"])
def test_a_repeated_training_is_identical_in_all_steps(trainings: Trainings, messages: list[str], mode: str) -> None:
    trainings.train("record")
    trainings.train(mode)
    assert "identical to the recording in all 3 steps" in summary(messages)
    assert not any("differs from its recording" in text for text in messages)


def test_each_update_of_a_step_has_its_own_tensors(trainings: Trainings, messages: list[str]) -> None:
    trainings.train("record", *SEPARATE, kind=SeparateTrainer)
    trainings.train("replay", *SEPARATE, kind=SeparateTrainer)
    line = ledgers(trainings)[0].steps[0]
    assert {"responses", "responses#2"} <= line.tensors.keys()
    assert line.tensors["responses"].digest != line.tensors["responses#2"].digest
    assert [rollout.gen_batch for rollout in line.rollouts] == [0, 1]
    assert "identical to the recording in all 4 steps" in summary(messages)


class Perturbed(SyncTrainer):
    """Changes one log-prob in step 2, if told so after the recording."""

    changes = False

    def _update_actor(self, batch: KVBatchMeta, metrics: dict[str, Any]) -> KVBatchMeta:
        if self.changes and self.global_steps == 2:
            values = torch.zeros(len(batch.keys))
            values[0] = -1e-6
            fields = TensorDict({"old_log_probs": values}, batch_size=len(batch.keys))
            tq.kv_batch_put(keys=batch.keys, partition_id=batch.partition_id, fields=fields)
        return super()._update_actor(batch, metrics)


def test_one_changed_log_prob_is_reported_once_with_its_step_and_stage(
    trainings: Trainings, messages: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    trainings.train("record", kind=Perturbed)
    monkeypatch.setattr(Perturbed, "changes", True)
    trainings.train("replay", kind=Perturbed)
    (warning,) = [text for text in messages if "differs from its recording" in text]
    assert "step 2, old log-probs: old_log_probs/min is -9.99999997" in warning
    assert "identical to the recording in 1 step, then different" in summary(messages)


def test_a_step_that_is_read_without_a_field_has_a_ledger_without_it(trainings: Trainings) -> None:
    """A field that only some rows have is in no slice, however the rows are cut."""
    trainings.train("record")
    for line in ledgers(trainings)[0].steps:
        assert "values" not in line.tensors
