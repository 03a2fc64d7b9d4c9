"""A local folder, safe against crashes, concurrent writers, and symbolic links that lead out of it.

Files are written under a temporary name in their folder, synced, and then hard-linked to their final name. Linking
fails if the name is taken, so the first writer wins without a lock. Every folder and file is opened relative to its
parent, without following symbolic links.
"""

from __future__ import annotations

import contextlib
import errno
import functools
import mmap
import os
import secrets
import shutil
import socket
import stat
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, ParamSpec, TypeVar

import pyarrow as pa
import xxhash

from verl_rollout_skip.errors import EntryTooLargeError, UnsafePathError
from verl_rollout_skip.store.names import TEMPORARY
from verl_rollout_skip.store.storage.contract import CHUNK, FileInfo, Staged, too_large

_ROOT_FLAGS = os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC
_FOLDER_FLAGS = _ROOT_FLAGS | os.O_NOFOLLOW
# Without O_NONBLOCK, opening a named pipe would wait for a writer.
_READ_FLAGS = os.O_RDONLY | os.O_NOFOLLOW | os.O_CLOEXEC | os.O_NONBLOCK
_WRITE_FLAGS = os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC
_APPEND_FLAGS = os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_NOFOLLOW | os.O_CLOEXEC | os.O_NONBLOCK
_ATTEMPTS = 5
_NO_LINKS = (errno.EPERM, errno.ENOTSUP, errno.EOPNOTSUPP, errno.ENOSYS, errno.EMLINK)

Result = TypeVar("Result")
Arguments = ParamSpec("Arguments")


def _again_if_stale(read: Callable[Arguments, Result]) -> Callable[Arguments, Result]:
    """Retry a read: on NFS, another machine can replace or delete a file or folder while it is open here."""

    @functools.wraps(read)
    def call(*arguments: Arguments.args, **options: Arguments.kwargs) -> Result:
        return _retry(errno.ESTALE, lambda: read(*arguments, **options))

    return call


class LocalStaged(Staged):
    """A temporary file in the folder where it will be published."""

    def __init__(self, folder: str, folder_fd: int) -> None:
        self.folder_fd = folder_fd
        self.temporary = _temporary_name()
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
        with contextlib.suppress(OSError):  # the bytes are discarded anyway
            self.stream.close()
        self._remove()
        os.close(self.folder_fd)
        self.folder_fd = -1

    def _remove(self) -> None:
        os.close(self._fd)
        with contextlib.suppress(FileNotFoundError):
            os.unlink(self.temporary, dir_fd=self.folder_fd)


