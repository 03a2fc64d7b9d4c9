"""verl's V1 trainers with recorded rollouts. Names are imported on first use, because importing verl is slow."""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from verl_rollout_skip.trainers.v1.mixin import RolloutSkipMixin
    from verl_rollout_skip.trainers.v1.trainers import (
        SkipPPOTrainerColocateAsync,
        SkipPPOTrainerSeparateAsync,
        SkipPPOTrainerSync,
    )

__all__ = ["RolloutSkipMixin", "SkipPPOTrainerColocateAsync", "SkipPPOTrainerSeparateAsync", "SkipPPOTrainerSync"]


def __getattr__(name: str) -> Any:
    if name not in __all__:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    if name == "RolloutSkipMixin":
        return import_module(f"{__name__}.mixin").RolloutSkipMixin
    import_module("verl")  # first, because it imports user modules that may use these names
    return getattr(import_module(f"{__name__}.trainers"), name)


def __dir__() -> list[str]:
    return sorted([*globals(), *__all__])
