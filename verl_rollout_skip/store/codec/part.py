"""One part, a Parquet file that may be damaged or hostile: its description and its columns, without torch.

Footer and pages are checked before Arrow sees them, and every type, length, null and size before anything is
allocated for it. Whatever cannot be read is a ``CorruptEntryError``.
"""

from __future__ import annotations

import errno
import json
from collections.abc import Iterator
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

from verl_rollout_skip.errors import CorruptEntryError, EntryTooLargeError, RolloutSkipError
from verl_rollout_skip.sizes import format_size
from verl_rollout_skip.store.codec.pages import read_columns
from verl_rollout_skip.store.format import METADATA_KEY, check_version

_SHORTAGE = (errno.ENOMEM, errno.EMFILE, errno.ENFILE)
_WIDTHS = {"BOOLEAN": 1, "INT32": 4, "FLOAT": 4}


class damage_is_corruption:
    """Whatever goes wrong while decoding bytes from outside means that the bytes are wrong."""

    def __enter__(self) -> None: ...

    def __exit__(self, kind: Any, error: BaseException | None, trace: Any) -> None:
        raise_shortage(error)
        if isinstance(error, Exception) and not isinstance(error, RolloutSkipError | ImportError):
            raise CorruptEntryError(f"It cannot be decoded ({type(error).__name__}: {error}).") from error


def raise_shortage(error: BaseException | None) -> None:
    """Raise for a machine that has run out of memory or of open files, which says nothing about the bytes."""
    if isinstance(error, MemoryError) or (isinstance(error, OSError) and error.errno in _SHORTAGE):
        raise EntryTooLargeError(
            f"This process cannot get the memory or the open files to decode it ({type(error).__name__}: {error}). The "
            "file is not damaged. Load it on a larger machine, or raise the limits of the process."
        ) from error


