"""Combines the metrics of the rollout steps of one training step."""

from __future__ import annotations

_SUMS = {"rollout_skip/load_s", "rollout_skip/saved_s"}
_LAST = {"rollout_skip/dump_bytes", "rollout_skip/dump_failures"}


def of_step(rollouts: list[dict[str, float]]) -> dict[str, float]:
    """Seconds are summed, running counts keep their last value, and everything else is averaged."""
    combined: dict[str, float] = {}
    for name in dict.fromkeys(name for metrics in rollouts for name in metrics):
        values = [metrics[name] for metrics in rollouts if name in metrics]
        if name in _LAST:
            combined[name] = values[-1]
        else:
            combined[name] = sum(values) if name in _SUMS else sum(values) / len(values)
    return combined
