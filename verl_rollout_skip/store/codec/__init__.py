"""Rollouts to Parquet and back: ``prepare`` and ``plan`` on the way in, ``Reader`` on the way out.

The names are imported when they are used: they need torch, and those who only look at columns do not.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from verl_rollout_skip.store.codec.decoder import Reader
    from verl_rollout_skip.store.codec.encoder import Plan, Summary, plan
    from verl_rollout_skip.store.codec.prepared import Prepared, Proof, TakenBatch, prepare, take
    from verl_rollout_skip.store.codec.rows import prompt_digests

_HOMES = {
    **dict.fromkeys(("Prepared", "Proof", "TakenBatch", "prepare", "take"), "prepared"),
    **dict.fromkeys(("Plan", "Summary", "plan"), "encoder"),
    "Reader": "decoder",
    "prompt_digests": "rows",
}

__all__ = ["Plan", "Prepared", "Proof", "Reader", "Summary", "TakenBatch", "plan", "prepare", "prompt_digests", "take"]


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(importlib.import_module(f"{__name__}.{_HOMES[name]}"), name)
