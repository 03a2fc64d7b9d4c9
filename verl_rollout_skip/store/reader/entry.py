"""Reads an open entry without torch: columns by name, the tokens of each row, and cells as Python values.

Only the requested columns are read. A damaged file raises ``CorruptEntryError`` with the name of the file.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from functools import cached_property
from typing import Any, TypeVar

import numpy as np
import pyarrow as pa
import xxhash

from verl_rollout_skip.store.codec import cells
from verl_rollout_skip.store.codec.encodings import Encoding, Form
from verl_rollout_skip.store.codec.objects import PartObjects
from verl_rollout_skip.store.codec.part import Layout, PartFile, as_numpy, check_memory, decoding
from verl_rollout_skip.store.format import BLOB_SIZES, BLOBS, BLOBS_OF, Side
from verl_rollout_skip.store.record import EntryRecord

T = TypeVar("T")
_NUMBERS = (pa.types.is_integer, pa.types.is_floating, pa.types.is_boolean)


class EntryReader:
    """The rows of one entry. A column that is missing in any part is None."""

    def __init__(self, record: EntryRecord, parts: Sequence[PartFile]) -> None:
        self.record = record
        self._parts = [_Part(part) for part in parts]
        self._tokens: dict[str, list[np.ndarray] | None] = {}

    @property
    def names(self) -> frozenset[str]:
        """The names of the columns in the Parquet files, without those of the bulk data, which all keys share."""
        names = frozenset().union(*(part.file.names for part in self._parts))
        return frozenset(name for name in names if name not in (BLOBS, BLOB_SIZES) and not name.startswith(BLOBS_OF))

    @property
    def response_width(self) -> int | None:
        """The width that responses are padded to; None if they are not padded."""
        spans = self._concatenate(lambda part: [part.output.spans])
        return max((span.response_width for span in spans or () if span is not None), default=None)

    def column(self, name: str) -> pa.ChunkedArray:
        """One column as an Arrow array, null for the rows of parts that do not have it."""
        tables = self._concatenate(lambda part: [pa.table({name: part.column(name)})])
        return pa.concat_tables(tables or [], promote_options="permissive").column(name)

    def numbers(self, name: str) -> np.ndarray | None:
        """A column of numbers or booleans, or None if any value is missing."""
        column = self.column(name)
        is_number = any(is_kind(column.type) for is_kind in _NUMBERS) and not column.null_count
        return np.concatenate([np.empty(0, bool), *map(as_numpy, column.chunks)]) if is_number else None

    def texts(self, name: str) -> list[str] | None:
        """A column of text, or None if any value is missing."""
        return self._concatenate(lambda part: part.texts(name))

    def tokens(self, name: str) -> list[np.ndarray] | None:
        """The values of an output tensor without padding, one array per row.

        None if the tensor does not have exactly one value per token.
        """
        if name not in self._tokens:
            self._tokens[name] = self._concatenate(lambda part: part.tokens(name))
        return self._tokens[name]

    def bulk_digests(self, column: str) -> list[bytes] | None:
        """A digest of the bulk data in each row of a column, or None if the column has no bulk data."""
        return self._concatenate(lambda part: part.bulk_digests(f"{BLOBS_OF}{column}"))

    def cells(self, name: str, rows: Sequence[int] | None = None, side: Side = Side.OUTPUT) -> list[Any] | None:
        """The Python values of a key for these rows, or for all rows: numbers, text, objects.

        An array is returned as it is; a tensor or an image is replaced by a placeholder such as
        ``(tensor float32 [3, 224, 224])``. None if the key is missing, or is a tensor with more than one value per row.
        """
        selected = range(self.record.rows) if rows is None else rows
        by_row: dict[int, Any] = {}
        start = 0
        for part in self._parts:
            part_rows = [row for row in selected if start <= row < start + part.file.rows]
            with decoding(part.file.error_prefix):
                values = part.cells(name, [row - start for row in part_rows], side)
            if values is None:
                return None
            by_row.update(zip(part_rows, values, strict=True))
            start += part.file.rows
        return [by_row[row] for row in selected]

    def simple_keys(self) -> list[str]:
        """The keys of the output that have exactly one number, boolean or text per row."""
        with decoding(self._parts[0].file.error_prefix):
            output = self._parts[0].output
            simple = {
                key: encoding.form is Form.DENSE and not encoding.shape for key, (_, encoding) in output.numbers.items()
            }
            simple |= {key: item["cells"] != "json" and not item["shape"] for key, item in output.objects.items()}
            return [str(path[0]) for (_, path), is_simple in simple.items() if is_simple and len(path) == 1]

    def meta(self, side: Side = Side.OUTPUT) -> dict[Any, Any]:
        """The meta_info of a batch."""
        part = self._parts[0].file
        with decoding(part.error_prefix):
            return dict(cells.decode_inline(part.description[side.value]["meta"], for_display=True))

    def _concatenate(self, read: Callable[[_Part], Iterable[T] | None]) -> list[T] | None:
        joined: list[T] = []
        for part in self._parts:
            with decoding(part.file.error_prefix):
                values = read(part)
            if values is None:
                return None
            joined += values
        return joined


class _Part:
    def __init__(self, file: PartFile) -> None:
        self.file = file
        self._objects = PartObjects(file)

    @cached_property
    def output(self) -> Layout:
        return self.file.layout(Side.OUTPUT)

    def column(self, name: str) -> pa.ChunkedArray:
        if name not in self.file.names:
            return pa.chunked_array([pa.nulls(self.file.rows)])
        chunks = [chunk for _, chunk in self.file.chunks(name, nullable=True)]
        plain = [chunk.dictionary_decode() if pa.types.is_dictionary(chunk.type) else chunk for chunk in chunks]
        return pa.chunked_array(plain, self.file.schema.field(name).type)

    def texts(self, name: str) -> list[str] | None:
        if name not in self.file.names or not pa.types.is_string(self.file.schema.field(name).type):
            return None
        texts, codes = self.file.texts(name)  # decoding a dictionary with Arrow would import its compute functions
        return None if (codes < 0).any() else [texts[code] for code in codes.tolist()]

    def tokens(self, name: str) -> list[np.ndarray] | None:
        column, encoding = self._resolve(name, self.output, tensors_first=True)
        if not isinstance(encoding, Encoding):
            return None
        if encoding.form in (Form.CONCAT, Form.JAGGED_CONCAT):
            prompts, responses = self.tokens("prompts"), self.tokens("responses")
            pairs = None if prompts is None or responses is None else zip(prompts, responses, strict=True)
            return None if pairs is None else [np.concatenate(pair) for pair in pairs]
        if not encoding.is_stored or len(encoding.shape) != (0 if encoding.is_nested else 1):
            return None
        rows = self._rows_of_lists(column)
        return self._unpadded(name, rows) if encoding.form is Form.DENSE else rows

    def cells(self, name: str, rows: Sequence[int], side: Side) -> list[Any] | None:
        layout = self.output if side is Side.OUTPUT else self._input
        column, spec = self._resolve(name, layout, tensors_first=False)
        if spec is None:
            return None
        if isinstance(spec, Encoding):
            return self._number_cells(column, spec, layout, rows)
        if spec["cells"] == "json":
            texts, codes = self.file.texts(column)
            blobs = self._objects.cell_blobs(spec["blobs"])
            values = [cells.decode(texts[codes[row]], blobs(row), for_display=True) for row in rows]
        else:
            decoded = self._objects.decode(spec, {})
            values = [decoded[row] for row in rows]
        shape = spec["shape"]
        return [np.fromiter(value, object, len(value)).reshape(shape).tolist() for value in values] if shape else values

    def bulk_digests(self, column: str) -> list[bytes] | None:
        if column not in self.file.names:
            return None
        blobs, digests = self._objects.cell_blobs(column), {}
        for cell in map(blobs, range(self.file.rows)):
            for number in cell.numbers:
                if number not in digests:
                    digests[number] = self._objects.make(number, "digest", lambda data: xxhash.xxh3_128(data).digest())
        return [b"".join(digests[number] for number in blobs(row).numbers) for row in range(self.file.rows)]

    @cached_property
    def _input(self) -> Layout:
        description = self.file.description[Side.INPUT.value]
        return Layout(self.file, None, {}, {}) if description is None else self.file.layout(Side.INPUT)

    def _rows_of_lists(self, column: str) -> list[np.ndarray]:
        lengths, values = self.file.lists(column, self.file.schema.field(column).type.value_type)
        return np.split(values, np.cumsum(lengths)[:-1]) if len(lengths) else []

    def _resolve(self, name: str, layout: Layout, tensors_first: bool) -> tuple[str, Encoding | dict[str, Any] | None]:
        """The column of a key and its encoding, or its description if it contains objects.

        A tensor and an array may have the same name. If a key is stored as equal to another one, that one is returned.
        """
        for is_tensor in (tensors_first, not tensors_first):
            key = is_tensor, (name,)
            if key in layout.objects:
                return layout.objects[key]["column"], layout.objects[key]
            column, encoding = layout.numbers.get(key, ("", None))
            if encoding is not None and encoding.form is Form.SAME:
                column, encoding = self.output.numbers.get((is_tensor, (encoding.of or name,)), ("", None))
            if encoding is not None:
                return column, encoding
        return "", None

    def _unpadded(self, name: str, rows: list[np.ndarray]) -> list[np.ndarray]:
        """Remove the padding of stored rows if the lengths or the attention mask say where it is."""
        spans = self.output.spans
        if spans is not None:
            windows = ("prompt",) if name == "prompts" else ("response", "full")
            window = next((window for window in windows if all(len(row) == spans.width(window) for row in rows)), None)
            if window is None:
                return rows
            starts, ends, _ = spans.bounds(window)
            return [row[start:end] for row, start, end in zip(rows, starts, ends, strict=True)]
        column, mask = self._resolve("attention_mask", self.output, tensors_first=True)
        if not isinstance(mask, Encoding) or mask.form is not Form.DENSE or len(mask.shape) != 1:
            return rows
        kept = [
            mask[: len(row)] if name == "prompts" else mask[len(mask) - len(row) :]
            for row, mask in zip(rows, self._rows_of_lists(column), strict=True)
        ]
        return [row[keep != 0] if len(keep) == len(row) else row for row, keep in zip(rows, kept, strict=True)]

    def _number_cells(self, column: str, encoding: Encoding, layout: Layout, rows: Sequence[int]) -> list[Any] | None:
        if encoding.element.holder == "torch":
            if encoding.form is not Form.DENSE or encoding.shape or encoding.element.components != 1:
                return None
            numbers = self.file.numbers(column, encoding.element.arrow)
            return [numbers[row].item() for row in rows]
        if encoding.is_nested or not encoding.is_stored:
            return None
        check_memory(encoding.row_bytes * self.file.rows, self.file.limit, f"Column {column!r}")
        bits = np.zeros((self.file.rows, *encoding.shape), encoding.element.bits)
        encoding.read_into(bits, self.file, column, layout.spans)
        return [bits[row].tolist() for row in rows]
