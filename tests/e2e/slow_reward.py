"""The reward of the arithmetic task, which is not computed for some prompts as long as the file $SLOW_REWARD exists."""

from __future__ import annotations

import os
import time
from typing import Any


def compute_score(data_source: str, solution_str: str, ground_truth: str, **_: Any) -> dict[str, float]:
    while int(ground_truth) % 3 == 0 and os.path.exists(os.environ["SLOW_REWARD"]):
        time.sleep(0.1)
    right = float(solution_str.strip() == ground_truth)
    return {"score": right, "acc": right}
