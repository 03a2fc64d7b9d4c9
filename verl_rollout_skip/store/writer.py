"""Writing in the background: one thread, in order, with a bound on the memory that waits.

A failure never disappears: it is logged when it happens and raised at the next call and at close. What was accepted is
written before the interpreter exits.
"""

from __future__ import annotations

import atexit
import logging
import os
import threading
import weakref
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass

from verl_rollout_skip.errors import DumpError
from verl_rollout_skip.key import RolloutKey
from verl_rollout_skip.sizes import format_size

logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class Job:
    """One dump that waits: what to do, and how much memory it holds on to."""

    key: RolloutKey
    size: int
    run: Callable[[], None]


class BackgroundWriter:
    """Runs jobs one after another on a thread of its own.

    ``submit`` returns at once while less than ``max_pending_bytes`` are waiting, and otherwise waits until there is
    room; a single job that is larger than the bound is accepted when nothing else waits.
    """

    def __init__(self, max_pending_bytes: int) -> None:
        self._max_pending_bytes = max_pending_bytes
        self._closed = False
        self._begin()

    def _begin(self) -> None:
        self._jobs: deque[Job] = deque()
        self._pending_bytes = 0
        self._failures: list[tuple[RolloutKey, BaseException]] = []
        self._changed = threading.Condition()
        self._thread: threading.Thread | None = None
        self._pid = os.getpid()

    def _check_fork(self) -> None:
        """A forked child has neither its parent's thread nor the right to its jobs: it begins anew."""
        if self._pid != os.getpid():
            self._begin()

    def submit(self, job: Job) -> None:
        """Queue a job. It is accepted even when this raises ``DumpError`` for an earlier one."""
        self._check_fork()
        with self._changed:
            self.raise_if_closed(job.key)
            self._start()
            while self._jobs and self._pending_bytes + job.size > self._max_pending_bytes:
                logger.debug("%s waits: %s are being written", job.key, format_size(self._pending_bytes))
                self._changed.wait()
                self.raise_if_closed(job.key)  # the thread may have ended meanwhile
            failures = self._take_failures()  # of earlier jobs: this one may fail before we return
            self._jobs.append(job)
            self._pending_bytes += job.size
            self._changed.notify_all()
        _raise(failures)

    def raise_if_closed(self, key: RolloutKey) -> None:
        if self._closed:
            raise DumpError(f"{key} was not written: the store is closed. Open it anew to write.")

    def wait(self, key: RolloutKey) -> None:
        """Return when no job of this key is waiting or running."""
        self._check_fork()
        with self._changed:
            self._changed.wait_for(lambda: all(job.key != key for job in self._jobs))

    def flush(self) -> None:
        """Return when everything is written; raise what failed."""
        self._check_fork()
        with self._changed:
            self._changed.wait_for(lambda: not self._jobs)
        self.raise_failures()

    def close(self) -> None:
        """Write what waits and end the thread; raise what failed. Closing again does nothing."""
        self._check_fork()
        self.stop()
        if self._thread is not None:
            self._thread.join()
            self._thread = None
        self.raise_failures()

    def stop(self) -> None:
        """End the thread once everything is written, without waiting for it."""
        self._check_fork()
        with self._changed:
            self._closed = True
            self._changed.notify_all()

    def raise_failures(self) -> None:
        """Raise what has failed since the last time, if anything."""
        with self._changed:
            failures = self._take_failures()
        _raise(failures)

    def _take_failures(self) -> list[tuple[RolloutKey, BaseException]]:
        failures, self._failures = self._failures, []
        return failures

    def _start(self) -> None:
        if self._thread is not None:
            return
        self._thread = threading.Thread(target=self._work, name="rollout-skip-writer", daemon=True)
        self._thread.start()
        # Daemon threads still run while exit handlers do, so this drains the queue when nobody called close.
        atexit.register(_close_at_exit, weakref.ref(self))

    def _work(self) -> None:
        while True:
            with self._changed:
                self._changed.wait_for(lambda: self._jobs or self._closed)
                if not self._jobs:
                    return
                job = self._jobs[0]
            try:
                job.run()
            except BaseException as error:
                logger.error("dump failed: %s: %s", job.key, error)
                with self._changed:
                    self._failures.append((job.key, error))
            with self._changed:
                self._jobs.popleft()
                self._pending_bytes -= job.size
                self._changed.notify_all()
            del job  # lets go of the batch while the thread waits for the next one


def _raise(failures: list[tuple[RolloutKey, BaseException]]) -> None:
    if failures:
        raise DumpError.of(failures) from failures[0][1]


def _close_at_exit(reference: weakref.ref[BackgroundWriter]) -> None:
    writer = reference()
    if writer is not None:
        try:
            writer.close()
        except DumpError as error:
            logger.error("at exit: %s", error)
