"""The stages of a training step in the order in which data flows through them, and which value belongs to which.

The first stage in which two trainings differ points at the cause, because later stages follow from earlier ones.
"""

from __future__ import annotations

from enum import Enum
from fnmatch import fnmatchcase
from functools import lru_cache


class Stage(str, Enum):
    """A stage of a training step. The order of the members is that of the data."""

    ROLLOUT = "rollout"
    REWARD = "reward"
    OLD_LOG_PROBS = "old log-probs"
    REFERENCE = "reference log-probs"
    VALUES = "values"
    ADVANTAGES = "advantages"
    UPDATE = "update"
    WEIGHTS = "weights"
    VALIDATION = "validation"


UP_TO_THE_UPDATE = frozenset(list(Stage)[: list(Stage).index(Stage.UPDATE)])
"""The stages before a training's settings for learning have any effect."""

# The first pattern that matches a name decides. Rewards with a KL penalty depend on log-probs of the reference, so they
# belong to the advantages. Everything else that the update receives comes from the rollout.
_TENSORS = {
    "rm_scores": Stage.REWARD,
    "token_level_scores": Stage.REWARD,
    "acc": Stage.REWARD,
    "*score*": Stage.REWARD,
    "old_log_prob*": Stage.OLD_LOG_PROBS,
    "entropy*": Stage.OLD_LOG_PROBS,
    "rollout_is_weights": Stage.OLD_LOG_PROBS,
    "sum_pi_squared": Stage.OLD_LOG_PROBS,
    "ref_log_prob*": Stage.REFERENCE,
    "values": Stage.VALUES,
    "token_level_rewards": Stage.ADVANTAGES,
    "reward_baselines": Stage.REWARD,
    "advantages": Stage.ADVANTAGES,
    "returns": Stage.ADVANTAGES,
}
_METRICS = {
    "val-*": Stage.VALIDATION,
    "val/*": Stage.VALIDATION,
    "critic/score/*": Stage.REWARD,
    "reward/*": Stage.REWARD,
    "critic/values/*": Stage.VALUES,
    "critic/rewards/*": Stage.ADVANTAGES,
    "critic/advantages/*": Stage.ADVANTAGES,
    "critic/returns/*": Stage.ADVANTAGES,
    "critic/vf_explained_var": Stage.ADVANTAGES,
    "actor/reward_kl_penalty*": Stage.ADVANTAGES,
    "actor/entropy": Stage.OLD_LOG_PROBS,
    "training/rollout_probs_diff*": Stage.OLD_LOG_PROBS,
    "training/rollout_actor_probs*": Stage.OLD_LOG_PROBS,
    "rollout_corr/*": Stage.OLD_LOG_PROBS,
    "mismatch/*": Stage.OLD_LOG_PROBS,
    "prompt_length/*": Stage.ROLLOUT,
    "response_length*": Stage.ROLLOUT,
    "response/*": Stage.ROLLOUT,
    "num_turns/*": Stage.ROLLOUT,
    "tool_call*": Stage.ROLLOUT,
    "global_seqlen/*": Stage.ROLLOUT,
    "perf/total_num_tokens": Stage.ROLLOUT,
    "training/global_step": Stage.ROLLOUT,
    "training/epoch": Stage.ROLLOUT,
    "train/num_gen_batches": Stage.ROLLOUT,
    "training/num_gen_batches": Stage.ROLLOUT,
}
# Figures of time, memory and speed, which differ from run to run.
_KEPT = ("perf/total_num_tokens",)
_TIMINGS = (
    *("timing_*", "perf/*", "rollout_skip/*", "agent_loop/*", "*_gb", "*mfu*", "*/perf/*", "*/throughput*", "*memory*"),
    *("*_s", "*_ms", "*_seconds", "*/time*", "*_time", "*_time/*", "*tokens_per_second*"),
)
_REMEMBERED = 4096  # names; the same ones return in every step


@lru_cache(_REMEMBERED)
def stage_of_tensor(name: str) -> Stage:
    """The stage that computed a tensor which an update receives. ``#2`` marks the second update of a step."""
    name = name.partition("#")[0]
    return next((stage for pattern, stage in _TENSORS.items() if fnmatchcase(name, pattern)), Stage.ROLLOUT)


@lru_cache(_REMEMBERED)
def stage_of_metric(name: str) -> Stage:
    """The stage that a metric describes. An unknown metric counts as one of the update, whose cause may be anywhere."""
    return next((stage for pattern, stage in _METRICS.items() if fnmatchcase(name, pattern)), Stage.UPDATE)


def is_timing(metric: str) -> bool:
    """Whether a metric measures time, memory or speed, or this package. Such metrics are not part of a ledger."""
    return metric not in _KEPT and any(fnmatchcase(metric, pattern) for pattern in _TIMINGS)
