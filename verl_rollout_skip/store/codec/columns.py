"""Which form each key of a batch gets: the choices, each proved on the recorded values before it is taken."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
import pyarrow as pa
import torch

from verl_rollout_skip.errors import ChangedBatchError, StoreError, UnsupportedBatchError
from verl_rollout_skip.sizes import format_size
from verl_rollout_skip.store.codec import cells
from verl_rollout_skip.store.codec.batch import Batch, BatchKind, Path, flatten
from verl_rollout_skip.store.codec.cells import CellColumn
from verl_rollout_skip.store.codec.dtypes import (
    Element,
    as_integers,
    element_of,
    narrower,
    refuse_unsupported,
    same_bits,
)
from verl_rollout_skip.store.codec.encodings import (
    Concat,
    Dense,
    Form,
    Jagged,
    JaggedConcat,
    JaggedPositions,
    Mask,
    Positions,
    Ragged,
    Rows,
    Same,
    count_up,
    interleave,
)
from verl_rollout_skip.store.codec.padding import (
    WINDOWS,
    Spans,
    find_spans,
    mask_rows,
    position_rows,
    proves,
    row_chunks,
)
from verl_rollout_skip.store.codec.snapshot import Copy, NonZero, Snapshot, held_bytes
from verl_rollout_skip.store.threads import map_in_threads

# Parquet readers refuse a description of more than 100 MB.
_MAX_META_BYTES = 48 << 20


@dataclass
class Numbers:
    """A numeric column that has its form: ``bits`` is the payload that the form writes from."""

    path: Path
    form: Form
    bits: Any


@dataclass
class Objects:
    """A column of Python objects, encoded; ``shape`` and ``dtype`` of the numpy array it came from."""

    path: Path
    cells: CellColumn
    shape: tuple[int, ...]
    dtype: str


@dataclass
class Part:
    """The output of a rollout step, or its input: everything that is written of one batch.

    ``tensors`` are those of the batch, or copies: ``snapshot`` knows whether anything that is shared was changed.
    ``meta`` is its encoded meta_info, ``lasting_meta`` the same without what differs from run to run.
    """

    batch: Batch
    tensors: dict[Path, torch.Tensor | NonZero]
    snapshot: Snapshot | None
    objects: list[Objects]
    meta: dict[str, Any]
    lasting_meta: dict[str, Any]
    numbers: list[Numbers] = field(default_factory=list)
    spans: Spans | None = None

    def restore(self) -> None:
        """Make whole tensors of those that were kept without their zeros."""
        for path, tensor in self.tensors.items():
            if isinstance(tensor, NonZero):
                self.tensors[path] = tensor.restore()

    @property
    def held_bytes(self) -> int:
        """The memory that it keeps alive while it waits."""
        numbers = [array for array in self.batch.arrays.values() if array.dtype.kind not in "OUS"]
        blobs = (blob for column in self.objects for row in column.cells.blobs or () for blob in row)
        texts = (text for column in self.objects for text in column.cells.values if type(text) is str)
        return held_bytes([*self.tensors.values(), *numbers, *blobs]) + sum(map(len, texts))


Proof = Callable[[Mapping[str, Any]], str | None]
"""Names the columns of a batch that are not what they were; None if all are."""


@dataclass(frozen=True)
class Prepared:
    """A rollout step that is ready to be written."""

    output: Part
    input: Part | None
    proof: Proof | None = None

    @property
    def parts(self) -> list[Part]:
        return [self.output] if self.input is None else [self.output, self.input]

    def raise_if_changed(self) -> None:
        """Raise ``ChangedBatchError`` if anything in it was written into since it was taken."""
        names = [name for part in self.parts if part.snapshot is not None for name in part.snapshot.changed()]
        if not names and self.proof is not None:
            self.output.restore()
            # Rewards that only some rows have are objects in a TensorDict; a DataProto keeps objects apart.
            is_tensordict = self.output.batch.kind is BatchKind.TENSORDICT
            columns = {**(self.output.batch.arrays if is_tensordict else {}), **self.output.tensors}
            named = self.proof({path[0]: column for path, column in columns.items() if len(path) == 1})
            names = [] if named is None else [named]
        if names:
            raise ChangedBatchError(names)


def prepare(batch: Any, inputs: Any = None, copy: Copy = Copy.NOTHING, proof: Proof | None = None) -> Prepared:
    """Take a rollout step's output and, if given, its input: a batch, or what ``take`` made of one before."""
    output = batch if isinstance(batch, Part) else take(batch, copy)
    given = inputs if inputs is None or isinstance(inputs, Part) else take(inputs, copy, "the input's ")
    if given is not None and given.batch.rows != output.batch.rows:
        raise StoreError(
            f"The input has {given.batch.rows} rows and the output {output.batch.rows}; a rollout is stored with one "
            "input row for each trajectory (repeat the input as the generate call does)."
        )
    return Prepared(output, given, proof)


