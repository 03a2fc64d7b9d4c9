"""Opens the storage for a path or URL."""

from __future__ import annotations

import re
from typing import Any

from verl_rollout_skip.store.storage.contract import Storage
from verl_rollout_skip.store.storage.local import LocalStorage
from verl_rollout_skip.store.storage.remote import RemoteStorage

# fsspec also supports chains such as dir::s3://bucket. A path that contains :// after a slash is still a path.
_URL = re.compile(r"[A-Za-z][A-Za-z0-9+.:-]*://")
_CACHES = {"simplecache", "filecache", "blockcache", "cached"}


def is_url(path: str) -> bool:
    """Whether this is a URL rather than a local path. file:// counts as a URL."""
    return _URL.match(path) is not None


def open_storage(path: str, options: dict[str, Any] | None = None) -> Storage:
    """Open a local folder (a plain path or file://) or any fsspec URL except its caches."""
    caches = _CACHES.intersection(path.split("::")[:-1]) if is_url(path) else ()
    if caches:
        raise OSError(
            f"{path} uses fsspec's {min(caches)}, which may return records that have been replaced. "
            f"Use {path.rpartition('::')[2]}."
        )
    if path.startswith("file://"):
        return LocalStorage(path.removeprefix("file://"))
    return RemoteStorage(path, options or {}) if is_url(path) else LocalStorage(path)


def join(path: str, *names: str) -> str:
    """Append names to a path or URL."""
    return "/".join([path.rstrip("/"), *names])
