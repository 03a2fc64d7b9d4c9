"""Entry points for trainings with recorded rollouts. The code is in ``verl_rollout_skip.trainers.runner``."""

from verl_rollout_skip.trainers.runner import SkipTaskRunner, train

__all__ = ["SkipTaskRunner", "train"]
