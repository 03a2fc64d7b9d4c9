"""The ledger of a V0 training, and what a training says when it is compared with its recording."""

from __future__ import annotations

import copy
import re
from pathlib import Path
from typing import Any

import pytest
from verl import DataProto

from tests.trainers.v0.stand_ins import VERL
from tests.trainers.v0.training import Finished, SkipTrainer, Trainings
from verl_rollout_skip.replay.ledger.file import Ledger, ledger_names, read_ledger
from verl_rollout_skip.store.storage import open_storage


def ledgers(dumps: Path) -> list[Ledger]:
    """The ledgers of all trainings, oldest first."""
    (variant,) = [path.parent for path in dumps.glob("*/*/manifest.json")]
    storage = open_storage(str(variant))
    return [read_ledger(storage, name) for name in ledger_names(storage)]


def said(training: Finished, text: str) -> str:
    (found,) = [message for message in training.messages if re.search(text, message)]
    return found


def summary(training: Finished) -> str:
    return said(training, "rollout steps:")


def test_a_training_writes_every_metric_and_tensor_of_each_step(trainings: Trainings) -> None:
    recording = trainings.run("record")
    (ledger,) = ledgers(trainings.dumps)
    assert [line.step for line in ledger.steps] == [1, 2, 3]
    assert (ledger.end, ledger.torn, ledger.header.mode) == ("finished", None, "record")
    for line in ledger.steps:
        logged = recording.metrics[line.step]
        kept = {name: float(value) for name, value in logged.items() if not name.startswith(("timing", "perf/"))}
        assert {name: line.metrics[name].hex() for name in kept} == {name: kept[name].hex() for name in kept}
        assert not [name for name in line.metrics if name.startswith("timing")]
        assert {"responses", "old_log_probs", "advantages", "response_mask"} <= line.tensors.keys()
        assert [rollout.hit for rollout in line.rollouts] == [False]
    digests = [line.tensors["responses"].digest for line in ledger.steps]
    assert len(set(digests)) == 3


@pytest.mark.parametrize("mode", ["cache", "replay"])
def test_a_replay_says_that_it_is_identical_in_all_steps(trainings: Trainings, mode: str) -> None:
    trainings.run("record")
    again = trainings.run(mode)
    assert "identical to the recording in all 3 steps" in summary(again)
    assert not [message for message in again.messages if message.startswith("WARNING")]
    recorded, replayed = ledgers(trainings.dumps)
    assert [line.tensors for line in replayed.steps] == [line.tensors for line in recorded.steps]
    assert {rollout.recorded_by for line in replayed.steps for rollout in line.rollouts} == {recorded.header.training}
    logged = again.metrics[3]
    assert logged["rollout_skip/audit/identical_steps"] == 2.0, "a step is compared when the next one begins"
    assert logged["rollout_skip/audit/first_difference"] == 0.0


def test_a_training_with_a_critic_is_compared_with_its_values(trainings: Trainings) -> None:
    trainings.run("record", "algorithm.adv_estimator=gae")
    replayed = trainings.run("replay", "algorithm.adv_estimator=gae")
    assert "identical to the recording in all 3 steps" in summary(replayed)
    assert {"values", "returns"} <= ledgers(trainings.dumps)[1].steps[0].critic_tensors.keys()


class Perturbed(SkipTrainer):  # type: ignore[misc]
    """Changes one value of the batch from step 2 on, if told so after it was made."""

    changes: str | None = None

    def _update_actor(self, batch: DataProto) -> Any:
        if self.changes is not None and self.global_steps >= 2:
            batch = copy.copy(batch)
            values = batch.batch[self.changes].clone()
            values.view(-1)[0] += 0.5
            batch.batch = batch.batch.clone(recurse=False)
            batch.batch[self.changes] = values
        return super()._update_actor(batch)


@pytest.mark.parametrize(
    ("tensor", "stage"),
    [("rm_scores", "reward"), ("old_log_probs", "old log-probs"), ("advantages", "advantages")],
)
@pytest.mark.skipif(VERL < (0, 7), reason="the driver of verl 0.6.1 updates the actor itself")
def test_one_changed_number_is_reported_once_with_its_step_and_stage(
    trainings: Trainings, monkeypatch: pytest.MonkeyPatch, tensor: str, stage: str
) -> None:
    trainings.run("record", trainer=Perturbed)
    monkeypatch.setattr(Perturbed, "changes", tensor)
    replayed = trainings.run("replay", trainer=Perturbed)
    warning = said(replayed, "differs from its recording")
    assert warning.startswith("WARNING")
    assert f"step 2, {stage}: {tensor}/" in warning
    assert f"identical to the recording in 1 step, then different from the recording (step 2, {stage}: " in summary(
        replayed
    )
    assert replayed.metrics[3]["rollout_skip/audit/identical_steps"] == 1.0
    assert replayed.metrics[3]["rollout_skip/audit/first_difference"] == 2.0


