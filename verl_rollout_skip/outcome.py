"""The outcome of a rollout step, and statistics over all steps so far."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from verl_rollout_skip.sizes import format_size

LOAD_S, SAVED_S = "rollout_skip/load_s", "rollout_skip/saved_s"


@dataclass(frozen=True)
class Rollout:
    """The outcome of one rollout step: the batch to train on and its input.

    ``inputs`` is the current input, or the recorded one if the recorded batch replaces the current one. ``metrics`` go
    into the step's log.
    """

    batch: Any
    inputs: Any
    hit: bool
    metrics: dict[str, float]


@dataclass
class Statistics:
    """Counts of what happened so far. ``not_dumped`` were generated but not dumped, because another rollout has their
    key; ``left_out`` were generated because the settings do not select their step."""

    hits: int = 0
    misses: int = 0
    dumped: int = 0
    not_dumped: int = 0
    left_out: int = 0
    dump_failures: int = 0
    off_policy: int = 0
    load_s: float = 0.0
    saved_s: float = 0.0
    generate_s: float = 0.0
    notes: list[str] = field(default_factory=list)

    @property
    def is_any(self) -> bool:
        return bool(self.hits or self.misses or self.left_out or self.dump_failures)

    def count_wait(self, rollout: Rollout, seconds: float) -> dict[str, float]:
        """Count how long the training waited for a hit in total; return the updated metrics."""
        loaded, saved = rollout.metrics[LOAD_S], rollout.metrics[SAVED_S]
        metrics = {**rollout.metrics, LOAD_S: seconds, SAVED_S: max(saved + loaded - seconds, 0.0)}
        self.load_s += seconds - loaded
        self.saved_s += metrics[SAVED_S] - saved
        return metrics

    def summary(self, stored_bytes: int) -> str:
        """One line for the end of a training."""
        parts = [
            f"{self.hits + self.misses} rollout steps: {self.hits} loaded in {self.load_s:.1f} s, {self.misses} "
            f"generated in {self.generate_s:.1f} s; about {self.saved_s:.0f} s saved; {self.dumped} dumped "
            f"({format_size(stored_bytes)}), {self.dump_failures} dumps failed"
        ]
        if self.left_out:
            parts.append(f"{self.left_out} not selected by rollout_skip.steps")
        if self.not_dumped:
            parts.append(f"{self.not_dumped} not dumped: another rollout has their key (mode refresh replaces it)")
        if self.off_policy:
            parts.append(f"{self.off_policy} loaded off-policy")
        return "; ".join([*parts, *self.notes])
