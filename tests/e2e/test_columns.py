"""Training columns of a real training: its trainer and its engine compute nearly the same log-probs."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.e2e.training import PPO, Trainings, skip, variant_in
from verl_rollout_skip import RolloutKey, RolloutStore
from verl_rollout_skip.runs.columns import columns_of, trainings_with_columns
from verl_rollout_skip.tools.mismatch import measure_mismatch

pytestmark = pytest.mark.slow

SETTINGS = (
    "trainer.total_training_steps=2",
    "trainer.save_freq=-1",
    "actor_rollout_ref.rollout.calculate_log_probs=True",
    "rollout_skip.training_columns=all",
)


def test_log_probs_of_trainer_and_engine_agree_and_each_row_names_its_response(
    trainings: Trainings, dumps: Path
) -> None:
    recorded = trainings.run(PPO, "columns", *SETTINGS, *skip("record", dumps))
    assert "training columns of 2 updates" in recorded.summary
    variant = variant_in(dumps)
    [training] = trainings_with_columns(str(variant))
    assert columns_of(str(variant), training).keys() == [RolloutKey(1), RolloutKey(2)]
    rollouts, columns = RolloutStore(variant), RolloutStore(variant / "columns" / training)
    for key in columns:
        update, rollout = columns.get(key), rollouts.get(key)
        rows = update["rollout_row"].tolist()
        assert sorted(rows) == list(range(len(rows)))
        assert update["responses"].tolist() == rollout.batch["responses"][rows].tolist()
    found = measure_mismatch(str(variant), training)
    for step in found.steps:
        assert step.figures is not None
        assert step.figures.tokens > 0
        assert 0 < step.figures.max_abs < 1e-3, "engine and trainer compute in float32 with the same weights"
