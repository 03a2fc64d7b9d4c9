"""The name of one rollout step within a run."""

from __future__ import annotations

import operator
from dataclasses import dataclass


@dataclass(frozen=True, order=True)
class RolloutKey:
    """Which rollout: the trainer's global step, and the ordinal of the generate call within that step.

    Counting within the step keeps keys aligned when a training is resumed from a checkpoint.
    """

    step: int
    gen_batch: int = 0

    def __post_init__(self) -> None:
        for name in ("step", "gen_batch"):
            value = getattr(self, name)
            try:
                number = operator.index(value)
            except TypeError:
                raise TypeError(f"RolloutKey.{name} must be an integer, not {value!r}") from None
            if isinstance(value, bool) or number < 0:
                raise ValueError(f"RolloutKey.{name} must be an integer of 0 or more, not {value!r}")
            object.__setattr__(self, name, number)

    def __str__(self) -> str:
        return f"step {self.step}, generation batch {self.gen_batch}"
