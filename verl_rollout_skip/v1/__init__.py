"""verl's V1 trainers with recorded rollouts. The code is in ``verl_rollout_skip.trainers.v1``."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from verl_rollout_skip.trainers import v1

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
    return getattr(v1, name)


def __dir__() -> list[str]:
    return sorted([*globals(), *__all__])
