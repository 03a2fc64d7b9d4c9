"""A run folder on a file system, safe against crashes, other writers and links that lead out of it.

Files are written under a temporary name in their folder, synced, and then linked to their own name: a link fails if
the name is taken, so the first writer wins without any lock. Every folder and file is opened relative to its parent
and without following symbolic links.
"""

from __future__ import annotations

import contextlib
import errno
import functools
import io
import mmap
import os
import secrets
import socket
import stat
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pyarrow as pa
import xxhash

from verl_rollout_skip.errors import EntryTooLargeError, UnsafePathError
from verl_rollout_skip.store.names import TEMPORARY
from verl_rollout_skip.store.storage.contract import FileInfo, Staged, too_large

_FOLDER_FLAGS = os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC
# Opening a named pipe would wait for a writer without O_NONBLOCK.
_READ_FLAGS = os.O_RDONLY | os.O_NOFOLLOW | os.O_CLOEXEC | os.O_NONBLOCK
_WRITE_FLAGS = os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC
_ATTEMPTS = 5
_NO_LINKS = (errno.EPERM, errno.ENOTSUP, errno.EOPNOTSUPP, errno.ENOSYS, errno.EMLINK)


class LocalStaged(Staged):
    """A temporary file in the folder where it will stay."""

    def __init__(self, folder: str, folder_fd: int) -> None:
        self.folder_fd = folder_fd
        self.temporary = f"{TEMPORARY}{_host()}-{os.getpid()}-{secrets.token_hex(6)}"
        self._fd = os.open(self.temporary, _WRITE_FLAGS, 0o644, dir_fd=folder_fd)
        try:
            super().__init__(folder, pa.OSFile(f"/dev/fd/{self._fd}", "wb"))
        except BaseException:
            self._remove()
            raise

    def content(self) -> Any:
        self.stream.close()
        if os.fstat(self._fd).st_size == 0:
            return b""
        return mmap.mmap(self._fd, 0, access=mmap.ACCESS_READ)

    def sync(self) -> None:
        """Make the bytes durable."""
        self.stream.close()
        os.fsync(self._fd)

    def discard(self) -> None:
        if self.folder_fd < 0:
            return
        with contextlib.suppress(OSError):  # the bytes are not wanted any more
            self.stream.close()
        self._remove()
        os.close(self.folder_fd)
        self.folder_fd = -1

    def _remove(self) -> None:
        os.close(self._fd)
        with contextlib.suppress(FileNotFoundError):
            os.unlink(self.temporary, dir_fd=self.folder_fd)


