"""Numeric columns: converts tensors and arrays to bits and back, and chooses an encoding for each column.

An encoding that omits something is used only after it has reproduced exactly the recorded bits.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch

from verl_rollout_skip.errors import CorruptEntryError, UnsupportedBatchError
from verl_rollout_skip.store.codec.dtypes import (
    NUMPY_NUMBERS,
    TORCH_BITS,
    Element,
    as_integers,
    initial_element,
    narrow_element,
    same_bits,
)
from verl_rollout_skip.store.codec.encodings import Bits, Encoding, Form, JaggedBits, Source
from verl_rollout_skip.store.codec.padding import WINDOWS, Spans, find_spans, row_chunks
from verl_rollout_skip.store.threads import map_in_threads

TORCH_DTYPES = {name: getattr(torch, name) for name in TORCH_BITS if hasattr(torch, name)}
_SAME_SIZE_DTYPES = {1: torch.uint8, 2: torch.int16}
Path = tuple[str, ...]


@dataclass(frozen=True)
class NumberColumn:
    """The bits of a tensor or a numeric array, and how they are stored."""

    path: Path
    encoding: Encoding
    bits: Any

    @property
    def is_tensor(self) -> bool:
        return self.encoding.element.holder == "torch"

    @property
    def values(self) -> np.ndarray:
        """All elements of the column."""
        return self.bits.values if isinstance(self.bits, JaggedBits) else self.bits


def tensor_bits(tensor: torch.Tensor) -> np.ndarray:
    """The bits of a dense tensor as a contiguous numpy array. A tensor that is contiguous on the CPU is not copied."""
    bits = TORCH_BITS[dtype_name(tensor)]
    tensor = tensor.detach().cpu().resolve_conj().resolve_neg().contiguous()
    if bits.kind == "u" and tensor.dtype.is_floating_point:
        return tensor.view(_SAME_SIZE_DTYPES[bits.itemsize]).numpy().view(bits)
    return tensor.numpy()


def tensor_from_bits(bits: np.ndarray, name: str) -> torch.Tensor:
    """The inverse of ``tensor_bits``, for the dtype of this name. Shares memory with ``bits``."""
    dtype = TORCH_DTYPES[name]
    if dtype.is_floating_point and bits.dtype.kind == "u":
        carrier = bits.view(np.int16) if bits.dtype.itemsize == 2 else bits
        return torch.from_numpy(carrier).view(dtype)
    return torch.from_numpy(bits)


def dtype_name(tensor: torch.Tensor) -> str:
    return str(tensor.dtype).removeprefix("torch.")


def reject_unsupported(values: Any, where: str) -> None:
    """Raise ``UnsupportedBatchError`` for a tensor or numeric array whose elements cannot be stored exactly."""
    if isinstance(values, torch.Tensor):
        is_known = dtype_name(values) in TORCH_DTYPES and values.layout in (torch.strided, torch.jagged)
        if is_known and not values.is_quantized:
            return
        description = f"a {values.layout} tensor of dtype {values.dtype}"
    elif NUMPY_NUMBERS.fullmatch(values.dtype.str):
        return
    else:
        description = f"a numpy array of dtype {values.dtype}"
    raise UnsupportedBatchError(
        f"Cannot store {where}: {description} has no exact representation on disk. Convert it to a dense tensor or "
        "array of a standard dtype."
    )


def element_of(values: Any, where: str) -> tuple[Element, np.ndarray]:
    """The element type of a tensor or an array before it is narrowed, and its bits."""
    reject_unsupported(values, where)
    if isinstance(values, torch.Tensor):
        bits = tensor_bits(values)
        return initial_element("torch", dtype_name(values), bits.dtype), bits
    bits = np.ascontiguousarray(values.astype(values.dtype.newbyteorder("="), copy=False))
    return initial_element("numpy", values.dtype.str, bits.dtype), bits


def plain_columns(tensors: Mapping[Path, torch.Tensor], arrays: Mapping[Path, np.ndarray]) -> list[NumberColumn]:
    """The numeric columns of a batch, each with an encoding that omits nothing."""
    groups: dict[tuple[int, int], int] = {}
    columns = []
    items: list[tuple[Path, Any]] = [*tensors.items(), *arrays.items()]
    for path, values in items:
        where = ".".join(path)
        if isinstance(values, torch.Tensor) and values.is_nested:
            columns.append(_nested_column(path, values, where, groups))
        elif isinstance(values, torch.Tensor) or values.dtype.kind not in "OUS":
            element, bits = element_of(values, where)
            columns.append(NumberColumn(path, Encoding(Form.DENSE, element, bits.shape[1:]), bits))
    return columns


def _nested_column(path: Path, tensor: Any, where: str, groups: dict[tuple[int, int], int]) -> NumberColumn:
    if tensor.layout is not torch.jagged:
        rows = tensor.unbind()
        flat = torch.cat([torch.empty(0, dtype=tensor.dtype), *(row.reshape(-1).cpu() for row in rows)])
        element, bits = element_of(flat, where)
        sizes, ndims = [size for row in rows for size in row.shape], [row.ndim for row in rows]
        shapes = JaggedBits(np.array(sizes, np.int64), np.array(ndims, np.int64))
        lengths = np.array([row.numel() for row in rows], np.int64)
        return NumberColumn(path, Encoding(Form.ROWS, element, ()), JaggedBits(bits, lengths, shapes))
    lengths = tensor.lengths()
    group = groups.setdefault((id(tensor.offsets()), id(lengths)), len(groups))
    # The data is ragged in dimension `_ragged_idx`, but the tensor was built to be ragged in the dimension with the
    # symbolic size. The two differ in tensors from verl's nested_tensor_from_tensor_list.
    laid_out = next(dim for dim, size in enumerate(tensor.shape) if isinstance(size, torch.SymInt))
    values, offsets = tensor.values(), tensor.offsets().cpu().numpy().astype(np.int64)
    element, bits = element_of(values.movedim(tensor._ragged_idx - 1, 0), where)
    sizes = np.diff(offsets) if lengths is None else lengths.cpu().numpy()
    if 0 in bits.shape[1:] or (len(sizes) and (offsets[:-1] + sizes).max() > len(bits)):
        raise UnsupportedBatchError(
            f"Cannot store {where}: its offsets exceed its values, or one of its dimensions is empty "
            f"(values of shape {tuple(values.shape)}, ragged in dimension {tensor._ragged_idx}). Build it again from "
            "its rows."
        )
    if lengths is not None or offsets[0] != 0 or offsets[-1] != len(bits):
        pieces = [bits[start : start + size] for start, size in zip(offsets[:-1], sizes, strict=True)]
        bits = np.concatenate([bits[:0], *pieces])
    has_bounds = {"min_seqlen", "max_seqlen"} <= set(tensor._metadata_cache)
    encoding = Encoding(
        *(Form.JAGGED, element, bits.shape[1:]),
        ragged_idx=tensor._ragged_idx,
        laid_out=laid_out,
        group=group,
        bounds=has_bounds,
    )
    return NumberColumn(path, encoding, JaggedBits(bits, sizes.astype(np.int64)))


def choose_encodings(plain: list[NumberColumn], outputs: list[NumberColumn]) -> tuple[list[NumberColumn], Spans | None]:
    """The columns of a batch with their best encodings, and its spans. For an input, ``outputs`` are the output's."""
    top_level = [column for column in plain if column.is_tensor and len(column.path) == 1]
    tensors = {column.path[0]: column for column in top_level if column.path[0]}
    by_path = {(column.is_tensor, column.path): column for column in outputs}
    spans = _spans(tensors)

    def choose(column: NumberColumn) -> NumberColumn:
        output = by_path.get((column.is_tensor, column.path))
        others = tensors if output is None else {**tensors, "": output}
        for encoding in _derived(column, others, spans):
            is_known = encoding.window == "full"  # the attention mask: its spans are already verified
            if is_known or is_lossless(encoding, column.bits, spans, lambda name: others[name].bits):
                return replace(column, encoding=encoding)
        narrow = replace(column.encoding, element=_narrow(column))
        return replace(column, encoding=_without_padding(column, narrow, spans) or narrow)

    return map_in_threads(choose, plain), spans


