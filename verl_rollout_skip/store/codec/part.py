"""Reads the description and the columns of one part without torch. The file may be damaged or hostile.

Footer and pages are checked before Arrow reads them. Types, lengths, nulls and sizes are checked before anything is
allocated for them. A file that cannot be read raises ``CorruptEntryError``.
"""

from __future__ import annotations

import errno
import json
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

from verl_rollout_skip.errors import CorruptEntryError, EntryTooLargeError, RolloutSkipError
from verl_rollout_skip.store.codec.dtypes import checked_size
from verl_rollout_skip.store.codec.encodings import Encoding, parse_encoding
from verl_rollout_skip.store.codec.padding import Spans
from verl_rollout_skip.store.codec.pages import read_columns
from verl_rollout_skip.store.format import (
    INPUT_LENGTH,
    INPUT_RESPONSE_LENGTH,
    METADATA_KEY,
    PROMPT_LENGTH,
    RESPONSE_LENGTH,
    Side,
    check_version,
)
from verl_rollout_skip.store.sizes import format_size

_OUT_OF_RESOURCES = (errno.ENOMEM, errno.EMFILE, errno.ENFILE)
# The memory of a Python string besides its characters. A dictionary may contain texts that no row uses.
_TEXT_BYTES = 60
_WIDTHS = {"BOOLEAN": 1, "INT32": 4, "FLOAT": 4}
_LENGTHS = {Side.OUTPUT: (PROMPT_LENGTH, RESPONSE_LENGTH), Side.INPUT: (INPUT_LENGTH, INPUT_RESPONSE_LENGTH)}
ColumnId = tuple[bool, tuple[str, ...]]
"""Identifies a key of a batch: whether it is a tensor, and its path."""


@contextmanager
def decoding(error_prefix: str = "") -> Iterator[None]:
    """Convert errors while decoding untrusted bytes to ``CorruptEntryError``, or ``EntryTooLargeError`` without memory.

    ``error_prefix`` names the bytes. It begins each message, unless a nested call has already added it.
    """
    try:
        yield
    except RolloutSkipError as error:
        if str(error).startswith(error_prefix):
            raise
        raise type(error)(f"{error_prefix} {error}") from error
    except (ImportError, FileNotFoundError, PermissionError):
        raise
    except Exception as error:
        prefix = f"{error_prefix} ".lstrip()
        if isinstance(error, MemoryError) or (isinstance(error, OSError) and error.errno in _OUT_OF_RESOURCES):
            raise EntryTooLargeError(
                f"{prefix}It cannot be decoded: memory or file descriptors have run out ({type(error).__name__}: "
                f"{error}). The file is not damaged. Load it on a larger machine, or raise the limits of this process."
            ) from error
        raise CorruptEntryError(f"{prefix}It cannot be decoded ({type(error).__name__}: {error}).") from error


def check_memory(needed: int, limit: int, subject: str = "Loading it") -> None:
    """Raise ``EntryTooLargeError`` before an allocation beyond the limit."""
    if needed > limit:
        raise EntryTooLargeError(
            f"{subject} would take {format_size(needed)} of memory and {format_size(limit)} are allowed. Load it on a "
            "larger machine, or raise max_load_bytes."
        )


@dataclass(frozen=True)
class Layout:
    """How a part stores one batch: column and encoding of each numeric key, and the description of each other key."""

    part: PartFile
    spans: Spans | None
    numbers: dict[ColumnId, tuple[str, Encoding]]
    objects: dict[ColumnId, dict[str, Any]]

    @property
    def kinds(self) -> dict[ColumnId, Any]:
        """The properties that must be the same in all parts."""
        numbers = {key: encoding.kind for key, (_, encoding) in self.numbers.items()}
        return numbers | {key: (item["shape"], item["dtype"]) for key, item in self.objects.items()}


