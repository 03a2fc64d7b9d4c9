"""The contract of a storage: the guarantees that ``commit.py`` relies on.

- A storage is one folder, which contains folders of files and no deeper levels. Names never contain a slash.
- ``stage`` collects bytes that are not visible to readers yet. ``publish`` turns them into a file atomically and
  durably: a reader sees the whole file or nothing. Without ``replace``, it raises ``FileExistsError`` if the name is
  taken.
- After ``publish``, ``rename`` or ``delete`` returns, a crash of the process or the machine cannot undo it.
- ``read`` returns one consistent version of the file, and raises ``FileNotFoundError`` if there is none.
- ``append`` durably adds bytes to the end of a file. After a crash, the file may contain only the first of these bytes.
  Not every storage can append.
- ``rename`` and ``delete`` do nothing if the file has been replaced since the caller saw it. On an object store, each
  takes two requests, and a file that is replaced between them is lost.
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
"""How many bytes ``chunks`` reads at once."""
HERE = "."
"""The name of the storage's folder itself."""


@dataclass(frozen=True)
class FileInfo:
    """A file in a folder: its name, size, and modification time (seconds since 1970).

    ``version`` changes whenever the file is replaced, even by the same bytes.
    """

    name: str
    size: int
    changed: float
    version: str = ""


class Staged(ABC):
    """Bytes that are not published yet. If the ``with`` block ends before they are, they are discarded.

    ``stream`` is an Arrow stream, and the digest is computed in one call at the end. So writing does not wait for the
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
        """All written bytes as a buffer. Ends writing."""

    def measure(self) -> tuple[int, str]:
        """The size and the digest of all written bytes. Ends writing."""
        with memoryview(self.content()) as view:
            return view.nbytes, digest_of(view)

    @abstractmethod
    def discard(self) -> None:
        """Discard the bytes. Does nothing if they have been published."""

    def __enter__(self) -> Staged:
        return self

    def __exit__(self, *error: object) -> None:
        self.discard()


def digest_of(data: Any) -> str:
    """The digest of a file's bytes."""
    return xxhash.xxh3_128_hexdigest(data)


class Storage(Protocol):
    """The module docstring lists the guarantees of each method."""

    shows_writers: bool
    """Whether staged files are visible in their folder, with names that start with ``names.TEMPORARY``."""
    can_append: bool

    def stage(self, folder: str) -> Staged: ...

    def publish(self, staged: Staged, name: str, replace: bool = False) -> None: ...

    def read(self, folder: str, name: str, limit: int) -> Any:
        """The content of a file. Raises ``EntryTooLargeError`` if it has more than ``limit`` bytes."""

    def chunks(self, folder: str, name: str) -> Iterator[bytes]:
        """The content of a file in small pieces. The file may grow while it is read."""

    def append(self, folder: str, name: str, data: bytes) -> None:
        """Append to a file, or create it. Requires ``can_append``. Only one process may append to a file."""

    def info(self, folder: str, name: str) -> FileInfo | None: ...

    def rename(self, folder: str, seen: FileInfo, new: str) -> bool:
        """Rename a file, unless it was replaced since it was seen. Overwrites ``new``. Returns whether it did so."""

    def delete(self, folder: str, file: str | FileInfo) -> bool:
        """Delete a file: by name, or unless it was replaced since it was seen. Returns whether it did so."""

    def folders(self) -> Iterator[str]: ...

    def names(self, folder: str) -> list[str]:
        """The names of the files in a folder, empty if the folder does not exist."""

    def files(self, folder: str) -> list[FileInfo]:
        """The files in a folder, empty if the folder does not exist."""

    def where(self, folder: str = "", name: str = "") -> str:
        """The path or URL of a file, a folder, or the storage itself, for messages."""


def too_large(where: str, size: int, limit: int) -> str:
    """The message for a file that is too large to read."""
    return (
        f"{where} has {format_size(size)}, but at most {format_size(limit)} may be read. If it is supposed to be that "
        "large, raise max_load_bytes."
    )
