"""JSON files with a checksum: readable by people, but an edited or damaged file is detected."""

from __future__ import annotations

import json
from datetime import datetime, timezone
from typing import Any

from verl_rollout_skip.errors import ManifestError
from verl_rollout_skip.store import new_files
from verl_rollout_skip.store.format import FORMAT_VERSION
from verl_rollout_skip.store.storage import Storage

_MAX_BYTES = 64 << 20


def publish(storage: Storage, folder: str, name: str, fields: dict[str, Any], replace: bool) -> None:
    """Write a file that appears complete or not at all."""
    new_files.publish(storage, folder, name, render(fields), replace=replace)


def read(storage: Storage, folder: str, name: str) -> dict[str, Any]:
    """Read a file; raise ``FileNotFoundError``, or ``ManifestError`` if its content cannot be trusted."""
    return _parse(storage.read(folder, name, _MAX_BYTES), storage.where(folder, name))


def render(fields: dict[str, Any]) -> bytes:
    """The content of a file with these fields."""
    return new_files.sealed_json(fields, ensure_ascii=False)


def timestamp() -> str:
    """The current time, in the format that the files of a variant use."""
    return datetime.now(timezone.utc).isoformat(timespec="seconds")


def _parse(data: bytes, path: str) -> dict[str, Any]:
    try:
        fields = json.loads(data.decode("utf-8", "surrogatepass"))
        if not isinstance(fields, dict):
            raise ValueError(f"it contains a {type(fields).__name__}")
    except (ValueError, RecursionError) as error:
        raise ManifestError(f"{path} is damaged: not a JSON object ({error}). Restore it from a copy.") from error
    version = fields.get("format_version", FORMAT_VERSION)
    if isinstance(version, int) and version != FORMAT_VERSION:
        return fields  # other versions may have other checksums; the caller rejects them
    if fields.pop("checksum", None) is None:
        raise ManifestError(f"{path} was not written by this package, or was edited: it has no checksum.")
    if not new_files.is_sealed(data):
        raise ManifestError(
            f"{path} was edited or damaged: its checksum is wrong, so it does not prove which settings the rollouts "
            "were recorded with. Restore it from a copy, or move its folder away and record again."
        )
    return fields