def _spans(tensors: Mapping[str, NumberColumn]) -> Spans | None:
    mask, responses = tensors.get("attention_mask"), tensors.get("responses")
    if mask is None or mask.encoding.is_nested:
        return None
    if responses is not None and (responses.encoding.is_nested or responses.bits.ndim != 2):
        return None
    return find_spans(mask.bits, 0 if responses is None else responses.bits.shape[1])


def _derived(column: NumberColumn, others: Mapping[str, NumberColumn], spans: Spans | None) -> Iterator[Encoding]:
    """The encodings that might derive a column, so that nothing is stored."""

    def have_same_type(*names: str) -> bool:
        encodings = [plain, *(others[name].encoding for name in names if name in others)]
        types = {(encoding.plain_form, encoding.element.holder, encoding.element.name) for encoding in encodings}
        return len(encodings) == 1 + len(names) and len(types) == 1

    plain, kind = column.encoding, column.values.dtype
    name = column.path[0] if len(column.path) == 1 and column.is_tensor else None
    jagged = {"input_ids": Form.JAGGED_CONCAT, "position_ids": Form.JAGGED_POSITIONS}
    if plain.form is Form.JAGGED and name in jagged and have_same_type("prompts", "responses"):
        yield replace(plain, form=jagged[name])
    if plain.is_nested:
        return  # a copy would share its offsets object with the original, and torch compares offsets by identity
    if have_same_type(""):
        yield replace(plain, form=Form.SAME)  # a rollout copies parts of its input to its output
    if name == "loss_mask" and have_same_type("response_mask"):
        yield replace(plain, form=Form.SAME, of="response_mask")  # V1 stores the same mask under both names
    if name == "input_ids" and kind.kind in "biu" and have_same_type("prompts", "responses"):
        yield replace(plain, form=Form.CONCAT)
    if spans is None:
        return
    if name == "attention_mask" or (name == "response_mask" and kind.kind in "biu"):
        yield replace(plain, form=Form.MASK, window="full" if name == "attention_mask" else "response")
    if name == "position_ids" and kind in (np.int64, np.int32):
        for rule in ("counted", "continued"):
            yield replace(plain, form=Form.POSITIONS, rule=rule)


