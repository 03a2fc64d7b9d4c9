"""Element types: how each torch and numpy dtype is laid out in memory and stored in a Parquet column.

*Bits* are a numpy array with the exact bits of the values, in a dtype that numpy supports. *Stored* values are those in
the column: readable numbers if the conversion is exact (a bfloat16 becomes the float32 with the same value), otherwise
the raw bits. Nothing here needs torch; ``numbers.py`` converts tensors to bits and back.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import Any

import numpy as np
import pyarrow as pa

_SAME_IN_NUMPY = "bool uint8 int8 int16 int32 int64 uint16 uint32 uint64 float16 float32 float64 complex64 complex128"
_FLOAT8 = "float8_e4m3fn float8_e5m2 float8_e4m3fnuz float8_e5m2fnuz float8_e8m0fnu"
TORCH_BITS = {
    **{name: np.dtype(name) for name in _SAME_IN_NUMPY.split()},
    "bfloat16": np.dtype("uint16"),
    **dict.fromkeys(_FLOAT8.split(), np.dtype("uint8")),
}
"""The numpy dtype for the bits of each torch dtype."""
NUMPY_NUMBERS = re.compile(r"[<>|=]([biu][1248]|f[248]|c8|c16|[mM]8\[\d*[a-zA-Z]+\])")
"""Matches the ``str`` of each numpy dtype that a numeric column can have."""
_STORED = {"bool", "float32", "float64", *(f"{sign}int{size}" for sign in ("", "u") for size in (8, 16, 32, 64))}
_SIGNED = {1: np.int8, 2: np.int16, 4: np.int32, 8: np.int64}


def as_integers(bits: np.ndarray) -> np.ndarray:
    """View bits as integers, to compare them exactly: NaN equals itself, and -0.0 differs from 0.0."""
    if bits.dtype.kind in "biu":
        return bits
    if bits.dtype.kind == "c":
        half = _SIGNED[bits.dtype.itemsize // 2]
        return bits.view(half).reshape(*bits.shape, 2)
    return bits.view(_SIGNED[bits.dtype.itemsize])


def same_bits(left: np.ndarray, right: np.ndarray) -> bool:
    """Whether two arrays have the same dtype, shape and bits."""
    return (
        left.dtype == right.dtype
        and left.shape == right.shape
        and np.array_equal(as_integers(left), as_integers(right))
    )


@dataclass(frozen=True)
class Element:
    """The element type of a numeric column: the library (``holder``) and dtype in memory, and the dtype in the file."""

    holder: str
    name: str
    stored: str

    @property
    def bits(self) -> np.dtype:
        """The numpy dtype of the bits in memory, in native byte order."""
        if self.holder == "torch":
            return TORCH_BITS[self.name]
        return np.dtype(self.name).newbyteorder("=")

    @property
    def components(self) -> int:
        """How many stored values make one element: two for complex numbers."""
        return 2 if self.bits.kind == "c" else 1

    @property
    def arrow(self) -> pa.DataType:
        return pa.type_for_alias(self.stored)

    @property
    def is_raw(self) -> bool:
        """Whether the file contains the same bytes under another type."""
        raw_half = self.stored == "uint16" and self.bits == np.float16
        return raw_half or self.bits.kind in "cmM"


def check_element(element: Element) -> None:
    """Check an element type from untrusted data. Raises ValueError if there is no such type."""
    is_known = element.name in TORCH_BITS if element.holder == "torch" else NUMPY_NUMBERS.fullmatch(element.name)
    if not is_known or element.holder not in ("torch", "numpy") or element.stored not in _STORED:
        raise ValueError(f"{element} is not a known element type")


def initial_element(holder: str, name: str, bits: np.dtype) -> Element:
    """The element type of a column before it is narrowed: ``name`` is its dtype, ``bits`` the dtype of its bits."""
    if name == "bfloat16" or bits == np.float16:
        return Element(holder, name, "float32")
    stored = {"c": f"float{bits.itemsize * 4}", "m": "int64", "M": "int64"}.get(bits.kind, bits.name)
    return Element(holder, name, stored)


def narrow_element(element: Element, bits: np.ndarray) -> Element:
    """The element type with the smallest is_exact storage for these bits: a whole column, or a chunk of it."""
    if element.stored == "int64" and element.bits.kind == "i":
        fits = bits.size == 0 or (bits.min() >= -(2**31) and bits.max() < 2**31)
        return Element(element.holder, element.name, "int32") if fits else element
    if element.stored == "float32" and element.bits == np.float16:
        # A conversion may turn a signaling NaN into a quiet one. Whether it does can differ between elements (vector or
        # scalar instructions). So a column with a signaling NaN is stored as raw bits.
        raw = bits.view(np.uint16)
        is_signaling = ((raw & 0x7C00) == 0x7C00) & ((raw & 0x03FF) != 0) & ((raw & 0x0200) == 0)
        is_exact = not is_signaling.any() and same_bits(bits.astype(np.float32).astype(np.float16), bits)
        return element if is_exact else Element(element.holder, element.name, "uint16")
    return element


def to_stored(element: Element, bits: np.ndarray) -> np.ndarray:
    """Convert the flat bits of a column to the values in the file."""
    if element.name == "bfloat16":
        return (bits.astype(np.uint32) << 16).view(np.float32)
    return bits.view(element.stored) if element.is_raw else bits.astype(element.stored, copy=False)


def from_stored(element: Element, stored: np.ndarray) -> np.ndarray:
    """The inverse of ``to_stored``."""
    if element.name == "bfloat16":
        return (np.ascontiguousarray(stored).view(np.uint32) >> 16).astype(np.uint16)
    return (
        np.ascontiguousarray(stored).view(element.bits) if element.is_raw else stored.astype(element.bits, copy=False)
    )


def checked_size(value: Any) -> int:
    """Return a size from untrusted data. Raises ValueError if it is not a valid size."""
    if type(value) is not int or not 0 <= value < 2**40:
        raise ValueError(f"{value!r} is not a valid size")
    return value
