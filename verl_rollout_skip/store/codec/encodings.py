"""How a numeric column lies in the file: each encoding with its way in and its way back side by side.

An encoding is a small description that is kept as JSON in the file. ``fields`` and ``store`` make its Parquet columns;
``read_into`` makes the bits again from them. An encoding that leaves something out (padding, a tensor that follows from
others) is chosen by ``columns.py`` only after it was proved to give the recorded bits back. Encodings of dense tensors
are here, those of nested tensors in ``jagged.py``. All of them work on numpy bits, without torch.

Everything an encoding says comes from a file that may be damaged or hostile, so ``check`` is called first and reading
trusts no length it has not compared.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import asdict, dataclass
from typing import Any, ClassVar

import numpy as np
import pyarrow as pa

from verl_rollout_skip.errors import CorruptEntryError, UnsupportedBatchError
from verl_rollout_skip.store.codec.dtypes import Element, as_integers, from_stored, to_stored
from verl_rollout_skip.store.codec.padding import WINDOWS, Spans, position_rows, row_chunks
from verl_rollout_skip.store.codec.part import PartFile


@dataclass(frozen=True)
class Stored:
    """What a Parquet column holds of some rows: numbers, and how many each row has if they are lists.

    ``content`` is what is digested in place of the values, if those depend on how the rows were cut into parts.
    """

    values: np.ndarray
    lengths: np.ndarray | None = None
    content: Any = None

    def to_arrow(self, item: pa.DataType) -> pa.Array:
        """As an Arrow array that shares the values; ``pa.array`` would import pandas."""
        values = np.packbits(self.values, bitorder="little") if pa.types.is_boolean(item) else self.values
        numbers = pa.Array.from_buffers(item, len(self.values), [None, pa.py_buffer(np.ascontiguousarray(values))])
        if self.lengths is None:
            return numbers
        offsets = np.concatenate([[0], np.cumsum(self.lengths)])
        if offsets[-1] >= 2**31:
            raise UnsupportedBatchError(
                f"A row has {offsets[-1]} values; Parquet lists of more than 2^31 are not written."
            )
        buffers = [None, pa.py_buffer(offsets.astype(np.int32))]
        return pa.Array.from_buffers(list_type(item), len(self.lengths), buffers, children=[numbers])


def list_type(item: pa.DataType) -> pa.DataType:
    """Lists in which nothing can be null: readers need no validity levels for them."""
    return pa.list_(pa.field("element", item, nullable=False))


@dataclass(frozen=True)
class Reading:
    """What an encoding may need to be read: the part, its spans, and the columns that were read before it.

    ``done`` gives the bits of another tensor of the batch in this part; with an empty name, those of the same key in
    the output, when this is the input.
    """

    part: PartFile
    spans: Spans | None
    done: Callable[[str], Any]


@dataclass(frozen=True)
class Encoding:
    """Base: ``element`` is the type of the elements, ``shape`` the dense shape of one row."""

    element: Element
    shape: tuple[int, ...]
    name: ClassVar[str]
    needs: ClassVar[tuple[str, ...]] = ()

    @property
    def row_bytes(self) -> int:
        """Memory that one decoded row takes; 0 if only the lists in the file tell."""
        return math.prod(self.shape) * self.element.bits.itemsize

    @property
    def kind(self) -> tuple[Any, ...]:
        """What must be the same in all parts of an entry."""
        return "dense", self.element.holder, self.element.name, self.shape

    def fields(self, column: str) -> list[pa.Field]:
        return []

    def store(self, bits: Any, rows: slice, spans: Spans | None) -> list[Stored]:
        """What goes into the columns of ``fields`` for these rows."""
        return []

    def check(self, spans: Spans | None) -> None:
        """Raise ValueError if this description cannot be meant."""


@dataclass(frozen=True)
class DenseEncoding(Encoding):
    """Base of the encodings of tensors and arrays whose rows have one shape."""

    def read_into(self, out: np.ndarray, column: str, reading: Reading) -> None:
        """Make the bits of all rows of a part in ``out``, which is zero."""
        raise NotImplementedError


@dataclass(frozen=True)
class Dense(DenseEncoding):
    """Every element: one number per row, or one list per row with the trailing dimensions laid out flat."""

    name: ClassVar[str] = "dense"

    def fields(self, column: str) -> list[pa.Field]:
        kind = self.element.arrow if self._is_scalar else list_type(self.element.arrow)
        return [pa.field(column, kind, nullable=False)]

    def store(self, bits: np.ndarray, rows: slice, spans: Spans | None) -> list[Stored]:
        part = bits[rows]
        values = to_stored(self.element, part.reshape(-1))
        return [Stored(values) if self._is_scalar else Stored(values, np.full(len(part), self._row_values))]

    def read_into(self, out: np.ndarray, column: str, reading: Reading) -> None:
        if self._is_scalar:
            for rows, values in reading.part.numbers(column, self.element.arrow):
                out[rows] = from_stored(self.element, values)
            return
        for rows, lengths, values in reading.part.lists(column, self.element.arrow):
            _compare(lengths, np.full(len(lengths), self._row_values), column)
            out[rows] = from_stored(self.element, values).reshape(len(lengths), *self.shape)

    @property
    def _is_scalar(self) -> bool:
        return not self.shape and self.element.components == 1

    @property
    def _row_values(self) -> int:
        return math.prod(self.shape) * self.element.components


@dataclass(frozen=True)
class Ragged(DenseEncoding):
    """A padded tensor without its padding: one list per row with the elements that lie in a window.

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
        if not self.shape or self.shape[self.axis] != spans.width(self.window) or self.element.components != 1:
            raise ValueError(f"a row of shape {self.shape} does not fit the window {self.window!r}")
        kind = as_integers(np.empty(0, self.element.bits)).dtype
        limits = (0, 1) if kind.kind == "b" else (np.iinfo(kind).min, np.iinfo(kind).max)
        if not limits[0] <= self.pad <= limits[1]:
            raise ValueError(f"{self.pad} cannot be the padding of type {kind}")

    def fields(self, column: str) -> list[pa.Field]:
        return [pa.field(column, list_type(self.element.arrow), nullable=False)]

    def store(self, bits: np.ndarray, rows: slice, spans: Spans | None) -> list[Stored]:
        assert spans is not None
        cells, mask = self._aligned(bits[rows], spans, rows)
        values = cells[mask].view(bits.dtype)
        return [Stored(to_stored(self.element, values), spans.lengths(self.window)[rows] * self._per_token())]

    def read_into(self, out: np.ndarray, column: str, reading: Reading) -> None:
        assert reading.spans is not None
        expected = reading.spans.lengths(self.window) * self._per_token()
        for rows, lengths, values in reading.part.lists(column, self.element.arrow):
            _compare(lengths, expected[rows], column)
            if self.pad:
                as_integers(out[rows])[...] = self.pad
            self._scatter(out[rows], values, reading.spans, rows)

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

    def _scatter(self, out: np.ndarray, values: np.ndarray, spans: Spans, rows: slice) -> None:
        cells, mask = self._aligned(out, spans, rows)
        if cells.dtype == out.dtype == np.int64:
            cells[mask] = values  # widens while copying
        else:
            cells[mask] = from_stored(self.element, values).view(cells.dtype)

    def _per_token(self) -> int:
        return math.prod(self.shape) // max(self.shape[self.axis], 1)

    def _aligned(self, part: np.ndarray, spans: Spans, rows: slice) -> tuple[np.ndarray, np.ndarray]:
        """Some rows of the tensor as a matrix of cells, and the mask that selects cells with tokens.

        With a single boolean mask of the same shape numpy copies whole runs, which is as fast as it gets; so the
        elements of one token become one opaque cell, or the dimensions before the padded one become rows.
        """
        mask = spans.mask(self.window, rows)
        per_token = self._per_token()
        width = self.shape[self.axis]
        if self.axis == 0:
            if per_token == 1:
                return part.reshape(len(part), width), mask
            flat = part.reshape(len(part), width * per_token)
            if flat.size == 0:
                return flat, np.zeros(flat.shape, bool)
            return flat.view(np.dtype((np.void, per_token * part.itemsize))), mask
        return part.reshape(-1, width), np.repeat(mask, per_token, axis=0)


