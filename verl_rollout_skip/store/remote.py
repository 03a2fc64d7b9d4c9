"""A run folder on an object store, through fsspec: s3://, gs://, memory:// and others.

Each file is one put, which is whole and durable when it returns. The first writer of a name wins where the store
supports conditional puts (S3, Google Cloud Storage and memory do); elsewhere the name is checked just before.
"""

from __future__ import annotations

import io
import os
from collections.abc import Iterator
from datetime import datetime
from typing import Any

import fsspec

from verl_rollout_skip.errors import EntryTooLargeError
from verl_rollout_skip.store.storage import HERE, FileInfo, Staged, too_large

_BUCKETS = {"s3", "s3a", "gs", "gcs", "abfs", "az"}


class RemoteStorage:
    """A run folder under a URL."""

    def __init__(self, url: str, options: dict[str, Any]) -> None:
        self.url = url.rstrip("/")
        self._options = options
        self._open()

    def _open(self) -> None:
        # A listing that was cached would hide what other processes have committed.
        self._filesystem, root = fsspec.core.url_to_fs(self.url, use_listings_cache=False, **self._options)
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

    def stage(self, folder: str) -> Staged:
        return Staged(folder, io.BytesIO())

    def publish(self, staged: Staged, name: str, replace: bool = False) -> None:
        if not staged.stream.closed:
            staged.stream.close()
        assert isinstance(staged._file, io.BytesIO)
        self._pipe(self._path(staged.folder, name), staged._file.getvalue(), "overwrite" if replace else "create")

    def read(self, folder: str, name: str, limit: int) -> bytes:
        info = self.info(folder, name)
        if info is None:
            raise FileNotFoundError(self.where(folder, name))
        if info.size > limit:
            raise EntryTooLargeError(too_large(self.where(folder, name), info.size, limit))
        return bytes(self._fs.cat_file(self._path(folder, name)))

    def info(self, folder: str, name: str) -> FileInfo | None:
        return self._find(self._path(folder, name))

    def rename(self, folder: str, old: str, new: str) -> None:
        data = self._fs.cat_file(self._path(folder, old))
        self._pipe(self._path(folder, new), data, "overwrite")
        self.delete(folder, old)

    def delete(self, folder: str, name: str) -> None:
        try:
            self._fs.rm_file(self._path(folder, name))
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
            self._fs.makedirs(path.rsplit("/", 1)[0], exist_ok=True)
        # Not every server of the S3 kind heeds the condition of a put.
        if mode == "create" and self._find(path) is not None:
            raise FileExistsError(path)
        self._fs.pipe_file(path, data, mode=mode)

    def _find(self, path: str) -> FileInfo | None:
        try:
            return _file_info(self._fs.info(path, refresh=True))
        except FileNotFoundError:
            return None

    def _list(self, path: str) -> list[dict[str, Any]]:
        try:
            return list(self._fs.ls(path, detail=True, refresh=True))
        except FileNotFoundError:
            return []

    def _path(self, folder: str, name: str = "") -> str:
        return "/".join(part for part in (self._root, folder, name) if part not in ("", HERE))


def _file_info(found: dict[str, Any]) -> FileInfo:
    changed = found.get("LastModified") or found.get("mtime") or found.get("updated") or found.get("created")
    seconds = changed.timestamp() if isinstance(changed, datetime) else float(changed or 0)
    return FileInfo(found["name"].rsplit("/", 1)[-1], int(found["size"]), seconds)
