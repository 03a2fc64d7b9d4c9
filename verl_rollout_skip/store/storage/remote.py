"""A folder on an object store, through fsspec: s3://, gs://, memory:// and others.

Each file is written by one put, which is complete and durable when it returns. The first writer of a name wins if the
store supports conditional puts (S3, Google Cloud Storage and memory do). Otherwise, the name is checked just before the
put. Errors of the library behind a URL are raised as ``OSError``, so that callers do not depend on the library.
"""

from __future__ import annotations

import contextlib
import inspect
import os
import time
from collections.abc import Iterator
from datetime import datetime
from typing import Any

import fsspec
import pyarrow as pa

from verl_rollout_skip.errors import EntryTooLargeError
from verl_rollout_skip.store.storage.contract import HERE, FileInfo, Staged, too_large

_CHUNK = 8 << 20  # each piece is a request
_BUCKETS = {"s3", "s3a", "gs", "gcs", "abfs", "az"}
_LIBRARIES = {
    **dict.fromkeys(("s3", "s3a", "gs", "gcs"), "Install it with pip install 'verl-rollout-skip[remote]'."),
    "hdfs": (
        "hdfs:// needs Hadoop's libhdfs and Java on this machine (JAVA_HOME, HADOOP_HOME, and CLASSPATH from 'hadoop "
        "classpath --glob'); webhdfs:// needs neither."
    ),
}
_CREDENTIALS = {
    **dict.fromkeys(("s3", "s3a"), ": AWS_ACCESS_KEY_ID and AWS_SECRET_ACCESS_KEY, ~/.aws/credentials or a role"),
    **dict.fromkeys(("gs", "gcs"), ": GOOGLE_APPLICATION_CREDENTIALS or a service account"),
}
# What S3, local files and SFTP, Google Cloud Storage, memory, and Azure call the modification time.
_TIMES = ("LastModified", "mtime", "updated", "created", "last_modified", "creation_time")


class RemoteStaged(Staged):
    """Bytes that stay in memory until they are published."""

    def content(self) -> Any:
        return self.stream.getvalue()

    def discard(self) -> None:
        self.stream.close()


