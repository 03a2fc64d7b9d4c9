"""``rollout-skip``: inspects, checks and manages recorded rollouts without verl or a training."""

from __future__ import annotations

from verl_rollout_skip.cli.program import main

__all__ = ["main"]