class LocalStorage:
    """A folder at a local path. The first write creates it."""

    shows_writers = True
    can_append = True

    def __init__(self, root: str | os.PathLike[str]) -> None:
        self.root = Path(os.path.abspath(os.path.expanduser(root)))

    def stage(self, folder: str) -> Staged:
        # Another process may prune and remove the empty folder between two of our calls.
        return _retry(errno.ENOENT, lambda: self._stage(folder))

    def _stage(self, folder: str) -> Staged:
        self._make(folder)
        with self._folder_fd(folder) as fd:
            folder_fd = os.dup(fd)
        try:
            return LocalStaged(folder, folder_fd)
        except BaseException:
            os.close(folder_fd)
            raise

    def publish(self, staged: Staged, name: str, replace: bool = False) -> None:
        assert isinstance(staged, LocalStaged)
        staged.sync()
        if replace:
            os.rename(staged.temporary, name, src_dir_fd=staged.folder_fd, dst_dir_fd=staged.folder_fd)
        else:
            _link(staged.folder_fd, staged.temporary, name)
        os.fsync(staged.folder_fd)
        staged.discard()

    @_again_if_stale
    def read(self, folder: str, name: str, limit: int) -> bytes:
        with (
            self._folder_fd(folder) as folder_fd,
            self._no_links(folder, name),
            _opened(name, _READ_FLAGS, folder_fd) as fd,
        ):
            size = self._regular(os.fstat(fd), folder, name).st_size
            if size > limit:
                raise EntryTooLargeError(too_large(self.where(folder, name), size, limit))
            with open(fd, "rb", closefd=False) as file:
                return file.read(size)

    def chunks(self, folder: str, name: str) -> Iterator[bytes]:
        with (
            self._folder_fd(folder) as folder_fd,
            self._no_links(folder, name),
            _opened(name, _READ_FLAGS, folder_fd) as fd,
        ):
            self._regular(os.fstat(fd), folder, name)
            while data := os.read(fd, CHUNK):
                yield data

    def append(self, folder: str, name: str, data: bytes) -> None:
        _retry(errno.ENOENT, lambda: self._append(folder, name, data))

    def _append(self, folder: str, name: str, data: bytes) -> None:
        self._make(folder)
        with (
            self._folder_fd(folder) as folder_fd,
            self._no_links(folder, name),
            _opened(name, _APPEND_FLAGS, folder_fd) as fd,
        ):
            is_new = self._regular(os.fstat(fd), folder, name).st_size == 0
            view = memoryview(data)
            while view:
                view = view[os.write(fd, view) :]
            os.fsync(fd)
            if is_new:
                os.fsync(folder_fd)

    @_again_if_stale
    def info(self, folder: str, name: str) -> FileInfo | None:
        try:
            with self._folder_fd(folder) as folder_fd:
                status = os.stat(name, dir_fd=folder_fd, follow_symlinks=False)
        except FileNotFoundError:
            return None
        return _file_info(name, self._regular(status, folder, name))

    def rename(self, folder: str, seen: FileInfo, new: str) -> bool:
        with contextlib.suppress(FileNotFoundError), self._folder_fd(folder) as folder_fd:
            is_renamed = _rename_if_unchanged(folder_fd, seen, new)
            os.fsync(folder_fd)
            return is_renamed
        return False

    def delete(self, folder: str, file: str | FileInfo) -> bool:
        with contextlib.suppress(FileNotFoundError), self._folder_fd(folder) as folder_fd:
            name = file if isinstance(file, str) else _temporary_name()
            if isinstance(file, str) or _rename_if_unchanged(folder_fd, file, name):
                os.unlink(name, dir_fd=folder_fd)
                os.fsync(folder_fd)
                return True
        return False

    def folders(self) -> Iterator[str]:
        with contextlib.suppress(FileNotFoundError), os.scandir(self.root) as entries:
            for entry in entries:
                if entry.is_dir(follow_symlinks=False):
                    yield entry.name

    @_again_if_stale
    def names(self, folder: str) -> list[str]:
        try:
            with self._folder_fd(folder) as folder_fd, os.scandir(folder_fd) as entries:
                return [entry.name for entry in entries if entry.is_file(follow_symlinks=False)]
        except FileNotFoundError:
            return []

    @_again_if_stale
    def files(self, folder: str) -> list[FileInfo]:
        infos = []
        with contextlib.suppress(FileNotFoundError), self._folder_fd(folder) as fd, os.scandir(fd) as entries:
            for entry in entries:
                if entry.is_file(follow_symlinks=False):
                    with contextlib.suppress(FileNotFoundError):  # removed by another process in the meantime
                        infos.append(_file_info(entry.name, entry.stat(follow_symlinks=False)))
        return infos

    def where(self, folder: str = "", name: str = "") -> str:
        return str(self.root / folder / name)

    def _make(self, folder: str) -> None:
        _make_durable(self.root)
        with _opened(self.root) as root_fd, contextlib.suppress(FileExistsError):
            os.mkdir(folder, 0o755, dir_fd=root_fd)
            os.fsync(root_fd)

    @contextlib.contextmanager
    def _folder_fd(self, folder: str) -> Iterator[int]:
        with contextlib.ExitStack() as stack:
            with _opened(self.root) as root_fd, self._no_links(folder):
                fd = stack.enter_context(_opened(folder, _FOLDER_FLAGS, root_fd))
            yield fd

    @contextlib.contextmanager
    def _no_links(self, folder: str, name: str = "") -> Iterator[None]:
        """Convert errors of the system about symbolic links and special files to ``UnsafePathError``."""
        try:
            yield
        except OSError as error:
            if error.errno in (errno.ELOOP, errno.ENOTDIR, errno.ENXIO):
                raise self._unsafe(folder, name) from error
            raise

    def _regular(self, status: os.stat_result, folder: str, name: str) -> os.stat_result:
        if not stat.S_ISREG(status.st_mode):
            raise self._unsafe(folder, name)
        return status

    def _unsafe(self, folder: str, name: str) -> UnsafePathError:
        return UnsafePathError(
            f"{self.where(folder, name)} is a symbolic link or a special file, which is not allowed in the store's "
            "folder. Replace it with the real file or folder, or remove it."
        )


