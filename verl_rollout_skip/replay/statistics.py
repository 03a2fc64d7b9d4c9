"""``Statistics``: what happened in a training so far, and its summary at the end."""

from __future__ import annotations

from dataclasses import dataclass, field

from verl_rollout_skip.store.sizes import format_size


@dataclass
class Statistics:
    """Counts of rollout steps. ``not_dumped`` were generated, but their key was already taken; ``left_out`` were
    generated because the settings do not select their step."""

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
    def has_activity(self) -> bool:
        return bool(self.hits or self.misses or self.left_out or self.dump_failures)

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
            parts.append(f"{self.not_dumped} not dumped: their keys are taken (mode refresh replaces what is recorded)")
        if self.off_policy:
            parts.append(f"{self.off_policy} loaded off-policy")
        return "; ".join([*parts, *self.notes])
