"""The contract of a storage. ``commit.py`` relies on these guarantees:

- A storage is one folder. It contains folders, and they contain files. There are no deeper levels. Names never contain
  a slash.
- ``stage`` collects bytes without a visible name. ``publish`` turns them into a file atomically and durably: a reader
  sees all of it or nothing. Without ``replace``, it raises ``FileExistsError`` if the name is taken.
- After ``publish``, ``rename`` or ``delete`` returns, a crash of the process or the machine cannot undo it.
- ``read`` returns a consistent version of the file, and raises ``FileNotFoundError`` if there is none.
- ``append`` adds bytes to the end of a file, durably. A crash may leave only the first of them. Not every storage can.
- ``rename`` and ``delete`` do nothing if the file was replaced since the caller saw it. On an object store these are
  two requests, and a replacement between them is lost.
- Nothing outside the folder is ever read or written.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, Protocol

import pyarrow as pa
import xxhash

from verl_rollout_skip.store.sizes import format_size

CHUNK = 1 << 20
"""The size of the pieces in which ``chunks`` reads a file."""
HERE = "."
"""The name of the storage's folder itself."""


@dataclass(frozen=True)
class FileInfo:
    """A file in a folder: its name, size, and modification time (seconds since 1970).

    ``version`` changes when the file is replaced, even by the same bytes.
    """

    name: str
    size: int
    changed: float
    version: str = ""


class Staged(ABC):
    """Bytes that are not published yet. Leaving the ``with`` block without publishing discards them.

    ``stream`` is an Arrow stream, and the digest is computed at the end in one call, so writing never waits for the
    GIL, which a busy training thread releases only every five milliseconds.
    """

    def __init__(self, folder: str, stream: pa.NativeFile) -> None:
        self.folder = folder
        self.stream = stream

    def write(self, data: Any) -> None:
        """Append bytes."""
        self.stream.write(data)

    @abstractmethod
    def content(self) -> Any:
        """All written bytes as a buffer. Nothing can be written afterwards."""

    def measure(self) -> tuple[int, str]:
        """Size and digest of all written bytes. Nothing can be written afterwards."""
        with memoryview(self.content()) as view:
            return view.nbytes, digest_of(view)

    @abstractmethod
    def discard(self) -> None:
        """Discard the bytes. Does nothing if they were published."""

    def __enter__(self) -> Staged:
        return self

    def __exit__(self, *error: object) -> None:
        self.discard()


def digest_of(data: Any) -> str:
    """The digest of a file's bytes."""
    return xxhash.xxh3_128_hexdigest(data)


class Storage(Protocol):
    """See the module docstring for the guarantees of each method."""

    shows_writers: bool
    """Whether staged files are visible in their folder, with names that start with ``names.TEMPORARY``."""
    can_append: bool

    def stage(self, folder: str) -> Staged: ...

    def publish(self, staged: Staged, name: str, replace: bool = False) -> None: ...

    def read(self, folder: str, name: str, limit: int) -> Any:
        """The bytes of a file. Raises ``EntryTooLargeError`` if there are more than ``limit``."""

    def chunks(self, folder: str, name: str) -> Iterator[bytes]:
        """The bytes of a file in small pieces. The file may grow meanwhile. Raises ``FileNotFoundError``."""

    def append(self, folder: str, name: str, data: bytes) -> None:
        """Append to a file, and create it if there is none. Only if ``can_append``, and by one process per file."""

    def info(self, folder: str, name: str) -> FileInfo | None: ...

    def rename(self, folder: str, seen: FileInfo, new: str) -> bool:
        """Rename a file if it has not been replaced since it was seen. Overwrites ``new``. Returns whether it did."""

    def delete(self, folder: str, file: str | FileInfo) -> bool:
        """Delete a file: by name, or only if it has not been replaced since it was seen. Returns whether it did."""

    def folders(self) -> Iterator[str]: ...

    def names(self, folder: str) -> list[str]:
        """The names of the files in a folder; empty if there is no such folder."""

    def files(self, folder: str) -> list[FileInfo]:
        """The files in a folder; empty if there is no such folder."""

    def where(self, folder: str = "", name: str = "") -> str:
        """A path or URL for messages."""


def too_large(where: str, size: int, limit: int) -> str:
    """The message for a file that is too large to be read."""
    return (
        f"{where} has {format_size(size)}, but at most {format_size(limit)} may be read. If it is supposed to be that "
        "large, raise max_load_bytes."
    )