class PartFile:
    """The columns of one part, by name.

    Each column is read when it is asked for, through a reader of its own: several threads may ask at once, and what
    Arrow holds of a column is freed as soon as the column is decoded. ``limit`` bounds the memory of one column.
    """

    def __init__(self, data: Any, limit: int) -> None:
        self._limit = limit
        with damage_is_corruption():
            self._data = pa.py_buffer(data)
            self._chunks = read_columns(memoryview(self._data).cast("B"))
            self._metadata = pq.read_metadata(pa.BufferReader(self._data))
            self.schema: pa.Schema = self._metadata.schema.to_arrow_schema()
            self._check_names()
            self.description = self._read_description()
            self.rows: int = self._metadata.num_rows
            if type(self.description["rows"]) is not int or self.description["rows"] != self.rows:
                raise CorruptEntryError(f"It claims {self.description['rows']!r} rows and holds {self.rows}.")

    def _check_names(self) -> None:
        """Arrow reads columns by position, so the sizes that were checked must be in the order of the schema."""
        schema = self._metadata.schema
        leaves = [(schema.column(number).path, schema.column(number).physical_type) for number in range(len(schema))]
        if [(chunk.path, chunk.physical) for chunk in self._chunks] != leaves * self._metadata.num_row_groups:
            raise CorruptEntryError("Its columns are not those of its schema.")

    @property
    def names(self) -> list[str]:
        names: list[str] = self.schema.names
        return names

    def stored_bytes(self, name: str, value_bytes: int = 0) -> int:
        """The memory that a column takes when it is read; ``value_bytes`` is what one value takes at least."""
        return sum(
            max(chunk.uncompressed, chunk.num_values * (value_bytes or _WIDTHS.get(chunk.physical, 8)))
            for chunk in self._chunks
            if chunk.path.split(".")[0] == name
        )

    def numbers(self, name: str, kind: pa.DataType) -> Iterator[tuple[slice, np.ndarray]]:
        """A column of numbers without nulls, piece by piece."""
        for rows, chunk in self.chunks(name, kind):
            yield rows, as_numpy(chunk)

    def all_numbers(self, name: str, kind: pa.DataType) -> np.ndarray:
        """A column of numbers without nulls."""
        return _joined([values for _, values in self.numbers(name, kind)], kind)

    def lists(self, name: str, item: pa.DataType) -> Iterator[tuple[slice, np.ndarray, np.ndarray]]:
        """A column of lists of numbers, piece by piece: the rows, the length of each list, and all values."""
        for rows, chunk in self.chunks(name):
            if not pa.types.is_list(chunk.type) or chunk.type.value_type != item:
                raise CorruptEntryError(f"Column {name!r} is of type {chunk.type}, not a list of {item}.")
            offsets = as_numpy(chunk.offsets)
            values = chunk.values.slice(offsets[0], offsets[-1] - offsets[0])
            if values.null_count:
                raise CorruptEntryError(f"Column {name!r} has missing values.")
            yield rows, np.diff(offsets).astype(np.int64), as_numpy(values)

    def all_lists(self, name: str, item: pa.DataType) -> tuple[np.ndarray, np.ndarray]:
        """The lengths of all lists of a column, and their values one after another."""
        pieces = list(self.lists(name, item))
        return (
            _joined([lengths for _, lengths, _ in pieces], pa.int64()),
            _joined([values for _, _, values in pieces], item),
        )

    def objects(self, name: str, kind: pa.DataType) -> list[Any]:
        """A column of single numbers as Python values, None where there is none."""
        return [value for _, chunk in self.chunks(name, kind, nullable=True) for value in chunk.to_pylist()]

    def texts(self, name: str) -> tuple[list[str], np.ndarray]:
        """A column of text: the distinct texts, and for each row which one it holds, -1 for none."""
        texts: list[str] = []
        codes = []
        total = 0
        for _, chunk in self.chunks(name, pa.dictionary(pa.int32(), pa.string()), nullable=True):
            lengths = np.diff(byte_offsets(chunk.dictionary))
            found = as_numpy(chunk.indices)
            if chunk.null_count:
                found = np.where(as_numpy(chunk.indices.is_valid()), found, -1)
            # A few bytes in a file can stand for a long text in a billion rows.
            total += int(lengths[found[found >= 0]].sum())
            if total > self._limit:
                raise EntryTooLargeError(f"Column {name!r} would take more than {format_size(self._limit)} of memory.")
            codes.append(np.where(found < 0, -1, found.astype(np.int64) + len(texts)))
            texts += chunk.dictionary.to_pylist()
        return texts, _joined(codes, pa.int64())

    def buffers(self, name: str) -> list[memoryview]:
        """A column of bytes, each row as a view of what Arrow read."""
        dictionary = any(chunk.has_dictionary for chunk in self._chunks if chunk.path == name)
        kind = pa.dictionary(pa.int32(), pa.binary()) if dictionary else pa.binary()
        views = []
        for _, chunk in self.chunks(name, kind):
            values = chunk.dictionary if dictionary else chunk
            rows = as_numpy(chunk.indices).tolist() if dictionary else range(len(chunk))
            offsets = byte_offsets(values).tolist()
            data = memoryview(values.buffers()[2] or b"")
            views += [data[offsets[row] : offsets[row + 1]] for row in rows]
        return views

    def chunks(
        self, name: str, kind: pa.DataType | None = None, nullable: bool = False
    ) -> Iterator[tuple[slice, pa.Array]]:
        """A column piece by piece as Arrow has it, of type ``kind`` if that is given."""
        if self.names.count(name) != 1:
            raise CorruptEntryError(f"The file has no column {name!r}, which it says it holds.")
        if self.stored_bytes(name) > self._limit:
            raise EntryTooLargeError(f"Column {name!r} would take more than {format_size(self._limit)} of memory.")
        file = pq.ParquetFile(
            pa.BufferReader(self._data),
            metadata=self._metadata,
            page_checksum_verification=True,
            pre_buffer=False,
            read_dictionary=[name] if kind is not None and pa.types.is_dictionary(kind) else None,
        )
        # One row group at a time: Arrow counts what it reads at once in 32 bits.
        start = 0
        for group in range(self._metadata.num_row_groups):
            for chunk in file.read_row_group(group, columns=[name], use_threads=False).column(name).chunks:
                if kind is not None and chunk.type != kind:
                    raise CorruptEntryError(f"Column {name!r} is of type {chunk.type}, not {kind}.")
                if chunk.null_count and not nullable:
                    raise CorruptEntryError(f"Column {name!r} has missing values.")
                yield slice(start, start + len(chunk)), chunk
                start += len(chunk)
        if start != self.rows:
            raise CorruptEntryError(f"Column {name!r} holds {start} rows, not {self.rows}.")

    def _read_description(self) -> dict[str, Any]:
        text = (self._metadata.metadata or {}).get(METADATA_KEY)
        if text is None:
            raise CorruptEntryError("It is a Parquet file, but not one that this package wrote: it has no description.")
        description: dict[str, Any] = json.loads(text)
        check_version(description["format_version"])
        return description


def as_numpy(array: pa.Array) -> np.ndarray:
    """An Arrow array of numbers without nulls; ``Array.to_numpy`` would import pandas."""
    data, dtype = array.buffers()[1], np.dtype(array.type.to_pandas_dtype())
    if data is None:
        return np.empty(0, dtype)
    if pa.types.is_boolean(array.type):
        bits = np.unpackbits(np.frombuffer(data, np.uint8), count=array.offset + len(array), bitorder="little")
        return bits[array.offset :].view(np.bool_)
    return np.frombuffer(data, dtype)[array.offset : array.offset + len(array)]


def byte_offsets(array: pa.Array) -> np.ndarray:
    """Where each text or bytes value of an Arrow array begins, and where the last one ends."""
    data = array.buffers()[1]
    return (
        np.frombuffer(data, np.int32)[array.offset : array.offset + len(array) + 1] if data else np.zeros(1, np.int32)
    )


def _joined(pieces: list[np.ndarray], kind: pa.DataType) -> np.ndarray:
    if len(pieces) == 1:
        return pieces[0]
    return np.concatenate(pieces) if pieces else np.empty(0, kind.to_pandas_dtype())
