"""Writes files that appear only when they are complete, and JSON with a checksum.

``publish`` writes a small file to any storage. ``new_file`` and ``put_folder`` write the local files that a user asks
for. ``new_file`` follows symbolic links, so a link stays a link, and writes directly to devices and named pipes.
"""

from __future__ import annotations

import contextlib
import json
import os
import secrets
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

import xxhash

if TYPE_CHECKING:
    from verl_rollout_skip.store.storage import Storage

_CHECKSUM = b',\n  "checksum": "'


def publish(storage: Storage, folder: str, name: str, data: bytes, *, replace: bool = False) -> None:
    """Write a file to a storage. Raises ``FileExistsError`` if the file exists and ``replace`` is False."""
    with storage.stage(folder) as staged:
        staged.write(data)
        storage.publish(staged, name, replace)


def sealed_json(fields: dict[str, Any], **options: Any) -> bytes:
    """Encode a JSON object that ends with a checksum of its other fields. ``options`` are passed to ``json.dumps``."""
    body = json.dumps(fields, indent=2, **options).encode("utf-8", "surrogatepass")
    return body.removesuffix(b"\n}") + _CHECKSUM + _checksum(body) + b'"\n}\n'


def is_sealed(data: bytes) -> bool:
    """Whether these bytes are the unchanged output of ``sealed_json``."""
    body, _, end = data.rpartition(_CHECKSUM)
    return end == _checksum(body + b"\n}") + b'"\n}\n'


def _checksum(body: bytes) -> bytes:
    return xxhash.xxh3_128_hexdigest(body).encode()


@contextlib.contextmanager
def new_file(path: Path) -> Iterator[Path]:
    """Yield a temporary path to write to. The file replaces ``path`` if the block ends without an error."""
    if path.exists() and not path.is_file():
        yield path
        return
    target = Path(os.path.realpath(path))
    temporary = target.with_name(f".{target.name}.{secrets.token_hex(4)}.tmp")
    try:
        yield temporary
        os.replace(temporary, target)
    finally:
        with contextlib.suppress(OSError):  # do not mask the original error
            temporary.unlink(missing_ok=True)


def put_folder(complete: Path, target: Path, backup: Path) -> None:
    """Rename a complete folder to ``target``. An existing folder is renamed to ``backup``, and back on failure."""
    has_backup = target.exists()
    if has_backup:
        os.rename(target, backup)
    try:
        os.rename(complete, target)
    except OSError:
        if has_backup:
            os.rename(backup, target)
        raise
