"""verl's trainers with recorded rollouts. Names are imported on first use, because importing verl is slow."""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from verl_rollout_skip.trainers.v0.trainers import SkipDAPOTrainer, SkipPPOTrainer

__all__ = ["SkipDAPOTrainer", "SkipPPOTrainer"]


def __getattr__(name: str) -> Any:
    if name not in __all__:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    import_module("verl")  # first, because it imports user modules that may use these names
    return getattr(import_module(f"{__name__}.v0.trainers"), name)
