"""Writes in the background: on one thread, in order, with a limit on queued memory.

A failure is logged when it happens, and raised once, by the next call or by ``close``. The executor finishes its queue
before the interpreter exits, so queued jobs are written even without ``close``.
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

    ``submit`` returns immediately unless more than ``max_pending_bytes`` would be queued. Then it blocks until there is
    room. A job larger than the limit is accepted once the queue is empty.
    """

    def __init__(self, max_pending_bytes: int) -> None:
        self._max_pending_bytes = max_pending_bytes
        self._closed = False
        self._reset()
        _writers.add(self)

    def _reset(self) -> None:
        self._jobs: list[Job] = []
        self._failures: list[tuple[RolloutKey, BaseException]] = []
        self._changed = threading.Condition()
        self._executor = _new_executor()

    def submit(self, job: Job) -> None:
        """Queue a job. The job is queued even if this call raises ``DumpError`` for an earlier one."""
        with self._changed:
            if not self._has_room(job):
                logger.debug("%s is waiting: %s are queued", job.key, format_size(self._pending_bytes))
                self._changed.wait_for(lambda: self._closed or self._has_room(job))
            self.raise_if_closed(job.key)
            failures = self._take_failures()  # of earlier jobs only: this one may fail before we return
            self._jobs.append(job)
            try:
                self._executor.submit(self._run, job)
            except RuntimeError:  # out of threads, or called by an exit handler after the executor has stopped
                self._executor = _new_executor()
                self._run(job)
        _raise_dump_error(failures)

    def raise_if_closed(self, key: RolloutKey) -> None:
        if self._closed:
            raise DumpError(f"{key} was not written: the store is closed. Open it again to write.")

    def wait(self, key: RolloutKey) -> None:
        """Wait until no job for this key is queued or running."""
        with self._changed:
            self._changed.wait_for(lambda: all(job.key != key for job in self._jobs))

    def flush(self) -> None:
        """Wait until all jobs have ended. Raises ``DumpError`` for failed jobs."""
        with self._changed:
            self._changed.wait_for(lambda: not self._jobs)
        self.raise_failures()

    def close(self) -> None:
        """Finish all queued jobs and stop the thread. Raises ``DumpError`` for failed jobs. May be called again."""
        with self._changed:
            self._closed = True
            self._changed.notify_all()
        self._executor.shutdown()
        self.raise_failures()

    def raise_failures(self) -> None:
        """Raise ``DumpError`` for jobs that failed since the last call, if any."""
        with self._changed:
            failures = self._take_failures()
        _raise_dump_error(failures)

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


def _new_executor() -> ThreadPoolExecutor:
    return ThreadPoolExecutor(1, thread_name_prefix="rollout-skip-writer")


def _raise_dump_error(failures: list[tuple[RolloutKey, BaseException]]) -> None:
    if failures:
        raise DumpError.of(failures) from failures[0][1]


_writers: weakref.WeakSet[BackgroundWriter] = weakref.WeakSet()


def _reset_in_child() -> None:
    """A forked child has no writer thread, and must not write its parent's jobs."""
    for writer in _writers:
        writer._reset()


os.register_at_fork(after_in_child=_reset_in_child)
