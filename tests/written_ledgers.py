"""Ledgers of made-up trainings, written as trainings write them."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np

from verl_rollout_skip.replay.ledger.figures import figures_of
from verl_rollout_skip.replay.ledger.file import LedgerFile
from verl_rollout_skip.replay.ledger.line import LedgerEnd, LedgerHeader, LedgerStep, StepRollout
from verl_rollout_skip.runs.paths import LEDGERS
from verl_rollout_skip.store.storage import open_storage

RECORDING = "20261119T210000.000Z-aaaaaaaa"
REPLAY = "20261119T220000.000Z-bbbbbbbb"
OTHER_REPLAY = "20261119T230000.000Z-cccccccc"

Change = Callable[[LedgerStep], LedgerStep]


def header(training: str, mode: str, **changes: Any) -> LedgerHeader:
    """The header of a training on one device."""
    usual: dict[str, Any] = {
        "training": training,
        "started_at": "2026-11-19T21:00:00+00:00",
        "mode": mode,
        "trainer": "recipes.ppo.main_ppo.Trainer",
        "config_hash": "c" * 64,
        "training_hash": "t" * 64,
        "training_settings": {"actor_rollout_ref.actor.optim.lr": 1e-06},
        "gpu_layout": {"nnodes": 1, "n_gpus_per_node": 1, "world_size": 1},
        "versions": {"verl": "0.9.1", "torch": "2.13.0"},
        "host": "here",
        "first_step": 1,
    }
    return LedgerHeader(**{**usual, **changes})


def computed(step: int, rollouts: tuple[StepRollout, ...]) -> LedgerStep:
    """What every training computes in a step, unless it is changed."""
    rng = np.random.default_rng(step)
    shape = (4, 6)
    tensors = {
        "responses": rng.integers(0, 99, shape),
        "token_level_scores": rng.random(shape, np.float32),
        "old_log_probs": -rng.random(shape, np.float32),
        "advantages": rng.standard_normal(shape, np.float32),
    }
    metrics = {
        "critic/score/mean": float(rng.random()),
        "critic/advantages/mean": float(rng.standard_normal()),
        "actor/pg_loss": float(rng.standard_normal()),
        "actor/grad_norm": 1.0 + float(rng.random()),
    }
    figures = {name: figures_of(tensor) for name, tensor in tensors.items()}
    weights = {"actor": f"{step:032x}"} if step % 2 == 0 else {}
    return LedgerStep(step, metrics, figures, {}, weights, rollouts)


def write(
    variant: Path | str,
    training: str,
    steps: range,
    recorded_by: str | Mapping[int, str | None] | None = None,
    change: Change = lambda step: step,
    end: str | None = "finished",
    **of_header: Any,
) -> None:
    """Write the ledger of a training, which loads the steps that ``recorded_by`` covers and generates the others."""
    loads = (
        recorded_by if isinstance(recorded_by, Mapping) else dict.fromkeys(steps if recorded_by else (), recorded_by)
    )
    mode = of_header.pop("mode", "replay" if loads else "record")
    file = LedgerFile(open_storage(str(variant)), header(training, mode, first_step=steps.start, **of_header))
    for step in steps:
        rollout = StepRollout(0, f"{step:032x}", step in loads, loads.get(step))
        file.append(change(computed(step, (rollout,))))
    if end is not None:
        file.append(LedgerEnd(end, len(steps)))


def with_metric(name: str, value: Callable[[float], float], first: int = 1) -> Change:
    """Change a metric from a step on."""

    def change(step: LedgerStep) -> LedgerStep:
        if step.step < first:
            return step
        return replace(step, metrics={**step.metrics, name: value(step.metrics.get(name, 0.0))})

    return change


def with_tensor(name: str, change_values: Callable[[np.ndarray], np.ndarray], first: int = 1) -> Change:
    """Change a tensor from a step on: the same random values, passed through a function."""

    def change(step: LedgerStep) -> LedgerStep:
        if step.step < first:
            return step
        values = np.random.default_rng(step.step).random((4, 6), np.float32)
        return replace(step, tensors={**step.tensors, name: figures_of(change_values(values))})

    return change


def write_examples(variant: Path | str, steps: range) -> None:
    """A recording with two replays: one that is identical, and one on two devices, whose last bits differ."""

    def last_bits(step: LedgerStep) -> LedgerStep:
        for name, factor in (("actor/pg_loss", 1 + 2e-6), ("actor/grad_norm", 1 - 3e-7)):
            step = with_metric(name, lambda value, factor=factor: value * factor, 2)(step)
        return step

    write(variant, RECORDING, steps)
    write(variant, REPLAY, steps, RECORDING)
    layout = {"nnodes": 1, "n_gpus_per_node": 2, "world_size": 2}
    write(variant, OTHER_REPLAY, steps, RECORDING, last_bits, gpu_layout=layout)


def with_rollouts_of(other: Mapping[int, int]) -> Change:
    """Learn from the rollouts of other steps."""

    def change(step: LedgerStep) -> LedgerStep:
        digest = f"{other.get(step.step, step.step):032x}"
        return replace(step, rollouts=tuple(replace(rollout, digest=digest) for rollout in step.rollouts))

    return change


def ledger_path(variant: Path, training: str) -> Path:
    return variant / LEDGERS / f"{training}.jsonl"
