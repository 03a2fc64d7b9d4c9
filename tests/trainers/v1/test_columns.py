"""``training_columns`` in verl's V1 training loop: the rows that an update reads from TransferQueue are dumped."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import transfer_queue as tq
from tensordict import TensorDict
from transfer_queue import KVBatchMeta

from tests.trainers.v1.test_async import SEPARATE
from tests.trainers.v1.training import SeparateTrainer, SyncTrainer, Trainings
from verl_rollout_skip import RolloutKey, RolloutStore
from verl_rollout_skip.runs.columns import trainings_with_columns
from verl_rollout_skip.tools.differing_rows import differing_tokens
from verl_rollout_skip.tools.mismatch import measure_mismatch

pytestmark = pytest.mark.usefixtures("queue")

COLUMNS = "+rollout_skip.training_columns=log_probs"
LOG_PROBS = ("actor_rollout_ref.rollout.calculate_log_probs=True",)


class WithLogProbs:
    """A trainer with log-probs that reverses the rows of a batch, as verl changes their order to balance it."""

    offset = 0.25

    def _balance_batch(self, batch: KVBatchMeta, metrics: dict[str, Any]) -> KVBatchMeta:
        super()._balance_batch(batch, metrics)  # type: ignore[misc]
        return KVBatchMeta(
            partition_id=batch.partition_id,
            keys=batch.keys[::-1],
            tags=batch.tags[::-1],
            fields=batch.fields,
            extra_info=batch.extra_info,
        )

    def _compute_old_log_prob(self, batch: KVBatchMeta, metrics: dict[str, Any]) -> KVBatchMeta:
        found = tq.kv_batch_get(keys=batch.keys, partition_id=batch.partition_id, select_fields=["rollout_log_probs"])
        rows = [row - self.offset for row in found.get("rollout_log_probs").unbind()]
        values = {"old_log_probs": torch.nested.as_nested_tensor(rows, layout=torch.jagged)}
        tq.kv_batch_put(keys=batch.keys, partition_id=batch.partition_id, fields=TensorDict(values, [len(rows)]))
        return batch


class LoggingTrainer(WithLogProbs, SyncTrainer):
    """The synchronous trainer with log-probs."""


class LoggingSeparateTrainer(WithLogProbs, SeparateTrainer):
    """The asynchronous trainer with log-probs: several updates per step."""


def columns_of(variant: Path, training: int = 0) -> RolloutStore:
    return RolloutStore(variant / "columns" / trainings_with_columns(str(variant))[training])


def assert_refers_to_its_rollouts(store: RolloutStore, rollouts: RolloutStore) -> None:
    """Each row names the recorded row with its rollout log-probs."""
    for key in store:
        found = store.get(key)
        places = zip(found["rollout_gen_batch"].tolist(), found["rollout_row"].tolist(), strict=True)
        own = [row.tolist() for row in found["rollout_log_probs"].unbind()]
        assert len(own) > 1
        for (gen_batch, row), log_probs in zip(places, own, strict=True):
            recorded = rollouts.get(RolloutKey(key.step, gen_batch))["rollout_log_probs"].unbind()
            assert recorded[row].tolist() == log_probs


def test_recording_and_replay_dump_the_log_probs_of_each_update(trainings: Trainings) -> None:
    for mode in ("cache", "replay"):
        trainings.train(mode, COLUMNS, *LOG_PROBS, kind=LoggingTrainer)
    variant = trainings.variant()
    one, other = trainings_with_columns(str(variant))
    for number in (0, 1):
        store = columns_of(variant, number)
        assert [(key.step, key.gen_batch) for key in store] == [(1, 0), (2, 0), (3, 0)]
        rows = store.get(RolloutKey(1))["rollout_row"].tolist()
        assert rows == list(range(len(rows)))[::-1]
        assert_refers_to_its_rollouts(store, RolloutStore(variant))
    for step in (1, 2, 3):
        assert differing_tokens(str(variant), one, str(variant), other, step) == []
    found = measure_mismatch(str(variant), one)
    for step in found.steps:
        assert step.figures is not None
        assert step.figures.mean_abs == pytest.approx(0.25)
        assert step.figures.k1 == pytest.approx(0.25)


def test_changed_log_prob_is_named_with_its_row_and_token(
    trainings: Trainings, monkeypatch: pytest.MonkeyPatch
) -> None:
    trainings.train("cache", COLUMNS, *LOG_PROBS, kind=LoggingTrainer)
    monkeypatch.setattr(WithLogProbs, "offset", 0.5)
    trainings.train("replay", COLUMNS, *LOG_PROBS, kind=LoggingTrainer)
    variant = trainings.variant()
    one, other = trainings_with_columns(str(variant))
    [found] = differing_tokens(str(variant), one, str(variant), other, 2)
    assert (found.tensor, found.place, found.position) == ("old_log_probs", (0, 0), 0)
    response = RolloutStore(variant).get(RolloutKey(2))["responses"].unbind()[0]
    assert found.token == response[0].item()


def test_step_with_several_updates_has_an_entry_for_each(trainings: Trainings) -> None:
    trainings.train("cache", COLUMNS, *LOG_PROBS, *SEPARATE, kind=LoggingSeparateTrainer)
    variant = trainings.variant()
    store = columns_of(variant)
    assert [(key.step, key.gen_batch) for key in store] == [
        (step, update) for step in (1, 2, 3, 4) for update in (0, 1)
    ]
    assert_refers_to_its_rollouts(store, RolloutStore(variant))
    for key in store:
        assert set(store.get(key)["rollout_gen_batch"].tolist()) == {key.gen_batch}
