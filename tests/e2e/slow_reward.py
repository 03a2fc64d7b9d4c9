"""The reward of the arithmetic task, which is not computed for some prompts as long as the file $SLOW_REWARD exists."""

from __future__ import annotations

import asyncio
import os
from typing import Any


async def compute_score(data_source: str, solution_str: str, ground_truth: str, **_: Any) -> dict[str, float]:
    while int(ground_truth) % 3 == 0 and os.path.exists(os.environ["SLOW_REWARD"]):
        await asyncio.sleep(0.1)  # without a thread, of which verl has only a few
    right = float(solution_str.strip() == ground_truth)
    return {"score": right, "acc": right}