def take(given: Any, copy: Copy = Copy.NOTHING, whose: str = "") -> Part:
    """Take from a batch what is written of it. ``whose`` goes before the names of its tensors in an error.

    This runs on the training thread, so it does only what cannot wait; ``choose_encodings`` does the rest.
    """
    batch = flatten(given)
    snapshot = None if copy is Copy.NOTHING else Snapshot(copy, whose)
    objects = []
    tensors: dict[Path, torch.Tensor | NonZero] = {}
    for path, tensor in batch.tensors.items():
        refuse_unsupported(tensor, ".".join(path))
        tensors[path] = tensor if snapshot is None else snapshot.tensor(".".join(path), tensor)
    batch.tensors = {}
    for path, array in batch.arrays.items():
        where = ".".join(path)
        if array.dtype.kind not in "OUS":
            refuse_unsupported(array, where)
            batch.arrays[path] = array if snapshot is None else snapshot.array(array)
            continue
        flat = array.tolist() if array.ndim == 1 else [row.ravel().tolist() for row in array]
        encoded = cells.encode_column(where, flat)
        if snapshot is not None and encoded.blobs is not None:
            snapshot.cells(where, encoded.blobs)
        objects.append(Objects(path, encoded, array.shape[1:], array.dtype.str))
    lasting = {key: value for key, value in batch.meta.items() if key != "timing"}
    # Paths of a TensorDict are tuples; as pairs, both kinds of meta are stored the same way.
    meta, lasting_meta = (
        cells.encode_inline([[key, value] for key, value in entries.items()], "meta_info")
        for entries in (batch.meta, lasting)
    )
    size = len(meta["json"]) + sum(map(len, meta["blobs"]))
    if size > _MAX_META_BYTES:
        raise UnsupportedBatchError(
            f"Cannot store meta_info of {format_size(size)}: up to {format_size(_MAX_META_BYTES)} go into the "
            "description of the file. What has one row a trajectory belongs in the batch."
        )
    return Part(batch, tensors, snapshot, objects, meta, lasting_meta)


def choose_encodings(part: Part, echoed: Part | None = None) -> None:
    """Choose the form of every numeric column of a part. ``echoed`` is the output, when this is the input."""
    groups: dict[tuple[int, int], int] = {}
    parts: dict[str, Numbers] = {}
    payloads: list[Numbers] = []
    part.restore()
    for path, tensor in part.tensors.items():
        assert isinstance(tensor, torch.Tensor)
        column = _tensor_column(path, tensor, part.batch.rows, groups)
        payloads.append(column)
        if len(path) == 1:
            parts[path[0]] = column
    for path, array in part.batch.arrays.items():
        if array.dtype.kind not in "OUS":
            element, bits = element_of(array, ".".join(path))
            payloads.append(Numbers(path, Dense(element, bits.shape[1:]), bits))
    part.spans = _spans(parts)
    part.numbers = map_in_threads(lambda column: _choose(column, part, parts, echoed), payloads)


def _tensor_column(path: Path, tensor: torch.Tensor, rows: int, groups: dict[tuple[int, int], int]) -> Numbers:
    where = ".".join(path)
    if not tensor.is_nested:
        element, bits = element_of(tensor, where)
        return Numbers(path, Dense(element, bits.shape[1:]), bits)
    if tensor.layout is not torch.jagged:
        pieces = [element_of(piece, where) for piece in tensor.unbind()]
        element = pieces[0][0] if pieces else element_of(torch.empty(0, dtype=tensor.dtype), where)[0]
        return Numbers(path, Rows(element, ()), [bits for _, bits in pieces])
    return _jagged_column(path, tensor, where, groups)


