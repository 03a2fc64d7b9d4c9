"""An earlier import path of ``verl_rollout_skip.trainers.v1.trainers``; manifests of older recordings name it."""

from verl_rollout_skip.trainers.v1.trainers import (
    SkipPPOTrainerColocateAsync,
    SkipPPOTrainerSeparateAsync,
    SkipPPOTrainerSync,
)

__all__ = ["SkipPPOTrainerColocateAsync", "SkipPPOTrainerSeparateAsync", "SkipPPOTrainerSync"]
