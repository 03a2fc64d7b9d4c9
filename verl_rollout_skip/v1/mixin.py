"""An earlier import path of ``verl_rollout_skip.trainers.v1.mixin``."""

from verl_rollout_skip.trainers.v1.mixin import RolloutSkipMixin

__all__ = ["RolloutSkipMixin"]
