"""Trainers may modify the batch while its dump waits: the batch that generate returned is recorded."""

from __future__ import annotations

import threading
from typing import Any

import pytest
from verl import DataProto

from tests.trainers.v0.stand_ins import VERL
from tests.trainers.v0.training import SkipTrainer, Trainings, assert_same_training
from verl_rollout_skip.store import commit

pytestmark = pytest.mark.skipif(VERL < (0, 7), reason="verl 0.6.1 computes rewards after the rollout step")

IN_ORDER = "trainer.balance_batch=False"
"""Makes verl train on the tensors that generate returned, not on reordered copies."""


class Overlong(SkipTrainer):
    """A trainer that subtracts a penalty for long responses in place."""

    changed = threading.Semaphore(0)

    def _compute_old_log_prob(self, batch: DataProto) -> Any:
        lengths = batch.batch["response_mask"].sum(-1)
        batch.batch["rm_scores"] -= 0.125 * lengths[:, None] * (batch.batch["rm_scores"] != 0)
        self.changed.release()
        return super()._compute_old_log_prob(batch)


@pytest.fixture
def late_writer(monkeypatch: pytest.MonkeyPatch) -> None:
    """Delays the background writer until the trainer has modified the step."""
    monkeypatch.setattr(Overlong, "changed", threading.Semaphore(0))
    write = commit.commit

    def wait(*arguments: Any, **options: Any) -> Any:
        assert Overlong.changed.acquire(timeout=60)
        return write(*arguments, **options)

    monkeypatch.setattr(commit, "commit", wait)


@pytest.mark.usefixtures("late_writer")
def test_rewards_that_the_trainer_modifies_in_place_are_recorded_as_generated(trainings: Trainings) -> None:
    recording = trainings.run("record", IN_ORDER, trainer=Overlong)
    replayed = trainings.run("replay", IN_ORDER, trainer=Overlong)
    plain = trainings.run("off", IN_ORDER, trainer=Overlong)
    assert_same_training(plain, recording)
    assert_same_training(plain, replayed)
    assert replayed.hits == [1.0, 1.0, 1.0]
