"""Writes files that appear under their name only when complete, and JSON with a checksum.

``publish`` writes a small file on any storage. ``new_file`` and ``put_folder`` write local files for
the user. They follow symbolic links, so that a link stays a link, and write to devices and named pipes directly.
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
    """Write a file to a storage. Raises ``FileExistsError`` if it exists and ``replace`` is not set."""
    with storage.stage(folder) as staged:
        staged.write(data)
        storage.publish(staged, name, replace)


def sealed_json(fields: dict[str, Any], **options: Any) -> bytes:
    """Encode a JSON object that ends with a checksum of everything before it. ``options`` go to ``json.dumps``."""
    body = json.dumps(fields, indent=2, **options).encode("utf-8", "surrogatepass")
    return body.removesuffix(b"\n}") + _CHECKSUM + _checksum(body) + b'"\n}\n'


def is_sealed(data: bytes) -> bool:
    """Whether the bytes are unchanged output of ``sealed_json``."""
    body, _, end = data.rpartition(_CHECKSUM)
    return end == _checksum(body + b"\n}") + b'"\n}\n'


def _checksum(body: bytes) -> bytes:
    return xxhash.xxh3_128_hexdigest(body).encode()


@contextlib.contextmanager
def new_file(path: Path) -> Iterator[Path]:
    """Yield a temporary path to write to. It replaces ``path`` when the block ends without an error."""
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


def put_folder(made: Path, target: Path, aside: Path) -> None:
    """Rename a complete folder to ``target``. An existing one is moved to ``aside`` first, and back on failure."""
    replaced = target.exists()
    if replaced:
        os.rename(target, aside)
    try:
        os.rename(made, target)
    except OSError:
        if replaced:
            os.rename(aside, target)
        raise
