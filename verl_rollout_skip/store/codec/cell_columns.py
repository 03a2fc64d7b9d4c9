"""Columns of Python objects: encoded cell by cell, with the objects that several rows share."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import pyarrow as pa

from verl_rollout_skip.errors import CorruptEntryError
from verl_rollout_skip.store.codec.blobs import Blob, CellBlobs
from verl_rollout_skip.store.codec.cells import INT64, decode, encode, is_utf8, numpy_dtype

CELL_TYPES = {
    "text": pa.string(),
    "json": pa.string(),
    "int": pa.int64(),
    "float": pa.float64(),
    "bool": pa.bool_(),
}
"""The Parquet type of a column of Python objects, by what it holds."""


@dataclass(frozen=True)
class CellColumn:
    """The cells of one object array, ready to be written: nothing mutable of the caller's is left in it.

    ``form`` says what ``values`` are: "text", "int", "float" and "bool" hold the cells themselves (or None),
    "json" holds JSON text. ``blobs`` is the bulk data of each row. ``first_rows[row]`` is the first row that holds the
    very same object; such rows share one object again after loading, and one list of blobs here.
    """

    form: str
    values: list[Any]
    blobs: list[list[Blob]] | None = None
    first_rows: list[int] | None = None


def encode_column(name: str, cells: Sequence[Any]) -> CellColumn:
    """Encode the cells of one column; ``name`` is for the error message."""
    form = _scalar_form(cells)
    if form is not None:
        return CellColumn(form, list(cells))
    values: list[str] = []
    blobs: list[list[Blob]] = []
    first_rows: list[int] = []
    row_of: dict[int, int] = {}
    for row, cell in enumerate(cells):
        first = row_of.setdefault(id(cell), row)
        first_rows.append(first)
        if first < row:
            values.append(values[first])
            blobs.append(blobs[first])
            continue
        blobs.append([])
        values.append(encode(cell, blobs[row], f"{name}[{row}]"))
    shared = any(first != row and type(cells[row]) not in _IMMUTABLE for row, first in enumerate(first_rows))
    return CellColumn("json", values, blobs if any(blobs) else None, first_rows if shared else None)


_IMMUTABLE = (str, int, float, bool, type(None))


def decode_column(
    texts: Sequence[str],
    codes: Sequence[int],
    blobs: Callable[[int], CellBlobs],
    objects: Sequence[int] | None,
    made: dict[int, tuple[str, Any]],
) -> list[Any]:
    """The cells of a column of JSON text in one part. ``codes`` says which of ``texts`` each row holds.

    Rows with the same number in ``objects`` hold one object; ``made`` has those of earlier parts, by number. Texts
    that stand for something immutable are decoded once.
    """
    cells: list[Any] = []
    immutable: dict[int, Any] = {}
    for row, code in enumerate(codes):
        if code < 0:
            raise CorruptEntryError("A cell is missing.")
        if code in immutable:
            cells.append(immutable[code])
            continue
        number = None if objects is None else objects[row]
        if number in made:
            text, cell = made[number]
            if text != texts[code]:
                raise CorruptEntryError(f"Rows that hold object {number} have different texts.")
        else:
            cell = decode(texts[code], blobs(row))
            if type(cell) in _IMMUTABLE:
                immutable[code] = cell
            elif number is not None:
                made[number] = texts[code], cell
        cells.append(cell)
    return cells


def _scalar_form(cells: Sequence[Any]) -> str | None:
    """The form of a column whose cells are all of one simple type, None aside; people can query such a column."""
    kinds = {type(cell) for cell in cells} - {type(None)}
    if len(kinds) != 1:
        return None
    kind = kinds.pop()
    if kind is str:
        return "text" if all(cell is None or cell.isascii() or is_utf8(cell) for cell in cells) else None
    if kind is int:
        return "int" if all(cell is None or cell in INT64 for cell in cells) else None
    return {float: "float", bool: "bool"}.get(kind)


def text_dtype(name: Any) -> np.dtype:
    """The dtype of a numpy array of fixed-width text or bytes, from data that cannot be trusted."""
    dtype = numpy_dtype(name)
    if dtype.kind not in "US":
        raise ValueError(f"{name!r} is not a dtype of text")
    return dtype
