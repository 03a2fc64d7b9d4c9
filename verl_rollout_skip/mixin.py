"""An earlier import path of ``verl_rollout_skip.RolloutSkipMixin``."""

from verl_rollout_skip.trainers.v0.mixin import RolloutSkipMixin

__all__ = ["RolloutSkipMixin"]
