"""Another reward for the arithmetic task: whether the answer has the correct parity."""

from __future__ import annotations

from typing import Any


def compute_score(data_source: str, solution_str: str, ground_truth: str, **_: Any) -> dict[str, float]:
    answer = solution_str.strip()
    right = float(answer.isdigit() and int(answer) % 2 == int(ground_truth) % 2)
    return {"score": right, "acc": right, "length": float(len(answer))}
