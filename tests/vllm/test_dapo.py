"""DAPO with vLLM: ``SkipDAPOTrainer`` on V0, ``algorithm.filter_groups`` on V1."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

from tests.e2e.training import (
    DAPO,
    VERL_V1,
    Trainings,
    assert_same_results,
    assert_same_weights,
    skip,
    skip_v1,
    variant_in,
)
from tests.vllm.checks import assert_no_engine, assert_weights_arrived
from verl_rollout_skip import RolloutKey, RolloutStore

STEPS = 2
SETTINGS = (
    f"trainer.total_training_steps={STEPS}",
    f"trainer.save_freq={STEPS}",
    "data.train_batch_size=4",
    "actor_rollout_ref.actor.ppo_mini_batch_size=4",
)
FILTER = ("algorithm.filter_groups.enable=True", "algorithm.filter_groups.metric=acc")


def test_v0_repeats_every_generation_batch(trainings: Trainings, tmp_path: Path, plain_python: str) -> None:
    settings = (*SETTINGS, "data.gen_batch_size=4")
    recorded = trainings.run(DAPO, "record-v0", *settings, *skip("record", tmp_path))
    assert_weights_arrived(recorded, STEPS)
    counts = {step: int(values["train/num_gen_batches"]) for step, values in recorded.metrics().items()}
    assert max(counts.values()) >= 2, "the test is about steps that take several"
    expected = [RolloutKey(step, number) for step, count in counts.items() for number in range(count)]
    assert RolloutStore(variant_in(tmp_path)).keys() == expected

    replayed = trainings.run(replace(DAPO, python=plain_python), "replay-v0", *settings, *skip("replay", tmp_path))
    assert_no_engine(replayed)
    assert replayed.timing("rollout_skip/hit") == dict.fromkeys(range(1, STEPS + 1), 1.0)
    assert_same_results(recorded, replayed)
    assert_same_weights(recorded, replayed, STEPS)


def test_v1_repeats_what_was_kept_and_reports_what_was_filtered(
    trainings: Trainings, tmp_path: Path, plain_python: str
) -> None:
    recorded = trainings.run(VERL_V1, "record-v1", *SETTINGS, *FILTER, *skip_v1("record", tmp_path))
    assert_weights_arrived(recorded, STEPS)
    evicted = "training/filter_groups/evicted_samples"
    assert any(metrics.get(evicted) for metrics in recorded.results().values()), "no group was filtered"

    plain = replace(VERL_V1, python=plain_python)
    replayed = trainings.run(plain, "replay-v1", *SETTINGS, *FILTER, *skip_v1("replay", tmp_path))
    assert_no_engine(replayed)
    assert replayed.hits() == [1, 2]
    assert_same_results(recorded, replayed)
    assert_same_weights(recorded, replayed, STEPS)
