"""Checks the sizes in the footer and the pages of a Parquet file, before Arrow trusts them.

The footer of a hostile file can claim that a column is small while its pages expand to any size. Each page begins with
a Thrift header that contains its sizes. Adding them up takes microseconds per page, and bounds the memory that Arrow
allocates. Footer and headers are parsed here, because pyarrow's ``ColumnChunkMetaData`` aborts the process if a footer
contradicts its own schema. Only the subset of Thrift's compact protocol that Parquet uses is supported.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, TypeVar

from verl_rollout_skip.errors import CorruptEntryError

T = TypeVar("T")
_MAGIC = b"PAR1"
_DICTIONARY_PAGE = 2
# The field with the encoding, by the field of the page header: data page, dictionary page, data page version 2.
_ENCODING_FIELDS = {5: 2, 7: 2, 8: 4}
# Plain, and the two dictionary encodings. Others can expand a few bytes to long texts.
_TEXT_ENCODINGS = (0, 2, 8)
_PHYSICAL = ("BOOLEAN", "INT32", "INT64", "INT96", "FLOAT", "DOUBLE", "BYTE_ARRAY", "FIXED_LEN_BYTE_ARRAY")
_MAX_DEPTH = 16


@dataclass(frozen=True)
class ColumnChunk:
    """How the footer describes one column in one row group."""

    path: str
    physical: str
    num_values: int
    uncompressed: int
    compressed: int
    start: int
    has_dictionary: bool

    @property
    def column(self) -> str:
        """The name of the top-level column that the path begins with."""
        return self.path.split(".")[0]


def read_columns(data: memoryview) -> list[ColumnChunk]:
    """The column chunks of a file. Raises unless the sizes of their pages agree with the footer."""
    length = int.from_bytes(data[-8:-4], "little")
    if len(data) < 12 or bytes(data[-4:]) != _MAGIC or length > len(data) - 12:
        raise CorruptEntryError("It does not have the footer of a Parquet file.")
    footer = _Thrift(data, len(data) - 8 - length, len(data) - 8).struct()
    groups = [_field(_typed(group, dict), 1, list) for group in _field(footer, 4, list)]
    chunks = [_column_chunk(_field(_typed(column, dict), 3, dict)) for group in groups for column in group]
    for chunk in chunks:
        _check_pages(data, chunk)
    return chunks


def _column_chunk(meta: dict[int, Any]) -> ColumnChunk:
    # An offset of 0 means none: a column without rows has no data page.
    offsets = [_field(meta, number, int) if number in meta else 0 for number in (9, 11)]
    physical = _field(meta, 1, int)
    if not 0 <= physical < len(_PHYSICAL):
        raise CorruptEntryError(f"Its footer has a column of type {physical}, which does not exist in Parquet.")
    return ColumnChunk(
        path=".".join(bytes(part).decode("utf-8", "replace") for part in _field(meta, 3, list)),
        physical=_PHYSICAL[physical],
        num_values=_field(meta, 5, int),
        uncompressed=_field(meta, 6, int),
        compressed=_field(meta, 7, int),
        start=min((offset for offset in offsets if offset), default=0),
        has_dictionary=bool(offsets[1]),
    )


def _check_pages(data: memoryview, chunk: ColumnChunk) -> None:
    position, end = chunk.start, chunk.start + chunk.compressed
    if min(chunk.start, chunk.compressed, chunk.num_values, chunk.uncompressed) < 0 or end > len(data):
        raise CorruptEntryError(f"Column {chunk.path!r} is not within the file.")
    uncompressed = values = 0
    while position < end:
        thrift = _Thrift(data, position, end)
        header = thrift.struct()
        kinds = [number for number in _ENCODING_FIELDS if number in header]
        page = _field(header, kinds[0], dict) if len(kinds) == 1 else {}
        sizes = _field(header, 2, int), _field(header, 3, int), _field(page, 1, int)
        if min(sizes) < 0:
            raise CorruptEntryError(f"A page of column {chunk.path!r} has an invalid size.")
        encoding = page.get(_ENCODING_FIELDS[kinds[0]])
        if chunk.physical == "BYTE_ARRAY" and encoding not in _TEXT_ENCODINGS:
            raise CorruptEntryError(f"Column {chunk.path!r} has the Parquet encoding {encoding}, which is not allowed.")
        if header.get(1) != _DICTIONARY_PAGE:
            values += sizes[2]
        elif not chunk.has_dictionary:
            raise CorruptEntryError(f"Column {chunk.path!r} has a dictionary that is not in the footer.")
        uncompressed += sizes[0] + thrift.position - position
        position = thrift.position + sizes[1]
    if position != end or values != chunk.num_values or uncompressed != chunk.uncompressed:
        raise CorruptEntryError(f"The pages of column {chunk.path!r} do not have the sizes in the footer.")


class _Thrift:
    """Parses Thrift's compact protocol. Structs become dicts by field number; text stays bytes."""

    def __init__(self, data: memoryview, position: int, end: int) -> None:
        self._data = data
        self._end = end
        self.position = position

    def struct(self, depth: int = _MAX_DEPTH) -> dict[int, Any]:
        fields: dict[int, Any] = {}
        number = 0
        while True:
            byte = self._byte()
            delta, kind = byte >> 4, byte & 0x0F
            if kind == 0:
                return fields
            number = number + delta if delta else self._value(4, depth)
            # A boolean field has no value: its type is the value.
            fields[number] = kind == 1 if kind in (1, 2) else self._value(kind, depth)

    def _value(self, kind: int, depth: int) -> Any:
        if depth == 0:
            raise CorruptEntryError("Its metadata is nested too deeply.")
        if kind in (1, 2, 3):
            return self._byte()
        if kind in (4, 5, 6):
            number = self._varint()
            return (number >> 1) ^ -(number & 1)
        if kind in (7, 8):
            return self._bytes(8 if kind == 7 else self._varint())
        if kind in (9, 10):
            byte = self._byte()
            size = self._varint() if byte >> 4 == 15 else byte >> 4
            if size > self._end - self.position:
                raise CorruptEntryError("Its metadata has a list that is longer than the file.")
            return [self._value(byte & 0x0F, depth - 1) for _ in range(size)]
        if kind == 12:
            return self.struct(depth - 1)
        raise CorruptEntryError(f"Its metadata has a field of the unknown type {kind}.")

    def _byte(self) -> int:
        return self._bytes(1)[0]

    def _bytes(self, size: int) -> memoryview:
        if size > self._end - self.position:
            raise CorruptEntryError("The metadata of the file or of a page is truncated.")
        self.position += size
        return self._data[self.position - size : self.position]

    def _varint(self) -> int:
        value = 0
        for shift in range(0, 70, 7):
            byte = self._byte()
            value |= (byte & 0x7F) << shift
            if byte < 0x80:
                return value
        raise CorruptEntryError("Its metadata has a malformed number.")


def _field(struct: dict[int, Any], number: int, kind: type[T]) -> T:
    return _typed(struct.get(number), kind)


def _typed(value: Any, kind: type[T]) -> T:
    if type(value) is not kind:
        raise CorruptEntryError(f"Its metadata lacks a value of type {kind.__name__}.")
    return value
