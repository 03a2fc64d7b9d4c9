"""Checks whether a rollout was prefetched, by damaging its files before it is requested."""

from __future__ import annotations

import threading
from pathlib import Path


def wait_for_prefetch() -> None:
    """Wait until no prefetch is running."""
    for thread in threading.enumerate():
        if thread.name == "rollout-skip-prefetch":
            thread.join(20)


def damage(variant: Path, step: int, gen_batch: int = 0) -> None:
    """Damage the files of a rollout, so that reading them fails."""
    parts = list((variant / f"step_{step:06d}").glob(f"gen_{gen_batch:03d}*.parquet"))
    assert parts
    for part in parts:
        part.write_bytes(part.read_bytes()[:-9] + b"x" * 9)
