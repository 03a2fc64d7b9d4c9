"""Where the bytes of a run folder are: a protocol, and what is common to its implementations.

The contract, which ``commit.py`` rests on:

- A run folder has folders, and they have files; no deeper. Names never contain a slash.
- ``stage`` collects bytes under no visible name. ``publish`` makes them a file, whole and durable, at once: a reader
  sees all of it or nothing. Without ``replace`` it raises ``FileExistsError`` if the name is taken, whoever took it.
- When ``publish``, ``rename`` or ``delete`` has returned, a crash of the process or of the machine cannot undo it.
- ``read`` returns the bytes as they were at one moment, and raises ``FileNotFoundError`` if there is no such file.
- Nothing outside the run folder is ever read or written.
"""

from __future__ import annotations

import io
from collections.abc import Iterator
from dataclasses import dataclass
from types import TracebackType
from typing import IO, Any, Protocol

import pyarrow as pa
import xxhash

from verl_rollout_skip.sizes import format_size

# pyarrow hands over pages of any size; few large writes mean few turns at the interpreter lock.
_BUFFER_BYTES = 4 << 20
HERE = "."
"""The folder that stands for the run folder itself."""


@dataclass(frozen=True)
class FileInfo:
    """A file in a folder: its name, its size, and when it was last changed (seconds since 1970)."""

    name: str
    size: int
    changed: float


class Staged:
    """Bytes on their way: a stream to write to that counts and digests what passes.

    Leaving the ``with`` block without having published it discards it.
    """

    def __init__(self, folder: str, file: IO[bytes]) -> None:
        self.folder = folder
        self.size = 0
        self._file = file
        self._hash = xxhash.xxh3_128()
        self.stream = pa.BufferedOutputStream(pa.PythonFile(_Tap(self), mode="w"), _BUFFER_BYTES)

    @property
    def digest(self) -> str:
        """The digest of everything that was written, once the stream is closed."""
        return str(self._hash.hexdigest())

    def write(self, data: bytes) -> None:
        """Write everything at once and close the stream."""
        self.stream.write(data)
        self.stream.close()

    def _pass_on(self, data: Any) -> int:
        size = len(data)
        self._hash.update(data)
        while len(data):
            # A raw file may take less than it was given: then the next write says why.
            data = data[self._file.write(data) :]
        self.size += size
        return size

    def discard(self) -> None:
        """Forget the bytes; nothing happens if they were published."""

    def __enter__(self) -> Staged:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.discard()


class Storage(Protocol):
    """See the module's docstring for what each method promises."""

    def stage(self, folder: str) -> Staged: ...

    def publish(self, staged: Staged, name: str, replace: bool = False) -> None: ...

    def read(self, folder: str, name: str, limit: int) -> Any:
        """The bytes of a file; ``EntryTooLargeError`` if there are more than ``limit``."""

    def info(self, folder: str, name: str) -> FileInfo | None: ...

    def rename(self, folder: str, old: str, new: str) -> None:
        """Replaces ``new``; raises ``FileNotFoundError`` if ``old`` is not there."""

    def delete(self, folder: str, name: str) -> None:
        """No error if it is not there."""

    def folders(self) -> Iterator[str]: ...

    def names(self, folder: str) -> list[str]:
        """The names of the files of a folder; empty if there is no such folder."""

    def files(self, folder: str) -> list[FileInfo]:
        """Empty if there is no such folder."""

    def where(self, folder: str = "", name: str = "") -> str:
        """A path or URL for messages."""


def too_large(where: str, size: int, limit: int) -> str:
    """The message for a file that is not read because of its size."""
    return (
        f"{where} has {format_size(size)} and {format_size(limit)} may be read. If it is meant to be that large, raise "
        "max_load_bytes."
    )


class _Tap(io.RawIOBase):
    """The side of ``Staged`` that pyarrow writes to."""

    def __init__(self, staged: Staged) -> None:
        super().__init__()
        self._staged = staged

    def writable(self) -> bool:
        return True

    def write(self, data: Any) -> int:
        return self._staged._pass_on(memoryview(data))
