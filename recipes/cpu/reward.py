"""The reward of the arithmetic task: 1 for exactly the right number, otherwise 0."""

from __future__ import annotations

from typing import Any


def compute_score(
    data_source: str, solution_str: str, ground_truth: str, extra_info: dict[str, Any] | None = None, **_: Any
) -> dict[str, float]:
    """verl's reward function; ``acc`` is for validation and algorithm.filter_groups.metric=acc."""
    right = float(solution_str.strip() == ground_truth)
    return {"score": right, "acc": right}
