"""Comparing steps of two ledgers: the first difference is that of the earliest stage."""

from __future__ import annotations

import math
from dataclasses import replace

import numpy as np
import pytest

from tests.replay.ledger.lines import HEADER, a_step
from verl_rollout_skip.replay.ledger.compare import Tolerance, compare_steps, layout_changes, settings_changes
from verl_rollout_skip.replay.ledger.figures import figures_of
from verl_rollout_skip.replay.ledger.stages import Stage, is_timing, stage_of_metric, stage_of_tensor

STEP = a_step(3)


def test_a_step_equals_itself() -> None:
    assert compare_steps(STEP, a_step(3)) == []


def test_one_last_bit_of_a_metric_is_a_difference() -> None:
    other = replace(STEP, metrics={**STEP.metrics, "actor/pg_loss": 0.1 + 2**-56})
    (found,) = compare_steps(STEP, other)
    assert (found.step, found.stage, found.name) == (3, Stage.UPDATE, "actor/pg_loss")
    assert found.describe() == (
        "step 3, update: actor/pg_loss is 0.10000000000000002, recorded as 0.1 (difference 1.39e-17, relative 1.39e-16)"
    )


def test_nan_equals_nan_and_nothing_else() -> None:
    nan = replace(STEP, metrics={"actor/pg_loss": math.nan})
    assert compare_steps(nan, replace(STEP, metrics={"actor/pg_loss": math.nan})) == []
    (found,) = compare_steps(nan, replace(STEP, metrics={"actor/pg_loss": 0.0}), Tolerance(rtol=1.0, atol=1.0))
    assert found.stage is Stage.UPDATE


def test_differences_are_in_the_order_of_the_data_whatever_the_order_of_the_lines() -> None:
    changed = {
        "advantages": figures_of(np.full((3, 4), 9, np.float32)),
        "rm_scores": figures_of(np.zeros((3, 4), np.float32)),
        "old_log_probs": figures_of(np.zeros((3, 4), np.float32)),
        "responses": STEP.tensors["responses"],
        "values": STEP.tensors["values"],
    }
    other = replace(
        STEP,
        tensors=changed,
        metrics={"val-core/acc": 0.0, "actor/grad_norm": 2.0, "critic/score/mean": 0.5, "actor/pg_loss": 0.2},
        weights={"actor": "cd" * 16},
    )
    stages = [found.stage for found in compare_steps(STEP, other)]
    assert list(dict.fromkeys(stages)) == [
        Stage.REWARD,
        Stage.OLD_LOG_PROBS,
        Stage.ADVANTAGES,
        Stage.UPDATE,
        Stage.WEIGHTS,
        Stage.VALIDATION,
    ]
    assert compare_steps(STEP, other)[0].name == "rm_scores/max"


def test_a_tensor_whose_moments_agree_still_differs_by_its_digest() -> None:
    swapped = figures_of(np.eye(3, 4, dtype=np.float32)[::-1])
    (found,) = compare_steps(STEP, replace(STEP, tensors={**STEP.tensors, "rm_scores": swapped}))
    assert (found.name, found.absolute) == ("rm_scores/digest", None)
    assert found.recorded != found.current


def test_within_a_tolerance_the_order_of_rows_does_not_count() -> None:
    swapped = figures_of(np.eye(3, 4, dtype=np.float32)[::-1])
    other = replace(STEP, tensors={**STEP.tensors, "rm_scores": swapped}, weights={"actor": "cd" * 16})
    assert compare_steps(STEP, other, Tolerance(rtol=1e-6)) == []


def test_a_tolerance_can_be_set_for_some_metrics_only() -> None:
    metrics = {**STEP.metrics, "actor/pg_loss": 0.1001, "actor/grad_norm": 1.501}
    other = replace(STEP, metrics=metrics)
    (found,) = compare_steps(STEP, other, Tolerance(rtol=1e-6, overrides={"*_loss": (1e-2, 0.0)}))
    assert found.name == "actor/grad_norm"


def test_a_metric_that_only_one_training_has_is_a_difference() -> None:
    metrics = {name: value for name, value in STEP.metrics.items() if name != "actor/pg_loss"}
    (lost,) = compare_steps(STEP, replace(STEP, metrics=metrics))
    (added,) = compare_steps(replace(STEP, metrics=metrics), STEP)
    assert (lost.recorded, lost.current) == (0.1, None)
    assert (added.recorded, added.current) == (None, 0.1)
    assert "actor/pg_loss is missing, recorded as 0.1" in lost.describe()


