"""Columns of Python objects, and the bulk data in their cells: arrays, tensors, images, bytes.

A column of one simple type contains the cells themselves. Any other column contains JSON text (see ``cells.py``). Bulk
data is pooled as *blobs*, and equal blobs are stored once per part. Torch is not imported here.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import pyarrow as pa
import xxhash

from verl_rollout_skip.errors import CorruptEntryError
from verl_rollout_skip.store.codec import cells
from verl_rollout_skip.store.codec.cells import Blob, CellBlobs, blob_size, blob_view
from verl_rollout_skip.store.codec.part import PartFile, check_memory
from verl_rollout_skip.store.format import BLOB_SIZES, BLOBS
from verl_rollout_skip.store.threads import map_in_threads

CELL_TYPES = {
    "text": pa.string(),
    "json": pa.string(),
    "int": pa.int64(),
    "float": pa.float64(),
    "bool": pa.bool_(),
}
"""The Parquet type of a column of Python objects, by its form."""
LARGE = 64 << 10
"""A blob of at least this many bytes is loaded as one object for all its cells. Smaller ones are copied."""
_IMMUTABLE = (str, int, float, bool, type(None))


@dataclass(frozen=True)
class ObjectColumn:
    """The cells of one object array, ready to be written. They share no mutable object with the caller.

    ``form`` is the type of ``values``: the cells themselves (or None) for "text", "int", "float" and "bool", JSON text
    for "json". ``blobs`` is the bulk data of each row. ``first_rows[row]`` is the first row that contains the same
    object: such rows share one list of blobs here, and one object again after loading. ``dtype`` is that of the array,
    and ``shape`` is its shape without the rows.
    """

    path: tuple[str, ...]
    shape: tuple[int, ...]
    dtype: str
    form: str
    values: list[Any]
    blobs: list[list[Blob]] | None = None
    first_rows: list[int] | None = None


def encode_objects(path: tuple[str, ...], array: np.ndarray) -> ObjectColumn:
    """Encode an array of objects or text."""
    flat = array.tolist() if array.ndim == 1 else [row.ravel().tolist() for row in array]
    kind = array.shape[1:], array.dtype.str
    form = _scalar_form(flat)
    if form is not None:
        return ObjectColumn(path, *kind, form, flat)
    values: list[str] = []
    blobs: list[list[Blob]] = []
    first_rows: list[int] = []
    row_of: dict[int, int] = {}
    for row, cell in enumerate(flat):
        first = row_of.setdefault(id(cell), row)
        first_rows.append(first)
        blobs.append([] if first == row else blobs[first])
        values.append(cells.encode(cell, blobs[row], f"{'.'.join(path)}[{row}]") if first == row else values[first])
    shared = any(first != row and type(flat[row]) not in _IMMUTABLE for row, first in enumerate(first_rows))
    return ObjectColumn(path, *kind, "json", values, blobs if any(blobs) else None, first_rows if shared else None)


def _scalar_form(flat: Sequence[Any]) -> str | None:
    """The form of a column whose cells all have one simple type or are None, so that it is easy to query."""
    kinds = {type(cell) for cell in flat} - {type(None)}
    if len(kinds) != 1:
        return None
    kind = kinds.pop()
    if kind is str:
        return "text" if all(cell is None or cell.isascii() or cells.is_utf8(cell) for cell in flat) else None
    if kind is int:
        return "int" if all(cell is None or cell in cells.INT64 for cell in flat) else None
    return {float: "float", bool: "bool"}.get(kind)


class BlobPool:
    """The numbered blobs of all cells of a rollout step. Equal blobs share a number."""

    def __init__(self, blobs: Iterable[Blob]) -> None:
        self.blobs: list[Blob] = []
        self.sizes: list[int] = []
        self.digests: list[bytes] = []
        # Compare identities first: the samples of a prompt usually contain the same objects.
        self._distinct = {id(blob): blob for blob in blobs}
        self._numbers: dict[int, int] = {}
        equal: dict[bytes, list[int]] = {}
        large = [blob for blob in self._distinct.values() if blob_size(blob) >= LARGE]
        digests = dict(zip(map(id, large), map_in_threads(_digest, large), strict=True))
        for blob in self._distinct.values():
            digest = digests.get(id(blob)) or _digest(blob)
            candidates = equal.setdefault(digest, [])
            number = next((number for number in candidates if _same_bytes(self.blobs[number], blob)), len(self.blobs))
            if number == len(self.blobs):
                candidates.append(number)
                self.blobs.append(blob)
                self.sizes.append(blob_size(blob))
                self.digests.append(digest)
            self._numbers[id(blob)] = number

    def numbers(self, blobs: Sequence[Blob]) -> list[int]:
        return [self._numbers[id(blob)] for blob in blobs]


class PartObjects:
    """Decodes the cells of a part. Its blobs are read on first use."""

    def __init__(self, part: PartFile) -> None:
        self._part = part
        self._built_bytes = 0
        self._data: list[Any] | None = None
        self._shared: dict[Hashable, Any] = {}

    def decode(self, item: dict[str, Any], objects: dict[int, tuple[str, Any]]) -> list[Any]:
        """Decode the cells of the column that ``item`` describes.

        Rows with the same object number share one object. ``objects`` contains those of earlier parts, by number.
        """
        form, column = item["cells"], item["column"]
        if form not in ("text", "json"):
            chunks = self._part.chunks(column, CELL_TYPES[form], nullable=True)
            return [value for _, chunk in chunks for value in chunk.to_pylist()]
        texts, codes = self._part.texts(column)
        if form == "text":
            return list(map([*texts, None].__getitem__, codes.tolist()))
        if (codes < 0).any():
            raise CorruptEntryError(f"Column {column!r} has missing cells.")
        numbers: list[Any] = [None] * len(codes)
        if item["object"] is not None:
            numbers = self._part.numbers(item["object"], pa.int64()).tolist()
            if min(numbers, default=0) < 0:
                raise CorruptEntryError(f"Column {item['object']!r} has negative numbers.")
        blobs = self.cell_blobs(item["blobs"])
        decoded: list[Any] = []
        immutable: dict[int, Any] = {}  # by text, which is decoded only once
        for row, (code, number) in enumerate(zip(codes.tolist(), numbers, strict=True)):
            if code in immutable:
                cell = immutable[code]
            elif number in objects:
                text, cell = objects[number]
                if text != texts[code]:
                    raise CorruptEntryError(f"The rows that share object {number} have different texts.")
            else:
                cell = cells.decode(texts[code], blobs(row))
                if type(cell) in _IMMUTABLE:
                    immutable[code] = cell
                elif number is not None:
                    objects[number] = texts[code], cell
            decoded.append(cell)
        return decoded

    def cell_blobs(self, column: str | None) -> Callable[[int], CellBlobs]:
        """Return a function from rows to blobs. ``column`` contains the numbers of the blobs, and may be None."""
        if column is None:
            return lambda row: CellBlobs(self.make, ())
        lengths, numbers = self._part.lists(column, pa.int32())
        ends, blob_numbers = [0, *np.cumsum(lengths).tolist()], numbers.tolist()
        return lambda row: CellBlobs(self.make, blob_numbers[ends[row] : ends[row + 1]])

    def make(self, number: int, kind: Hashable, build: Callable[[Any], Any]) -> Any:
        """Return ``build(blob)``. For a large blob, all callers that request the same ``kind`` share the result."""
        if (number, kind) in self._shared:
            return self._shared[number, kind]
        if self._data is None or (0 <= number < len(self._data) and self._data[number] is None):
            self._data = self._read()  # or read again, if a large blob is requested as another kind
        if not 0 <= number < len(self._data):
            raise ValueError(f"there is no blob {number}")
        data = self._data[number]
        self._built_bytes += len(data)
        check_memory(self._built_bytes, self._part.limit, "The bulk data in its cells")
        result = build(data)
        if len(data) >= LARGE:
            self._shared[number, kind] = result
            self._data[number] = None  # frees the memory that Arrow allocated
        return result

    def _read(self) -> list[Any]:
        """Read all blobs: large ones as views of Arrow's memory, small ones as copies, which do not keep it alive."""
        counts, sizes = self._part.lists(BLOB_SIZES, pa.int64())
        remaining = iter(sizes.tolist())
        blobs: list[Any] = []
        for row_data, count in zip(self._part.buffers(BLOBS), counts.tolist(), strict=True):
            start = 0
            for size in (next(remaining) for _ in range(count)):
                blob = row_data[start : start + max(size, 0)]
                blobs.append(blob if size >= LARGE else bytes(blob))
                start += size
                if len(blob) != size:
                    raise CorruptEntryError("The blobs of a row do not have their recorded sizes.")
            if start != len(row_data):
                raise CorruptEntryError("The blobs of a row do not have their recorded sizes.")
        return blobs


def _digest(blob: Blob) -> bytes:
    return xxhash.xxh3_128(blob_view(blob)).digest()


def _same_bytes(left: Blob, right: Blob) -> bool:
    left_bytes, right_bytes = (np.frombuffer(blob_view(blob), np.uint8) for blob in (left, right))
    return np.array_equal(left_bytes, right_bytes)
