"""Writes in the background: on one thread, in order, with a limit on queued memory.

A failure is logged when it happens and raised once, by the next call or by ``close``. The executor finishes its queue
before the interpreter exits, so accepted jobs are written even without ``close``.
"""

from __future__ import annotations

import logging
import os
import threading
import weakref
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass

from verl_rollout_skip.errors import DumpError
from verl_rollout_skip.key import RolloutKey
from verl_rollout_skip.store.sizes import format_size

logger = logging.getLogger(__name__)


@dataclass(frozen=True, eq=False)
class Job:
    """A queued dump: how to write it, and how much memory it takes."""

    key: RolloutKey
    size: int
    run: Callable[[], None]


class BackgroundWriter:
    """Runs jobs one after another on its own thread.

    ``submit`` returns immediately if at most ``max_pending_bytes`` are queued, and otherwise blocks until there is
    room. A job larger than this limit is accepted when the queue is empty.
    """

    def __init__(self, max_pending_bytes: int) -> None:
        self._max_pending_bytes = max_pending_bytes
        self._closed = False
        self._start_over()
        _writers.add(self)

    def _start_over(self) -> None:
        self._jobs: list[Job] = []
        self._failures: list[tuple[RolloutKey, BaseException]] = []
        self._changed = threading.Condition()
        self._executor = _one_thread()

    def submit(self, job: Job) -> None:
        """Queue a job. It is accepted even if this raises ``DumpError`` for an earlier one."""
        with self._changed:
            if not self._has_room(job):
                logger.debug("%s is waiting: %s are being written", job.key, format_size(self._pending_bytes))
                self._changed.wait_for(lambda: self._closed or self._has_room(job))
            self.raise_if_closed(job.key)
            failures = self._take_failures()  # only of earlier jobs: this one may fail before we return
            self._jobs.append(job)
            try:
                self._executor.submit(self._run, job)
            except RuntimeError:  # out of threads, or an exit handler writes after the executor stopped
                self._executor = _one_thread()
                self._run(job)
        _raise(failures)

    def raise_if_closed(self, key: RolloutKey) -> None:
        if self._closed:
            raise DumpError(f"{key} was not written: the store is closed. Open it again to write.")

    def wait(self, key: RolloutKey) -> None:
        """Wait until no job of this key is queued or running."""
        with self._changed:
            self._changed.wait_for(lambda: all(job.key != key for job in self._jobs))

    def flush(self) -> None:
        """Wait until everything is written. Raises ``DumpError`` for failed jobs."""
        with self._changed:
            self._changed.wait_for(lambda: not self._jobs)
        self.raise_failures()

    def close(self) -> None:
        """Write all queued jobs and stop the thread. Raises ``DumpError`` for failed jobs. Can be called again."""
        with self._changed:
            self._closed = True
            self._changed.notify_all()
        self._executor.shutdown()
        self.raise_failures()

    def raise_failures(self) -> None:
        """Raise ``DumpError`` for jobs that failed since the last call, if any."""
        with self._changed:
            failures = self._take_failures()
        _raise(failures)

    @property
    def _pending_bytes(self) -> int:
        return sum(job.size for job in self._jobs)

    def _has_room(self, job: Job) -> bool:
        return not self._jobs or self._pending_bytes + job.size <= self._max_pending_bytes

    def _take_failures(self) -> list[tuple[RolloutKey, BaseException]]:
        failures, self._failures = self._failures, []
        return failures

    def _run(self, job: Job) -> None:
        failure = None
        try:
            job.run()
        except BaseException as error:
            logger.error("dump failed: %s: %s", job.key, error)
            failure = error
        with self._changed:
            self._jobs.remove(job)
            if failure is not None:
                self._failures.append((job.key, failure))
            self._changed.notify_all()


def _one_thread() -> ThreadPoolExecutor:
    return ThreadPoolExecutor(1, thread_name_prefix="rollout-skip-writer")


def _raise(failures: list[tuple[RolloutKey, BaseException]]) -> None:
    if failures:
        raise DumpError.of(failures) from failures[0][1]


_writers: weakref.WeakSet[BackgroundWriter] = weakref.WeakSet()


def _start_over_in_child() -> None:
    """A forked child does not have its parent's thread, and must not write its parent's jobs."""
    for writer in _writers:
        writer._start_over()


os.register_at_fork(after_in_child=_start_over_in_child)
