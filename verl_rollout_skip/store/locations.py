"""From a path or URL to the storage behind it."""

from __future__ import annotations

from typing import Any

from verl_rollout_skip.store.local import LocalStorage
from verl_rollout_skip.store.remote import RemoteStorage
from verl_rollout_skip.store.storage import Storage


def open_storage(path: str, options: dict[str, Any] | None = None) -> Storage:
    """A local folder (a plain path or file://) or anything that fsspec knows."""
    if path.startswith("file://"):
        return LocalStorage(path.removeprefix("file://"))
    return RemoteStorage(path, options or {}) if "://" in path else LocalStorage(path)


def join(path: str, *names: str) -> str:
    """A path or URL below another one."""
    return "/".join([path.rstrip("/"), *names])
