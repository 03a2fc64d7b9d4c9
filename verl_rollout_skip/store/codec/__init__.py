"""Converts rollouts to Parquet and back: ``prepare`` and ``Plan`` write, ``Reader`` reads.

These names are imported lazily, because they need torch, and code that only reads columns does not.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from verl_rollout_skip.store.codec.columns import prompt_digests
    from verl_rollout_skip.store.codec.decoder import Reader
    from verl_rollout_skip.store.codec.encoder import Plan, Summary
    from verl_rollout_skip.store.codec.snapshot import BatchSnapshot, Copy, Prepared, Proof, prepare, take_snapshot

_MODULE_OF = {
    **dict.fromkeys(("BatchSnapshot", "Copy", "Prepared", "Proof", "prepare", "take_snapshot"), "snapshot"),
    **dict.fromkeys(("Plan", "Summary"), "encoder"),
    "Reader": "decoder",
    "prompt_digests": "columns",
}

__all__ = [
    "BatchSnapshot",
    "Copy",
    "Plan",
    "Prepared",
    "Proof",
    "Reader",
    "Summary",
    "prepare",
    "prompt_digests",
    "take_snapshot",
]


def __getattr__(name: str) -> Any:
    if name not in _MODULE_OF:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(importlib.import_module(f"{__name__}.{_MODULE_OF[name]}"), name)
