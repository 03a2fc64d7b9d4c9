"""Tensors from the bytes and numbers of a file that cannot be trusted, on a budget that depends on its size."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import torch

from verl_rollout_skip.tools.upstream.pickles import DamagedDumpError, Name

_FREE_WEIGHT = 2_000_000
# Rollouts of one prompt share its data, so an honest file costs a multiple of its size.
_WEIGHT_PER_BYTE = 64
_FREE_ROWS = 1 << 20
STORAGES = {
    "FloatStorage": torch.float32,
    "DoubleStorage": torch.float64,
    "HalfStorage": torch.float16,
    "BFloat16Storage": torch.bfloat16,
    "LongStorage": torch.int64,
    "IntStorage": torch.int32,
    "ShortStorage": torch.int16,
    "CharStorage": torch.int8,
    "ByteStorage": torch.uint8,
    "BoolStorage": torch.bool,
    "UntypedStorage": torch.uint8,
}
DTYPES = {str(dtype).removeprefix("torch."): dtype for dtype in (*STORAGES.values(), torch.complex64, torch.complex128)}


@dataclass(frozen=True)
class Storage:
    """The elements of a torch storage, as a one-dimensional tensor."""

    elements: torch.Tensor


class Budget:
    """Limits the cost of building the values of one file, by its size in bytes.

    The unit is one object or eight bytes of bulk data. Shared objects count each time.
    """

    def __init__(self, size: int) -> None:
        self._limit = _FREE_WEIGHT + _WEIGHT_PER_BYTE * size
        self.spent = 0
        self.max_rows = max(size, _FREE_ROWS)
        """The limit for any dimension of an array: a row takes at least one byte."""
        self.torch_files = 0

    def weigh(self, amount: int) -> None:
        self.spent += amount
        if self.spent > self._limit:
            raise DamagedDumpError("It repeats parts of itself so often that it would not fit in memory.")


def storage_identity(identity: Any) -> tuple[torch.dtype, str, int]:
    """Parse torch's reference to a storage: its dtype, its key and its number of elements."""
    if isinstance(identity, tuple) and 5 <= len(identity) <= 6:
        word, kind, key, _, count = identity[:5]
        is_named = isinstance(word, str) and word == "storage" and isinstance(key, str)
        if is_named and isinstance(kind, Name) and kind.name in STORAGES:
            return STORAGES[kind.name], key, natural(count)
    raise ValueError("its reference to a storage is not one that torch writes")


def storage_of(data: Any, dtype: torch.dtype, count: int, budget: Budget) -> Storage:
    """A storage from its bytes."""
    budget.weigh(len(data) // 8)
    if len(data) != count * torch.empty(0, dtype=dtype).element_size():
        raise ValueError(f"it has {len(data)} bytes for {count} elements of {dtype}")
    return Storage(torch.frombuffer(bytearray(data), dtype=dtype) if count else torch.empty(0, dtype=dtype))


def view(elements: torch.Tensor, offset: int, sizes: list[int], strides: list[int]) -> torch.Tensor:
    """A tensor of these sizes and strides, copied out of the elements of a storage."""
    count = math.prod(sizes)
    last = offset + sum((length - 1) * step for length, step in zip(sizes, strides, strict=True)) if count else 0
    if count > len(elements) or last >= max(len(elements), 1):
        raise ValueError(f"size {sizes} with stride {strides} exceeds {len(elements)} elements")
    return elements.as_strided(sizes, strides, offset).clone() if count else elements.new_empty(sizes)


def make_jagged(values: Any, offsets: Any, lengths: Any, dim: int = 1) -> torch.Tensor:
    """A jagged tensor, whose offsets and lengths stay within its values."""
    if not isinstance(values, torch.Tensor) or values.is_nested or not 1 <= dim <= values.dim():
        raise ValueError("its values are not a tensor")
    starts = _offsets(offsets)
    if not starts or starts[0] < 0 or starts != sorted(starts):
        raise ValueError("invalid offsets")
    ends = [starts[-1]]
    if lengths is not None:
        sizes = _offsets(lengths)
        ends = [start + size for start, size in zip(starts[:-1], sizes, strict=True)]
        if any(size < 0 for size in sizes):
            raise ValueError("rows with a negative length")
    if max(ends, default=0) > values.shape[dim - 1]:
        raise ValueError("rows beyond the values")
    return torch.nested.nested_tensor_from_jagged(values, offsets=offsets, lengths=lengths, jagged_dim=dim)


def _offsets(tensor: Any) -> list[int]:
    if not isinstance(tensor, torch.Tensor) or tensor.is_nested or tensor.dim() != 1:
        raise ValueError("invalid offsets")
    if tensor.dtype not in (torch.int32, torch.int64):
        raise ValueError(f"offsets of type {tensor.dtype}")
    found: list[int] = tensor.tolist()
    return found


def natural(value: Any) -> int:
    """A size or an index: a non-negative number that fits in 63 bits."""
    if type(value) is not int:
        raise ValueError(f"a {type(value).__name__} is not a size")
    if not 0 <= value < 2**63:
        raise ValueError("a size is negative or has more than 63 bits")
    return value