def test_a_tensor_that_only_one_training_has_is_a_difference() -> None:
    tensors = {name: figures for name, figures in STEP.tensors.items() if name != "values"}
    (found,) = compare_steps(STEP, replace(STEP, tensors=tensors, critic_tensors={}))
    assert (found.stage, found.name, found.current) == (Stage.VALUES, "values", None)


def test_validation_and_checkpoints_of_one_training_only_are_no_difference() -> None:
    metrics = {name: value for name, value in STEP.metrics.items() if not name.startswith("val-")}
    assert compare_steps(STEP, replace(STEP, metrics=metrics, weights={})) == []


def test_a_training_that_has_no_tensors_is_compared_by_its_metrics() -> None:
    assert compare_steps(STEP, replace(STEP, tensors={}, critic_tensors={})) == []


def test_a_tensor_that_both_updates_received_is_reported_once() -> None:
    values = figures_of(np.full((3, 4), 0.75, np.float32))
    other = replace(
        STEP,
        tensors={**STEP.tensors, "values": values},
        critic_tensors={**STEP.critic_tensors, "values": values},
    )
    assert {found.name for found in compare_steps(STEP, other)} == {"values/min", "values/max", "values/mean"}


def test_a_tensor_that_only_the_critic_received_differently_names_the_critic() -> None:
    values = figures_of(np.full((3, 4), 0.75, np.float32))
    other = replace(STEP, critic_tensors={**STEP.critic_tensors, "values": values})
    assert compare_steps(STEP, other)[0].name == "critic's values/min"


@pytest.mark.parametrize(
    ("name", "stage"),
    [
        ("response_mask", Stage.ROLLOUT),
        ("rollout_log_probs", Stage.ROLLOUT),
        ("token_level_scores", Stage.REWARD),
        ("token_level_rewards", Stage.ADVANTAGES),
        ("old_log_probs", Stage.OLD_LOG_PROBS),
        ("ref_log_prob", Stage.REFERENCE),
        ("returns", Stage.ADVANTAGES),
    ],
)
def test_each_tensor_belongs_to_the_stage_that_computed_it(name: str, stage: Stage) -> None:
    assert stage_of_tensor(name) is stage


@pytest.mark.parametrize(
    ("name", "stage"),
    [
        ("response_length/mean", Stage.ROLLOUT),
        ("critic/score/max", Stage.REWARD),
        ("critic/rewards/max", Stage.ADVANTAGES),
        ("critic/values/mean", Stage.VALUES),
        ("critic/vf_loss", Stage.UPDATE),
        ("critic/grad_norm", Stage.UPDATE),
        ("actor/kl_loss", Stage.UPDATE),
        ("my/own/metric", Stage.UPDATE),
        ("val-core/gsm8k/acc/mean@1", Stage.VALIDATION),
    ],
)
def test_each_metric_belongs_to_a_stage(name: str, stage: Stage) -> None:
    assert stage_of_metric(name) is stage
    assert not is_timing(name)


@pytest.mark.parametrize(
    "name",
    [
        *("timing_s/gen", "timing_per_token_ms/ref", "perf/throughput", "perf/mfu/actor", "rollout_skip/hit"),
        *("perf/max_memory_allocated_gb", "my/generation_time", "agent_loop/slowest/generate_sequences"),
    ],
)
def test_figures_of_time_and_memory_are_not_kept(name: str) -> None:
    assert is_timing(name)


def test_layout_and_settings_that_differ_are_named() -> None:
    layout = {"world_size": 2, "actor": {"tensor": 1}, "settings": {"actor_rollout_ref.actor.use_dynamic_bsz": True}}
    other = replace(HEADER, gpu_layout=layout, training_settings={"actor_rollout_ref.actor.optim.lr": 2e-6})
    assert layout_changes(HEADER, other) == [
        "actor_rollout_ref.actor.use_dynamic_bsz: False → True",
        "world_size: 1 → 2",
    ]
    assert settings_changes(HEADER, other) == ["actor_rollout_ref.actor.optim.lr: 1e-06 → 2e-06"]
    assert layout_changes(HEADER, HEADER) == settings_changes(HEADER, HEADER) == []
