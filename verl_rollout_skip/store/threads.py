"""Threads for work that numpy and Arrow do without holding the GIL.

These are daemon threads rather than executors, for two reasons: an executor rejects work while the interpreter exits,
while the last dumps are still being encoded; and it keeps a process with a hanging load from exiting.
"""

from __future__ import annotations

import contextlib
import os
import threading
from collections.abc import Callable, Sequence
from concurrent.futures import Future, wait
from functools import partial
from typing import TypeVar

Item = TypeVar("Item")
Result = TypeVar("Result")


def worker_count() -> int:
    """How many threads are worth starting on this machine or in this container."""
    return min(8, len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1)


def start_thread(function: Callable[[], Result], name: str) -> Future[Result]:
    """Call a function on a new thread. Raises ``RuntimeError`` if no thread can be started."""
    future: Future[Result] = Future()
    threading.Thread(target=_fulfill, args=(future, function), name=name, daemon=True).start()
    return future


def in_thread(function: Callable[[], Result]) -> Future[Result]:
    """Call a function on a new thread if there are several cores, and otherwise on this thread before returning."""
    if worker_count() > 1:
        with contextlib.suppress(RuntimeError):  # out of threads, or the interpreter is exiting
            return start_thread(function, "rollout-skip-digest")
    future: Future[Result] = Future()
    _fulfill(future, function)
    return future


def map_in_threads(function: Callable[[Item], Result], items: Sequence[Item]) -> list[Result]:
    """``[function(item) for item in items]``, several at a time. Items are started in order; raises the first error."""
    results: list[Future[Result]] = [Future() for _ in items]
    remaining = iter(range(len(items)))  # shared by all threads, so every item is processed exactly once

    def work() -> None:
        for index in remaining:
            _fulfill(results[index], partial(function, items[index]))

    helpers = []
    with contextlib.suppress(RuntimeError):  # out of threads: this one processes the rest
        for _ in range(min(worker_count(), len(items)) - 1):
            helpers.append(start_thread(work, "rollout-skip-codec"))
    work()
    wait(helpers)
    return [result.result() for result in results]


def _fulfill(future: Future[Result], function: Callable[[], Result]) -> None:
    try:
        future.set_result(function())
    except BaseException as error:
        future.set_exception(error)
