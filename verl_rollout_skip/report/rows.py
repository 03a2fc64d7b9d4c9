"""The tokens, log-probs and cells of single rows of an entry, from the columns that the Parquet file has.

Works for padded batches and for jagged ones. What the recording does not give, or gives in a form that is not one value
a token, is None.
"""

from __future__ import annotations

import json
import math
import struct
from typing import Any

import numpy as np
import pyarrow as pa

from verl_rollout_skip.entry_columns import EntryColumns

_MAX_HOPS = 8
_SCALAR_CELLS = ("int", "float", "bool", "text")
_MAX_EXTRAS = 16


class RowReader:
    """Rows of one entry. Columns are read when they are first asked for."""

    def __init__(self, entry: EntryColumns) -> None:
        self._entry = entry
        self._lists: dict[str, _Lists | None] = {}
        self._columns: dict[str, pa.ChunkedArray] = {}

    def prompt(self, row: int) -> np.ndarray | None:
        """The token ids of the prompt without padding."""
        return self._values("prompts", row, integers=True)

    def response(self, row: int) -> np.ndarray | None:
        """The token ids of the response without padding."""
        return self._values("responses", row, integers=True)

    def log_probs(self, row: int, length: int) -> np.ndarray | None:
        """The log-probs of the sampled tokens at the time of the rollout."""
        return self._of_length(self._values("rollout_log_probs", row, integers=False), length)

    def not_generated(self, row: int, length: int) -> np.ndarray | None:
        """Which tokens of the response did not come from the model: tool output, for example. None: all did."""
        mask = self._of_length(self._values("response_mask", row, integers=True), length)
        return None if mask is None or mask.all() else mask == 0

    def cell(self, name: str, row: int) -> Any:
        """A cell of the input, as plain JSON."""
        item = self._entry.place(name, part="input")
        if item is None or "cells" not in item:
            return None
        value = self._column(item["column"])[row].as_py()
        return readable(_parsed(value)) if item["cells"] == "json" else value

    def extras(self, row: int) -> dict[str, Any]:
        """The single numbers and words that the rollout gave for a row: turns, reward extras …"""
        found: dict[str, Any] = {}
        described = self._entry.description["output"]
        for item in [*described["numbers"], *described["objects"]]:
            scalar = item.get("cells") in _SCALAR_CELLS or item.get("form") == "dense"
            if scalar and not item["shape"] and len(item["path"]) == 1 and len(found) < _MAX_EXTRAS:
                column = self._column(item["column"])
                if not pa.types.is_list(column.type):
                    found[str(item["path"][0])] = column[row].as_py()
        return found

    def _column(self, name: str) -> pa.ChunkedArray:
        if name not in self._columns:
            self._columns[name] = self._entry.column(name)
        return self._columns[name]

    def _values(self, name: str, row: int, integers: bool) -> np.ndarray | None:
        if name not in self._lists:
            self._lists[name] = self._open(name)
        lists = self._lists[name]
        values = None if lists is None else lists.row(row)
        if values is None or values.dtype.kind not in ("biu" if integers else "f"):
            return None
        return values

    def _open(self, name: str) -> _Lists | None:
        item = self._entry.place(name)
        for _ in range(_MAX_HOPS):  # a tensor that is the same as another one is stored once
            if item is None or item.get("form") != "same" or not item.get("of"):
                break
            item = self._entry.place(item["of"])
        if item is None or item.get("form") not in ("dense", "ragged", "jagged", "rows"):
            return None
        one_dimensional = item["form"] in ("jagged", "rows") or len(item["shape"]) == 1
        found = self._entry.lists(item["column"]) if one_dimensional else None
        if found is None:
            return None
        padded = None
        spans = self._entry.description["output"].get("spans")
        if item["form"] == "dense" and spans is not None:
            lengths = self._entry.numbers(f"skip__{'prompt' if name == 'prompts' else 'response'}_length")
            padded = None if lengths is None else (lengths, name == "prompts")
        return _Lists(*found, padded)

    def _of_length(self, values: np.ndarray | None, length: int) -> np.ndarray | None:
        return values if values is not None and len(values) == length else None


class _Lists:
    """A column with one list of numbers a row; ``padded`` says how long the rows are and whether padding is left."""

    def __init__(self, values: np.ndarray, offsets: np.ndarray, padded: tuple[np.ndarray, bool] | None) -> None:
        self._values = values
        self._offsets = offsets
        self._padded = padded

    def row(self, row: int) -> np.ndarray:
        values = self._values[self._offsets[row] : self._offsets[row + 1]]
        if self._padded is None:
            return values
        lengths, left = self._padded
        length = min(int(lengths[row]), len(values))
        return values[len(values) - length :] if left else values[:length]


def _parsed(text: Any) -> Any:
    try:
        return json.loads(text)
    except (TypeError, ValueError, RecursionError):
        return str(text)


def readable(value: Any, depth: int = 0) -> Any:
    """A stored cell for people: tuples and object arrays become lists, bulk data becomes a word."""
    if depth > 50:
        return "…"
    if isinstance(value, list):
        return [readable(item, depth + 1) for item in value]
    if not isinstance(value, dict):
        return value
    kind = value.get("$type")
    if kind is None:
        return {key: readable(item, depth + 1) for key, item in value.items()}
    items = value.get("items")
    if kind in ("tuple", "ndarray") and isinstance(items, list):
        return [readable(item, depth + 1) for item in items]
    if kind == "dict" and isinstance(items, list) and all(isinstance(pair, list) and len(pair) == 2 for pair in items):
        return {str(readable(key, depth + 1)): readable(item, depth + 1) for key, item in items}
    try:
        return _scalar(kind, value)
    except (TypeError, ValueError, KeyError, IndexError):
        return f"({kind})"


def _scalar(kind: Any, tag: dict[str, Any]) -> Any:
    """What JSON has no word for and people can read: text that is no Unicode, long integers, numpy scalars."""
    if kind == "int":
        return str(int(tag["hex"], 16))
    data = bytes.fromhex(tag["hex"])
    if kind == "float":
        return str(struct.unpack(">d", data)[0])
    if kind == "str" or tag.get("dtype") in ("U", "S"):
        return data.decode("utf-8", "backslashreplace")
    value = np.frombuffer(data, np.dtype(tag["dtype"]))[0].item()
    return value if isinstance(value, int | float | bool) and math.isfinite(value) else str(value)