class LocalStorage:
    """A run folder under a local path. It is made by the first write."""

    shows_writers = True

    def __init__(self, root: str | os.PathLike[str]) -> None:
        self.root = Path(os.path.abspath(os.path.expanduser(root)))

    def stage(self, folder: str) -> Staged:
        for _ in range(_ATTEMPTS - 1):
            # Somebody may prune, and remove the empty folder between two of our calls.
            with contextlib.suppress(FileNotFoundError):
                return self._stage(folder)
        return self._stage(folder)

    def _stage(self, folder: str) -> Staged:
        _make_durable_folder(self.root)
        with self._root_fd() as root_fd:
            try:
                os.mkdir(folder, 0o755, dir_fd=root_fd)
                os.fsync(root_fd)
            except FileExistsError:
                pass
        folder_fd = self._open_folder(folder)
        try:
            return LocalStaged(folder, folder_fd)
        except BaseException:
            os.close(folder_fd)
            raise

    def publish(self, staged: Staged, name: str, replace: bool = False) -> None:
        assert isinstance(staged, LocalStaged)
        staged.sync()
        folder_fd, temporary = staged.folder_fd, staged.temporary
        if replace:
            os.rename(temporary, name, src_dir_fd=folder_fd, dst_dir_fd=folder_fd)
        else:
            self._link(folder_fd, temporary, name)
        os.fsync(folder_fd)
        staged.discard()

    def read(self, folder: str, name: str, limit: int) -> bytes:
        with self._folder_fd(folder) as folder_fd:
            try:
                fd = os.open(name, _READ_FLAGS, dir_fd=folder_fd)
            except OSError as error:
                raise self._link_error(error, folder, name) from error
        info = os.fstat(fd)
        if not stat.S_ISREG(info.st_mode):
            os.close(fd)
            raise self._unsafe(folder, name)
        with io.FileIO(fd, "rb") as file:
            if info.st_size > limit:
                raise EntryTooLargeError(too_large(self.where(folder, name), info.st_size, limit))
            return _read_exactly(file, info.st_size)

    def info(self, folder: str, name: str) -> FileInfo | None:
        try:
            with self._folder_fd(folder) as folder_fd:
                found = os.stat(name, dir_fd=folder_fd, follow_symlinks=False)
        except FileNotFoundError:
            return None
        if not stat.S_ISREG(found.st_mode):
            raise self._unsafe(folder, name)
        return FileInfo(name, found.st_size, found.st_mtime)

    def rename(self, folder: str, old: str, new: str) -> None:
        with self._folder_fd(folder) as folder_fd:
            os.rename(old, new, src_dir_fd=folder_fd, dst_dir_fd=folder_fd)
            os.fsync(folder_fd)

    def delete(self, folder: str, name: str) -> None:
        with contextlib.suppress(FileNotFoundError), self._folder_fd(folder) as folder_fd:
            os.unlink(name, dir_fd=folder_fd)
            os.fsync(folder_fd)

    def folders(self) -> Iterator[str]:
        with contextlib.suppress(FileNotFoundError), os.scandir(self.root) as entries:
            for entry in entries:
                if entry.is_dir(follow_symlinks=False):
                    yield entry.name

    def names(self, folder: str) -> list[str]:
        try:
            with self._folder_fd(folder) as folder_fd, os.scandir(folder_fd) as entries:
                return [entry.name for entry in entries if entry.is_file(follow_symlinks=False)]
        except FileNotFoundError:
            return []

    def files(self, folder: str) -> list[FileInfo]:
        found = []
        with contextlib.suppress(FileNotFoundError), self._folder_fd(folder) as folder_fd:
            for name in os.listdir(folder_fd):
                # It may be gone by now: another process commits or cleans up.
                with contextlib.suppress(FileNotFoundError):
                    info = os.stat(name, dir_fd=folder_fd, follow_symlinks=False)
                    if stat.S_ISREG(info.st_mode):
                        found.append(FileInfo(name, info.st_size, info.st_mtime))
        return found

    def where(self, folder: str = "", name: str = "") -> str:
        return str(self.root / folder / name)

    def _link(self, folder_fd: int, temporary: str, name: str) -> None:
        try:
            os.link(temporary, name, src_dir_fd=folder_fd, dst_dir_fd=folder_fd, follow_symlinks=False)
        except OSError as error:
            if error.errno not in _NO_LINKS:
                raise
            # A file system without hard links. Two writers of one name at the same moment can both pass this check;
            # then the later one wins.
            if _exists(folder_fd, name):
                raise FileExistsError(errno.EEXIST, os.strerror(errno.EEXIST), name) from None
            os.rename(temporary, name, src_dir_fd=folder_fd, dst_dir_fd=folder_fd)

    @contextlib.contextmanager
    def _root_fd(self) -> Iterator[int]:
        fd = os.open(self.root, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
        try:
            yield fd
        finally:
            os.close(fd)

    def _open_folder(self, folder: str) -> int:
        with self._root_fd() as root_fd:
            try:
                return os.open(folder, _FOLDER_FLAGS, dir_fd=root_fd)
            except OSError as error:
                raise self._link_error(error, folder) from error

    @contextlib.contextmanager
    def _folder_fd(self, folder: str) -> Iterator[int]:
        fd = self._open_folder(folder)
        try:
            yield fd
        finally:
            os.close(fd)

    def _link_error(self, error: OSError, folder: str, name: str = "") -> Exception:
        if error.errno in (errno.ELOOP, errno.ENOTDIR, errno.ENXIO):
            return self._unsafe(folder, name)
        return error

    def _unsafe(self, folder: str, name: str) -> UnsafePathError:
        return UnsafePathError(
            f"{self.where(folder, name)} is a symbolic link, or not a regular file or folder; such things in a run "
            "folder are not followed. Replace it by the real thing or remove it."
        )


def is_own_leftover(name: str) -> bool | None:
    """Of a temporary file: True if its process on this machine is gone, False if it lives, None if unknown."""
    host, _, rest = name.removeprefix(TEMPORARY).rpartition("-")[0].rpartition("-")
    if host != _host() or not rest.isdigit():
        return None
    try:
        os.kill(int(rest), 0)
    except ProcessLookupError:
        return True
    except (PermissionError, OverflowError):
        return False
    return False


def _read_exactly(file: io.FileIO, size: int) -> bytes:
    """So many bytes, or fewer if the file ends before; one read returns at most 2 GiB."""
    pieces = []
    while size > 0 and (piece := file.read(size)):
        pieces.append(piece)
        size -= len(piece)
    return pieces[0] if len(pieces) == 1 else b"".join(pieces)


def _make_durable_folder(path: Path) -> None:
    """``mkdir -p`` that survives a crash of the machine: each new folder is synced into its parent."""
    if path.is_dir():
        return
    if path.parent != path:
        _make_durable_folder(path.parent)
    path.mkdir(exist_ok=True)
    fd = os.open(path.parent, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        os.fsync(fd)
    finally:
        os.close(fd)


def _exists(folder_fd: int, name: str) -> bool:
    try:
        os.stat(name, dir_fd=folder_fd, follow_symlinks=False)
    except FileNotFoundError:
        return False
    return True


@functools.lru_cache(maxsize=1)
def _host() -> str:
    """Where a process id means this process: the machine since it was started, and the container on it."""
    identity = socket.gethostname()
    with contextlib.suppress(OSError):
        identity += Path("/proc/sys/kernel/random/boot_id").read_text() + os.readlink("/proc/self/ns/pid")
    return xxhash.xxh3_64(identity.encode()).hexdigest()


def free_bytes(path: Any) -> int:
    """Free space on the file system of a path that may not exist yet."""
    here = Path(path)
    while not here.exists() and here != here.parent:
        here = here.parent
    found = os.statvfs(here)
    return found.f_bavail * found.f_frsize
