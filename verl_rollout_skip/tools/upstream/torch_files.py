"""Reads files written by ``torch.save`` and ``pickle.dump`` without executing any code in them.

A torch file is a zip archive with a pickle and the bytes of each storage that the pickle names. Sizes that a file
claims are checked against its actual size before any memory is allocated.
"""

from __future__ import annotations

import io
import os
import zipfile
from typing import IO, Any

from verl_rollout_skip.errors import StoreError
from verl_rollout_skip.tools.upstream.batches import CALLS, NAMES
from verl_rollout_skip.tools.upstream.builder import Builder
from verl_rollout_skip.tools.upstream.pickles import DamagedDumpError, read_pickle, shortened
from verl_rollout_skip.tools.upstream.tensors import Budget, Storage, storage_identity, storage_of

_ZIP = b"PK\x03\x04"


def read_dump_file(path: str) -> Any:
    """The value in a file written by ``torch.save`` or ``pickle.dump``."""
    try:
        with _Bounded(path) as file:
            budget = Budget(file.size)
            is_zip = file.read(len(_ZIP)) == _ZIP
            file.seek(0)
            if is_zip:
                return _read_zip(file, budget)
            return Builder(CALLS, budget, read_torch_bytes).build(read_pickle(file, NAMES))
    except StoreError:
        raise
    except Exception as error:  # damage takes many forms, and zipfile raises many errors
        raise DamagedDumpError(f"It cannot be read ({type(error).__name__}: {shortened(error)}).") from error


def read_torch_bytes(data: bytes, budget: Budget) -> Any:
    """The value in bytes written by ``torch.save``."""
    if not data.startswith(_ZIP):
        raise DamagedDumpError("It contains tensors in an unknown format.")
    return _read_zip(io.BytesIO(data), budget)


class _Bounded(io.BufferedReader):
    """A file that never reads more than its size, because Python allocates the requested size first."""

    def __init__(self, path: str) -> None:
        super().__init__(io.FileIO(path))
        self.size = os.fstat(self.fileno()).st_size

    def read(self, size: int | None = -1, /) -> bytes:
        return super().read(size if size is None else min(size, self.size))


def _read_zip(file: IO[bytes], budget: Budget) -> Any:
    with zipfile.ZipFile(file) as archive:
        return _read_archive(archive, file.seek(0, io.SEEK_END), budget)


def _read_archive(archive: zipfile.ZipFile, size: int, budget: Budget) -> Any:
    if any(item.compress_type != zipfile.ZIP_STORED for item in archive.infolist()):
        raise DamagedDumpError("It is compressed, which torch never does.")
    if sum(max(item.file_size, item.compress_size) for item in archive.infolist()) > size:
        raise DamagedDumpError("It claims to have more data than it does.")
    names = set(archive.namelist())
    pickles = [name for name in names if name.endswith("/data.pkl")]
    if len(pickles) != 1:
        raise DamagedDumpError("It is a zip file, but not one written by torch.")
    root = pickles[0].removesuffix("/data.pkl")
    if f"{root}/byteorder" in names and archive.read(f"{root}/byteorder") != b"little":
        raise DamagedDumpError("It was written on a big-endian machine.")
    storages: dict[str, Storage] = {}

    def find_storage(identity: Any) -> Storage:
        dtype, key, count = storage_identity(identity)
        if key not in storages:
            storages[key] = storage_of(archive.read(f"{root}/data/{key}"), dtype, count, budget)
        return storages[key]

    tree = read_pickle(io.BytesIO(archive.read(pickles[0])), NAMES)
    return Builder(CALLS, budget, read_torch_bytes, find_storage).build(tree)