def _jagged_column(path: Path, tensor: Any, where: str, groups: dict[tuple[int, int], int]) -> Numbers:
    lengths = tensor.lengths()
    group = groups.setdefault((id(tensor.offsets()), id(lengths)), len(groups))
    # The data is ragged in `_ragged_idx`; the symbolic size stands where the tensor was built to be ragged, which is
    # another dimension in tensors of verl's nested_tensor_from_tensor_list.
    laid_out = next(dim for dim, size in enumerate(tensor.shape) if isinstance(size, torch.SymInt))
    values, offsets = tensor.values(), tensor.offsets().cpu().numpy().astype(np.int64)
    element, bits = element_of(values.movedim(tensor._ragged_idx - 1, 0), where)
    sizes = np.diff(offsets) if lengths is None else lengths.cpu().numpy()
    if 0 in bits.shape[1:] or (len(sizes) and (offsets[:-1] + sizes).max() > len(bits)):
        raise UnsupportedBatchError(
            f"Cannot store {where}: its offsets reach beyond its values, or a dimension of it is empty "
            f"(values of shape {tuple(values.shape)}, ragged in dimension {tensor._ragged_idx})."
        )
    if lengths is not None or offsets[0] != 0 or offsets[-1] != len(bits):
        pieces = [bits[start : start + size] for start, size in zip(offsets[:-1], sizes, strict=True)]
        bits = np.concatenate([bits[:0], *pieces])
        offsets = np.concatenate([[0], np.cumsum(sizes)])
    known = {"min_seqlen", "max_seqlen"} <= set(tensor._metadata_cache)
    form = Jagged(element, bits.shape[1:], tensor._ragged_idx, laid_out, group, known)
    return Numbers(path, form, (bits, offsets))


def _spans(parts: dict[str, Numbers]) -> Spans | None:
    mask = parts.get("attention_mask")
    if mask is None or not isinstance(mask.form, Dense):
        return None
    responses = parts.get("responses")
    if responses is None:
        return find_spans(mask.bits, 0)
    if not isinstance(responses.form, Dense) or responses.bits.ndim != 2:
        return None
    return find_spans(mask.bits, responses.bits.shape[1])


def _choose(column: Numbers, part: Part, parts: dict[str, Numbers], echoed: Part | None) -> Numbers:
    form = (
        _echo(column, echoed)
        or _twin(column, parts)
        or _derived(column, part.spans, parts)
        or _without_padding(column, part.spans)
        or replace(column.form, element=_narrow(column))
    )
    return Numbers(column.path, form, column.bits)


def _echo(column: Numbers, echoed: Part | None) -> Form | None:
    """The input that a rollout hands through to its output is stored once."""
    for other in echoed.numbers if echoed else ():
        if other.path == column.path and _identical(column, other):
            return Same(column.form.element, (), "")
    return None


def _twin(column: Numbers, parts: dict[str, Numbers]) -> Form | None:
    """V1 writes the response mask a second time as the loss mask."""
    other = parts.get("response_mask")
    if column.path == ("loss_mask",) and other is not None and _identical(column, other):
        return Same(column.form.element, (), "response_mask")
    return None


def _identical(left: Numbers, right: Numbers) -> bool:
    a, b = left.form.element, right.form.element
    if (a.holder, a.name) != (b.holder, b.name):
        return False
    # Not for nested tensors: a copy would share its offsets with the original, and those decide what torch allows.
    dense = isinstance(left.bits, np.ndarray) and isinstance(right.bits, np.ndarray)
    return dense and same_bits(left.bits, right.bits)


def _derived(column: Numbers, spans: Spans | None, parts: dict[str, Numbers]) -> Form | None:
    name, element, bits = column.path[-1], column.form.element, column.bits
    if len(column.path) > 1 or element.holder != "torch":
        return None
    if isinstance(column.form, Jagged):
        return _derived_jagged(name, column, parts)
    if name == "input_ids" and _is_concat(column, parts):
        return Concat(element, bits.shape[1:])
    if spans is None or not isinstance(bits, np.ndarray) or bits.ndim != 2:
        return None
    if name == "attention_mask":
        return Mask(element, bits.shape[1:], "full")  # proved when the spans were found in it
    if name == "response_mask" and bits.dtype.kind in "biu" and bits.shape[1:] == (spans.response_width,):
        return Mask(element, bits.shape[1:], "response") if proves(mask_rows, "response", spans, bits) else None
    if name == "position_ids" and bits.shape[1] == spans.width("full") and bits.dtype in (np.int64, np.int32):
        for rule in ("counted", "continued"):
            if proves(position_rows, rule, spans, bits):
                return Positions(element, bits.shape[1:], rule)
    return None


