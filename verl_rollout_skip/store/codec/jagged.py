"""Encodings of nested tensors, as bits: jagged ones, what follows from them, and strided ones."""

from __future__ import annotations

import math
from dataclasses import dataclass, fields
from functools import cached_property
from typing import Any, ClassVar

import numpy as np
import pyarrow as pa

from verl_rollout_skip.errors import CorruptEntryError
from verl_rollout_skip.store.codec.dtypes import Element, check_element, from_stored, to_stored
from verl_rollout_skip.store.codec.encodings import (
    Concat,
    Dense,
    Encoding,
    Mask,
    Positions,
    Ragged,
    Reading,
    Same,
    Stored,
    list_type,
    natural,
)
from verl_rollout_skip.store.codec.padding import Spans
from verl_rollout_skip.store.format import SHAPE


@dataclass(frozen=True)
class JaggedBits:
    """The rows of a jagged tensor one after another, the ragged dimension first, and how long each row is."""

    values: np.ndarray
    lengths: np.ndarray

    @cached_property
    def offsets(self) -> np.ndarray:
        """Where each row begins, and where the last one ends."""
        return np.concatenate([[0], np.cumsum(self.lengths)]).astype(np.int64)

    def rows(self, rows: slice) -> np.ndarray:
        """The values of some rows."""
        return self.values[self.offsets[rows.start] : self.offsets[rows.stop]]


@dataclass(frozen=True)
class NestedEncoding(Encoding):
    """Base of the encodings of tensors whose rows differ in shape."""

    @property
    def row_bytes(self) -> int:
        return 0

    def read(self, column: str, reading: Reading) -> Any:
        """The bits of all rows of a part."""
        raise NotImplementedError