class PartFile:
    """The columns of one part, by name.

    Each column is read on demand, with a separate Arrow reader. So several threads can read at once, and Arrow's memory
    for a column is freed as soon as the column is decoded. ``limit`` bounds the memory for one column, ``error_prefix``
    begins each error message, and ``start`` is the index of the part's first row in the entry.
    """

    def __init__(self, data: Any, limit: int, error_prefix: str = "", start: int = 0) -> None:
        self.limit, self.error_prefix = limit, error_prefix
        with decoding(error_prefix):
            self._data = pa.py_buffer(data)
            self._chunks = read_columns(memoryview(self._data).cast("B"))
            self._metadata = pq.read_metadata(pa.BufferReader(self._data))
            self.schema: pa.Schema = self._metadata.schema.to_arrow_schema()
            self.names: list[str] = self.schema.names
            self._check_names()
            self.description = self._read_description()
            self.rows: int = self._metadata.num_rows
            if type(self.description["rows"]) is not int or self.description["rows"] != self.rows:
                raise CorruptEntryError(
                    f"Its description says {self.description['rows']!r} rows, but it has {self.rows}."
                )
            self.entry_rows = slice(start, start + self.rows)

    def _check_names(self) -> None:
        """Check that the columns are in the order of the schema, because Arrow reads them by position."""
        schema = self._metadata.schema
        leaves = [(schema.column(number).path, schema.column(number).physical_type) for number in range(len(schema))]
        if [(chunk.path, chunk.physical) for chunk in self._chunks] != leaves * self._metadata.num_row_groups:
            raise CorruptEntryError("Its columns do not match its schema.")

    def _read_description(self) -> dict[str, Any]:
        text = (self._metadata.metadata or {}).get(METADATA_KEY)
        if text is None:
            raise CorruptEntryError("It is a Parquet file, but this package did not write it: it has no description.")
        description: dict[str, Any] = json.loads(text)
        check_version(description["format_version"])
        return description

    def layout(self, side: Side) -> Layout:
        """The layout of one of the two batches."""
        description = self.description[side.value]
        spans = self._spans(side)
        numbers: dict[ColumnId, tuple[str, Encoding]] = {}
        for item in description["numbers"]:
            encoding = parse_encoding(item, spans)
            numbers[encoding.element.holder == "torch", tuple(item["path"])] = item["column"], encoding
        objects = {(False, tuple(item["path"])): item for item in description["objects"]}
        columns = [field.name for column, encoding in numbers.values() for field in encoding.fields(column)]
        key_count = len(description["numbers"]) + len(description["objects"])
        if len(set(columns)) != len(columns) or len(numbers.keys() | objects.keys()) != key_count:
            raise CorruptEntryError("Its description lists a key or a column twice.")
        return Layout(self, spans, numbers, objects)

    def _spans(self, side: Side) -> Spans | None:
        if self.description[side.value]["spans"] is None:
            return None
        widths = [checked_size(width) for width in self.description[side.value]["spans"]]
        prompts, responses = (self.numbers(name, pa.int32()).astype(np.int64) for name in _LENGTHS[side])
        for lengths, width in zip((prompts, responses), widths, strict=True):
            if (lengths < 0).any() or (lengths > width).any():
                raise CorruptEntryError("Its prompt and response lengths do not fit the widths in its description.")
        return Spans(widths[0], widths[1], prompts, responses)

    def stored_bytes(self, name: str, value_bytes: int = 0) -> int:
        """The memory for reading a column. ``value_bytes`` is the minimum per value."""
        return sum(
            max(chunk.uncompressed, chunk.num_values * (value_bytes or _WIDTHS.get(chunk.physical, 8)))
            for chunk in self._chunks
            if chunk.column == name
        )

    def pieces(self, name: str, kind: pa.DataType) -> Iterator[tuple[slice, np.ndarray | None, np.ndarray]]:
        """A column of numbers or of lists of numbers, piece by piece: the rows, the length of each list, all values."""
        for rows, chunk in self.chunks(name, kind):
            if not pa.types.is_list(kind):
                yield rows, None, as_numpy(chunk)
                continue
            offsets = as_numpy(chunk.offsets)
            values = chunk.values.slice(offsets[0], offsets[-1] - offsets[0])
            if values.null_count:
                raise CorruptEntryError(f"Column {name!r} has missing values.")
            yield rows, np.diff(offsets).astype(np.int64), as_numpy(values)

    def numbers(self, name: str, kind: pa.DataType) -> np.ndarray:
        """A column of numbers without nulls."""
        return _concatenate([values for _, _, values in self.pieces(name, kind)], kind)

    def lists(self, name: str, item: pa.DataType) -> tuple[np.ndarray, np.ndarray]:
        """A column of lists of numbers, as the length of each list and the concatenated values."""
        pieces = list(self.pieces(name, pa.list_(item)))
        lengths = [lengths for _, lengths, _ in pieces if lengths is not None]
        return _concatenate(lengths, pa.int64()), _concatenate([values for _, _, values in pieces], item)

    def texts(self, name: str) -> tuple[list[str], np.ndarray]:
        """A column of text, as the distinct texts and the index of each row's text in them, -1 for null."""
        texts: list[str] = []
        codes = []
        for _, chunk in self.chunks(name, pa.string(), nullable=True):
            chunk_codes = _codes(chunk)
            codes.append(np.where(chunk_codes < 0, -1, chunk_codes + len(texts)))
            texts += chunk.dictionary.to_pylist()
        return texts, _concatenate(codes, pa.int64())

    def buffers(self, name: str) -> list[memoryview]:
        """A column of bytes, as one view of Arrow's memory per row."""
        views = []
        for _, chunk in self.chunks(name, pa.binary()):
            data = memoryview(chunk.buffers()[2] or b"")
            views += [data[start:end] for start, end in pairwise(byte_offsets(chunk).tolist())]
        return views

    def chunks(
        self, name: str, kind: pa.DataType | None = None, nullable: bool = False
    ) -> Iterator[tuple[slice, pa.Array]]:
        """The Arrow chunks of a column. ``kind`` is the expected type. Text is returned as a dictionary."""
        if self.names.count(name) != 1:
            raise CorruptEntryError(f"It has no column {name!r}, although its description lists one.")
        actual = self.schema.field(name).type
        if kind is not None and not _is_same_type(actual, kind):
            raise CorruptEntryError(f"Column {name!r} is of type {actual}, not {kind}.")
        is_text = pa.types.is_string(actual)
        with_dictionary = [chunk.physical for chunk in self._chunks if chunk.has_dictionary and chunk.column == name]
        if any(physical.endswith("BYTE_ARRAY") for physical in with_dictionary) and not is_text:
            # This package never writes one, and a few bytes in a dictionary can expand to gigabytes.
            raise CorruptEntryError(f"Column {name!r} has a dictionary, which is not allowed for bulk data.")
        check_memory(self.stored_bytes(name), self.limit, f"Column {name!r}")
        file = pq.ParquetFile(
            pa.BufferReader(self._data),
            metadata=self._metadata,
            page_checksum_verification=True,
            pre_buffer=False,
            read_dictionary=[name] if is_text else None,
        )
        # One row group at a time, because Arrow's offsets within one read have 32 bits.
        start = text_bytes = 0
        for group in range(self._metadata.num_row_groups):
            for chunk in file.read_row_group(group, columns=[name], use_threads=False).column(name).chunks:
                if chunk.null_count and not nullable:
                    raise CorruptEntryError(f"Column {name!r} has missing values.")
                if is_text:
                    lengths, codes = np.diff(byte_offsets(chunk.dictionary)), _codes(chunk)
                    text_bytes += int(lengths[codes[codes >= 0]].sum()) + len(lengths) * _TEXT_BYTES
                    check_memory(text_bytes, self.limit, f"Column {name!r}")
                yield slice(start, start + len(chunk)), chunk
                start += len(chunk)
        if start != self.rows:
            raise CorruptEntryError(f"Column {name!r} contains {start} rows, not {self.rows}.")


