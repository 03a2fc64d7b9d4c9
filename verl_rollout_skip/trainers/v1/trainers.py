"""verl's V1 trainers with recorded rollouts, registered as values of ``trainer.v1.trainer_mode``."""

from __future__ import annotations

from verl.trainer.ppo.v1 import PPOTrainerColocateAsync, PPOTrainerSeparateAsync, PPOTrainerSync, register_trainer

from verl_rollout_skip.trainers.v1.mixin import RolloutSkipMixin


@register_trainer("skip_sync")
class SkipPPOTrainerSync(RolloutSkipMixin, PPOTrainerSync):
    """``PPOTrainerSync`` that records and reuses its rollouts."""


@register_trainer("skip_colocate_async")
class SkipPPOTrainerColocateAsync(RolloutSkipMixin, PPOTrainerColocateAsync):
    """``PPOTrainerColocateAsync`` that records and reuses its rollouts."""


@register_trainer("skip_separate_async")
class SkipPPOTrainerSeparateAsync(RolloutSkipMixin, PPOTrainerSeparateAsync):
    """``PPOTrainerSeparateAsync`` that records and reuses its rollouts."""
