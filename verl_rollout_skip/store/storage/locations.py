"""From a path or URL to the storage behind it."""

from __future__ import annotations

import re
from typing import Any

from verl_rollout_skip.store.storage.contract import Storage
from verl_rollout_skip.store.storage.local import LocalStorage
from verl_rollout_skip.store.storage.remote import RemoteStorage

# fsspec also knows chains, such as simplecache::s3://bucket. A path with :// further behind is a path.
_URL = re.compile(r"[A-Za-z][A-Za-z0-9+.:-]*://")


def is_url(path: str) -> bool:
    """Whether it is a URL rather than a local path; file:// is one too."""
    return _URL.match(path) is not None


def open_storage(path: str, options: dict[str, Any] | None = None) -> Storage:
    """A local folder (a plain path or file://) or anything that fsspec knows."""
    if path.startswith("file://"):
        return LocalStorage(path.removeprefix("file://"))
    return RemoteStorage(path, options or {}) if is_url(path) else LocalStorage(path)


def join(path: str, *names: str) -> str:
    """A path or URL below another one."""
    return "/".join([path.rstrip("/"), *names])