def as_numpy(array: pa.Array) -> np.ndarray:
    """Convert an Arrow array of numbers without nulls. ``Array.to_numpy`` would import pandas."""
    data, dtype = array.buffers()[1], np.dtype(array.type.to_pandas_dtype())
    if data is None:
        return np.empty(0, dtype)
    if pa.types.is_boolean(array.type):
        bits = np.unpackbits(np.frombuffer(data, np.uint8), count=array.offset + len(array), bitorder="little")
        return bits[array.offset :].view(np.bool_)
    return np.frombuffer(data, dtype)[array.offset : array.offset + len(array)]


def _codes(texts: pa.DictionaryArray) -> np.ndarray:
    """The dictionary index of each row's text, -1 for null."""
    codes = as_numpy(texts.indices).astype(np.int64)
    return np.where(as_numpy(texts.indices.is_valid()), codes, -1) if texts.null_count else codes


def byte_offsets(array: pa.Array) -> np.ndarray:
    """Where each text or bytes value of an Arrow array begins, and where the last one ends."""
    data = array.buffers()[1]
    return (
        np.frombuffer(data, np.int32)[array.offset : array.offset + len(array) + 1] if data else np.zeros(1, np.int32)
    )


def _is_same_type(actual: pa.DataType, expected: pa.DataType) -> bool:
    if pa.types.is_list(actual) and pa.types.is_list(expected):
        return bool(actual.value_type == expected.value_type)  # the name of the inner field does not matter
    return bool(actual == expected)


def _concatenate(pieces: list[np.ndarray], kind: pa.DataType) -> np.ndarray:
    if len(pieces) == 1:
        return pieces[0]
    return np.concatenate(pieces) if pieces else np.empty(0, kind.to_pandas_dtype())