@dataclass(frozen=True)
class Jagged(NestedEncoding):
    """A jagged NestedTensor: one list per row. ``shape`` is the shape of its values without the ragged dimension.

    ``ragged_idx`` is the ragged dimension as torch counts it; ``laid_out`` the one that it was built with: verl builds
    position ids of vision models with another one and changes it afterwards. Columns with one ``group`` share their
    offsets object, as the originals did: torch computes only between NestedTensors that do. ``bounds``: the shortest
    and longest length were known.
    """

    ragged_idx: int
    laid_out: int
    group: int
    bounds: bool
    name: ClassVar[str] = "jagged"

    @property
    def kind(self) -> tuple[Any, ...]:
        built = (self.ragged_idx, self.laid_out, self.group, self.bounds)
        return "jagged", self.element.holder, self.element.name, self.shape, *built

    def check(self, spans: Spans | None) -> None:
        dims = len(self.shape) + 1
        if not (1 <= self.ragged_idx <= dims and 1 <= self.laid_out <= dims) or self.element.holder != "torch":
            raise ValueError(f"a nested tensor of {dims} dimensions cannot be ragged in dimension {self.ragged_idx}")

    def fields(self, column: str) -> list[pa.Field]:
        return [pa.field(column, list_type(self.element.arrow), nullable=False)]

    def store(self, bits: JaggedBits, rows: slice, spans: Spans | None) -> list[Stored]:
        lengths = bits.lengths[rows] * math.prod(self.shape) * self.element.components
        return [Stored(to_stored(self.element, bits.rows(rows).reshape(-1)), lengths)]

    def read(self, column: str, reading: Reading) -> JaggedBits:
        per_token = math.prod(self.shape) * self.element.components
        lengths, values = reading.part.all_lists(column, self.element.arrow)
        if (per_token == 0 and lengths.any()) or (per_token and (lengths % per_token).any()):
            raise CorruptEntryError(f"A list of column {column!r} does not hold whole tokens of shape {self.shape}.")
        bits = from_stored(self.element, values).reshape(-1, *self.shape)
        return JaggedBits(bits, lengths // max(per_token, 1))


@dataclass(frozen=True)
class JaggedPositions(Jagged):
    """Position ids 0, 1, 2 … of each row of a jagged tensor, as long as the input ids."""

    name: ClassVar[str] = "jagged_positions"
    needs: ClassVar[tuple[str, ...]] = ("prompts", "responses")

    def fields(self, column: str) -> list[pa.Field]:
        return []

    def store(self, bits: JaggedBits, rows: slice, spans: Spans | None) -> list[Stored]:
        return []

    def read(self, column: str, reading: Reading) -> JaggedBits:
        prompts, responses = (_flat(reading, name) for name in self.needs)
        return count_up(prompts.lengths + responses.lengths, self.element.bits)


@dataclass(frozen=True)
class JaggedConcat(JaggedPositions):
    """Prompts and responses of jagged tensors, row by row: the input ids."""

    name: ClassVar[str] = "jagged_concat"

    def read(self, column: str, reading: Reading) -> JaggedBits:
        prompts, responses = (_flat(reading, name) for name in self.needs)
        if any(piece.values.dtype != self.element.bits for piece in (prompts, responses)):
            raise CorruptEntryError("The file derives input ids from prompts or responses of another type.")
        return interleave(prompts, responses)


@dataclass(frozen=True)
class Rows(NestedEncoding):
    """A strided NestedTensor: rows of different shapes. A second column holds the shapes."""

    name: ClassVar[str] = "rows"

    @property
    def kind(self) -> tuple[Any, ...]:
        return "rows", self.element.holder, self.element.name

    def check(self, spans: Spans | None) -> None:
        if self.element.holder != "torch":
            raise ValueError("only a tensor can be nested")

    def fields(self, column: str) -> list[pa.Field]:
        kinds = {column: self.element.arrow, f"{SHAPE}{column}": pa.int64()}
        return [pa.field(name, list_type(item), nullable=False) for name, item in kinds.items()]

    def store(self, bits: list[np.ndarray], rows: slice, spans: Spans | None) -> list[Stored]:
        part = bits[rows]
        flat = [to_stored(self.element, row.reshape(-1)) for row in part]
        values = np.concatenate([np.empty(0, self.element.stored), *flat])
        shapes = np.array([size for row in part for size in row.shape], np.int64)
        lengths = [np.array(sizes, np.int64) for sizes in (list(map(len, flat)), [row.ndim for row in part])]
        return [Stored(values, lengths[0]), Stored(shapes, lengths[1])]

    def read(self, column: str, reading: Reading) -> list[np.ndarray]:
        lengths, values = reading.part.all_lists(column, self.element.arrow)
        ndims, shapes = reading.part.all_lists(f"{SHAPE}{column}", pa.int64())
        bits = from_stored(self.element, values)
        lengths = lengths // self.element.components
        rows = []
        for end, length, shape in zip(
            np.cumsum(lengths), lengths, np.split(shapes, np.cumsum(ndims)[:-1]) if len(ndims) else [], strict=True
        ):
            if math.prod(int(size) for size in shape) != length or (shape < 0).any():
                raise CorruptEntryError(
                    f"A row of column {column!r} holds {length} values, not the shape {shape.tolist()}."
                )
            rows.append(bits[end - length : end].reshape(shape))
        return rows


ENCODINGS: dict[str, type[Encoding]] = {
    encoding.name: encoding
    for encoding in (Dense, Ragged, Mask, Positions, Concat, Jagged, JaggedPositions, JaggedConcat, Rows, Same)
}


def encoding_from_json(data: Any, spans: Spans | None) -> Encoding:
    """The inverse of ``encoding_to_json``, for data that cannot be trusted."""
    kind = ENCODINGS[data["form"]]
    element = Element(**{key: str(value) for key, value in data["element"].items()})
    check_element(element)
    arguments: dict[str, Any] = {"element": element, "shape": tuple(natural(size) for size in data["shape"])}
    for field in fields(kind)[2:]:
        expected = {"int": int, "str": str, "bool": bool}[str(field.type)]
        if type(data[field.name]) is not expected:
            raise ValueError(f"{field.name} is {data[field.name]!r}, not of type {field.type}")
        arguments[field.name] = data[field.name]
    encoding = kind(**arguments)
    encoding.check(spans)
    return encoding


def count_up(lengths: np.ndarray, dtype: np.dtype) -> JaggedBits:
    """0, 1, 2 … for each length in turn."""
    starts = np.cumsum(lengths) - lengths
    values = (np.arange(np.sum(lengths)) - np.repeat(starts, lengths)).astype(dtype, copy=False)
    return JaggedBits(values, lengths)


def interleave(left: JaggedBits, right: JaggedBits) -> JaggedBits:
    """Rows of two jagged tensors joined one by one."""
    lengths = np.stack([left.lengths, right.lengths], axis=1)
    from_left = np.repeat(np.tile([True, False], len(lengths)), lengths.reshape(-1))
    values = np.empty(len(from_left), left.values.dtype)
    values[from_left] = left.values
    values[~from_left] = right.values
    return JaggedBits(values, lengths.sum(axis=1))


def _flat(reading: Reading, name: str) -> JaggedBits:
    bits = reading.done(name)
    if not isinstance(bits, JaggedBits) or bits.values.ndim != 1:
        raise CorruptEntryError(f"The file derives a column from {name!r}, which is not a jagged tensor.")
    return bits
