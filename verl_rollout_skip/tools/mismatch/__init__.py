"""The mismatch between rollout and training: recorded rollout log-probs against those of the trainer."""

from verl_rollout_skip.tools.mismatch.compute import Mismatch, find_training, measure_mismatch
from verl_rollout_skip.tools.mismatch.what_if import REJECTIONS, TRUNCATIONS, Kind, Rule, parse_rule

__all__ = [
    "REJECTIONS",
    "TRUNCATIONS",
    "Kind",
    "Mismatch",
    "Rule",
    "find_training",
    "measure_mismatch",
    "parse_rule",
]
