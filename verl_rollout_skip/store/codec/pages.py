"""The sizes that a Parquet file claims in its footer and in its pages, read before Arrow believes them.

The footer of a hostile file can say that a column is small while its pages expand to any size. Each page begins with a
Thrift header that gives its sizes; adding those up costs microseconds a page and bounds what Arrow will allocate. Both
are read here rather than through pyarrow's ``ColumnChunkMetaData``, which ends the process on a footer that contradicts
its own schema. Only what Parquet uses of Thrift's compact protocol is known.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from verl_rollout_skip.errors import CorruptEntryError

_MAGIC = b"PAR1"
_DICTIONARY_PAGE = 2
# In a data page, a dictionary page, and a data page of version 2.
_ENCODING_FIELDS = {5: 2, 7: 2, 8: 4}
# Plain, and numbers into a dictionary. Others can make long texts out of a few bytes.
_TEXT_ENCODINGS = (0, 2, 8)
_PHYSICAL = ("BOOLEAN", "INT32", "INT64", "INT96", "FLOAT", "DOUBLE", "BYTE_ARRAY", "FIXED_LEN_BYTE_ARRAY")
_MAX_DEPTH = 16


@dataclass(frozen=True)
class ColumnChunk:
    """What the footer says of one column in one row group."""

    path: str
    physical: str
    num_values: int
    uncompressed: int
    compressed: int
    start: int
    has_dictionary: bool


def read_columns(data: memoryview) -> list[ColumnChunk]:
    """The column chunks of a file, after their pages were found to have the sizes that the footer says."""
    length = int.from_bytes(data[-8:-4], "little")
    if len(data) < 12 or bytes(data[-4:]) != _MAGIC or length > len(data) - 12:
        raise CorruptEntryError("It does not end as a Parquet file does.")
    footer = _Thrift(data, len(data) - 8 - length, len(data) - 8).struct()
    chunks = []
    for group in _list(footer.get(4)):
        for column in _list(_struct(group).get(1)):
            chunk = _column_chunk(_struct(_struct(column).get(3)))
            _check_pages(data, chunk)
            chunks.append(chunk)
    return chunks


def _column_chunk(meta: dict[int, Any]) -> ColumnChunk:
    # An offset of 0 is none: a column without rows has no data page.
    offsets = [_integer(meta.get(field, 0)) for field in (9, 11)]
    physical = _integer(meta.get(1))
    if not 0 <= physical < len(_PHYSICAL):
        raise CorruptEntryError(f"The file has a column of type {physical}, which Parquet does not know.")
    return ColumnChunk(
        path=".".join(bytes(part).decode("utf-8", "replace") for part in _list(meta.get(3))),
        physical=_PHYSICAL[physical],
        num_values=_integer(meta.get(5)),
        uncompressed=_integer(meta.get(6)),
        compressed=_integer(meta.get(7)),
        start=min((offset for offset in offsets if offset), default=0),
        has_dictionary=bool(offsets[1]),
    )


def _check_pages(data: memoryview, chunk: ColumnChunk) -> None:
    position, end = chunk.start, chunk.start + chunk.compressed
    if min(chunk.start, chunk.compressed, chunk.num_values, chunk.uncompressed) < 0 or end > len(data):
        raise CorruptEntryError(f"Column {chunk.path!r} does not lie within the file.")
    uncompressed = values = 0
    while position < end:
        thrift = _Thrift(data, position, end)
        header = thrift.struct()
        page = [(_struct(header[field]), encoding) for field, encoding in _ENCODING_FIELDS.items() if field in header]
        sizes = [_integer(header.get(field)) for field in (2, 3)] + [_integer(kind.get(1)) for kind, _ in page]
        if len(page) != 1 or min(sizes) < 0:
            raise CorruptEntryError(f"A page of column {chunk.path!r} has an invalid size.")
        encoding = page[0][0].get(page[0][1])
        if chunk.physical == "BYTE_ARRAY" and encoding not in _TEXT_ENCODINGS:
            raise CorruptEntryError(f"Column {chunk.path!r} has the Parquet encoding {encoding}, which is not allowed.")
        values += 0 if header.get(1) == _DICTIONARY_PAGE else sizes[2]
        uncompressed += sizes[0] + thrift.position - position
        position = thrift.position + sizes[1]
    if position != end or values != chunk.num_values or uncompressed != chunk.uncompressed:
        raise CorruptEntryError(f"The pages of column {chunk.path!r} have other sizes than the file says.")


class _Thrift:
    """A reader of Thrift's compact protocol: structs become dicts by field number, text stays bytes."""

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
            number = number + delta if delta else self._zigzag()
            # A boolean field is its type.
            fields[number] = kind == 1 if kind in (1, 2) else self._value(kind, depth)

    def _value(self, kind: int, depth: int) -> Any:
        if depth == 0:
            raise CorruptEntryError("The description of the file is nested too deeply.")
        if kind in (1, 2, 3):
            return self._byte()
        if kind in (4, 5, 6):
            return self._zigzag()
        if kind == 7:
            return self._bytes(8)
        if kind == 8:
            return self._bytes(self._varint())
        if kind in (9, 10):
            byte = self._byte()
            size = self._varint() if byte >> 4 == 15 else byte >> 4
            if size > self._end - self.position:
                raise CorruptEntryError("The file claims a list that is longer than the file.")
            return [self._value(byte & 0x0F, depth - 1) for _ in range(size)]
        if kind == 12:
            return self.struct(depth - 1)
        raise CorruptEntryError(f"The description of the file holds a field of type {kind}, unknown there.")

    def _byte(self) -> int:
        if self.position >= self._end:
            raise CorruptEntryError("The description of the file, or of a page of it, is cut off.")
        self.position += 1
        return self._data[self.position - 1]

    def _bytes(self, size: int) -> memoryview:
        if size > self._end - self.position:
            raise CorruptEntryError("The description of the file, or of a page of it, is cut off.")
        self.position += size
        return self._data[self.position - size : self.position]

    def _varint(self) -> int:
        value = shift = 0
        while True:
            byte = self._byte()
            value |= (byte & 0x7F) << shift
            if byte < 0x80:
                return value
            shift += 7
            if shift > 63:
                raise CorruptEntryError("The description of the file holds a malformed number.")

    def _zigzag(self) -> int:
        value = self._varint()
        return (value >> 1) ^ -(value & 1)


def _list(value: Any) -> list[Any]:
    if not isinstance(value, list):
        raise CorruptEntryError("The description of the file has no list where one belongs.")
    return value


def _struct(value: Any) -> dict[int, Any]:
    if not isinstance(value, dict):
        raise CorruptEntryError("The description of the file has no structure where one belongs.")
    return value


def _integer(value: Any) -> int:
    if type(value) is not int:
        raise CorruptEntryError("The description of the file has no number where one belongs.")
    return value
