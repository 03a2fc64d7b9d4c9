"""verl's trainers (V0) with recorded rollouts, ready to be named in an entry point."""

from __future__ import annotations

from verl.trainer.ppo.ray_trainer import RayPPOTrainer

from verl_rollout_skip.trainers.v0.dapo import DynamicSampling
from verl_rollout_skip.trainers.v0.mixin import RolloutSkipMixin


class SkipPPOTrainer(RolloutSkipMixin, RayPPOTrainer):
    """``RayPPOTrainer`` that records and reuses its rollouts."""


class SkipDAPOTrainer(DynamicSampling, RolloutSkipMixin, RayPPOTrainer):
    """DAPO: ``RayPPOTrainer`` with dynamic sampling, which records and reuses every generation batch of a step."""
