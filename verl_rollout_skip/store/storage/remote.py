"""A run folder on an object store, through fsspec: s3://, gs://, memory:// and others.

Each file is one put, which is whole and durable when it returns. The first writer of a name wins where the store
supports conditional puts (S3, Google Cloud Storage and memory do); elsewhere the name is checked just before.
Whatever the library behind a URL raises is an ``OSError`` here: callers need not know its errors.
"""

from __future__ import annotations

import os
import time
from collections.abc import Iterator
from datetime import datetime
from typing import Any

import fsspec
import pyarrow as pa

from verl_rollout_skip.errors import EntryTooLargeError
from verl_rollout_skip.store.storage.contract import HERE, FileInfo, Staged, too_large

_BUCKETS = {"s3", "s3a", "gs", "gcs", "abfs", "az"}
_EXTRA = "Install it with pip install 'verl-rollout-skip[remote]'."
_LIBRARIES = {
    **dict.fromkeys(("s3", "s3a", "gs", "gcs"), _EXTRA),
    "hdfs": (
        "hdfs:// needs Hadoop's libhdfs and Java on this machine (JAVA_HOME, HADOOP_HOME, and CLASSPATH from 'hadoop "
        "classpath --glob'); webhdfs:// needs neither."
    ),
}
_CREDENTIALS = {
    **dict.fromkeys(("s3", "s3a"), "AWS_ACCESS_KEY_ID and AWS_SECRET_ACCESS_KEY, ~/.aws/credentials or a role"),
    **dict.fromkeys(("gs", "gcs"), "GOOGLE_APPLICATION_CREDENTIALS or a service account"),
}


class RemoteStaged(Staged):
    """Bytes that wait in memory."""

    def content(self) -> Any:
        return self.stream.getvalue()

    def discard(self) -> None:
        self.stream.close()


# What S3, local and SFTP, Google Cloud Storage, memory, and Azure call the time of the last change.
_TIMES = ("LastModified", "mtime", "updated", "created", "last_modified", "creation_time")


class RemoteStorage:
    """A run folder under a URL."""

    shows_writers = False

    def __init__(self, url: str, options: dict[str, Any]) -> None:
        self.url = url.rstrip("/")
        self._options = options
        self._open()

    def _open(self) -> None:
        # A listing that was cached would hide what other processes have committed.
        try:
            self._filesystem, root = fsspec.core.url_to_fs(self.url, use_listings_cache=False, **self._options)
        except (ImportError, OSError, ValueError) as error:
            raise OSError(self._cannot_open(error)) from error
        self._root = root.rstrip("/")
        self._pid = os.getpid()
        # There are no folders in a bucket, and asking for one could create a bucket whose name was misspelt.
        protocol = self._filesystem.protocol
        self._has_buckets = not _BUCKETS.isdisjoint([protocol] if isinstance(protocol, str) else protocol)

    @property
    def _fs(self) -> Any:
        if self._pid != os.getpid():
            # Connections do not survive a fork, and the instance that fsspec has cached is the parent's.
            fsspec.AbstractFileSystem.clear_instance_cache()
            type(self._filesystem).clear_instance_cache()
            self._open()
        return self._filesystem

    @property
    def _protocol(self) -> str:
        """That of the store itself, in a chain such as simplecache::s3://bucket too."""
        return self.url.partition("://")[0].rpartition("::")[2]

    def _cannot_open(self, error: Exception) -> str:
        advice = _LIBRARIES.get(self._protocol, "")
        if "not known" in str(error):
            advice = "Give an absolute path, or a URL of a kind that fsspec knows."
        return f"{self.url} cannot be opened: {_first_line(error)}. {advice}".rstrip()

    def _ask(self, method: str, *arguments: Any, **options: Any) -> Any:
        """Call a method of the file system."""
        try:
            return getattr(self._fs, method)(*arguments, **options)
        except OSError:
            raise
        except Exception as error:
            advice = ""
            if "credential" in f"{type(error).__name__} {error}".lower():
                known = _CREDENTIALS.get(self._protocol, "")
                advice = " This process needs credentials" + (f": {known}." if known else ".")
            message = f"{self.url} does not answer: {type(error).__name__}: {_first_line(error)}.{advice}"
            raise OSError(message) from error

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

    def info(self, folder: str, name: str) -> FileInfo | None:
        return self._find(self._path(folder, name))

    def rename(self, folder: str, old: str, new: str) -> None:
        data = self._ask("cat_file", self._path(folder, old))
        self._pipe(self._path(folder, new), data, "overwrite")
        self.delete(folder, old)

    def delete(self, folder: str, name: str) -> None:
        try:
            self._ask("rm_file", self._path(folder, name))
        except FileNotFoundError:
            pass

    def folders(self) -> Iterator[str]:
        for found in self._list(self._root):
            if found["type"] == "directory":
                yield found["name"].rstrip("/").rsplit("/", 1)[-1]

    def names(self, folder: str) -> list[str]:
        return [file.name for file in self.files(folder)]

    def files(self, folder: str) -> list[FileInfo]:
        return [_file_info(found) for found in self._list(self._path(folder)) if found["type"] == "file"]

    def where(self, folder: str = "", name: str = "") -> str:
        return "/".join(part for part in (self.url, folder, name) if part not in ("", HERE))

    def _pipe(self, path: str, data: bytes, mode: str) -> None:
        if not self._has_buckets:
            self._ask("makedirs", path.rsplit("/", 1)[0], exist_ok=True)
        # Not every server of the S3 kind heeds the condition of a put.
        if mode == "create" and self._find(path) is not None:
            raise FileExistsError(path)
        self._ask("pipe_file", path, data, mode=mode)

    def _find(self, path: str) -> FileInfo | None:
        try:
            return _file_info(self._ask("info", path, refresh=True))
        except FileNotFoundError:
            return None

    def _list(self, path: str) -> list[dict[str, Any]]:
        try:
            return list(self._ask("ls", path, detail=True, refresh=True))
        except FileNotFoundError:
            return []

    def _path(self, folder: str, name: str = "") -> str:
        return "/".join(part for part in (self._root, folder, name) if part not in ("", HERE))


def _first_line(error: Exception) -> str:
    return (str(error).splitlines() or [type(error).__name__])[0].rstrip(". ")


def _file_info(found: dict[str, Any]) -> FileInfo:
    changed = next((found[name] for name in _TIMES if found.get(name)), None)
    if changed is None:
        changed = time.time()  # unknown: what may be young is not taken for a leftover
    seconds = changed.timestamp() if isinstance(changed, datetime) else float(changed)
    return FileInfo(found["name"].rsplit("/", 1)[-1], int(found["size"]), seconds)
