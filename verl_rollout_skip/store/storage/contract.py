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

from abc import ABC, abstractmethod
from collections.abc import Iterator
from dataclasses import dataclass
from types import TracebackType
from typing import Any, Protocol

import pyarrow as pa
import xxhash

from verl_rollout_skip.sizes import format_size

HERE = "."
"""The folder that stands for the run folder itself."""


@dataclass(frozen=True)
class FileInfo:
    """A file in a folder: its name, its size, and when it was last changed (seconds since 1970)."""

    name: str
    size: int
    changed: float


class Staged(ABC):
    """Bytes on their way. Leaving the ``with`` block without having published them discards them.

    ``stream`` is Arrow's own, and the digest is taken at the end in one call: writing never waits for the interpreter
    lock, which a busy training thread gives up only every five milliseconds.
    """

    def __init__(self, folder: str, stream: pa.NativeFile) -> None:
        self.folder = folder
        self.stream = stream

    def write(self, data: Any) -> None:
        """Write everything at once."""
        self.stream.write(data)

    @abstractmethod
    def content(self) -> Any:
        """Everything that was written, as a buffer. Nothing can be written afterwards."""

    def measure(self) -> tuple[int, str]:
        """Size and digest of everything that was written. Nothing can be written afterwards."""
        with memoryview(self.content()) as view:
            return view.nbytes, digest_of(view)

    @abstractmethod
    def discard(self) -> None:
        """Forget the bytes; nothing happens if they were published."""

    def __enter__(self) -> Staged:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.discard()


def digest_of(data: Any) -> str:
    """The digest of a file's bytes."""
    return xxhash.xxh3_128_hexdigest(data)


class Storage(Protocol):
    """See the module's docstring for what each method promises."""

    shows_writers: bool
    """Whether files that are staged show in their folder, under names that begin with ``names.TEMPORARY``."""

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
