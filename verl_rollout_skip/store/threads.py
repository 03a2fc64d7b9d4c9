"""A few threads for work that numpy and Arrow do outside the interpreter lock."""

from __future__ import annotations

import os
import threading
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from typing import Any, TypeVar

Item = TypeVar("Item")
Result = TypeVar("Result")


def worker_count() -> int:
    """How many threads are worth starting on this machine, or in this container."""
    return min(8, len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1)


def in_thread(function: Callable[[], Result]) -> Future[Result]:
    """Start work that rarely needs the interpreter lock on a new thread; a single core does it before this returns."""
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
    """``[function(item) for item in items]``, several at a time and begun in order; the first exception is raised."""
    results: list[Any] = [None] * len(items)
    errors: dict[int, BaseException] = {}
    waiting = iter(range(len(items)))  # each thread takes the next one, so every item is done exactly once

    def work() -> None:
        for index in waiting:
            try:
                results[index] = function(items[index])
            except BaseException as error:
                errors[index] = error

    helpers = [
        threading.Thread(target=work, name="rollout-skip-codec", daemon=True)
        for _ in range(min(worker_count(), len(items)) - 1)
    ]
    started = []
    for helper in helpers:
        try:
            helper.start()
        except RuntimeError:
            break  # the system, or an interpreter that shuts down, starts no more threads: this one does the work
        started.append(helper)
    work()
    for helper in started:
        helper.join()
    if errors:
        raise errors[min(errors)]
    return results