@dataclass(frozen=True)
class Mask(DenseEncoding):
    """1 on tokens and 0 on padding: the attention mask, and the response mask of single-turn rollouts."""

    window: str
    name: ClassVar[str] = "mask"

    def check(self, spans: Spans | None) -> None:
        if spans is None or self.window not in WINDOWS or self.shape != (spans.width(self.window),):
            raise ValueError(f"a mask of shape {self.shape} does not fit the window {self.window!r}")

    def read_into(self, out: np.ndarray, column: str, reading: Reading) -> None:
        assert reading.spans is not None
        for chunk in row_chunks(len(out), self.row_bytes):
            # Padding is zero already, and its memory is left untouched.
            out[chunk][reading.spans.mask(self.window, chunk)] = 1


@dataclass(frozen=True)
class Positions(DenseEncoding):
    """Position ids that count the tokens of the row."""

    rule: str
    name: ClassVar[str] = "positions"

    def check(self, spans: Spans | None) -> None:
        if spans is None or self.rule not in ("counted", "continued") or self.shape != (spans.width("full"),):
            raise ValueError(f"position ids of shape {self.shape} do not fit rule {self.rule!r}")

    def read_into(self, out: np.ndarray, column: str, reading: Reading) -> None:
        assert reading.spans is not None
        for chunk in row_chunks(len(out), self.row_bytes):
            out[chunk] = position_rows(self.rule, reading.spans, chunk, out.dtype)


