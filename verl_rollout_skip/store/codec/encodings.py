"""The forms in which a numeric column can lie in the file, each with its way in and its way back side by side.

A form is a small description that is kept as JSON in the file. ``fields`` and ``write`` make its Parquet columns;
``read`` makes the bits again from them. A form that leaves something out (padding, a tensor that follows from
others) is chosen by ``columns.py`` only after it was proved to give the recorded bits back.

Everything a form says comes from a file that may be damaged or hostile, so ``check`` is called first and ``read``
trusts no length it has not compared.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import asdict, dataclass, fields
from typing import Any, ClassVar

import numpy as np
import pyarrow as pa
import torch

from verl_rollout_skip.errors import CorruptEntryError
from verl_rollout_skip.store.codec.dtypes import (
    NUMPY_NUMBERS,
    TORCH_DTYPES,
    Element,
    as_integers,
    finish,
    from_stored,
    tensor_from_bits,
    to_stored,
)
from verl_rollout_skip.store.codec.padding import WINDOWS, Spans, mask_rows, position_rows, row_chunks
from verl_rollout_skip.store.codec.table import ColumnReader, list_array, list_field

_STORED = {
    "bool",
    "float32",
    "float64",
    *(f"{sign}int{bits}" for sign in ("", "u") for bits in (8, 16, 32, 64)),
}


@dataclass(frozen=True)
class Reading:
    """What a form may need to be read: its columns, the spans, and the columns that were read before it."""

    rows: int
    columns: ColumnReader
    spans: Spans | None
    done: Callable[[str], Any]


@dataclass(frozen=True)
class Form:
    """Base: ``element`` is the type of the elements, ``shape`` the dense shape of one row."""

    element: Element
    shape: tuple[int, ...]
    name: ClassVar[str]
    needs: ClassVar[tuple[str, ...]] = ()

    def row_bytes(self) -> int:
        """Memory that one decoded row takes; jagged forms add what their lists hold."""
        return math.prod(self.shape) * self.element.bits.itemsize

    def fields(self, column: str) -> list[pa.Field]:
        return []

    def write(self, bits: Any, rows: slice, spans: Spans | None) -> list[pa.Array]:
        return []

    def check(self, spans: Spans | None) -> None:
        """Raise ValueError if this description cannot be meant."""

    def read(self, column: str, reading: Reading) -> Any:
        raise NotImplementedError


@dataclass(frozen=True)
class Dense(Form):
    """Every element: one number a row, or one list a row with the trailing dimensions laid out flat."""

    name: ClassVar[str] = "dense"

    def fields(self, column: str) -> list[pa.Field]:
        if not self.shape and self.element.parts == 1:
            return [pa.field(column, self.element.arrow, nullable=False)]
        return [list_field(column, self.element.arrow)]

    def write(self, bits: np.ndarray, rows: slice, spans: Spans | None) -> list[pa.Array]:
        part = bits[rows]
        values = to_stored(self.element, part.reshape(-1))
        if not self.shape and self.element.parts == 1:
            return [pa.array(values, self.element.arrow)]
        lengths = np.full(len(part), math.prod(self.shape) * self.element.parts)
        return [list_array(values, lengths, self.element.arrow)]

    def read(self, column: str, reading: Reading) -> torch.Tensor | np.ndarray:
        out = np.empty((reading.rows, *self.shape), self.element.bits)
        if not self.shape and self.element.parts == 1:
            for rows, values in reading.columns.numbers(column, self.element.arrow):
                out[rows] = from_stored(self.element, values)
        else:
            lengths = np.full(reading.rows, math.prod(self.shape) * self.element.parts)
            for rows, values in reading.columns.lists(column, self.element.arrow, lengths):
                out[rows] = from_stored(self.element, values).reshape(rows.stop - rows.start, *self.shape)
        return finish(self.element, out)


@dataclass(frozen=True)
class Ragged(Form):
    """A padded tensor without its padding: one list a row with the elements that lie in a window.

    ``axis`` is the padded dimension of a row: the first, or the last (position ids of vision models, [3, L]).
    ``pad`` is what stands outside the window, as an integer with the same bits.
    """

    window: str
    axis: int
    pad: int
    name: ClassVar[str] = "ragged"

    def check(self, spans: Spans | None) -> None:
        if spans is None or self.window not in WINDOWS or self.axis not in (0, len(self.shape) - 1):
            raise ValueError("a column without padding needs a window and an axis")
        if not self.shape or self.shape[self.axis] != spans.width(self.window) or self.element.parts != 1:
            raise ValueError(f"a row of shape {self.shape} does not fit the window {self.window!r}")
        kind = as_integers(np.empty(0, self.element.bits)).dtype
        limits = (0, 1) if kind.kind == "b" else (np.iinfo(kind).min, np.iinfo(kind).max)
        if not limits[0] <= self.pad <= limits[1]:
            raise ValueError(f"{self.pad} is no padding of type {kind}")

    def fields(self, column: str) -> list[pa.Field]:
        return [list_field(column, self.element.arrow)]

    def write(self, bits: np.ndarray, rows: slice, spans: Spans | None) -> list[pa.Array]:
        assert spans is not None
        cells, mask = self._aligned(bits[rows], spans, rows)
        values = cells[mask].view(bits.dtype)
        lengths = spans.lengths(self.window)[rows] * self._per_token()
        return [list_array(to_stored(self.element, values), lengths, self.element.arrow)]

    def read(self, column: str, reading: Reading) -> torch.Tensor | np.ndarray:
        spans = reading.spans
        assert spans is not None
        shape = (reading.rows, *self.shape)
        out = np.zeros(shape, self.element.bits)
        if self.pad:
            as_integers(out)[...] = self.pad
        lengths = spans.lengths(self.window) * self._per_token()
        for rows, values in reading.columns.lists(column, self.element.arrow, lengths):
            cells, mask = self._aligned(out[rows], spans, rows)
            if cells.dtype == out.dtype == np.int64:
                cells[mask] = values  # widens on the way, without a copy of its own
            else:
                cells[mask] = from_stored(self.element, values).view(cells.dtype)
        return finish(self.element, out)

    def outside_is(self, bits: np.ndarray, spans: Spans) -> bool:
        """Whether nothing but ``pad`` stands outside the window."""
        for chunk in row_chunks(len(bits), bits.nbytes // max(len(bits), 1)):
            part = as_integers(bits[chunk])
            other = part != np.array(self.pad).astype(part.dtype)
            if self.axis == 0:
                other = other.reshape(len(part), self.shape[0], -1).any(axis=2) if len(self.shape) > 1 else other
                mask = spans.mask(self.window, chunk)
            else:
                mask = np.expand_dims(spans.mask(self.window, chunk), tuple(range(1, len(self.shape))))
            if np.any(other > mask):
                return False
        return True

    def _per_token(self) -> int:
        return math.prod(self.shape) // max(self.shape[self.axis], 1)

    def _aligned(self, part: np.ndarray, spans: Spans, rows: slice) -> tuple[np.ndarray, np.ndarray]:
        """A part of the tensor as a matrix of cells, and the mask that selects cells with tokens.

        With a single boolean mask of the same shape numpy copies whole runs, which is as fast as it gets; so the
        elements of one token become one opaque cell, or the dimensions before the padded one become rows.
        """
        mask = spans.mask(self.window, rows)
        per_token = self._per_token()
        width = self.shape[self.axis]
        if self.axis == 0:
            if per_token == 1:
                return part.reshape(len(part), width), mask
            if per_token == 0 or width == 0:
                return part.reshape(len(part), -1), np.zeros((len(part), 0), bool)
            cell = np.dtype((np.void, per_token * part.itemsize))
            return part.reshape(len(part), -1).view(cell), mask
        return part.reshape(-1, width), np.repeat(mask, per_token, axis=0)


@dataclass(frozen=True)
class Mask(Form):
    """1 on tokens and 0 on padding: the attention mask, and the response mask of single-turn rollouts."""

    window: str
    name: ClassVar[str] = "mask"

    def check(self, spans: Spans | None) -> None:
        if spans is None or self.window not in WINDOWS or self.shape != (spans.width(self.window),):
            raise ValueError(f"a mask of shape {self.shape} does not fit the window {self.window!r}")

    def read(self, column: str, reading: Reading) -> torch.Tensor | np.ndarray:
        return _made_by(mask_rows, self.window, self, reading)


@dataclass(frozen=True)
class Positions(Form):
    """Position ids that count the tokens of the row."""

    rule: str
    name: ClassVar[str] = "positions"

    def check(self, spans: Spans | None) -> None:
        if spans is None or self.rule not in ("counted", "continued") or self.shape != (spans.width("full"),):
            raise ValueError(f"position ids of shape {self.shape} do not fit rule {self.rule!r}")

    def read(self, column: str, reading: Reading) -> torch.Tensor | np.ndarray:
        return _made_by(position_rows, self.rule, self, reading)


@dataclass(frozen=True)
class Concat(Form):
    """Prompts and responses side by side: the input ids."""

    name: ClassVar[str] = "concat"
    needs: ClassVar[tuple[str, ...]] = ("prompts", "responses")

    def read(self, column: str, reading: Reading) -> torch.Tensor | np.ndarray:
        parts = [_need(reading, name, 2) for name in self.needs]
        if (parts[0].shape[1] + parts[1].shape[1],) != self.shape or any(p.dtype != self.element.bits for p in parts):
            raise CorruptEntryError("The stored prompts and responses do not make the input ids that the file claims.")
        out = np.empty((reading.rows, *self.shape), self.element.bits)
        out[:, : parts[0].shape[1]] = parts[0]
        out[:, parts[0].shape[1] :] = parts[1]
        return finish(self.element, out)


@dataclass(frozen=True)
class Jagged(Form):
    """A jagged NestedTensor: one list a row. ``shape`` is the shape of its values without the ragged dimension.

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

    def row_bytes(self) -> int:
        return 0

    def check(self, spans: Spans | None) -> None:
        dims = len(self.shape) + 1
        if not (1 <= self.ragged_idx <= dims and 1 <= self.laid_out <= dims) or self.element.holder != "torch":
            raise ValueError(f"a nested tensor of {dims} dimensions cannot be ragged in dimension {self.ragged_idx}")

    def fields(self, column: str) -> list[pa.Field]:
        return [list_field(column, self.element.arrow)]

    def write(self, bits: tuple[np.ndarray, np.ndarray], rows: slice, spans: Spans | None) -> list[pa.Array]:
        values, offsets = bits
        part = values[offsets[rows.start] : offsets[rows.stop]].reshape(-1)
        lengths = np.diff(offsets[rows.start : rows.stop + 1]) * math.prod(self.shape) * self.element.parts
        return [list_array(to_stored(self.element, part), lengths, self.element.arrow)]

    def read(self, column: str, reading: Reading) -> torch.Tensor:
        per_token = math.prod(self.shape) * self.element.parts
        lengths, values = reading.columns.all_lists(column, self.element.arrow)
        if (per_token == 0 and lengths.any()) or (per_token and (lengths % per_token).any()):
            raise CorruptEntryError(f"A list of column {column!r} does not hold whole tokens of shape {self.shape}.")
        bits = from_stored(self.element, values).reshape(-1, *self.shape)
        return make_nested(self, bits, lengths // max(per_token, 1), reading)


@dataclass(frozen=True)
class JaggedPositions(Jagged):
    """Position ids 0, 1, 2 … of each row of a jagged tensor, as long as the input ids."""

    name: ClassVar[str] = "jagged_positions"
    needs: ClassVar[tuple[str, ...]] = ("prompts", "responses")

    def fields(self, column: str) -> list[pa.Field]:
        return []

    def write(self, bits: Any, rows: slice, spans: Spans | None) -> list[pa.Array]:
        return []

    def read(self, column: str, reading: Reading) -> torch.Tensor:
        lengths = sum(np.diff(_need_nested(reading, name)[1]) for name in self.needs)
        return make_nested(self, count_up(lengths, self.element.bits), lengths, reading)


@dataclass(frozen=True)
class JaggedConcat(JaggedPositions):
    """Prompts and responses of jagged tensors, row by row: the input ids."""

    name: ClassVar[str] = "jagged_concat"

    def read(self, column: str, reading: Reading) -> torch.Tensor:
        prompts, responses = (_need_nested(reading, name) for name in self.needs)
        bits, lengths = interleave(prompts, responses)
        return make_nested(self, bits, lengths, reading)


@dataclass(frozen=True)
class Rows(Form):
    """A strided NestedTensor: rows of different shapes. A second column holds the shapes."""

    name: ClassVar[str] = "rows"

    def row_bytes(self) -> int:
        return 0

    def fields(self, column: str) -> list[pa.Field]:
        return [list_field(column, self.element.arrow), list_field(_shape_column(column), pa.int64())]

    def write(self, bits: list[np.ndarray], rows: slice, spans: Spans | None) -> list[pa.Array]:
        part = bits[rows]
        flat = [to_stored(self.element, row.reshape(-1)) for row in part]
        values = np.concatenate(flat) if flat else np.empty(0, self.element.stored)
        shapes = np.array([size for row in part for size in row.shape], np.int64)
        return [
            list_array(values, np.array([len(row) for row in flat], np.int64), self.element.arrow),
            list_array(shapes, np.array([row.ndim for row in part], np.int64), pa.int64()),
        ]

    def read(self, column: str, reading: Reading) -> torch.Tensor:
        lengths, values = reading.columns.all_lists(column, self.element.arrow)
        ndims, shapes = reading.columns.all_lists(_shape_column(column), pa.int64())
        if reading.rows == 0:
            return torch.nested.nested_tensor([], dtype=TORCH_DTYPES[self.element.name].torch)
        bits = from_stored(self.element, values)
        ends = np.cumsum(lengths) // self.element.parts
        rows: list[Any] = []
        for end, length, shape in zip(
            ends, lengths // self.element.parts, np.split(shapes, np.cumsum(ndims)[:-1]), strict=True
        ):
            if math.prod(int(size) for size in shape) != length or (shape < 0).any():
                raise CorruptEntryError(
                    f"A row of column {column!r} holds {length} values, not the shape {shape.tolist()}."
                )
            rows.append(finish(self.element, bits[end - length : end].reshape(shape)))
        return torch.nested.as_nested_tensor(rows, layout=torch.strided)


@dataclass(frozen=True)
class Same(Form):
    """The very same values as another column, stored once: as the key ``of`` of the same batch or, if that is empty,
    as the same key of the rollout's output (an input that the rollout handed through)."""

    of: str
    name: ClassVar[str] = "same"

    def row_bytes(self) -> int:
        return 0


FORMS: dict[str, type[Form]] = {
    form.name: form
    for form in (Dense, Ragged, Mask, Positions, Concat, Jagged, JaggedPositions, JaggedConcat, Rows, Same)
}


def form_to_json(form: Form) -> dict[str, Any]:
    """A form as the file keeps it."""
    return {"form": form.name, **asdict(form)}


def form_from_json(data: Any, spans: Spans | None) -> Form:
    """The inverse of ``form_to_json``, for data that cannot be trusted."""
    kind = FORMS[data["form"]]
    element = Element(**{key: str(value) for key, value in data["element"].items()})
    known = element.name in TORCH_DTYPES if element.holder == "torch" else NUMPY_NUMBERS.fullmatch(element.name)
    if not known or element.holder not in ("torch", "numpy") or element.stored not in _STORED:
        raise ValueError(f"{element} is no element type")
    arguments: dict[str, Any] = {"element": element, "shape": tuple(natural(size) for size in data["shape"])}
    for field in fields(kind)[2:]:
        expected = {"int": int, "str": str, "bool": bool}[str(field.type)]
        if type(data[field.name]) is not expected:
            raise ValueError(f"{field.name} is {data[field.name]!r}, not of type {field.type}")
        arguments[field.name] = data[field.name]
    form = kind(**arguments)
    form.check(spans)
    return form


def count_up(lengths: Any, dtype: np.dtype) -> np.ndarray:
    """0, 1, 2 … for each length in turn."""
    starts = np.cumsum(lengths) - lengths
    return (np.arange(np.sum(lengths)) - np.repeat(starts, lengths)).astype(dtype, copy=False)


def interleave(
    left: tuple[np.ndarray, np.ndarray], right: tuple[np.ndarray, np.ndarray]
) -> tuple[np.ndarray, np.ndarray]:
    """Rows of two jagged tensors (values, offsets) joined one by one: the values and the lengths."""
    lengths = np.stack([np.diff(left[1]), np.diff(right[1])], axis=1)
    from_left = np.repeat(np.tile([True, False], len(lengths)), lengths.reshape(-1))
    values = np.empty(len(from_left), left[0].dtype)
    values[from_left] = left[0]
    values[~from_left] = right[0]
    return values, lengths.sum(axis=1)


def make_nested(form: Jagged, bits: np.ndarray, lengths: Any, reading: Reading) -> torch.Tensor:
    """A NestedTensor built the way the recorded one was."""
    values = tensor_from_bits(np.ascontiguousarray(bits), TORCH_DTYPES[form.element.name].torch)
    values = values.movedim(0, form.ragged_idx - 1).contiguous()
    offsets = reading.columns.shared_offsets(form.group, np.asarray(lengths))
    known: dict[str, Any] = {}
    if form.bounds and len(lengths):
        known = {"min_seqlen": int(lengths.min()), "max_seqlen": int(lengths.max())}
    nested: Any = torch.nested.nested_tensor_from_jagged(values, offsets, jagged_dim=form.laid_out, **known)
    if form.ragged_idx != form.laid_out:
        nested._ragged_idx = form.ragged_idx
    return nested


def _made_by(make: Callable[..., np.ndarray], rule: str, form: Form, reading: Reading) -> torch.Tensor | np.ndarray:
    assert reading.spans is not None
    out = np.empty((reading.rows, *form.shape), form.element.bits)
    for chunk in row_chunks(reading.rows, form.row_bytes()):
        out[chunk] = make(rule, reading.spans, chunk, out.dtype)
    return finish(form.element, out)


def _need(reading: Reading, name: str, dims: int) -> np.ndarray:
    value = reading.done(name)
    if not isinstance(value, torch.Tensor) or value.is_nested or value.dim() != dims:
        raise CorruptEntryError(f"The file derives a column from {name!r}, which is no tensor of {dims} dimensions.")
    return value.numpy()


def _need_nested(reading: Reading, name: str) -> tuple[np.ndarray, np.ndarray]:
    nested: Any = reading.done(name)
    if getattr(nested, "layout", None) is not torch.jagged or nested.values().dim() != 1:
        raise CorruptEntryError(f"The file derives a column from {name!r}, which is no jagged tensor.")
    return nested.values().numpy(), nested.offsets().numpy()


def _shape_column(column: str) -> str:
    return f"skip__shape__{column}"


def natural(value: Any) -> int:
    """A size from data that cannot be trusted."""
    if type(value) is not int or not 0 <= value < 2**40:
        raise ValueError(f"{value!r} is no size")
    return value
