"""Which encoding each key of a batch gets: the choices, each proved on the recorded values before it is taken."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import torch

from verl_rollout_skip.errors import UnsupportedBatchError
from verl_rollout_skip.store.codec.batch import Path
from verl_rollout_skip.store.codec.dtypes import Element, as_integers, narrower, same_bits
from verl_rollout_skip.store.codec.encodings import Concat, Dense, Encoding, Mask, Positions, Ragged, Same
from verl_rollout_skip.store.codec.jagged import (
    Jagged,
    JaggedBits,
    JaggedConcat,
    JaggedPositions,
    Rows,
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
from verl_rollout_skip.store.codec.prepared import Numbers, TakenBatch
from verl_rollout_skip.store.codec.tensors import element_of
from verl_rollout_skip.store.threads import map_in_threads


def choose_encodings(batch: TakenBatch, echoed: TakenBatch | None = None) -> None:
    """Choose the encoding of every numeric column of a batch. ``echoed`` is the output, when this is the input."""
    plain = plain_columns(batch)
    by_name = {column.path[0]: column for column in plain if column.is_tensor and len(column.path) == 1}
    batch.spans = _spans(by_name)
    batch.numbers = map_in_threads(lambda column: _choose(column, batch, by_name, echoed), plain)


def plain_columns(batch: TakenBatch) -> list[Numbers]:
    """The numeric columns of a batch, each with an encoding that leaves nothing out."""
    groups: dict[tuple[int, int], int] = {}
    columns = []
    batch.restore()
    for path, tensor in batch.tensors.items():
        assert isinstance(tensor, torch.Tensor)
        columns.append(_tensor_column(path, tensor, groups))
    for path, array in batch.batch.arrays.items():
        if array.dtype.kind not in "OUS":
            element, bits = element_of(array, ".".join(path))
            columns.append(Numbers(path, Dense(element, bits.shape[1:]), bits))
    return columns


def _tensor_column(path: Path, tensor: torch.Tensor, groups: dict[tuple[int, int], int]) -> Numbers:
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
    known = {"min_seqlen", "max_seqlen"} <= set(tensor._metadata_cache)
    encoding = Jagged(element, bits.shape[1:], tensor._ragged_idx, laid_out, group, known)
    return Numbers(path, encoding, JaggedBits(bits, sizes.astype(np.int64)))


def _spans(tensors: dict[str, Numbers]) -> Spans | None:
    mask = tensors.get("attention_mask")
    if mask is None or not isinstance(mask.encoding, Dense):
        return None
    responses = tensors.get("responses")
    if responses is None:
        return find_spans(mask.bits, 0)
    if not isinstance(responses.encoding, Dense) or responses.bits.ndim != 2:
        return None
    return find_spans(mask.bits, responses.bits.shape[1])


def _choose(column: Numbers, batch: TakenBatch, tensors: dict[str, Numbers], echoed: TakenBatch | None) -> Numbers:
    encoding = (
        _echo(column, echoed)
        or _twin(column, tensors)
        or _derived(column, batch.spans, tensors)
        or _without_padding(column, batch.spans)
        or replace(column.encoding, element=_narrow(column))
    )
    return Numbers(column.path, encoding, column.bits)


def _echo(column: Numbers, echoed: TakenBatch | None) -> Encoding | None:
    """The input that a rollout hands through to its output is stored once."""
    for other in echoed.numbers if echoed else ():
        if other.path == column.path and _identical(column, other):
            return Same(column.encoding.element, column.bits.shape[1:], "")
    return None


def _twin(column: Numbers, tensors: dict[str, Numbers]) -> Encoding | None:
    """V1 writes the response mask a second time as the loss mask."""
    other = tensors.get("response_mask")
    if column.path == ("loss_mask",) and other is not None and _identical(column, other):
        return Same(column.encoding.element, column.bits.shape[1:], "response_mask")
    return None


def _identical(left: Numbers, right: Numbers) -> bool:
    a, b = left.encoding.element, right.encoding.element
    if (a.holder, a.name) != (b.holder, b.name):
        return False
    # Not for nested tensors: a copy would share its offsets with the original, and those decide what torch allows.
    dense = isinstance(left.bits, np.ndarray) and isinstance(right.bits, np.ndarray)
    return dense and same_bits(left.bits, right.bits)


def _derived(column: Numbers, spans: Spans | None, tensors: dict[str, Numbers]) -> Encoding | None:
    name, element, bits = column.path[-1], column.encoding.element, column.bits
    if len(column.path) > 1 or element.holder != "torch":
        return None
    if isinstance(column.encoding, Jagged):
        return _derived_jagged(name, column, tensors)
    if name == "input_ids" and _is_concat(column, tensors):
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


def _is_concat(column: Numbers, tensors: dict[str, Numbers]) -> bool:
    pieces = [tensors[name] for name in Concat.needs if name in tensors]
    if len(pieces) != 2 or not all(isinstance(piece.encoding, Dense) and piece.bits.ndim == 2 for piece in pieces):
        return False
    whole, prompts, responses = column.bits, pieces[0].bits, pieces[1].bits
    width = prompts.shape[1]
    if whole.ndim != 2 or whole.shape[1] != width + responses.shape[1] or whole.dtype.kind not in "biu":
        return False
    if any(piece.encoding.element.name != column.encoding.element.name for piece in pieces):
        return False
    return all(
        np.array_equal(whole[chunk, :width], prompts[chunk]) and np.array_equal(whole[chunk, width:], responses[chunk])
        for chunk in row_chunks(len(whole), whole.nbytes // max(len(whole), 1))
    )


def _derived_jagged(name: str, column: Numbers, tensors: dict[str, Numbers]) -> Encoding | None:
    plain = column.encoding
    assert isinstance(plain, Jagged)
    pieces = [tensors[piece] for piece in JaggedConcat.needs if piece in tensors]
    if len(pieces) != 2 or not all(isinstance(piece.encoding, Jagged) and not piece.encoding.shape for piece in pieces):
        return None
    if plain.shape or any(piece.encoding.element.name != plain.element.name for piece in pieces):
        return None
    joined = interleave(pieces[0].bits, pieces[1].bits)
    if not np.array_equal(joined.lengths, column.bits.lengths):
        return None
    arguments = (plain.element, plain.shape, plain.ragged_idx, plain.laid_out, plain.group, plain.bounds)
    if name == "input_ids" and same_bits(column.bits.values, joined.values):
        return JaggedConcat(*arguments)
    if name == "position_ids" and _counts_up(column.bits):
        return JaggedPositions(*arguments)
    return None


def _counts_up(bits: JaggedBits) -> bool:
    return same_bits(bits.values, count_up(bits.lengths, bits.values.dtype).values)


def _without_padding(column: Numbers, spans: Spans | None) -> Encoding | None:
    bits = column.bits
    if (
        spans is None
        or not isinstance(column.encoding, Dense)
        or bits.ndim < 2
        or bits.dtype.kind == "c"
        or not bits.size
    ):
        return None
    windows = sorted(WINDOWS, key=lambda window: window != "prompt") if column.path[-1] == "prompts" else WINDOWS
    for axis in dict.fromkeys((0, bits.ndim - 2)):
        for window in windows:
            if bits.shape[axis + 1] != spans.width(window):
                continue
            pad = _pad(np.moveaxis(as_integers(bits), axis + 1, -1), spans, window)
            encoding = Ragged(_narrow(column), bits.shape[1:], window, axis, pad)
            if encoding.outside_is(bits, spans):
                return encoding
    return None


def _pad(bits: np.ndarray, spans: Spans, window: str) -> int:
    """What stands in the first padding of the column; 0 if nothing is padded."""
    start, end, width = spans.bounds(window)
    for padded, edge in ((end < width, -1), (start > 0, 0)):
        if padded.any():
            return int(bits[padded.argmax(), ..., edge].flat[0])
    return 0


def _narrow(column: Numbers) -> Element:
    """The narrowest element that holds every value of the column, found piece by piece to keep memory small."""
    wide = column.encoding.element
    narrow = narrower(wide, np.empty(0, wide.bits))
    if isinstance(column.encoding, Rows):
        pieces = column.bits
    else:
        pieces = [column.bits.values if isinstance(column.bits, JaggedBits) else column.bits]
    for piece in pieces:
        flat = piece.reshape(-1)
        for chunk in row_chunks(len(flat), flat.itemsize):
            element = narrower(wide, flat[chunk])
            if element != narrow:
                return element
    return narrow
