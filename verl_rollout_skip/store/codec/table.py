"""Arrow arrays in and out: lists of numbers to write, and columns of a file that cannot be trusted to read."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq
import torch

from verl_rollout_skip.errors import CorruptEntryError, EntryTooLargeError, UnsupportedBatchError


def list_field(name: str, item: pa.DataType) -> pa.Field:
    """A column of lists in which nothing can be null: readers need no validity levels for it."""
    return pa.field(name, pa.list_(pa.field("element", item, nullable=False)), nullable=False)


def list_array(values: np.ndarray, lengths: np.ndarray, item: pa.DataType) -> pa.Array:
    """One list a row, without copying the values."""
    offsets = np.zeros(len(lengths) + 1, np.int64)
    np.cumsum(lengths, out=offsets[1:])
    if offsets[-1] >= 2**31:
        raise UnsupportedBatchError(f"A row has {offsets[-1]} values; Parquet lists of more than 2^31 are not written.")
    offsets = offsets.astype(np.int32)
    kind = pa.list_(pa.field("element", item, nullable=False))
    return pa.ListArray.from_arrays(pa.array(offsets), pa.array(values, item), type=kind)


class ColumnReader:
    """The columns of one file. Every type, length and null is compared with what the caller expects.

    Each column is read when it is asked for, through a reader of its own: several threads may ask at once, and
    what Arrow holds of a column is freed as soon as the column is decoded.
    """

    def __init__(self, data: pa.Buffer, metadata: pq.FileMetaData, limit: int) -> None:
        self._limit = limit
        self._data = data
        self._metadata = metadata
        self._names = metadata.schema.to_arrow_schema().names
        self._offsets: dict[int, torch.Tensor] = {}
        self._lock = threading.Lock()

    def numbers(self, name: str, kind: pa.DataType) -> Iterator[tuple[slice, np.ndarray]]:
        """A column of numbers, piece by piece."""
        for rows, chunk in self._chunks(name, kind):
            yield rows, chunk.to_numpy(zero_copy_only=False)

    def lists(self, name: str, item: pa.DataType, lengths: np.ndarray) -> Iterator[tuple[slice, np.ndarray]]:
        """The flat values of a column of lists, piece by piece; the lists must have these lengths."""
        for rows, found, values in self._list_chunks(name, item):
            if not np.array_equal(found, lengths[rows]):
                raise CorruptEntryError(f"Column {name!r} holds lists of other lengths than the file says.")
            yield rows, values

    def all_lists(self, name: str, item: pa.DataType) -> tuple[np.ndarray, np.ndarray]:
        """The lengths of all lists of a column, and their values one after another."""
        chunks = list(self._list_chunks(name, item))
        lengths = np.concatenate([found for _, found, _ in chunks] or [np.empty(0, np.int64)])
        values = np.concatenate([values for _, _, values in chunks]) if chunks else item_numpy(item)
        return lengths.astype(np.int64), values

    def objects(self, name: str, kind: pa.DataType) -> list[Any]:
        """A column as Python values, None where there is none."""
        if not (pa.types.is_string(kind) or pa.types.is_binary(kind)):
            return [value for _, chunk in self._chunks(name, kind, nullable=True) for value in chunk.to_pylist()]
        # Read as a dictionary, because a few bytes in a file can stand for a long text in a billion rows.
        values: list[Any] = []
        total = 0
        for _, chunk in self._chunks(name, pa.dictionary(pa.int32(), kind), nullable=True, dictionary=True):
            lengths = pc.binary_length(chunk.dictionary).to_numpy(zero_copy_only=False)
            codes = chunk.indices.drop_null().to_numpy()
            total += int(lengths[codes].sum())
            if total > self._limit:
                raise EntryTooLargeError(
                    f"Column {name!r} would take more than the {self._limit} bytes that are allowed."
                )
            texts = chunk.dictionary.to_pylist()
            values += [None if code is None else texts[code] for code in chunk.indices.to_pylist()]
        return values

    def shared_offsets(self, group: int, lengths: np.ndarray) -> torch.Tensor:
        """One offsets tensor for all NestedTensors of a group."""
        with self._lock:
            if group not in self._offsets:
                self._offsets[group] = torch.from_numpy(np.concatenate([[0], np.cumsum(lengths)]).astype(np.int64))
            offsets = self._offsets[group]
        if not np.array_equal(np.diff(offsets.numpy()), lengths):
            raise CorruptEntryError("Nested tensors that share their lengths hold different lengths in the file.")
        return offsets

    def _list_chunks(self, name: str, item: pa.DataType) -> Iterator[tuple[slice, np.ndarray, np.ndarray]]:
        for rows, chunk in self._chunks(name, None):
            if not pa.types.is_list(chunk.type) or chunk.type.value_type != item:
                raise CorruptEntryError(f"Column {name!r} is of type {chunk.type}, not a list of {item}.")
            offsets = chunk.offsets.to_numpy()
            values = chunk.values.slice(offsets[0], offsets[-1] - offsets[0])
            if values.null_count:
                raise CorruptEntryError(f"Column {name!r} has missing values.")
            yield rows, np.diff(offsets), values.to_numpy(zero_copy_only=False)

    def _chunks(
        self, name: str, kind: pa.DataType | None, nullable: bool = False, dictionary: bool = False
    ) -> Iterator[tuple[slice, pa.Array]]:
        if self._names.count(name) != 1:
            raise CorruptEntryError(f"The file has no column {name!r}, which it says it holds.")
        file = pq.ParquetFile(
            pa.BufferReader(self._data),
            metadata=self._metadata,
            page_checksum_verification=True,
            pre_buffer=False,
            read_dictionary=[name] if dictionary else None,
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
        if start != self._metadata.num_rows:
            raise CorruptEntryError(f"Column {name!r} holds {start} rows, not {self._metadata.num_rows}.")


def item_numpy(item: pa.DataType) -> np.ndarray:
    """An empty numpy array of an Arrow type."""
    return np.empty(0, item.to_pandas_dtype())
