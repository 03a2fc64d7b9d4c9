"""Element types: how each torch and numpy dtype lies in memory, and how it is stored in a Parquet column.

*Bits* are a numpy array with the very bits of the values, in a dtype numpy knows. *Stored* values are what the
column holds: readable numbers where that is exact (a bfloat16 becomes the float32 with the same value), the raw
bits where it is not.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import Any

import numpy as np
import pyarrow as pa
import torch

from verl_rollout_skip.errors import UnsupportedBatchError


@dataclass(frozen=True)
class TorchDtype:
    """A torch dtype and the numpy dtype that carries its bits."""

    torch: torch.dtype
    bits: np.dtype


def _torch_dtypes() -> dict[str, TorchDtype]:
    same = "bool uint8 int8 int16 int32 int64 uint16 uint32 uint64 float16 float32 float64 complex64 complex128"
    table = {name: TorchDtype(getattr(torch, name), np.dtype(name)) for name in same.split()}
    table["bfloat16"] = TorchDtype(torch.bfloat16, np.dtype("uint16"))
    for name in ("float8_e4m3fn", "float8_e5m2", "float8_e4m3fnuz", "float8_e5m2fnuz", "float8_e8m0fnu"):
        if hasattr(torch, name):
            table[name] = TorchDtype(getattr(torch, name), np.dtype("uint8"))
    return table


TORCH_DTYPES = _torch_dtypes()
NUMPY_NUMBERS = re.compile(r"[<>|=]([biu][1248]|f[248]|c8|c16|[mM]8\[\d*[a-zA-Z]+\])")
"""Numpy dtypes, by their ``str``, that a numeric column can have."""
_BITS_VIEW = {1: torch.uint8, 2: torch.int16}
_SIGNED = {1: np.int8, 2: np.int16, 4: np.int32, 8: np.int64}


def tensor_bits(tensor: torch.Tensor) -> np.ndarray:
    """The bits of a dense tensor as a contiguous numpy array; no copy if it is contiguous on the CPU."""
    dtype = TORCH_DTYPES[str(tensor.dtype).removeprefix("torch.")]
    tensor = tensor.detach().cpu().resolve_conj().resolve_neg().contiguous()
    if np.dtype(dtype.bits).kind == "u" and dtype.torch.is_floating_point:
        return tensor.view(_BITS_VIEW[dtype.bits.itemsize]).numpy().view(dtype.bits)
    return tensor.numpy()


def tensor_from_bits(bits: np.ndarray, dtype: torch.dtype) -> torch.Tensor:
    """The inverse of ``tensor_bits``; shares memory with ``bits``."""
    if dtype.is_floating_point and bits.dtype.kind == "u":
        carrier = bits.view(np.int16) if bits.dtype.itemsize == 2 else bits
        return torch.from_numpy(carrier).view(dtype)
    return torch.from_numpy(bits)


def as_integers(bits: np.ndarray) -> np.ndarray:
    """A view in which equal means the same bits: NaN equals itself, -0.0 differs from 0.0."""
    if bits.dtype.kind in "biu":
        return bits
    if bits.dtype.kind == "c":
        half = _SIGNED[bits.dtype.itemsize // 2]
        return bits.view(half).reshape(*bits.shape, 2)
    return bits.view(_SIGNED[bits.dtype.itemsize])


def same_bits(left: np.ndarray, right: np.ndarray) -> bool:
    """Whether two arrays agree in dtype, shape and every bit."""
    return (
        left.dtype == right.dtype
        and left.shape == right.shape
        and np.array_equal(as_integers(left), as_integers(right))
    )


@dataclass(frozen=True)
class Element:
    """The element type of a numeric column: ``holder`` and ``name`` say what it was, ``stored`` what the file has."""

    holder: str
    name: str
    stored: str

    @property
    def bits(self) -> np.dtype:
        """The numpy dtype of the bits in memory, in native byte order."""
        if self.holder == "torch":
            return TORCH_DTYPES[self.name].bits
        return np.dtype(self.name).newbyteorder("=")

    @property
    def parts(self) -> int:
        """How many stored values make one element: two for complex numbers."""
        return 2 if self.bits.kind == "c" else 1

    @property
    def arrow(self) -> pa.DataType:
        return pa.type_for_alias(self.stored)


def refuse_unsupported(values: Any, where: str) -> None:
    """Raise ``UnsupportedBatchError`` for a tensor or numeric array whose elements cannot be stored exactly."""
    if isinstance(values, torch.Tensor):
        name = str(values.dtype).removeprefix("torch.")
        if name in TORCH_DTYPES and values.layout in (torch.strided, torch.jagged) and not values.is_quantized:
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
        name = str(values.dtype).removeprefix("torch.")
        bits = tensor_bits(values)
        return Element("torch", name, _default_storage(bits.dtype, name)), bits
    dtype = values.dtype
    bits = np.ascontiguousarray(values.astype(dtype.newbyteorder("="), copy=False))
    return Element("numpy", dtype.str, _default_storage(bits.dtype, dtype.name)), bits


def _default_storage(bits: np.dtype, name: str) -> str:
    if name in ("bfloat16", "float16"):
        return "float32"
    return {"c": f"float{bits.itemsize * 4}", "m": "int64", "M": "int64"}.get(bits.kind, bits.name)


def narrower(element: Element, bits: np.ndarray) -> Element:
    """The element type with the smallest exact storage for these bits, which may be all or some of a column."""
    if element.stored == "int64" and element.bits.kind == "i":
        fits = bits.size == 0 or (bits.min() >= -(2**31) and bits.max() < 2**31)
        return Element(element.holder, element.name, "int32") if fits else element
    if element.stored == "float32" and element.bits == np.float16:
        # A conversion may make a signalling NaN a quiet one, and whether it does can differ from element to element
        # (vector or scalar instructions): a column with one keeps its raw bits.
        raw = bits.view(np.uint16)
        signalling = ((raw & 0x7C00) == 0x7C00) & ((raw & 0x03FF) != 0) & ((raw & 0x0200) == 0)
        exact = not signalling.any() and same_bits(bits.astype(np.float32).astype(np.float16), bits)
        return element if exact else Element(element.holder, element.name, "uint16")
    return element


def to_stored(element: Element, bits: np.ndarray) -> np.ndarray:
    """Flat bits of a column as the values that the file holds."""
    stored = np.dtype(element.stored)
    if element.name == "bfloat16":
        return (bits.astype(np.uint32) << 16).view(np.float32)
    if element.stored == "uint16" and bits.dtype == np.float16:
        return bits.view(np.uint16)
    if element.parts == 2 or element.bits.kind in "mM":
        return bits.view(stored)
    return bits.astype(stored, copy=False)


def from_stored(element: Element, stored: np.ndarray) -> np.ndarray:
    """The inverse of ``to_stored``."""
    if element.name == "bfloat16":
        return (np.ascontiguousarray(stored).view(np.uint32) >> 16).astype(np.uint16)
    if (element.stored == "uint16" and element.bits == np.float16) or element.parts == 2 or element.bits.kind in "mM":
        return np.ascontiguousarray(stored).view(element.bits)
    return stored.astype(element.bits, copy=False)


def finish(element: Element, bits: np.ndarray) -> torch.Tensor | np.ndarray:
    """Whole bits as the tensor or array that was recorded."""
    if element.holder == "torch":
        return tensor_from_bits(bits, TORCH_DTYPES[element.name].torch)
    return bits.astype(np.dtype(element.name), copy=False)
