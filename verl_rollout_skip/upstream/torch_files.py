"""Files of ``torch.save`` and ``pickle.dump``, read into values without running what is in them.

A file of torch is a zip archive: a pickle, and beside it the bytes of each storage, which the pickle names.
"""

from __future__ import annotations

import io
import zipfile
from typing import IO, Any

from verl_rollout_skip.errors import StoreError
from verl_rollout_skip.upstream.batches import CALLS, NAMES
from verl_rollout_skip.upstream.pickles import DamagedDumpError, Name, read_pickle
from verl_rollout_skip.upstream.values import STORAGES, Builder, Storage, storage_of

_ZIP = b"PK\x03\x04"


def read_dump_file(path: str) -> Any:
    """The value in a file of ``torch.save`` or ``pickle.dump``."""
    with open(path, "rb") as file:
        try:
            is_zip = file.read(4) == _ZIP
            file.seek(0)
            return _read_zip(file) if is_zip else Builder(CALLS, read_torch_bytes).build(read_pickle(file, NAMES))
        except StoreError:
            raise
        except Exception as error:  # damage shows in many ways, and zipfile has many errors
            raise DamagedDumpError(f"It cannot be read ({type(error).__name__}: {error}).") from error


def read_torch_bytes(data: bytes) -> Any:
    """The value of what ``torch.save`` wrote into memory."""
    if not data.startswith(_ZIP):
        raise DamagedDumpError("It holds tensors in a format that is not known here.")
    return _read_zip(io.BytesIO(data))


def _read_zip(file: IO[bytes]) -> Any:
    with zipfile.ZipFile(file) as archive:
        return _read_archive(archive)


def _read_archive(archive: zipfile.ZipFile) -> Any:
    if any(item.compress_type != zipfile.ZIP_STORED for item in archive.infolist()):
        raise DamagedDumpError("It is compressed, and torch does not do that.")
    pickles = [name for name in archive.namelist() if name.endswith("/data.pkl")]
    if len(pickles) != 1:
        raise DamagedDumpError("It is a zip file, but not one of torch.")
    root = pickles[0].removesuffix("/data.pkl")
    if f"{root}/byteorder" in archive.namelist() and archive.read(f"{root}/byteorder") != b"little":
        raise DamagedDumpError("It was written by a big-endian machine.")
    storages: dict[str, Storage] = {}

    def find_storage(identity: Any) -> Storage:
        if not isinstance(identity, tuple) or len(identity) < 5 or identity[0] != "storage":
            raise ValueError(f"{identity!r} is no storage")
        _, kind, key, _, count = identity[:5]
        if (
            not isinstance(kind, Name)
            or kind.name not in STORAGES
            or not isinstance(key, str)
            or type(count) is not int
        ):
            raise ValueError(f"{identity!r} is no storage")
        if key not in storages:
            storages[key] = storage_of(archive.read(f"{root}/data/{key}"), STORAGES[kind.name], count)
        return storages[key]

    tree = read_pickle(io.BytesIO(archive.read(pickles[0])), NAMES)
    return Builder(CALLS, read_torch_bytes, find_storage).build(tree)
