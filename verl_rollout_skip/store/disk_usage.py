"""``DiskUsage``: how much of ``max_disk`` is used. Several stores can share one."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable

from verl_rollout_skip.errors import DiskLimitError
from verl_rollout_skip.store import names
from verl_rollout_skip.store.sizes import format_size
from verl_rollout_skip.store.storage import Storage

_RESCAN_SECONDS = 60.0


class DiskUsage:
    """Compares the size of a folder with a limit; None for no limit. ``measure`` returns the size. It is called from
    time to time, because other processes write and prune too."""

    def __init__(self, where: str, measure: Callable[[], int], limit: int | None) -> None:
        self._where = where
        self._measure = measure
        self._limit = limit
        self._used = 0
        self._counted_at = float("-inf")
        self._counting = threading.Lock()

    def admit(self, size: int) -> None:
        """Count ``size`` more bytes, or raise ``DiskLimitError`` if the folder would become too large."""
        if self._limit is None:
            return
        with self._counting:
            if time.monotonic() - self._counted_at > _RESCAN_SECONDS or self._used + size > self._limit:
                self._used = self._measure()
                self._counted_at = time.monotonic()
            if self._used + size > self._limit:
                raise DiskLimitError(
                    f"Not written: {self._where} has {format_size(self._used)}, and {format_size(size)} more would "
                    f"exceed max_disk of {format_size(self._limit)}. Raise max_disk, delete entries, or record fewer "
                    "steps."
                )
            self._used += size


def stored_bytes(storage: Storage) -> int:
    """The size of all files in the folders of a storage, except those that are still being written."""
    files = (file for folder in storage.folders() for file in storage.files(folder))
    return sum(file.size for file in files if not file.name.startswith(names.TEMPORARY))
