"""Lines of ledgers for tests."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np

from verl_rollout_skip.replay.ledger.figures import figures_of
from verl_rollout_skip.replay.ledger.line import LedgerHeader, LedgerStep, StepRollout

TRAINING = "20261119T214500.123Z-1a2b3c4d"

HEADER = LedgerHeader(
    training=TRAINING,
    started_at="2026-11-19T21:45:00+00:00",
    mode="record",
    trainer="my.module.MyTrainer",
    config_hash="c" * 64,
    training_hash="d" * 64,
    training_settings={"actor_rollout_ref.actor.optim.lr": 1e-6},
    gpu_layout={
        "world_size": 1,
        "actor": {"tensor": 1},
        "settings": {"actor_rollout_ref.actor.use_dynamic_bsz": False},
    },
    versions={"verl": "0.9.1"},
    host="node-1",
)


def a_step(step: int, **changes: Any) -> LedgerStep:
    """The line of a step of an ordinary training with a critic."""
    tensors = {
        "responses": figures_of(np.arange(12).reshape(3, 4) + step),
        "rm_scores": figures_of(np.eye(3, 4, dtype=np.float32)),
        "old_log_probs": figures_of(np.linspace(-3, 0, 12, dtype=np.float32).reshape(3, 4)),
        "values": figures_of(np.full((3, 4), 0.5, np.float32)),
        "advantages": figures_of(np.full((3, 4), step, np.float32)),
    }
    line = LedgerStep(
        step=step,
        metrics={"actor/pg_loss": 0.1, "critic/score/mean": 0.25, "actor/grad_norm": 1.5, "val-core/acc": 0.5},
        tensors=tensors,
        critic_tensors=dict(tensors),
        weights={"actor": "ab" * 16},
        rollouts=(StepRollout(0, "ef" * 16, hit=False),),
    )
    return replace(line, **changes)