class RemoteStorage:
    """A folder at a URL."""

    shows_writers = False
    can_append = False

    def __init__(self, url: str, options: dict[str, Any]) -> None:
        self.url = url.rstrip("/")
        self._protocol = url.partition("://")[0].rpartition("::")[2]
        self._options = options
        self._open()

    def _open(self) -> None:
        # A cached listing would hide entries that other processes have committed.
        advice = _LIBRARIES.get(self._protocol, "")
        with self._as_os_error("cannot be opened:", advice, passthrough=()):
            self._filesystem, root = fsspec.core.url_to_fs(self.url, use_listings_cache=False, **self._options)
        self._root = root.rstrip("/")
        self._pid = os.getpid()
        # WebHDFS does not cache listings, so it has no option to refresh them.
        parameters = inspect.signature(self._filesystem.info).parameters
        self._no_cache = {"refresh": True} if {"refresh", "kwargs"} & parameters.keys() else {}
        # Buckets have no folders, and if a name is misspelled, makedirs could create a bucket.
        protocol = self._filesystem.protocol
        self._has_buckets = not _BUCKETS.isdisjoint([protocol] if isinstance(protocol, str) else protocol)

    @property
    def _fs(self) -> Any:
        if self._pid != os.getpid():
            # Connections do not survive a fork, and fsspec caches the parent's instance.
            fsspec.AbstractFileSystem.clear_instance_cache()
            type(self._filesystem).clear_instance_cache()
            self._open()
        return self._filesystem

    @contextlib.contextmanager
    def _as_os_error(self, problem: str, advice: str = "", passthrough: Any = OSError) -> Iterator[None]:
        """Convert any error of the library behind the URL to an ``OSError`` that names the URL and says what to do."""
        try:
            yield
        except passthrough:
            raise
        except Exception as error:
            if "not known" in str(error):
                advice = "Use an absolute path, or a URL that fsspec supports."
            elif "credential" in f"{type(error).__name__} {error}".lower():
                sources = _CREDENTIALS.get(self._protocol, "")
                advice = f"This process needs credentials{sources}."
            first_line = (str(error).splitlines() or [""])[0].rstrip(". ")
            raise OSError(f"{self.url} {problem} {type(error).__name__}: {first_line}. {advice}".rstrip()) from error

    def _ask(self, method: str, *arguments: Any, **options: Any) -> Any:
        """Call a method of the file system, with its errors converted."""
        with self._as_os_error("cannot be accessed:"):
            return getattr(self._fs, method)(*arguments, **options)

    def stage(self, folder: str) -> Staged:
        return RemoteStaged(folder, pa.BufferOutputStream())

    def publish(self, staged: Staged, name: str, replace: bool = False) -> None:
        data = staged.content().to_pybytes()
        self._pipe(self._path(staged.folder, name), data, "overwrite" if replace else "create")

    def read(self, folder: str, name: str, limit: int) -> bytes:
        info = self.info(folder, name)
        if info is None:
            raise FileNotFoundError(self.where(folder, name))
        if info.size > limit:
            raise EntryTooLargeError(too_large(self.where(folder, name), info.size, limit))
        return bytes(self._ask("cat_file", self._path(folder, name)))

    def chunks(self, folder: str, name: str) -> Iterator[bytes]:
        size = self._ask("info", self._path(folder, name), **self._no_cache)["size"]
        for start in range(0, size, _CHUNK):
            end = min(start + _CHUNK, size)
            yield bytes(self._ask("cat_file", self._path(folder, name), start=start, end=end))

    def append(self, folder: str, name: str, data: bytes) -> None:
        raise OSError(
            f"{self.where(folder, name)} is on an object store, which cannot append. Publish the whole file again."
        )

    def info(self, folder: str, name: str) -> FileInfo | None:
        return self._find(self._path(folder, name))

    def rename(self, folder: str, seen: FileInfo, new: str) -> bool:
        try:
            data = self._ask("cat_file", self._path(folder, seen.name))
        except FileNotFoundError:
            return False
        self._pipe(self._path(folder, new), data, "overwrite")
        if self.delete(folder, seen):
            return True
        self.delete(folder, new)
        return False

    def delete(self, folder: str, file: str | FileInfo) -> bool:
        name = file.name if isinstance(file, FileInfo) else file
        if isinstance(file, FileInfo):
            current = self.info(folder, name)
            if current is None or (current.size, current.version) != (file.size, file.version):
                return False
        try:
            self._ask("rm_file", self._path(folder, name))
            return True
        except FileNotFoundError:
            return False

    def folders(self) -> Iterator[str]:
        for item in self._list(self._root):
            if item["type"] == "directory":
                yield item["name"].rstrip("/").rsplit("/", 1)[-1]

    def names(self, folder: str) -> list[str]:
        return [file.name for file in self.files(folder)]

    def files(self, folder: str) -> list[FileInfo]:
        return [_file_info(item) for item in self._list(self._path(folder)) if item["type"] == "file"]

    def where(self, folder: str = "", name: str = "") -> str:
        return "/".join(part for part in (self.url, folder, name) if part not in ("", HERE))

    def _pipe(self, path: str, data: bytes, mode: str) -> None:
        if not self._has_buckets:
            self._ask("makedirs", path.rsplit("/", 1)[0], exist_ok=True)
        # Not every S3-compatible server honors conditional puts.
        if mode == "create" and self._find(path) is not None:
            raise FileExistsError(path)
        self._ask("pipe_file", path, data, mode=mode)

    def _find(self, path: str) -> FileInfo | None:
        try:
            return _file_info(self._ask("info", path, **self._no_cache))
        except FileNotFoundError:
            return None

    def _list(self, path: str) -> list[dict[str, Any]]:
        try:
            return list(self._ask("ls", path, detail=True, refresh=True))
        except FileNotFoundError:
            return []

    def _path(self, folder: str, name: str = "") -> str:
        return "/".join(part for part in (self._root, folder, name) if part not in ("", HERE))


def _file_info(details: dict[str, Any]) -> FileInfo:
    changed = next((details[name] for name in _TIMES if details.get(name)), None)
    seconds = changed.timestamp() if isinstance(changed, datetime) else changed
    if seconds is None and "modificationTime" in details:  # WebHDFS
        seconds = details["modificationTime"] / 1000
    etag = details.get("ETag") or details.get("etag") or details.get("fileId")
    # S3 returns fractions of a second in a listing, but not for a single file.
    version = f"{etag} {seconds and int(seconds)}" if etag else str(seconds)
    if seconds is None:
        seconds = time.time()  # unknown: treat the file as new, so that it is never pruned as a leftover
    return FileInfo(details["name"].rsplit("/", 1)[-1], int(details["size"]), float(seconds), version)
