"""The processes of a training: their total resource usage, and how to end them all."""

from __future__ import annotations

import contextlib
import ctypes
import os
import re
import time
from collections.abc import Iterator

import psutil

_PR_SET_CHILD_SUBREAPER = 36
_ENGINES = re.compile(r"(?:ray|VLLM)::(CPUServer|vLLMHttpServer|EngineCore)")


class Usage:
    """CPU, memory and engine processes of a process and its descendants, sampled while it runs."""

    def __init__(self, pid: int, memory_interval: float = 2.0) -> None:
        self.peak_bytes = 0
        self.engines: set[str] = set()
        self._pid = pid
        self._cpu_seconds: dict[int, float] = {}
        self._memory_interval = memory_interval
        self._memory_due = 0.0

    @property
    def cpu_seconds(self) -> float:
        return sum(self._cpu_seconds.values())

    def sample(self) -> None:
        # Reading the memory of a process slows it down, so this happens less often.
        with_memory = time.monotonic() >= self._memory_due
        total = 0
        for process in _tree(self._pid):
            with contextlib.suppress(psutil.Error):  # it has just ended
                times = process.cpu_times()
                self._cpu_seconds[process.pid] = times.user + times.system
                if engine := _ENGINES.match(" ".join(process.cmdline())):
                    self.engines.add(engine[1])
                total += process.memory_full_info().pss if with_memory else 0
        if with_memory:
            self.peak_bytes = max(self.peak_bytes, total)
            self._memory_due = time.monotonic() + self._memory_interval


def keep_descendants() -> None:
    """Make this process adopt descendants whose own parent ends, so that none of them is lost."""
    if ctypes.CDLL(None, use_errno=True).prctl(_PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0) != 0:
        raise OSError(ctypes.get_errno(), "prctl(PR_SET_CHILD_SUBREAPER) failed")


def end_descendants(grace_seconds: float = 3.0) -> None:
    """End all descendants of this process, first with SIGTERM, then the remaining ones with SIGKILL."""
    deadline = time.monotonic() + grace_seconds
    while running := list(_tree(psutil.Process().pid, itself=False)):
        for process in running:
            with contextlib.suppress(psutil.Error):
                process.terminate() if time.monotonic() < deadline else process.kill()
        psutil.wait_procs(running, timeout=0.5)
    with contextlib.suppress(ChildProcessError):
        while os.waitpid(-1, os.WNOHANG) != (0, 0):  # no one else waits for adopted processes
            pass


def _tree(pid: int, itself: bool = True) -> Iterator[psutil.Process]:
    with contextlib.suppress(psutil.NoSuchProcess):
        top = psutil.Process(pid)
        for process in [top, *top.children(recursive=True)] if itself else top.children(recursive=True):
            with contextlib.suppress(psutil.NoSuchProcess):
                if process.status() != psutil.STATUS_ZOMBIE:
                    yield process
