"""A few threads for work that numpy and Arrow do outside the interpreter lock."""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import TypeVar

Item = TypeVar("Item")
Result = TypeVar("Result")


def worker_count() -> int:
    """How many threads are worth starting on this machine, or in this container."""
    return min(8, len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1)


def map_in_threads(function: Callable[[Item], Result], items: Sequence[Item]) -> list[Result]:
    """``[function(item) for item in items]``, several at a time; the first exception is raised."""
    workers = min(worker_count(), len(items))
    if workers > 1:
        try:
            with ThreadPoolExecutor(workers, "rollout-skip-codec") as pool:
                futures = [pool.submit(function, item) for item in items]
        except RuntimeError:
            # The interpreter is shutting down and starts no threads; a dump that is still pending must be finished.
            return [function(item) for item in items]
        return [future.result() for future in futures]
    return [function(item) for item in items]
