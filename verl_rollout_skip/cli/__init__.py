"""``rollout-skip``: look at recorded rollouts and check them, without verl and without a training."""

from __future__ import annotations

from verl_rollout_skip.cli.program import main

__all__ = ["main"]