def _is_concat(column: Numbers, parts: dict[str, Numbers]) -> bool:
    pieces = [parts[name] for name in Concat.needs if name in parts]
    if len(pieces) != 2 or not all(isinstance(piece.form, Dense) and piece.bits.ndim == 2 for piece in pieces):
        return False
    whole, prompts, responses = column.bits, pieces[0].bits, pieces[1].bits
    width = prompts.shape[1]
    if whole.ndim != 2 or whole.shape[1] != width + responses.shape[1]:
        return False
    if any(piece.form.element.name != column.form.element.name for piece in pieces):
        return False
    return all(
        np.array_equal(whole[chunk, :width], prompts[chunk]) and np.array_equal(whole[chunk, width:], responses[chunk])
        for chunk in row_chunks(len(whole), whole.nbytes // max(len(whole), 1))
    )


def _derived_jagged(name: str, column: Numbers, parts: dict[str, Numbers]) -> Form | None:
    form = column.form
    assert isinstance(form, Jagged)
    pieces = [parts[piece] for piece in JaggedConcat.needs if piece in parts]
    if len(pieces) != 2 or not all(isinstance(piece.form, Jagged) and not piece.form.shape for piece in pieces):
        return None
    if form.shape or any(piece.form.element.name != form.element.name for piece in pieces):
        return None
    values, offsets = column.bits
    joined, lengths = interleave(pieces[0].bits, pieces[1].bits)
    if not np.array_equal(lengths, np.diff(offsets)):
        return None
    arguments = (form.element, form.shape, form.ragged_idx, form.laid_out, form.group, form.bounds)
    if name == "input_ids" and same_bits(values, joined):
        return JaggedConcat(*arguments)
    if name == "position_ids" and same_bits(values, count_up(lengths, values.dtype)):
        return JaggedPositions(*arguments)
    return None


def _without_padding(column: Numbers, spans: Spans | None) -> Form | None:
    bits = column.bits
    if spans is None or not isinstance(column.form, Dense) or bits.ndim < 2 or bits.dtype.kind == "c" or not bits.size:
        return None
    windows = sorted(WINDOWS, key=lambda window: window != "prompt") if column.path[-1] == "prompts" else WINDOWS
    for axis in dict.fromkeys((0, bits.ndim - 2)):
        for window in windows:
            if bits.shape[axis + 1] != spans.width(window):
                continue
            pad = _pad(np.moveaxis(as_integers(bits), axis + 1, -1), spans, window)
            form = Ragged(_narrow(column), bits.shape[1:], window, axis, pad)
            if form.outside_is(bits, spans):
                return form
    return None


def _pad(bits: np.ndarray, spans: Spans, window: str) -> int:
    """What stands in the first padding of the column; 0 if nothing is padded."""
    start, end, width = spans.bounds(window)
    for padded, place in ((end < width, -1), (start > 0, 0)):
        if padded.any():
            return int(bits[padded.argmax(), ..., place].flat[0])
    return 0


def _narrow(column: Numbers) -> Element:
    """The narrowest element that holds every value of the column, found piece by piece to keep memory small."""
    wide = column.form.element
    narrow = narrower(wide, np.empty(0, wide.bits))
    if isinstance(column.form, Rows):
        pieces = column.bits
    else:
        pieces = [column.bits[0] if isinstance(column.form, Jagged) else column.bits]
    for piece in pieces:
        flat = piece.reshape(-1)
        for chunk in row_chunks(len(flat), flat.itemsize):
            element = narrower(wide, flat[chunk])
            if element != narrow:
                return element
    return narrow


def cell_type(form: str) -> pa.DataType:
    """The Parquet type of a column of Python objects."""
    kinds = {
        "text": pa.string(),
        "json": pa.string(),
        "int": pa.int64(),
        "float": pa.float64(),
        "bool": pa.bool_(),
    }
    if form not in kinds:
        raise ValueError(f"{form!r} is no form of a column of objects; there are {', '.join(kinds)}")
    return kinds[form]