@dataclass(frozen=True)
class Concat(DenseEncoding):
    """Prompts and responses side by side: the input ids."""

    name: ClassVar[str] = "concat"
    needs: ClassVar[tuple[str, ...]] = ("prompts", "responses")

    def read_into(self, out: np.ndarray, column: str, reading: Reading) -> None:
        pieces = [reading.done(name) for name in self.needs]
        if not all(isinstance(piece, np.ndarray) and piece.ndim == 2 and piece.dtype == out.dtype for piece in pieces):
            raise CorruptEntryError("The file derives input ids from prompts or responses of another type.")
        width = pieces[0].shape[1]
        if (width + pieces[1].shape[1],) != self.shape:
            raise CorruptEntryError("The stored prompts and responses do not make the input ids that the file claims.")
        out[:, :width] = pieces[0]
        out[:, width:] = pieces[1]


@dataclass(frozen=True)
class Same(DenseEncoding):
    """The very same values as another column, stored once: as the key ``of`` of the same batch or, if that is empty,
    as the same key of the rollout's output (an input that the rollout handed through)."""

    of: str
    name: ClassVar[str] = "same"

    def read_into(self, out: np.ndarray, column: str, reading: Reading) -> None:
        other = reading.done(self.of)
        if not isinstance(other, np.ndarray) or (other.dtype, other.shape) != (out.dtype, out.shape):
            raise CorruptEntryError(f"The file says that {column!r} is the same as a column of another type.")
        out[...] = other


def encoding_to_json(encoding: Encoding) -> dict[str, Any]:
    """An encoding as the file keeps it."""
    return {"form": encoding.name, **asdict(encoding)}


def _compare(lengths: np.ndarray, expected: np.ndarray, column: str) -> None:
    if not np.array_equal(lengths, expected):
        raise CorruptEntryError(f"Column {column!r} holds lists of other lengths than the file says.")


def natural(value: Any) -> int:
    """A size from data that cannot be trusted."""
    if type(value) is not int or not 0 <= value < 2**40:
        raise ValueError(f"{value!r} is not a size")
    return value
