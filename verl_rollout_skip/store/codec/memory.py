"""Zeroed memory for the tensors of a load, on huge pages if they are cheap.

Page faults dominate the cost of loading a large batch, because nearly all of its memory is new. If the machine has a
huge page ready, it takes a fifth of the time of the 512 small pages that it replaces. But in a virtual machine that
returns free memory to its host, it can take ten times as long. There, small pages are better: they are ready more
often, and zero padding needs none at all. So the time is measured while pages are allocated.
"""

from __future__ import annotations

import contextlib
import math
import mmap
import time
from typing import TYPE_CHECKING

import numpy as np

if TYPE_CHECKING:
    from numpy.typing import DTypeLike

_LARGE = 4 << 20
_STEP = 4 << 20
_HUGE_PAGE = 2 << 20
_SMALL_PAGE = 4 << 10
# Below the cost of small pages. Measured for 2 MB: small pages 0.5 ms; a huge page 0.09 ms if ready, else 1 to 5 ms.
_MAX_SECONDS_PER_BYTE = 0.4e-3 / _HUGE_PAGE


class ZeroedMemory:
    """Allocates the arrays of one load. After the first expensive huge page, it uses only small pages."""

    def __init__(self, huge_pages: bool = True) -> None:
        self._huge_pages = huge_pages

    def zeros(self, shape: tuple[int, ...], dtype: DTypeLike) -> np.ndarray:
        """Like ``np.zeros``. Thread-safe."""
        size = math.prod(shape) * np.dtype(dtype).itemsize
        if size < _LARGE or not hasattr(mmap, "MADV_HUGEPAGE"):
            return np.zeros(shape, dtype)
        rounded_size = -(-size // _HUGE_PAGE) * _HUGE_PAGE
        memory = mmap.mmap(-1, rounded_size + _HUGE_PAGE, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
        content = np.frombuffer(memory, np.uint8)
        start = -content.ctypes.data % _HUGE_PAGE
        # A kernel without huge pages rejects the advice, but does not need it either.
        with contextlib.suppress(OSError):
            memory.madvise(mmap.MADV_NOHUGEPAGE)
            self._take_huge_pages(memory, content, slice(start, start + rounded_size))
        return content[start : start + size].view(dtype).reshape(shape)

    def _take_huge_pages(self, memory: mmap.mmap, content: np.ndarray, span: slice) -> None:
        """Back this range of the memory with huge pages, step by step, as long as they are cheap."""
        for start in range(span.start, span.stop, _STEP):
            if not self._huge_pages:
                return
            step = content[start : min(start + _STEP, span.stop)]
            memory.madvise(mmap.MADV_HUGEPAGE, start, len(step))
            started = time.thread_time()
            step[::_SMALL_PAGE] = 0
            self._huge_pages = time.thread_time() - started < len(step) * _MAX_SECONDS_PER_BYTE