def is_lossless(encoding: Encoding, bits: Bits, spans: Spans | None, source: Source) -> bool:
    """Whether a reader accepts an encoding and decodes exactly the recorded bits. Decodes them to find out."""
    try:
        encoding.check(spans)
        if isinstance(bits, JaggedBits):
            joined = encoding.join(source)
            return np.array_equal(joined.lengths, bits.lengths) and same_bits(joined.values, bits.values)
        chunks = list(row_chunks(len(bits), bits.nbytes // max(len(bits), 1)))
        scratch = np.empty_like(bits[chunks[0]] if chunks else bits)  # the first chunk is the largest
        for chunk in chunks:
            decoded = scratch[: chunk.stop - chunk.start]
            decoded[...] = 0
            encoding.fill(decoded, chunk, spans, source)
            if not same_bits(decoded, bits[chunk]):
                return False
    except ValueError:
        return False
    return True


def _without_padding(column: NumberColumn, narrow: Encoding, spans: Spans | None) -> Encoding | None:
    bits = column.bits
    if spans is None or narrow.is_nested or bits.ndim < 2 or bits.dtype.kind == "c" or not bits.size:
        return None
    windows = sorted(WINDOWS, key=lambda window: window != "prompt") if column.path[-1] == "prompts" else WINDOWS
    for axis in dict.fromkeys((0, bits.ndim - 2)):
        for window in windows:
            if bits.shape[axis + 1] != spans.width(window):
                continue
            pad = _pad(np.moveaxis(as_integers(bits), axis + 1, -1), spans, window)
            encoding = replace(narrow, form=Form.RAGGED, window=window, axis=axis, pad=pad)
            if encoding.is_padding_uniform(bits, spans):
                return encoding
    return None


def _pad(bits: np.ndarray, spans: Spans, window: str) -> int:
    """The first padding value in a column, or 0 if it has no padding."""
    start, end, width = spans.bounds(window)
    for padded, edge in ((end < width, -1), (start > 0, 0)):
        if padded.any():
            return int(bits[padded.argmax(), ..., edge].flat[0])
    return 0


def _narrow(column: NumberColumn) -> Element:
    """The narrowest element type that fits every value of the column, found in chunks to save memory."""
    wide, flat = column.encoding.element, column.values.reshape(-1)
    narrow = narrow_element(wide, flat[:0])
    pieces = (narrow_element(wide, flat[chunk]) for chunk in row_chunks(len(flat), flat.itemsize))
    return next((element for element in pieces if element != narrow), narrow)


def make_column(encoding: Encoding, bits: Any, groups: dict[int, torch.Tensor]) -> torch.Tensor | np.ndarray:
    """Convert bits to the recorded tensor or array. ``groups`` has the offsets that jagged tensors share."""
    element = encoding.element
    if encoding.form is Form.ROWS:
        return _strided_tensor(element, bits)
    if encoding.is_nested:
        return _jagged_tensor(encoding, bits, groups)
    return tensor_from_bits(bits, element.name) if element.holder == "torch" else bits.astype(element.name, copy=False)


def _strided_tensor(element: Element, bits: JaggedBits) -> torch.Tensor:
    if not len(bits.lengths):
        return torch.nested.nested_tensor([], dtype=TORCH_DTYPES[element.name])
    assert bits.shapes is not None
    row_slices = [slice(row, row + 1) for row in range(len(bits.lengths))]
    rows = [np.ascontiguousarray(bits.rows(row)).reshape(bits.shapes.rows(row)) for row in row_slices]
    return torch.nested.as_nested_tensor([tensor_from_bits(row, element.name) for row in rows], layout=torch.strided)


def _jagged_tensor(encoding: Encoding, bits: JaggedBits, groups: dict[int, torch.Tensor]) -> torch.Tensor:
    """Build a jagged NestedTensor in the same way as the recorded one."""
    values = tensor_from_bits(np.ascontiguousarray(bits.values), encoding.element.name)
    values = values.movedim(0, encoding.ragged_idx - 1).contiguous()
    offsets = groups.setdefault(encoding.group, torch.from_numpy(bits.offsets))
    if not np.array_equal(offsets.numpy(), bits.offsets):
        raise CorruptEntryError("Its nested tensors that share their offsets have rows of different lengths.")
    length_bounds: dict[str, Any] = {}
    if encoding.bounds and len(bits.lengths):
        length_bounds = {"min_seqlen": int(bits.lengths.min()), "max_seqlen": int(bits.lengths.max())}
    nested: Any = torch.nested.nested_tensor_from_jagged(values, offsets, jagged_dim=encoding.laid_out, **length_bounds)
    if encoding.ragged_idx != encoding.laid_out:
        nested._ragged_idx = encoding.ragged_idx
    return nested
