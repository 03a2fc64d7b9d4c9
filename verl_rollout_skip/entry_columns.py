"""Single columns of a recorded entry, without decoding the rest and without torch.

On a local disk only the pages that are asked for are read, and each is checked by its page checksum; from an object
store the file is fetched whole and checked by its digest. The bytes may be damaged or hostile: what they claim is
compared before Arrow believes it.
"""

from __future__ import annotations

import json
import mmap
import os
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import xxhash

from verl_rollout_skip.errors import CorruptEntryError, EntryTooLargeError, RolloutSkipError
from verl_rollout_skip.sizes import format_size
from verl_rollout_skip.store import names
from verl_rollout_skip.store.codec.pages import read_columns
from verl_rollout_skip.store.format import METADATA_KEY, check_version
from verl_rollout_skip.store.record import EntryRecord
from verl_rollout_skip.store.storage import Storage
from verl_rollout_skip.store.storage.local import LocalStorage

_LIMIT = 4 << 30
_VALUE_BYTES = 16


class EntryColumns:
    """The columns of one entry by their names in the Parquet file; ``description`` says what they hold."""

    def __init__(self, storage: Storage, record: EntryRecord) -> None:
        self.record = record
        self._where = storage.where(names.folder_name(record.key), names.data_name(record.key))
        with self._damage():
            self._data = pa.py_buffer(_bytes_of(storage, record))
            self._chunks = read_columns(memoryview(self._data).cast("B"))
            metadata = pq.read_metadata(pa.BufferReader(self._data))
            self._file = pq.ParquetFile(
                pa.BufferReader(self._data), metadata=metadata, page_checksum_verification=True, pre_buffer=False
            )
            text = (metadata.metadata or {}).get(METADATA_KEY)
            if text is None:
                raise CorruptEntryError("It is a Parquet file, but not one that this package wrote.")
            self.description: dict[str, Any] = json.loads(text)
            check_version(self.description["format_version"])
            if metadata.num_rows != record.rows:
                raise CorruptEntryError(f"It holds {metadata.num_rows} rows, its record says {record.rows}.")
            self.names = frozenset(self._file.schema_arrow.names)

    def column(self, name: str) -> pa.ChunkedArray:
        """One column as Arrow has it."""
        with self._damage():
            self._check_size(name)
            groups = [
                self._file.read_row_group(group, columns=[name], use_threads=False).column(name)
                for group in range(self._file.num_row_groups)
            ]
            kind = self._file.schema_arrow.field(name).type
            found = pa.chunked_array([chunk for group in groups for chunk in group.chunks], kind)
            if len(found) != self.record.rows:
                raise CorruptEntryError(f"Column {name!r} holds {len(found)} rows, not {self.record.rows}.")
            return found

    def numbers(self, name: str) -> np.ndarray | None:
        """A column of numbers or truth values; None if it is not there, or if one of its values is missing."""
        if name not in self.names:
            return None
        found = self.column(name)
        if found.null_count or not _is_number(found.type):
            return None
        return found.to_numpy()

    def texts(self, name: str) -> list[str] | None:
        """A column of text; None if it is not there, or if one of its values is missing."""
        if name not in self.names:
            return None
        found = self.column(name)
        return None if found.null_count or not pa.types.is_string(found.type) else found.to_pylist()

    def lists(self, name: str) -> tuple[np.ndarray, np.ndarray] | None:
        """A column of lists of numbers: all values, and where each row begins and the last one ends."""
        if name not in self.names or not pa.types.is_list(self._file.schema_arrow.field(name).type):
            return None
        with self._damage():
            values, lengths = [], []
            for chunk in self.column(name).chunks:
                offsets = chunk.offsets.to_numpy()
                values.append(chunk.values.slice(offsets[0], offsets[-1] - offsets[0]).to_numpy(zero_copy_only=False))
                lengths.append(np.diff(offsets))
            offsets = np.concatenate([[0], np.cumsum(np.concatenate([*lengths, np.empty(0, np.int64)]))])
            return np.concatenate(values) if values else np.empty(0, np.int64), offsets.astype(np.int64)

    def place(self, *path: str, part: str = "output") -> dict[str, Any] | None:
        """What the description says of one key of the output or of the input: its column and its form."""
        with self._damage():
            described = self.description[part] or {"numbers": [], "objects": []}
            for item in [*described["numbers"], *described["objects"]]:
                if item["path"] == list(path):
                    return item
        return None

    def _check_size(self, name: str) -> None:
        chunks = [chunk for chunk in self._chunks if chunk.path.split(".")[0] == name]
        size = sum(max(chunk.uncompressed, chunk.num_values * _VALUE_BYTES) for chunk in chunks)
        if size > _LIMIT:
            raise EntryTooLargeError(
                f"Column {name!r} of {self._where} would take {format_size(size)} of memory, and {format_size(_LIMIT)} "
                "are allowed."
            )

    @contextmanager
    def _damage(self) -> Iterator[None]:
        """Whatever goes wrong while decoding bytes from outside means that the bytes are wrong."""
        try:
            yield
        except CorruptEntryError as error:
            raise CorruptEntryError(f"The entry of {self.record.key} is damaged: {self._where}. {error}") from error
        except (RolloutSkipError, FileNotFoundError, PermissionError):
            raise
        except Exception as error:
            raise CorruptEntryError(
                f"The entry of {self.record.key} is damaged: {self._where}. It cannot be decoded "
                f"({type(error).__name__}: {error})."
            ) from error


def _bytes_of(storage: Storage, record: EntryRecord) -> Any:
    folder, name = names.folder_name(record.key), names.data_name(record.key)
    if not isinstance(storage, LocalStorage):
        data = storage.read(folder, name, max(record.bytes, 1))
        digest = xxhash.xxh3_128(data).hexdigest()
        if digest != record.digest:
            raise CorruptEntryError(f"It has digest {digest} and its record says {record.digest}.")
        return data
    storage.info(folder, name)  # refuses links
    fd = os.open(storage.where(folder, name), os.O_RDONLY | os.O_NOFOLLOW | os.O_CLOEXEC)
    try:
        size = os.fstat(fd).st_size
        if size != record.bytes:
            raise CorruptEntryError(f"It has {size} bytes and its record says {record.bytes}.")
        return mmap.mmap(fd, 0, access=mmap.ACCESS_READ)
    finally:
        os.close(fd)


def _is_number(kind: pa.DataType) -> bool:
    return bool(pa.types.is_integer(kind) or pa.types.is_floating(kind) or pa.types.is_boolean(kind))
