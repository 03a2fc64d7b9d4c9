"""One part of an entry for people: its columns by name, the tokens of its rows, and the cells of its keys.

Only the columns that are asked for are read. Damage is a ``CorruptEntryError`` that says where it is.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from enum import Enum
from typing import Any

import numpy as np
import pyarrow as pa
import xxhash

from verl_rollout_skip.errors import CorruptEntryError, EntryTooLargeError, RolloutSkipError
from verl_rollout_skip.key import RolloutKey
from verl_rollout_skip.sizes import format_size
from verl_rollout_skip.store.codec import cells
from verl_rollout_skip.store.codec.blobs import part_blobs, row_blobs
from verl_rollout_skip.store.codec.encodings import DenseEncoding, Reading, natural
from verl_rollout_skip.store.codec.jagged import encoding_from_json
from verl_rollout_skip.store.codec.padding import Spans
from verl_rollout_skip.store.codec.part import PartFile, as_numpy, raise_shortage
from verl_rollout_skip.store.format import BLOBS_OF, INPUT_LENGTH, INPUT_RESPONSE_LENGTH, PROMPT_LENGTH, RESPONSE_LENGTH

_LIMIT = 4 << 30
_MAX_HOPS = 8


class Side(str, Enum):
    """The two batches of an entry: what the rollout step returned, and what it was given."""

    OUTPUT = "output"
    INPUT = "input"


_LENGTHS = {Side.OUTPUT: (PROMPT_LENGTH, RESPONSE_LENGTH), Side.INPUT: (INPUT_LENGTH, INPUT_RESPONSE_LENGTH)}


class PartReader:
    """A Parquet file whose bytes are in memory or mapped."""

    def __init__(self, data: Any, key: RolloutKey, rows: int, where: str) -> None:
        self.rows = rows
        self._key, self._where = key, where
        with self._damaged():
            self._file = PartFile(data, _LIMIT)
            self.description = self._file.description
            self.names = frozenset(self._file.names)
            self._blobs = part_blobs(self._file, _LIMIT)
            if self._file.rows != rows:
                raise CorruptEntryError(f"It holds {self._file.rows} rows, its record says {rows} rows.")

    def column(self, name: str) -> pa.ChunkedArray:
        """One column as Arrow has it."""
        with self._damaged():
            chunks = [chunk for _, chunk in self._file.chunks(name, nullable=True)]
            return pa.chunked_array(chunks, self._file.schema.field(name).type)

    def numbers(self, name: str) -> np.ndarray | None:
        """A column of numbers or truth values; None if it is not there, or if one of its values is missing."""
        if name not in self.names or not _is_number(self._file.schema.field(name).type):
            return None
        found = self.column(name)
        return None if found.null_count else np.concatenate([np.empty(0, bool), *map(as_numpy, found.chunks)])

    def texts(self, name: str) -> list[str] | None:
        """A column of text; None if it is not there, or if one of its values is missing."""
        if name not in self.names or not pa.types.is_string(self._file.schema.field(name).type):
            return None
        with self._damaged():
            texts, codes = self._file.texts(name)
            return None if (codes < 0).any() else [texts[code] for code in codes.tolist()]

    def lists(self, name: str) -> list[np.ndarray] | None:
        """A column of lists of numbers, one array per row; None if it is not there."""
        if name not in self.names or not pa.types.is_list(self._file.schema.field(name).type):
            return None
        with self._damaged():
            lengths, values = self._file.all_lists(name, self._file.schema.field(name).type.value_type)
            return np.split(values, np.cumsum(lengths)[:-1]) if len(lengths) else []

    def tokens(self, name: str) -> list[np.ndarray] | None:
        """What a tensor of the output holds for each token of a row, padding left out; None if it is not recorded, or
        not one value per token."""
        with self._damaged():
            item = self._stored(self._find(name, Side.OUTPUT))
            form = None if item is None else item.get("form")
            if item is None or form is None:
                return None
            if form in ("concat", "jagged_concat"):
                prompts, responses = self.tokens("prompts"), self.tokens("responses")
                if prompts is None or responses is None:
                    return None
                return [np.concatenate(pair) for pair in zip(prompts, responses, strict=True)]
            dimensions = {"dense": 1, "ragged": 1, "jagged": 0, "rows": 0}.get(form)
            rows = self.lists(item["column"]) if len(item["shape"]) == dimensions else None
            return rows if rows is None or form != "dense" else self._unpadded(name, rows)

    def cells(self, name: str, rows: Sequence[int], side: Side) -> list[Any] | None:
        """The Python values of a key for these rows, without torch (see ``cells.decode_for_people``). None if the key
        is not recorded, or is a tensor with more than one value per row."""
        with self._damaged():
            item = self._stored(self._find(name, side, arrays_first=True))
            if item is None:
                return None
            if "cells" not in item:
                return self._number_cells(item, rows, side)
            if item["cells"] in ("text", "json"):
                texts, codes = self._file.texts(item["column"])
                found: list[Any] = [None if codes[row] < 0 else texts[codes[row]] for row in rows]
            else:
                column = self.column(item["column"])
                found = [column[row].as_py() for row in rows]
            if item["cells"] == "json":
                blobs = row_blobs(self._file, item["blobs"], self._blobs)
                found = [cells.decode_for_people(text, blobs(row)) for text, row in zip(found, rows, strict=True)]
            return [_reshaped(value, item["shape"]) for value in found] if item["shape"] else found

    def bulk_digests(self, column: str) -> list[bytes] | None:
        """For each row a digest of the bulk data in the cells of a column; None if it has none."""
        numbers = f"{BLOBS_OF}{column}"
        if numbers not in self.names:
            return None
        digests: dict[int, bytes] = {}
        with self._damaged():
            blobs = row_blobs(self._file, numbers, self._blobs)
            for row in range(self.rows):
                for index, number in enumerate(blobs(row).numbers):
                    if number not in digests:
                        digests[number] = blobs(row).make(index, "digest", lambda data: xxhash.xxh3_128(data).digest())
            return [b"".join(digests[number] for number in blobs(row).numbers) for row in range(self.rows)]

    def simple_keys(self) -> list[str]:
        """The keys of the output that have one number, truth value or text per row."""
        with self._damaged():
            described = self.description[Side.OUTPUT.value]
            numbers = [item for item in described["numbers"] if item["form"] == "dense"]
            objects = [item for item in described["objects"] if item["cells"] != "json"]
            found = [item for item in [*numbers, *objects] if not item["shape"] and len(item["path"]) == 1]
            return [str(item["path"][0]) for item in found]

    def meta(self, side: Side) -> dict[Any, Any]:
        """The meta_info of a batch."""
        with self._damaged():
            return dict(cells.decode_inline(self.description[side.value]["meta"], cells.decode_for_people))

    @property
    def response_width(self) -> int | None:
        """The width to which responses were padded; None if they were not."""
        with self._damaged():
            widths = self.description[Side.OUTPUT.value]["spans"]
            return None if widths is None else natural(widths[1])

    def _find(self, name: str, side: Side, arrays_first: bool = False) -> dict[str, Any] | None:
        """What the description says of a key. A tensor and an array may have the same one: then the first counts."""
        described = self.description[side.value] or {"numbers": [], "objects": []}
        items: list[dict[str, Any]] = [*described["numbers"], *described["objects"]]
        if arrays_first:
            items.sort(key=lambda item: "element" in item and item["element"]["holder"] == "torch")
        return next((item for item in items if item["path"] == [name]), None)

    def _stored(self, item: dict[str, Any] | None) -> dict[str, Any] | None:
        """Where the values of a key are that are the same as those of another one, which are stored once."""
        for _ in range(_MAX_HOPS):
            if item is None or item.get("form") != "same":
                return item
            item = self._find(item["of"] or item["path"][0], Side.OUTPUT)
        return None

    def _unpadded(self, name: str, rows: list[np.ndarray]) -> list[np.ndarray]:
        """The tokens of rows that are stored with padding, if the lengths or the attention mask tell."""
        spans = self._spans(Side.OUTPUT)
        if spans is not None:
            windows = ("prompt",) if name == "prompts" else ("response", "full")
            window = next((window for window in windows if all(len(row) == spans.width(window) for row in rows)), None)
            if window is None:
                return rows
            starts, ends, _ = spans.bounds(window)
            return [row[start:end] for row, start, end in zip(rows, starts, ends, strict=True)]
        mask = self._stored(self._find("attention_mask", Side.OUTPUT))
        masks = None if mask is None or mask.get("form") != "dense" else self.lists(mask["column"])
        if masks is None:
            return rows
        kept = [
            mask[: len(row)] if name == "prompts" else mask[len(mask) - len(row) :]
            for row, mask in zip(rows, masks, strict=True)
        ]
        return [row[keep != 0] if len(keep) == len(row) else row for row, keep in zip(rows, kept, strict=True)]

    def _number_cells(self, item: dict[str, Any], rows: Sequence[int], side: Side) -> list[Any] | None:
        if item["element"]["holder"] == "torch":
            numbers = None if item["shape"] or item["form"] != "dense" else self.numbers(item["column"])
            return None if numbers is None else [numbers[row].item() for row in rows]
        spans = self._spans(side)
        encoding = encoding_from_json(item, spans)
        if not isinstance(encoding, DenseEncoding):
            return None
        if encoding.row_bytes * self.rows > _LIMIT:
            raise EntryTooLargeError(
                f"{item['path']} of {self._where} would take more than {format_size(_LIMIT)} of memory."
            )
        bits = np.zeros((self.rows, *encoding.shape), encoding.element.bits)
        encoding.read_into(bits, item["column"], Reading(self._file, spans, lambda name: None))
        return [bits[row].tolist() for row in rows]

    def _spans(self, side: Side) -> Spans | None:
        widths = self.description[side.value]["spans"]
        prompt, response = (None if widths is None else self.numbers(name) for name in _LENGTHS[side])
        return (
            None
            if prompt is None or response is None
            else Spans(natural(widths[0]), natural(widths[1]), prompt, response)
        )

    @contextmanager
    def _damaged(self) -> Iterator[None]:
        with damaged(self._key, self._where):
            yield


@contextmanager
def damaged(key: RolloutKey, where: str) -> Iterator[None]:
    """Whatever goes wrong while decoding bytes from outside means that the bytes are wrong."""
    said = f"The entry of {key} is damaged: {where}."
    try:
        yield
    except CorruptEntryError as error:
        if str(error).startswith(said):  # by a step of what was done
            raise
        raise CorruptEntryError(f"{said} {error}") from error
    except (RolloutSkipError, FileNotFoundError, PermissionError):
        raise
    except Exception as error:
        raise_shortage(error)
        raise CorruptEntryError(f"{said} It cannot be decoded ({type(error).__name__}: {error}).") from error


def _reshaped(values: list[Any], shape: list[int]) -> Any:
    """A flat list as nested ones."""
    return np.fromiter(values, object, len(values)).reshape(shape).tolist()


def _is_number(kind: pa.DataType) -> bool:
    return bool(pa.types.is_integer(kind) or pa.types.is_floating(kind) or pa.types.is_boolean(kind))