def writer_has_exited(name: str) -> bool | None:
    """Whether the pid that wrote a temporary file has ended; None if it ran on another machine or is unknown."""
    host, _, pid = name.removeprefix(TEMPORARY).rpartition("-")[0].rpartition("-")
    if host != _host() or not pid.isdigit():
        return None
    try:
        os.kill(int(pid), 0)
    except ProcessLookupError:
        return True
    except (PermissionError, OverflowError):
        pass
    return False


def free_bytes(path: Any) -> int:
    """The free space on the file system of a path, which does not have to exist."""
    start = Path(path)
    return shutil.disk_usage(next(folder for folder in (start, *start.parents) if folder.exists())).free


@contextlib.contextmanager
def _opened(path: str | Path, flags: int = _ROOT_FLAGS, dir_fd: int | None = None) -> Iterator[int]:
    fd = os.open(path, flags, dir_fd=dir_fd)
    try:
        yield fd
    finally:
        os.close(fd)


def _retry(number: int, function: Callable[[], Result]) -> Result:
    """Call a function, and retry a few times if it raises an ``OSError`` with this number."""
    for _ in range(_ATTEMPTS - 1):
        try:
            return function()
        except OSError as error:
            if error.errno != number:
                raise
    return function()


def _link(folder_fd: int, temporary: str, name: str) -> None:
    try:
        os.link(temporary, name, src_dir_fd=folder_fd, dst_dir_fd=folder_fd, follow_symlinks=False)
    except OSError as error:
        if error.errno not in _NO_LINKS:
            raise
        # The file system has no hard links. If two writers of the same name pass this check at the same moment, the
        # later one wins.
        if os.access(name, os.F_OK, dir_fd=folder_fd, follow_symlinks=False):
            raise FileExistsError(errno.EEXIST, os.strerror(errno.EEXIST), name) from None
        os.rename(temporary, name, src_dir_fd=folder_fd, dst_dir_fd=folder_fd)


def _rename_if_unchanged(folder_fd: int, seen: FileInfo, new: str) -> bool:
    os.rename(seen.name, new, src_dir_fd=folder_fd, dst_dir_fd=folder_fd)
    if _file_info(new, os.stat(new, dir_fd=folder_fd, follow_symlinks=False)).version == seen.version:
        return True
    # Another process has replaced the file. Restore its file, unless there is an even newer one.
    with contextlib.suppress(FileExistsError):
        _link(folder_fd, new, seen.name)
    with contextlib.suppress(FileNotFoundError):
        os.unlink(new, dir_fd=folder_fd)
    return False


def _make_durable(folder: Path) -> None:
    """Like ``mkdir -p``, but survives a crash of the machine: the parent of each new folder is synced."""
    if folder.is_dir():
        return
    if folder.parent != folder:
        _make_durable(folder.parent)
    folder.mkdir(exist_ok=True)
    with _opened(folder.parent) as parent_fd:
        os.fsync(parent_fd)


def _file_info(name: str, status: os.stat_result) -> FileInfo:
    return FileInfo(name, status.st_size, status.st_mtime, f"{status.st_ino} {status.st_mtime_ns}")


def _temporary_name() -> str:
    return f"{TEMPORARY}{_host()}-{os.getpid()}-{secrets.token_hex(6)}"


@functools.lru_cache(maxsize=1)
def _host() -> str:
    """Identify the scope of a pid: this machine since its last boot, and the container on it."""
    identity = socket.gethostname()
    with contextlib.suppress(OSError):
        identity += Path("/proc/sys/kernel/random/boot_id").read_text() + os.readlink("/proc/self/ns/pid")
    return xxhash.xxh3_64_hexdigest(identity.encode())