def test_another_learning_rate_is_compared_up_to_the_first_update(trainings: Trainings) -> None:
    trainings.run("record")
    replayed = trainings.run("replay", "actor_rollout_ref.actor.optim.lr=3e-6")
    text = summary(replayed)
    assert "identical to the recording up to the update of its first step" in text
    assert "2 steps not compared: off-policy" in text
    assert not replayed.said("differs from its recording")


def test_steps_that_the_recording_did_not_log_are_not_compared(trainings: Trainings) -> None:
    trainings.run("record")
    (file,) = trainings.dumps.glob("*/*/ledgers/*.jsonl")
    lines = file.read_bytes().splitlines(keepends=True)
    file.write_bytes(b"".join(lines[:3]) + lines[3][:100])
    replayed = trainings.run("replay")
    assert "identical to the recording in 2 of 3 loaded steps" in summary(replayed)
    assert "1 step not compared: the recording training ended before it logged the step" in summary(replayed)


def test_a_recording_without_a_ledger_is_replayed_and_the_summary_says_why_it_is_not_compared(
    trainings: Trainings,
) -> None:
    trainings.run("record", "rollout_skip.audit=off")
    assert not list(trainings.dumps.glob("*/*/ledgers"))
    replayed = trainings.run("replay")
    assert "3 steps not compared: the recording training has no ledger" in summary(replayed)


def test_without_audit_nothing_is_written_and_nothing_is_compared(trainings: Trainings) -> None:
    trainings.run("record")
    replayed = trainings.run("replay", "rollout_skip.audit=off")
    assert len(ledgers(trainings.dumps)) == 1
    assert "recording" not in summary(replayed)
    assert "rollout_skip/audit/identical_steps" not in replayed.metrics[3]


def test_a_damaged_ledger_does_not_stop_a_replay(trainings: Trainings) -> None:
    trainings.run("record")
    (file,) = trainings.dumps.glob("*/*/ledgers/*.jsonl")
    file.write_bytes(file.read_bytes().replace(b'"step":2', b'"step":"two"'))
    replayed = trainings.run("replay")
    assert "step: 'two' is not a count" in said(replayed, "cannot be compared with its recording")
    assert "identical to the recording in 1 of 3 loaded steps" in summary(replayed)


def test_a_ledger_that_cannot_be_written_does_not_stop_a_recording(trainings: Trainings) -> None:
    first = trainings.run("record", "trainer.total_training_steps=1")
    (folder,) = trainings.dumps.glob("*/*/ledgers")
    for file in folder.iterdir():
        file.unlink()
    folder.rmdir()
    folder.write_text("not a folder")
    continued = trainings.run("cache")
    assert continued.hits == [1.0, 0.0, 0.0]
    assert "a step is missing in the ledger, but the training continues" in said(continued, "the training continues")
    assert "the ledger is incomplete (3 failures)" in summary(continued)
    assert first.hits == [0.0]


def test_a_training_that_fails_ends_its_ledger_with_that(trainings: Trainings, monkeypatch: pytest.MonkeyPatch) -> None:
    class Failing(SkipTrainer):  # type: ignore[misc]
        def _update_actor(self, batch: DataProto) -> Any:
            if self.global_steps == 2:
                raise RuntimeError("out of memory")
            return super()._update_actor(batch)

    trainings.run("record", trainer=Failing, fails=True)
    (ledger,) = ledgers(trainings.dumps)
    assert [line.step for line in ledger.steps] == [1]
    assert ledger.end == "failed"


def test_a_repeated_step_is_not_compared_with_another_step(trainings: Trainings) -> None:
    trainings.run("record", "trainer.total_training_steps=1")
    repeated = trainings.run("repeat_last")
    assert "identical to the recording in 1 of 3 loaded steps" in summary(repeated)
    assert "2 steps not compared: repeats the rollouts of another step" in summary(repeated)


def test_the_metrics_of_the_trainers_of_others_are_not_touched(trainings: Trainings) -> None:
    """The class that verl logs with is as before once the training is over."""
    from verl.utils.tracking import Tracking

    before = Tracking.log
    trainings.run("record")
    assert Tracking.log is before
