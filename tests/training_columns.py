"""Training columns beside a recording, as a training would write them. The trainer's log-probs are a little off."""

from __future__ import annotations

from pathlib import Path

import torch

from verl_rollout_skip.config.modes import Mode
from verl_rollout_skip.config.modes import TrainingColumns as Level
from verl_rollout_skip.config.skip_config import SkipConfig
from verl_rollout_skip.key import RolloutKey
from verl_rollout_skip.replay.columns import TrainingColumns
from verl_rollout_skip.replay.ledger.updates import UpdateSlice
from verl_rollout_skip.store.store import RolloutStore

TRAINING = "20261119T210000.000Z-aaaaaaaa"
WORST = (2, 5, 3)
"""The step, row and position of the token whose log-prob is far off."""


def trained(variant: Path, key: RolloutKey) -> dict[str, torch.Tensor]:
    """What the update of a recorded step received."""
    tensors = dict(RolloutStore(variant).get(key).batch.items())
    generator = torch.Generator().manual_seed(key.step)
    noise = torch.randn(tensors["rollout_log_probs"].shape, generator=generator) * 0.01
    tensors["old_log_probs"] = (tensors["rollout_log_probs"] + noise) * tensors["response_mask"]
    step, row, position = WORST
    if key.step == step:
        tensors["old_log_probs"][row, position] = -9.0
    return tensors


def add_columns(
    variant: Path, training: str = TRAINING, level: Level = Level.LOG_PROBS, leave_out: tuple[str, ...] = ()
) -> None:
    """Write the columns of all recorded steps, in another row order than the rollouts."""
    columns = TrainingColumns(str(variant), training, SkipConfig(mode=Mode.CACHE, training_columns=level))
    for key in RolloutStore(variant):
        tensors = trained(variant, key)
        order = torch.randperm(len(tensors["responses"]), generator=torch.Generator().manual_seed(7)).tolist()
        names = [f"row {row}" for row in range(len(order))]
        columns.add_rollout(key, lambda names=names: names)
        kept = {name: tensor[order] for name, tensor in tensors.items() if name not in leave_out}
        update = columns.begin_update(key.step, "actor")
        assert update is not None
        update.add(UpdateSlice(0, kept, [names[row] for row in order]))
        update.finish()
    columns.close()
    assert columns.failures == 0
