"""Tensors and arrays into bits and back: the only module that the codec's encodings leave torch to."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch

from verl_rollout_skip.errors import CorruptEntryError, UnsupportedBatchError
from verl_rollout_skip.store.codec.dtypes import NUMPY_NUMBERS, TORCH_BITS, Element, widest
from verl_rollout_skip.store.codec.jagged import Jagged, JaggedBits

TORCH_DTYPES = {name: getattr(torch, name) for name in TORCH_BITS if hasattr(torch, name)}
_CARRIERS = {1: torch.uint8, 2: torch.int16}


def tensor_bits(tensor: torch.Tensor) -> np.ndarray:
    """The bits of a dense tensor as a contiguous numpy array; no copy if it is contiguous on the CPU."""
    bits = TORCH_BITS[dtype_name(tensor)]
    tensor = tensor.detach().cpu().resolve_conj().resolve_neg().contiguous()
    if bits.kind == "u" and tensor.dtype.is_floating_point:
        return tensor.view(_CARRIERS[bits.itemsize]).numpy().view(bits)
    return tensor.numpy()


def tensor_from_bits(bits: np.ndarray, name: str) -> torch.Tensor:
    """The inverse of ``tensor_bits`` for a dtype of this name; shares memory with ``bits``."""
    dtype = TORCH_DTYPES[name]
    if dtype.is_floating_point and bits.dtype.kind == "u":
        carrier = bits.view(np.int16) if bits.dtype.itemsize == 2 else bits
        return torch.from_numpy(carrier).view(dtype)
    return torch.from_numpy(bits)


def dtype_name(tensor: torch.Tensor) -> str:
    return str(tensor.dtype).removeprefix("torch.")


def refuse_unsupported(values: Any, where: str) -> None:
    """Raise ``UnsupportedBatchError`` for a tensor or numeric array whose elements cannot be stored exactly."""
    if isinstance(values, torch.Tensor):
        known = dtype_name(values) in TORCH_DTYPES and values.layout in (torch.strided, torch.jagged)
        if known and not values.is_quantized:
            return
        what = f"a {values.layout} tensor of dtype {values.dtype}"
    elif NUMPY_NUMBERS.fullmatch(values.dtype.str):
        return
    else:
        what = f"a numpy array of dtype {values.dtype}"
    raise UnsupportedBatchError(f"Cannot store {where}: {what} has no exact representation on disk.")


def element_of(values: Any, where: str) -> tuple[Element, np.ndarray]:
    """The element type of a tensor or array, before it is narrowed, and the bits."""
    refuse_unsupported(values, where)
    if isinstance(values, torch.Tensor):
        bits = tensor_bits(values)
        return widest("torch", dtype_name(values), bits.dtype), bits
    bits = np.ascontiguousarray(values.astype(values.dtype.newbyteorder("="), copy=False))
    return widest("numpy", values.dtype.str, bits.dtype), bits


def dense_column(element: Element, bits: np.ndarray) -> torch.Tensor | np.ndarray:
    """Whole bits as the tensor or array that was recorded."""
    if element.holder == "torch":
        return tensor_from_bits(bits, element.name)
    return bits.astype(np.dtype(element.name), copy=False)


def strided_tensor(element: Element, rows: list[np.ndarray]) -> torch.Tensor:
    """A strided NestedTensor of rows of different shapes."""
    if not rows:
        return torch.nested.nested_tensor([], dtype=TORCH_DTYPES[element.name])
    tensors = [tensor_from_bits(np.ascontiguousarray(row), element.name) for row in rows]
    return torch.nested.as_nested_tensor(tensors, layout=torch.strided)


def jagged_tensor(encoding: Jagged, bits: JaggedBits, groups: dict[int, torch.Tensor]) -> torch.Tensor:
    """A jagged NestedTensor built the way the recorded one was; ``groups`` are the offsets that several share."""
    values = tensor_from_bits(np.ascontiguousarray(bits.values), encoding.element.name)
    values = values.movedim(0, encoding.ragged_idx - 1).contiguous()
    offsets = groups.setdefault(encoding.group, torch.from_numpy(bits.offsets))
    if not np.array_equal(offsets.numpy(), bits.offsets):
        raise CorruptEntryError("Nested tensors that share their offsets have rows of different lengths.")
    known: dict[str, Any] = {}
    if encoding.bounds and len(bits.lengths):
        known = {"min_seqlen": int(bits.lengths.min()), "max_seqlen": int(bits.lengths.max())}
    nested: Any = torch.nested.nested_tensor_from_jagged(values, offsets, jagged_dim=encoding.laid_out, **known)
    if encoding.ragged_idx != encoding.laid_out:
        nested._ragged_idx = encoding.ragged_idx
    return nested
