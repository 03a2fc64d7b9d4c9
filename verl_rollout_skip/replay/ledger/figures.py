"""``TensorFigures``: what a ledger keeps of a tensor, which are its digest and a few moments.

Tensors may be dense or jagged, and may arrive in slices of rows. A jagged tensor whose rows happen to have the same
length has the figures of the dense tensor with the same values.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import numpy as np
import xxhash

_CHUNK = 1 << 20
"""Values per pass: they fit into the processor's cache."""


@dataclass(frozen=True)
class TensorFigures:
    """The digest covers dtype, shape and every bit. The second size of a jagged tensor is that of its longest row.

    ``min``, ``max`` and ``mean`` are NaN if the tensor is empty or contains a NaN.
    """

    digest: str
    dtype: str
    shape: tuple[int, ...]
    count: int
    min: float
    max: float
    mean: float


def figures_of(tensor: Any) -> TensorFigures:
    """The figures of a torch tensor, dense or jagged, or of a numpy array."""
    return rows_figures(tensor).result()


class FiguresOfRows:
    """Computes the figures of a tensor from consecutive slices of its rows, which several processes may read.

    Each row has its own digest, so the figures do not depend on where the rows were cut.
    """

    def __init__(self) -> None:
        self._digests: list[bytes] = []
        self._lengths: list[np.ndarray] = []
        self._dtype = ""
        self._row_shape: tuple[int, ...] = ()
        self._is_scalar = False
        self._count = 0
        self._sum = 0.0
        self._min, self._max = math.inf, -math.inf

    def add(self, rows: Any) -> None:
        """Add the next rows."""
        dtype, values, lengths, row_shape = _as_rows(rows)
        self._check_type(dtype, row_shape)
        self._is_scalar = lengths is None
        self._lengths.append(np.ones(1, np.int64) if lengths is None else lengths)
        data = memoryview(values.data).cast("B") if values.size else memoryview(b"")
        ends = np.cumsum(self._lengths[-1]) * math.prod(row_shape[1:]) * values.itemsize
        starts = [0, *ends.tolist()]
        self._digests += [xxhash.xxh3_128_digest(data[start:end]) for start, end in pairwise(starts)]
        for first in range(0, values.size, _CHUNK):
            numbers = _as_numbers(values[first : first + _CHUNK], dtype)
            with np.errstate(all="ignore"):
                low, high = float(numbers.min()), float(numbers.max())
                self._add_moments(low, high, float(numbers.sum(dtype=np.float64)), numbers.size)

    def merge(self, following: FiguresOfRows) -> None:
        """Add the figures of the rows that follow."""
        self._check_type(following._dtype, following._row_shape)
        self._digests += following._digests
        self._lengths += following._lengths
        self._add_moments(following._min, following._max, following._sum, following._count)

    def result(self) -> TensorFigures:
        """The figures of all rows so far."""
        lengths = np.concatenate(self._lengths) if self._lengths else np.empty(0, np.int64)
        shape = () if self._is_scalar else (len(lengths), *self._row_shape)
        whole = xxhash.xxh3_128(b"".join(self._digests))
        if not self._is_scalar and self._row_shape:
            longest = int(lengths.max()) if len(lengths) else self._row_shape[0]
            shape = (len(lengths), longest, *self._row_shape[1:])
        whole.update(f"{self._dtype} {shape}".encode())
        is_empty = self._count == 0
        return TensorFigures(
            whole.hexdigest(),
            self._dtype,
            shape,
            self._count,
            math.nan if is_empty else self._min,
            math.nan if is_empty else self._max,
            math.nan if is_empty else self._sum / self._count,
        )

    def _check_type(self, dtype: str, row_shape: tuple[int, ...]) -> None:
        if self._dtype and (dtype, len(row_shape)) != (self._dtype, len(self._row_shape)):
            raise ValueError(f"slices of one tensor are {self._dtype} and {dtype}, or have different dimensions")
        self._dtype, self._row_shape = dtype, row_shape

    def _add_moments(self, low: float, high: float, total: float, count: int) -> None:
        # Unlike min and max, these keep a NaN.
        self._min = float(np.minimum(self._min, low))
        self._max = float(np.maximum(self._max, high))
        self._sum += total
        self._count += count


def rows_figures(rows: Any) -> FiguresOfRows:
    """The figures of some rows, to be merged with those of others."""
    figures = FiguresOfRows()
    figures.add(rows)
    return figures


def _as_rows(rows: Any) -> tuple[str, np.ndarray, np.ndarray | None, tuple[int, ...]]:
    """dtype, contiguous values, the length of each row along its first dimension, and the shape of a row.

    The lengths are None for a number without dimensions.
    """
    if not isinstance(rows, np.ndarray) and getattr(rows, "is_nested", False):
        parts = [part.detach().cpu() for part in rows.unbind()]
        values = [_bytes_as_array(part).reshape(-1) for part in parts]
        lengths = np.array([part.shape[0] for part in parts], np.int64)
        row_shape = tuple(parts[0].shape) if parts else (0,)
        merged = np.concatenate(values) if values else np.empty(0, np.uint8)
        return _dtype_name(rows), merged, lengths, row_shape
    array = rows if isinstance(rows, np.ndarray) else _bytes_as_array(rows.detach().cpu())
    shape = tuple(rows.shape)
    values_ = np.ascontiguousarray(array)
    if not shape:
        return _dtype_name(rows), values_.reshape(-1), None, ()
    length = shape[1] if len(shape) > 1 else 1
    return _dtype_name(rows), values_.reshape(-1), np.full(shape[0], length, np.int64), shape[1:]


def _bytes_as_array(tensor: Any) -> np.ndarray:
    """A torch tensor on the CPU as an array. A type that numpy lacks becomes unsigned integers with the same bits."""
    tensor = tensor.contiguous()
    try:
        array: np.ndarray = tensor.numpy()
    except TypeError:
        import torch

        kinds = {1: torch.uint8, 2: torch.int16}
        array = (
            tensor.view(kinds[tensor.element_size()]).numpy().view({1: np.uint8, 2: np.uint16}[tensor.element_size()])
        )
    return array


def _as_numbers(values: np.ndarray, dtype: str) -> np.ndarray:
    if dtype == "bfloat16":  # the upper half of a float32
        widened: np.ndarray = (values.astype(np.uint32) << 16).view(np.float32)
        return widened
    if values.dtype == np.bool_:
        return values.view(np.uint8)
    return values


def _dtype_name(tensor: Any) -> str:
    return str(tensor.dtype).removeprefix("torch.")
