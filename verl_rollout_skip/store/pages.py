"""The sizes that the pages of a Parquet file claim, read before Arrow believes them.

The footer of a hostile file can say that a column is small while its pages expand to any size. Each page begins with a
Thrift header that gives its sizes; adding those up costs microseconds a page and bounds what Arrow will allocate. Only
what is needed of Thrift's compact protocol is read here.
"""

from __future__ import annotations

from typing import Any

from verl_rollout_skip.errors import CorruptEntryError

_I32_FIELDS = {2: "uncompressed", 3: "compressed"}
_PAGE_KINDS = (5, 7, 8)  # data page, dictionary page, data page of version 2: each holds its number of values first


def check_pages(data: memoryview, metadata: Any) -> None:
    """Raise ``CorruptEntryError`` if the pages of a column claim more than the footer says of the column."""
    for group in range(metadata.num_row_groups):
        for index in range(metadata.num_columns):
            column = metadata.row_group(group).column(index)
            _check_column(data, column)


def _check_column(data: memoryview, column: Any) -> None:
    # An offset of 0 is none: a column without rows has no data page.
    offsets = [column.data_page_offset, column.dictionary_page_offset if column.has_dictionary_page else None]
    start = min((offset for offset in offsets if offset), default=0)
    position, end = start, start + column.total_compressed_size
    if not 0 <= start <= end <= len(data):
        raise CorruptEntryError(f"Column {column.path_in_schema!r} does not lie within the file.")
    uncompressed = values = 0
    while position < end:
        header = _Header(data, position, end)
        values += header.values if header.kind != 7 else 0
        uncompressed += header.uncompressed + header.position - position
        position = header.position + header.compressed
    if position != end or values != column.num_values or uncompressed != column.total_uncompressed_size:
        raise CorruptEntryError(f"The pages of column {column.path_in_schema!r} have other sizes than the file says.")


class _Header:
    """One page header: the sizes of the page, its number of values, and where the page itself begins."""

    def __init__(self, data: memoryview, position: int, end: int) -> None:
        self._data = data
        self._end = end
        self.position = position
        self.uncompressed = self.compressed = self.values = self.kind = 0
        number = 0
        while True:
            kind, number = self._field(number)
            if kind == 0:
                break
            if number in _I32_FIELDS and kind == 5:
                setattr(self, _I32_FIELDS[number], self._integer())
            elif number in _PAGE_KINDS and kind == 12:
                self.kind = number
                self.values = self._first_integer()
            else:
                self._skip(kind)
        if min(self.uncompressed, self.compressed, self.values) < 0:
            raise CorruptEntryError("A page of the file has a negative size.")

    def _byte(self) -> int:
        if self.position >= self._end:
            raise CorruptEntryError("A page header of the file is cut off.")
        self.position += 1
        return self._data[self.position - 1]

    def _varint(self) -> int:
        value = shift = 0
        while True:
            byte = self._byte()
            value |= (byte & 0x7F) << shift
            if byte < 0x80:
                return value
            shift += 7
            if shift > 63:
                raise CorruptEntryError("A page header of the file is malformed.")

    def _integer(self) -> int:
        value = self._varint()
        return (value >> 1) ^ -(value & 1)

    def _field(self, previous: int) -> tuple[int, int]:
        """Type and number of the next field; type 0 ends a struct."""
        byte = self._byte()
        delta, kind = byte >> 4, byte & 0x0F
        if kind == 0:
            return 0, 0
        return kind, previous + delta if delta else self._integer()

    def _first_integer(self) -> int:
        """The first field of a struct, an integer; the rest of the struct is skipped."""
        found = number = 0
        while True:
            kind, number = self._field(number)
            if kind == 0:
                return found
            if number == 1 and kind == 5:
                found = self._integer()
            else:
                self._skip(kind)

    def _skip(self, kind: int, depth: int = 8) -> None:
        if depth == 0:
            raise CorruptEntryError("A page header of the file is nested too deeply.")
        if kind in (1, 2):  # a boolean is its type
            return
        if kind == 3:
            self._byte()
        elif kind in (4, 5, 6):
            self._varint()
        elif kind == 7:
            self.position += 8
        elif kind == 8:
            length = self._varint()  # moves the position itself
            self.position += length
        elif kind == 12:
            number = 0
            while True:
                inner, number = self._field(number)
                if inner == 0:
                    return
                self._skip(inner, depth - 1)
        else:
            raise CorruptEntryError(f"A page header of the file holds a field of type {kind}, unknown there.")
