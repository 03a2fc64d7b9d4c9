"""verl's V0 trainers with recorded rollouts, ready to use in an entry point."""

from __future__ import annotations

from verl.trainer.ppo.ray_trainer import RayPPOTrainer

from verl_rollout_skip.trainers.v0.dapo import DynamicSampling
from verl_rollout_skip.trainers.v0.mixin import RolloutSkipMixin


class SkipPPOTrainer(RolloutSkipMixin, RayPPOTrainer):
    """``RayPPOTrainer`` that records and reuses its rollouts."""


class SkipDAPOTrainer(DynamicSampling, RolloutSkipMixin, RayPPOTrainer):
    """``RayPPOTrainer`` with DAPO's dynamic sampling. Every generation batch of a step is recorded and reused."""
