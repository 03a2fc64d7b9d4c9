"""Files and folders that are made for others: they get their name when they are complete, or not at all.

A link is followed, so that it stays a link. A device or a named pipe is written to as it is: renaming a file over it
would put the file in its place, and nobody who reads from it would get anything.
"""

from __future__ import annotations

import contextlib
import os
import secrets
from collections.abc import Iterator
from pathlib import Path


@contextlib.contextmanager
def new_file(path: Path) -> Iterator[Path]:
    """Where to write what is to become ``path``; what was there is replaced when the block ends without an error."""
    if path.exists() and not path.is_file():
        yield path
        return
    target = Path(os.path.realpath(path))
    temporary = target.with_name(f".{target.name}.{secrets.token_hex(4)}.tmp")
    try:
        yield temporary
        os.replace(temporary, target)
    finally:
        with contextlib.suppress(OSError):  # the error that is on its way says more
            temporary.unlink(missing_ok=True)


def put_folder(made: Path, target: Path, aside: Path) -> None:
    """Give a complete folder its name; one that has this name is moved to ``aside`` first, and back if that fails."""
    replaced = target.exists()
    if replaced:
        os.rename(target, aside)
    try:
        os.rename(made, target)
    except OSError:
        if replaced:
            os.rename(aside, target)
        raise
