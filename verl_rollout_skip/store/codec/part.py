"""Reads the description and the columns of one part, a Parquet file that may be damaged or hostile, without torch.

Footer and pages are checked before Arrow sees them, and every type, length, null and size before anything is
allocated for it. A file that cannot be read raises ``CorruptEntryError``.
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
from verl_rollout_skip.store.codec.dtypes import natural
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

_SHORTAGE = (errno.ENOMEM, errno.EMFILE, errno.ENFILE)
# What a Python string takes in addition to its characters. No row needs to refer to it.
_TEXT_BYTES = 60
_WIDTHS = {"BOOLEAN": 1, "INT32": 4, "FLOAT": 4}
_LENGTHS = {Side.OUTPUT: (PROMPT_LENGTH, RESPONSE_LENGTH), Side.INPUT: (INPUT_LENGTH, INPUT_RESPONSE_LENGTH)}
ColumnId = tuple[bool, tuple[str, ...]]
"""A key of a batch: whether it is a tensor, and its path."""


@contextmanager
def decoding(what: str = "") -> Iterator[None]:
    """Turn failures to decode untrusted bytes into ``CorruptEntryError``, or ``EntryTooLargeError`` if memory runs out.
    ``what`` describes the bytes and is the prefix of the message, unless an inner call has added it."""
    try:
        yield
    except RolloutSkipError as error:
        if str(error).startswith(what):
            raise
        raise type(error)(f"{what} {error}") from error
    except (ImportError, FileNotFoundError, PermissionError):
        raise
    except Exception as error:
        lead = f"{what} ".lstrip()
        if isinstance(error, MemoryError) or (isinstance(error, OSError) and error.errno in _SHORTAGE):
            raise EntryTooLargeError(
                f"{lead}There is not enough memory, or too many files are open, to decode it ({type(error).__name__}: "
                f"{error}). The file is not damaged. Load it on a larger machine, or raise the limits of the process."
            ) from error
        raise CorruptEntryError(f"{lead}It cannot be decoded ({type(error).__name__}: {error}).") from error


def check_memory(needed: int, limit: int, what: str = "Loading it") -> None:
    """Raise ``EntryTooLargeError`` before an allocation beyond the limit."""
    if needed > limit:
        raise EntryTooLargeError(
            f"{what} would take {format_size(needed)} of memory and {format_size(limit)} are allowed. Load it on a "
            "larger machine or raise max_load_bytes."
        )


@dataclass(frozen=True)
class Layout:
    """A part's description of one batch: the column and encoding of each numeric key, and the items of its objects."""

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

    Each column is read on demand through a separate reader: several threads can read at once, and Arrow's memory for a
    column is freed as soon as the column is decoded. ``limit`` bounds the memory of one column; ``what`` is the prefix
    of error messages; ``start`` is the row of the entry that the part begins with.
    """

    def __init__(self, data: Any, limit: int, what: str = "", start: int = 0) -> None:
        self.limit, self.what = limit, what
        with decoding(what):
            self._data = pa.py_buffer(data)
            self._chunks = read_columns(memoryview(self._data).cast("B"))
            self._metadata = pq.read_metadata(pa.BufferReader(self._data))
            self.schema: pa.Schema = self._metadata.schema.to_arrow_schema()
            self.names: list[str] = self.schema.names
            self._check_names()
            self.description = self._read_description()
            self.rows: int = self._metadata.num_rows
            if type(self.description["rows"]) is not int or self.description["rows"] != self.rows:
                raise CorruptEntryError(f"It claims {self.description['rows']!r} rows but contains {self.rows}.")
            self.entry_rows = slice(start, start + self.rows)

    def _check_names(self) -> None:
        """Arrow reads columns by position, so the sizes that were checked must be in the order of the schema."""
        schema = self._metadata.schema
        leaves = [(schema.column(number).path, schema.column(number).physical_type) for number in range(len(schema))]
        if [(chunk.path, chunk.physical) for chunk in self._chunks] != leaves * self._metadata.num_row_groups:
            raise CorruptEntryError("Its columns are not those of its schema.")

    def _read_description(self) -> dict[str, Any]:
        text = (self._metadata.metadata or {}).get(METADATA_KEY)
        if text is None:
            raise CorruptEntryError("It is a Parquet file, but not one that this package wrote: it has no description.")
        description: dict[str, Any] = json.loads(text)
        check_version(description["format_version"])
        return description

    def layout(self, side: Side) -> Layout:
        """The description of one of the two batches."""
        described = self.description[side.value]
        spans = self._spans(side)
        numbers: dict[ColumnId, tuple[str, Encoding]] = {}
        for item in described["numbers"]:
            encoding = parse_encoding(item, spans)
            numbers[encoding.element.holder == "torch", tuple(item["path"])] = item["column"], encoding
        objects = {(False, tuple(item["path"])): item for item in described["objects"]}
        columns = [field.name for column, encoding in numbers.values() for field in encoding.fields(column)]
        listed = len(described["numbers"]) + len(described["objects"])
        if len(set(columns)) != len(columns) or len(numbers.keys() | objects.keys()) != listed:
            raise CorruptEntryError("The file lists a key or a column twice.")
        return Layout(self, spans, numbers, objects)

    def _spans(self, side: Side) -> Spans | None:
        if self.description[side.value]["spans"] is None:
            return None
        widths = [natural(width) for width in self.description[side.value]["spans"]]
        prompts, responses = (self.numbers(name, pa.int32()).astype(np.int64) for name in _LENGTHS[side])
        for found, width in zip((prompts, responses), widths, strict=True):
            if (found < 0).any() or (found > width).any():
                raise CorruptEntryError("The stored prompt and response lengths do not fit the widths.")
        return Spans(widths[0], widths[1], prompts, responses)

    def stored_bytes(self, name: str, value_bytes: int = 0) -> int:
        """The memory that a column takes when it is read; ``value_bytes`` is the minimum for one value."""
        return sum(
            max(chunk.uncompressed, chunk.num_values * (value_bytes or _WIDTHS.get(chunk.physical, 8)))
            for chunk in self._chunks
            if chunk.path.split(".")[0] == name
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
        return _joined([values for _, _, values in self.pieces(name, kind)], kind)

    def lists(self, name: str, item: pa.DataType) -> tuple[np.ndarray, np.ndarray]:
        """A column of lists of numbers: the length of each list, and all values concatenated."""
        pieces = list(self.pieces(name, pa.list_(item)))
        lengths = [lengths for _, lengths, _ in pieces if lengths is not None]
        return _joined(lengths, pa.int64()), _joined([values for _, _, values in pieces], item)

    def texts(self, name: str) -> tuple[list[str], np.ndarray]:
        """A column of text: the distinct texts, and the index of each row's text, -1 for none."""
        texts: list[str] = []
        codes = []
        for _, chunk in self.chunks(name, pa.string(), nullable=True):
            found = _codes(chunk)
            codes.append(np.where(found < 0, -1, found + len(texts)))
            texts += chunk.dictionary.to_pylist()
        return texts, _joined(codes, pa.int64())

    def buffers(self, name: str) -> list[memoryview]:
        """A column of bytes, each row as a view of Arrow's memory."""
        views = []
        for _, chunk in self.chunks(name, pa.binary()):
            data = memoryview(chunk.buffers()[2] or b"")
            views += [data[start:end] for start, end in pairwise(byte_offsets(chunk).tolist())]
        return views

    def chunks(
        self, name: str, kind: pa.DataType | None = None, nullable: bool = False
    ) -> Iterator[tuple[slice, pa.Array]]:
        """The Arrow chunks of a column, of type ``kind`` if given; text as a dictionary."""
        if self.names.count(name) != 1:
            raise CorruptEntryError(f"The file has no column {name!r}, although it lists one.")
        found = self.schema.field(name).type
        if kind is not None and not _is_same_type(found, kind):
            raise CorruptEntryError(f"Column {name!r} is of type {found}, not {kind}.")
        is_text = pa.types.is_string(found)
        own = [chunk for chunk in self._chunks if chunk.path.split(".")[0] == name]
        if any(chunk.has_dictionary and chunk.physical.endswith("BYTE_ARRAY") for chunk in own) and not is_text:
            # No part is written this way, and a few bytes in a dictionary can expand to gigabytes.
            raise CorruptEntryError(f"Column {name!r} has a dictionary, which is not allowed for bulk data.")
        check_memory(self.stored_bytes(name), self.limit, f"Column {name!r}")
        file = pq.ParquetFile(
            pa.BufferReader(self._data),
            metadata=self._metadata,
            page_checksum_verification=True,
            pre_buffer=False,
            read_dictionary=[name] if is_text else None,
        )
        # One row group at a time: Arrow's offsets within one read have 32 bits.
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
    """An Arrow array of numbers without nulls; ``Array.to_numpy`` would import pandas."""
    data, dtype = array.buffers()[1], np.dtype(array.type.to_pandas_dtype())
    if data is None:
        return np.empty(0, dtype)
    if pa.types.is_boolean(array.type):
        bits = np.unpackbits(np.frombuffer(data, np.uint8), count=array.offset + len(array), bitorder="little")
        return bits[array.offset :].view(np.bool_)
    return np.frombuffer(data, dtype)[array.offset : array.offset + len(array)]


def _codes(texts: pa.DictionaryArray) -> np.ndarray:
    """The dictionary index of each row's text, -1 for none."""
    found = as_numpy(texts.indices).astype(np.int64)
    return np.where(as_numpy(texts.indices.is_valid()), found, -1) if texts.null_count else found


def byte_offsets(array: pa.Array) -> np.ndarray:
    """Where each text or bytes value of an Arrow array begins, and where the last one ends."""
    data = array.buffers()[1]
    return (
        np.frombuffer(data, np.int32)[array.offset : array.offset + len(array) + 1] if data else np.zeros(1, np.int32)
    )


def _is_same_type(found: pa.DataType, kind: pa.DataType) -> bool:
    if pa.types.is_list(found) and pa.types.is_list(kind):
        return bool(found.value_type == kind.value_type)  # the name of the inner field does not matter
    return bool(found == kind)


def _joined(pieces: list[np.ndarray], kind: pa.DataType) -> np.ndarray:
    if len(pieces) == 1:
        return pieces[0]
    return np.concatenate(pieces) if pieces else np.empty(0, kind.to_pandas_dtype())
