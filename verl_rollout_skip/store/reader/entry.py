"""An open entry: what its parts hold, row after row."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, TypeVar

import numpy as np
import pyarrow as pa

from verl_rollout_skip.store.format import BLOB_SIZES, BLOBS, BLOBS_OF
from verl_rollout_skip.store.reader.part import PartReader, Side
from verl_rollout_skip.store.record import EntryRecord

T = TypeVar("T")


class EntryReader:
    """The rows of one entry. A column that is not recorded, or not in all parts, is None."""

    def __init__(self, record: EntryRecord, parts: list[PartReader]) -> None:
        self.record = record
        self._parts = parts
        self._tokens: dict[str, list[np.ndarray] | None] = {}

    @property
    def names(self) -> frozenset[str]:
        """The names of the columns in the Parquet files, but for those with bulk data, which belong to all of them."""
        names = frozenset().union(*(part.names for part in self._parts))
        return frozenset(name for name in names if name not in (BLOBS, BLOB_SIZES) and not name.startswith(BLOBS_OF))

    @property
    def response_width(self) -> int | None:
        """The width to which responses were padded; None if they were not."""
        widths = self._joined(lambda part: part.response_width)
        return None if widths is None else max(widths)

    def column(self, name: str) -> pa.ChunkedArray:
        """One column as Arrow has it; null in parts that do not have it."""
        columns = [part.column(name) if name in part.names else pa.nulls(part.rows) for part in self._parts]
        tables = [pa.table({name: column}) for column in columns]
        return pa.concat_tables(tables, promote_options="permissive").column(name)

    def numbers(self, name: str) -> np.ndarray | None:
        """A column of numbers or truth values; None if one of its values is missing."""
        found = self._joined(lambda part: part.numbers(name))
        return None if found is None else np.concatenate(found)

    def texts(self, name: str) -> list[str] | None:
        """A column of text; None if one of its values is missing."""
        found = self._joined(lambda part: part.texts(name))
        return None if found is None else [text for texts in found for text in texts]

    def tokens(self, name: str) -> list[np.ndarray] | None:
        """What a tensor of the output holds for each token, one array per row, padding left out; None if it does not
        have one value per token."""
        if name not in self._tokens:
            found = self._joined(lambda part: part.tokens(name))
            self._tokens[name] = None if found is None else [row for rows in found for row in rows]
        return self._tokens[name]

    def bulk_digests(self, column: str) -> list[bytes] | None:
        """For each row a digest of the bulk data in the cells of a column; None if it has none."""
        found = self._joined(lambda part: part.bulk_digests(column))
        return None if found is None else [digest for digests in found for digest in digests]

    def cells(self, name: str, rows: Sequence[int] | None = None, side: Side = Side.OUTPUT) -> list[Any] | None:
        """The Python values of a key for these rows, or for all: numbers, text, objects. A tensor or an image among
        them is a word such as ``(tensor float32 [3, 224, 224])``, an array is an array."""
        wanted = range(self.record.rows) if rows is None else rows
        found: dict[int, Any] = {}
        start = 0
        for part in self._parts:
            own = [row for row in wanted if start <= row < start + part.rows]
            values = part.cells(name, [row - start for row in own], side)
            if values is None:
                return None
            found.update(zip(own, values, strict=True))
            start += part.rows
        return [found[row] for row in wanted]

    def simple_keys(self) -> list[str]:
        """The keys of the output that have one number, truth value or text per row."""
        return self._parts[0].simple_keys()

    def meta(self, side: Side = Side.OUTPUT) -> dict[Any, Any]:
        """The meta_info of a batch."""
        return self._parts[0].meta(side)

    def _joined(self, read: Callable[[PartReader], T | None]) -> list[T] | None:
        found = []
        for part in self._parts:
            values = read(part)
            if values is None:
                return None
            found.append(values)
        return found
