"""The reward of the arithmetic task. For some prompts, it waits until the file $SLOW_REWARD is removed."""

from __future__ import annotations

import asyncio
import os
from typing import Any


async def compute_score(data_source: str, solution_str: str, ground_truth: str, **_: Any) -> dict[str, float]:
    while int(ground_truth) % 3 == 0 and os.path.exists(os.environ["SLOW_REWARD"]):
        await asyncio.sleep(0.1)  # asynchronous, because verl has only a few threads
    right = float(solution_str.strip() == ground_truth)
    return {"score": right, "acc": right}
