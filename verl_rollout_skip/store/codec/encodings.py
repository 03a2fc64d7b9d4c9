"""How the bits of a numeric column are stored and restored, without torch: the ten forms of docs/format.md.

*Stored* forms (dense, ragged, jagged, rows) have Parquet columns, which ``store`` makes and ``read`` and ``read_into``
decode. *Derived* forms have none: ``fill`` and ``join`` compute the bits from the token spans or from other columns.
They run at load time, and also at dump time, to prove that they reproduce the recorded bits. An encoding may come from
a hostile file: ``parse_encoding`` checks it, and every length is checked before use.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import asdict, dataclass
from enum import Enum
from functools import cached_property
from typing import TYPE_CHECKING, Any

import numpy as np
import pyarrow as pa

from verl_rollout_skip.errors import CorruptEntryError, UnsupportedBatchError
from verl_rollout_skip.store.codec.dtypes import (
    Element,
    as_integers,
    check_element,
    checked_size,
    from_stored,
    to_stored,
)
from verl_rollout_skip.store.codec.padding import WINDOWS, Spans, row_chunks
from verl_rollout_skip.store.format import SHAPE

if TYPE_CHECKING:
    from verl_rollout_skip.store.codec.part import PartFile

Source = Callable[[str], Any]
"""Returns the bits of another tensor of the batch, or of the same key in the output if the name is empty."""


class Form(str, Enum):
    """How a column is stored or derived."""

    DENSE = "dense"
    """All elements: one number per row, or one flat list per row."""
    RAGGED = "ragged"
    """A padded tensor without its padding: one list per row with the elements inside a window."""
    MASK = "mask"
    """1 on tokens and 0 on padding: the attention mask, and the response mask of single-turn rollouts."""
    POSITIONS = "positions"
    """Position ids that count the tokens of the row."""
    CONCAT = "concat"
    """Prompts and responses concatenated: the input ids."""
    SAME = "same"
    """The same bits as the column ``of`` in this batch or, if ``of`` is empty, as the same key of the output."""
    JAGGED = "jagged"
    """A jagged NestedTensor: one list per row."""
    JAGGED_CONCAT = "jagged_concat"
    """Prompts and responses of jagged tensors, concatenated row by row: the input ids."""
    JAGGED_POSITIONS = "jagged_positions"
    """Position ids 0, 1, 2 … for each row of a jagged tensor, as many as input ids."""
    ROWS = "rows"
    """A strided NestedTensor, whose rows have different shapes. A second column contains the shapes."""


_JAGGED_FIELDS = {"ragged_idx": int, "laid_out": int, "group": int, "bounds": bool}
_JAGGED_FORMS = (Form.JAGGED, Form.JAGGED_CONCAT, Form.JAGGED_POSITIONS)
_EXTRA_FIELDS: dict[Form, dict[str, type]] = {
    Form.RAGGED: {"window": str, "axis": int, "pad": int},
    Form.MASK: {"window": str},
    Form.POSITIONS: {"rule": str},
    Form.SAME: {"of": str},
    **dict.fromkeys(_JAGGED_FORMS, _JAGGED_FIELDS),
}
"""The fields in the description of a column, in addition to its form, element and shape."""
_PROMPTS_AND_RESPONSES = ("prompts", "responses")


@dataclass(frozen=True)
class JaggedBits:
    """Concatenated rows, ragged dimension first, and the length of each. With ``shapes`` if the shapes differ."""

    values: np.ndarray
    lengths: np.ndarray
    shapes: JaggedBits | None = None

    @cached_property
    def offsets(self) -> np.ndarray:
        """The start of each row, and the end of the last one."""
        return np.concatenate([[0], np.cumsum(self.lengths)]).astype(np.int64)

    def rows(self, rows: slice) -> np.ndarray:
        """The values of some rows."""
        return self.values[self.offsets[rows.start] : self.offsets[rows.stop]]


Bits = np.ndarray | JaggedBits
"""The bits of a column: an array if all rows have the same shape."""


@dataclass(frozen=True)
class Stored:
    """The content of a Parquet column for some rows: its values, and the length of each row if the rows are lists.

    ``content`` is digested instead of the values if these depend on how the rows are split into parts.
    """

    values: np.ndarray
    lengths: np.ndarray | None = None
    content: Any = None

    def to_arrow(self, item: pa.DataType) -> pa.Array:
        """Return an Arrow array that shares the values. ``pa.array`` would import pandas."""
        values = np.packbits(self.values, bitorder="little") if pa.types.is_boolean(item) else self.values
        numbers = pa.Array.from_buffers(item, len(self.values), [None, pa.py_buffer(np.ascontiguousarray(values))])
        if self.lengths is None:
            return numbers
        offsets = np.concatenate([[0], np.cumsum(self.lengths)])
        if offsets[-1] >= 2**31:
            raise UnsupportedBatchError(
                f"Cannot store a row of {offsets[-1]} values: a Parquet list is limited to 2^31. Split the row."
            )
        buffers = [None, pa.py_buffer(offsets.astype(np.int32))]
        return pa.Array.from_buffers(list_type(item), len(self.lengths), buffers, children=[numbers])


def list_type(item: pa.DataType) -> pa.DataType:
    """A list type whose values cannot be null, which saves the validity levels."""
    return pa.list_(pa.field("element", item, nullable=False))


@dataclass(frozen=True)
class Encoding:
    """The form of a column, the type of its elements, and the shape of one row (of one token in a jagged tensor).

    Ragged: ``axis`` is the padded dimension of a row, the first or the last one (position ids of vision models are
    [3, L]). ``pad`` is the value outside the window, as an integer with the same bits.

    Jagged: ``ragged_idx`` is the ragged dimension as torch counts it, and ``laid_out`` the one that the tensor was
    built with. For position ids of vision models, they differ: verl changes the dimension afterwards. Columns of one
    ``group`` share their offsets object like the recorded ones: torch combines only NestedTensors that share it.
    ``bounds`` is True if the minimum and the maximum length were known.
    """

    form: Form
    element: Element
    shape: tuple[int, ...]
    window: str = ""
    axis: int = 0
    pad: int = 0
    rule: str = ""
    of: str = ""
    ragged_idx: int = 0
    laid_out: int = 0
    group: int = 0
    bounds: bool = False

    @property
    def is_nested(self) -> bool:
        return self.form in (*_JAGGED_FORMS, Form.ROWS)

    @property
    def is_stored(self) -> bool:
        return self.form in (Form.DENSE, Form.RAGGED, Form.JAGGED, Form.ROWS)

    @property
    def dependencies(self) -> tuple[str, ...]:
        """The tensors of the same batch that this one is derived from."""
        if self.form is Form.SAME:
            return (self.of,) if self.of else ()
        return _PROMPTS_AND_RESPONSES if self.form in (Form.CONCAT, Form.JAGGED_CONCAT, Form.JAGGED_POSITIONS) else ()

    @property
    def row_bytes(self) -> int:
        """The memory for one decoded row, or 0 if it depends on the lists in the file."""
        return 0 if self.is_nested else math.prod(self.shape) * self.element.bits.itemsize

    @property
    def plain_form(self) -> Form:
        """The stored form of this column that omits nothing."""
        return Form.JAGGED if self.form in _JAGGED_FORMS else Form.ROWS if self.is_nested else Form.DENSE

    @property
    def kind(self) -> tuple[Any, ...]:
        """The properties that must be the same in all parts of an entry."""
        built = tuple(getattr(self, name) for name in _JAGGED_FIELDS)
        return self.plain_form, self.element.holder, self.element.name, self.shape, built

    def to_json(self) -> dict[str, Any]:
        """The description in the file."""
        common = {"form": self.form.value, "element": asdict(self.element), "shape": list(self.shape)}
        return common | {name: getattr(self, name) for name in _EXTRA_FIELDS.get(self.form, ())}

    def check(self, spans: Spans | None) -> None:
        """Check the encoding. Raises ValueError if it is invalid or does not fit the spans."""
        form, shape = self.form, self.shape
        if form in (Form.RAGGED, Form.MASK) and (spans is None or self.window not in WINDOWS):
            raise ValueError(f"the window {self.window!r} does not exist")
        if form is Form.POSITIONS and (spans is None or self.rule not in ("counted", "continued")):
            raise ValueError(f"the rule {self.rule!r} does not exist")
        if form in (Form.MASK, Form.POSITIONS):
            assert spans is not None
            if shape != (spans.width(self.window or "full"),):
                raise ValueError(f"a row of shape {shape} does not fit the window {self.window!r}")
        if form is Form.RAGGED:
            assert spans is not None
            if not shape or self.axis not in (0, len(shape) - 1) or self.element.components != 1:
                raise ValueError(f"a row of shape {shape} has no padding along dimension {self.axis}")
            if shape[self.axis] != spans.width(self.window):
                raise ValueError(f"a row of shape {shape} does not fit the window {self.window!r}")
            kind = as_integers(np.empty(0, self.element.bits)).dtype
            lowest, highest = (0, 1) if kind.kind == "b" else (np.iinfo(kind).min, np.iinfo(kind).max)
            if not lowest <= self.pad <= highest:
                raise ValueError(f"{self.pad} is not a padding value of type {kind}")
        if self.is_nested and self.element.holder != "torch":
            raise ValueError("only a tensor can be nested")
        if form is Form.ROWS and shape:
            raise ValueError("rows of different shapes have no common shape")
        if form in _JAGGED_FORMS and not all(1 <= dim <= len(shape) + 1 for dim in (self.ragged_idx, self.laid_out)):
            raise ValueError(f"rows of {len(shape) + 1} dimensions cannot be ragged in dimension {self.ragged_idx}")

    def fields(self, column: str) -> list[pa.Field]:
        """The Parquet columns of a key."""
        if not self.is_stored:
            return []
        kind = self.element.arrow if self._is_scalar else list_type(self.element.arrow)
        shapes = [pa.field(f"{SHAPE}{column}", list_type(pa.int64()), nullable=False)]
        return [pa.field(column, kind, nullable=False), *(shapes if self.form is Form.ROWS else [])]

    def store(self, bits: Any, rows: slice, spans: Spans | None) -> list[Stored]:
        """The content of the columns of ``fields`` for these rows."""
        if not self.is_stored:
            return []
        if self.form is Form.DENSE:
            values, lengths = bits[rows].reshape(-1), np.full(len(bits[rows]), self._unit)
        elif self.form is Form.RAGGED:
            assert spans is not None
            cells, mask = self._tokens(bits[rows], spans, rows)
            values, lengths = cells[mask].view(bits.dtype), spans.lengths(self.window)[rows] * self._unit
        else:
            values, lengths = bits.rows(rows).reshape(-1), bits.lengths[rows] * self._unit
        stored = [Stored(to_stored(self.element, values), None if self._is_scalar else lengths)]
        if self.form is Form.ROWS:
            stored.append(Stored(bits.shapes.rows(rows), bits.shapes.lengths[rows]))
        return stored

    def read_into(self, out: np.ndarray, part: PartFile, column: str, spans: Spans | None) -> None:
        """Read a dense or ragged column into ``out``, which contains zeros."""
        tokens = spans.lengths(self.window) if spans and self.form is Form.RAGGED else np.ones(part.rows, np.int64)
        for rows, lengths, values in part.pieces(column, self.fields(column)[0].type):
            if lengths is not None and not np.array_equal(lengths, tokens[rows] * self._unit):
                raise CorruptEntryError(
                    f"Column {column!r} has lists of the wrong length for the tokens and the shape in the file."
                )
            if self.form is Form.DENSE:
                out[rows] = from_stored(self.element, values).reshape(out[rows].shape)
                continue
            assert spans is not None
            if self.pad:
                as_integers(out[rows])[...] = self.pad
            cells, mask = self._tokens(out[rows], spans, rows)
            if cells.dtype == out.dtype == np.int64:
                cells[mask] = values  # widens while copying
            else:
                cells[mask] = from_stored(self.element, values).view(cells.dtype)

    def read(self, part: PartFile, column: str) -> JaggedBits:
        """Read a nested column."""
        lengths, values = part.lists(column, self.element.arrow)
        if (lengths % max(self._unit, 1)).any() or (lengths.any() and not self._unit):
            raise CorruptEntryError(f"Column {column!r} has a list that is not made of tokens of shape {self.shape}.")
        lengths = lengths // max(self._unit, 1)
        bits = from_stored(self.element, values).reshape(-1, *self.shape)
        if self.form is not Form.ROWS:
            return JaggedBits(bits, lengths)
        ndims, sizes = part.lists(f"{SHAPE}{column}", pa.int64())
        shapes = JaggedBits(sizes, ndims)
        for row, length in enumerate(lengths.tolist()):
            shape = shapes.rows(slice(row, row + 1)).tolist()
            if math.prod(shape) != length or min(shape, default=0) < 0:
                raise CorruptEntryError(
                    f"A row of column {column!r} has {length} values, which do not fit the shape {shape}."
                )
        return JaggedBits(bits, lengths, shapes)

    def fill(self, out: np.ndarray, rows: slice, spans: Spans | None, source: Source) -> None:
        """Derive some rows of a dense column. Writes them to ``out``, which contains zeros."""
        if self.form is Form.MASK and spans is not None:
            out[spans.mask(self.window, rows)] = 1  # does not touch the memory of the padding
        elif self.form is Form.POSITIONS and spans is not None:
            out[...] = spans.positions(self.rule, rows)
        elif self.form is Form.SAME:
            other = source(self.of)
            if not isinstance(other, np.ndarray) or (other.dtype, other.shape[1:]) != (out.dtype, out.shape[1:]):
                raise ValueError(f"it is stored as equal to {self.of!r}, which has a different type or shape")
            out[...] = other[rows]
        else:
            inputs = [source(name) for name in self.dependencies]
            if not all(isinstance(bits, np.ndarray) and (bits.ndim, bits.dtype) == (2, out.dtype) for bits in inputs):
                raise ValueError("prompts or responses have a different type than the input ids")
            width = inputs[0].shape[1]
            if (width + inputs[1].shape[1],) != self.shape:
                raise ValueError("the widths of prompts and responses do not add up to that of the input ids")
            out[:, :width], out[:, width:] = inputs[0][rows], inputs[1][rows]

    def join(self, source: Source) -> JaggedBits:
        """Derive a jagged column from the prompts and the responses."""
        inputs = [source(name) for name in self.dependencies]
        if not all(isinstance(bits, JaggedBits) and bits.values.ndim == 1 for bits in inputs) or self.shape:
            raise ValueError("prompts or responses are not jagged tensors of one value per token")
        lengths = np.stack([bits.lengths for bits in inputs], axis=1)
        joined = lengths.sum(axis=1)
        if self.form is Form.JAGGED_POSITIONS:
            row_starts = np.repeat(np.cumsum(joined) - joined, joined)
            return JaggedBits((np.arange(joined.sum()) - row_starts).astype(self.element.bits, copy=False), joined)
        if any(bits.values.dtype != self.element.bits for bits in inputs):
            raise ValueError("prompts or responses have a different type than the input ids")
        is_prompt = np.repeat(np.tile([True, False], len(lengths)), lengths.reshape(-1))
        values = np.empty(len(is_prompt), self.element.bits)
        values[is_prompt], values[~is_prompt] = (bits.values for bits in inputs)
        return JaggedBits(values, joined)

    def is_padding_uniform(self, bits: np.ndarray, spans: Spans) -> bool:
        """Whether all values outside the window are ``pad``."""
        for chunk in row_chunks(len(bits), bits.nbytes // max(len(bits), 1)):
            part = as_integers(bits[chunk])
            differs = part != np.array(self.pad).astype(part.dtype)
            mask = spans.mask(self.window, chunk)
            if self.axis == 0:
                differs = differs.reshape(len(part), self.shape[0], -1).any(axis=2) if len(self.shape) > 1 else differs
            else:
                mask = np.expand_dims(mask, tuple(range(1, len(self.shape))))
            if np.any(differs > mask):
                return False
        return True

    @property
    def _is_scalar(self) -> bool:
        return self.form is Form.DENSE and not self.shape and self.element.components == 1

    @property
    def _unit(self) -> int:
        """The number of stored values per row of a dense column, or per token of any other."""
        tokens = self.shape[self.axis] if self.form is Form.RAGGED else 1
        return math.prod(self.shape) // max(tokens, 1) * self.element.components

    def _tokens(self, part: np.ndarray, spans: Spans, rows: slice) -> tuple[np.ndarray, np.ndarray]:
        """View rows of a padded tensor as a matrix of cells. Returns it with the mask of the cells that contain tokens.

        numpy is fastest with a boolean mask of the same shape, because it then copies whole runs. So all elements of a
        token become one opaque cell, or the dimensions before the padded one become rows.
        """
        mask = spans.mask(self.window, rows)
        width = self.shape[self.axis]
        if self.axis != 0:
            return part.reshape(-1, width), np.repeat(mask, self._unit, axis=0)
        flat = part.reshape(len(part), width * self._unit)
        if self._unit == 1:
            return flat, mask
        if flat.size == 0:
            return flat, np.zeros(flat.shape, bool)
        return flat.view(np.dtype((np.void, self._unit * part.itemsize))), mask


def parse_encoding(data: Any, spans: Spans | None) -> Encoding:
    """The inverse of ``Encoding.to_json``, for untrusted data."""
    form = Form(data["form"])
    element = Element(**{key: str(value) for key, value in data["element"].items()})
    check_element(element)
    fields = {name: data[name] for name in _EXTRA_FIELDS.get(form, ())}
    for name, kind in _EXTRA_FIELDS.get(form, {}).items():
        if type(fields[name]) is not kind:
            raise ValueError(f"{name} is {fields[name]!r}, not of type {kind.__name__}")
    encoding = Encoding(form, element, tuple(checked_size(size) for size in data["shape"]), **fields)
    encoding.check(spans)
    return encoding
