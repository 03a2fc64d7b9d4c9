"""Separate file systems for tests with full or read-only disks."""

from __future__ import annotations

import os
import subprocess
from pathlib import Path


def mount(*arguments: str) -> bool:
    try:
        return subprocess.run(["mount", *arguments], capture_output=True).returncode == 0
    except FileNotFoundError:
        return False


class Disk:
    """A separate file system, or the closest substitute if mounting is not permitted."""

    def __init__(self, path: Path, size: int, mounted: bool) -> None:
        self.path = path
        self.size = size
        self.mounted = mounted
        self._ballast = path / "ballast"

    def leave_free(self, size: int) -> None:
        """Fill the disk until only this many bytes are free."""
        self._ballast.unlink(missing_ok=True)
        with self._ballast.open("wb") as file:
            file.write(bytes(max(self.free() - size, 0)))

    def make_room(self) -> None:
        self._ballast.unlink(missing_ok=True)

    def free(self) -> int:
        if self.mounted:
            found = os.statvfs(self.path)
            return found.f_bavail * found.f_frsize
        return self.size - sum(file.stat().st_size for file in self.path.rglob("*") if file.is_file())
