"""A few threads for work that numpy and Arrow do outside the interpreter lock."""

from __future__ import annotations

import os
import threading
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from typing import TypeVar

Item = TypeVar("Item")
Result = TypeVar("Result")


def worker_count() -> int:
    """How many threads are worth starting on this machine, or in this container."""
    return min(8, len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1)


def in_thread(function: Callable[[], Result]) -> Future[Result]:
    """Begin something that hardly needs the interpreter lock on a thread of its own; done at once on a single core."""
    future: Future[Result] = Future()

    def run() -> None:
        try:
            future.set_result(function())
        except BaseException as error:
            future.set_exception(error)

    try:
        if worker_count() < 2:
            raise RuntimeError("nothing would be gained")
        threading.Thread(target=run, name="rollout-skip-digest", daemon=True).start()
    except RuntimeError:  # also if the interpreter is shutting down and starts no more threads
        run()
    return future


def map_in_threads(function: Callable[[Item], Result], items: Sequence[Item]) -> list[Result]:
    """``[function(item) for item in items]``, several at a time; the first exception is raised."""
    workers = min(worker_count(), len(items))
    if workers < 2:
        return [function(item) for item in items]
    futures: list[Future[Result]] = []
    with ThreadPoolExecutor(workers, "rollout-skip-codec") as pool:
        try:
            for item in items:
                futures.append(pool.submit(function, item))
        except RuntimeError:
            # The interpreter is shutting down and starts no more threads; what is left is done right here.
            pass
        rest = [function(item) for item in items[len(futures) :]]
    return [*(future.result() for future in futures), *rest]
