"""What ``put`` keeps of a batch, so that what is recorded is what was put, whatever the trainer does to it afterwards.

A copy of a large batch costs the training thread more than everything else together, because fresh memory has to be
mapped page by page. So a ``Snapshot`` copies what is cheap and proves the rest:

- Rewards are copied, because trainers shape them in place. An outcome reward stands on one token of a response, so
  only the blocks that are not zero are kept (``NonZero``). Small tensors and arrays are copied as they are; Python
  objects are encoded at once.
- Large tensors are shared, and examined after they were encoded and before they are committed. torch counts the writes
  into a tensor and all of its views. Writes that it cannot see (through numpy or ``.data``) are looked for in a sample
  of the bytes. Large arrays have no such counter, so all of their bytes are digested.

Whatever was changed fails the dump; the store copies everything from then on. Copy-on-write tensors
(``torch._lazy_clone``) would do without that, but they are private to torch, and any ``numpy()`` of the trainer's
would then make the whole copy on the training thread.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from enum import Enum
from typing import Any

import numpy as np
import torch
import xxhash

from verl_rollout_skip.store.codec.blobs import blob_size
from verl_rollout_skip.store.codec.dtypes import TORCH_BITS
from verl_rollout_skip.store.codec.tensors import dtype_name, tensor_bits, tensor_from_bits

_SMALL_TENSOR = 1 << 20
# There may be thousands of cells.
_SMALL_CELL = 4 << 10
_BLOCK = 1 << 10
# A piece of each megabyte or so; the stride is no multiple of a row, so that pieces come from all columns.
_SAMPLE_STRIDE, _SAMPLE_BYTES = 1_000_003, 4 << 10


class Copy(Enum):
    """What is copied of a batch that is put."""

    NOTHING = "nothing"
    """It is written before ``put`` returns."""
    CHEAP = "cheap"
    ALL = "all"


@dataclass(frozen=True)
class NonZero:
    """A copy of a dense tensor that is mostly zero: the blocks of its bytes that are not, and the odd end."""

    shape: torch.Size
    dtype: str
    places: np.ndarray
    blocks: np.ndarray
    end: np.ndarray

    @classmethod
    def of(cls, tensor: torch.Tensor) -> NonZero:
        raw = _raw(tensor)
        whole = len(raw) - len(raw) % _BLOCK
        # As words, because numpy reduces those fastest; all bits count, so -0.0 is not zero.
        words = raw[:whole].view(np.int64).reshape(-1, _BLOCK // 8)
        places = np.flatnonzero(np.bitwise_or.reduce(words, axis=1))
        return cls(tensor.shape, dtype_name(tensor), places, words[places], raw[whole:].copy())

    def restore(self) -> torch.Tensor:
        """The tensor in memory of its own."""
        array = np.zeros(self.shape, TORCH_BITS[self.dtype])
        raw = array.reshape(-1).view(np.uint8)
        whole = len(raw) - len(self.end)
        raw[:whole].view(np.int64).reshape(-1, _BLOCK // 8)[self.places] = self.blocks
        raw[whole:] = self.end
        return tensor_from_bits(array, self.dtype)


@dataclass(frozen=True)
class _Shared:
    """Something that the caller may still write into, and how to tell whether it was."""

    name: str
    value: Any
    version: int
    digest: bytes

    def is_changed(self) -> bool:
        return (self.version, self.digest) != (_version(self.value), _digest(self.value))


class Snapshot:
    """Takes the tensors and arrays of a batch: copies them, or shares them and knows afterwards which were changed."""

    def __init__(self, copy: Copy, whose: str = "") -> None:
        self._copy_all = copy is Copy.ALL
        self._whose = whose
        self._shared: list[_Shared] = []
        self._taken: dict[int, tuple[Any, Any]] = {}

    def tensor(self, name: str, tensor: torch.Tensor) -> torch.Tensor | NonZero:
        """A tensor of the batch, or a copy of it."""
        small = tensor.numel() * tensor.element_size() <= _SMALL_TENSOR
        if not small and not self._copy_all and _is_reward(name) and _is_plain(tensor):
            return NonZero.of(tensor)
        if small or self._copy_all or _is_reward(name) or tensor.is_inference():
            return tensor.detach().clone()
        # Detached, so that `tensor.data = …` does not reach it. Nested tensors would lose their counter by that.
        return self._share(name, tensor if tensor.is_nested else tensor.detach())

    def array(self, array: np.ndarray) -> np.ndarray:
        """A copy of a column of numbers, which is small: reward extras, counts of turns."""
        return array.copy()

    def cells(self, name: str, rows: list[list[Any]]) -> None:
        """Copy or share the bulk data of the cells of a column, in place of what is there."""
        lists = {id(blobs): (row, blobs) for row, blobs in enumerate(rows)}  # rows with one object share one list
        for row, blobs in lists.values():
            blobs[:] = [self._blob(f"{name}[{row}]", blob) for blob in blobs]

    def changed(self) -> Iterator[str]:
        """What was shared and is no longer what it was."""
        return (f"{self._whose}{shared.name}" for shared in self._shared if shared.is_changed())

    def _blob(self, name: str, blob: Any) -> Any:
        if not isinstance(blob, np.ndarray | torch.Tensor):
            return blob
        if id(blob) not in self._taken:
            self._taken[id(blob)] = blob, self._take_blob(name, blob)
        return self._taken[id(blob)][1]

    def _take_blob(self, name: str, blob: Any) -> Any:
        copied = self._copy_all or blob.nbytes <= _SMALL_CELL
        if isinstance(blob, np.ndarray):
            return blob.copy() if copied or not blob.flags.c_contiguous else self._share(name, blob)
        return blob.detach().clone() if copied or blob.is_inference() else self._share(name, blob.detach())

    def _share(self, name: str, value: Any) -> Any:
        self._shared.append(_Shared(name, value, _version(value), _digest(value)))
        return value


def held_bytes(values: Iterable[Any]) -> int:
    """The memory of tensors, arrays, bytes and images; storages that several tensors share count once."""
    storages: dict[int, int] = {}
    others = 0
    for value in {id(value): value for value in values}.values():
        if isinstance(value, torch.Tensor):
            storage = (value.values() if value.layout is torch.jagged else value).untyped_storage()
            storages[storage.data_ptr()] = storage.nbytes()
        else:
            others += blob_size(value.blocks if isinstance(value, NonZero) else value)
    return sum(storages.values()) + others


def _is_reward(name: str) -> bool:
    last = name.rpartition(".")[2].lower()
    return "score" in last or "reward" in last


def _is_plain(tensor: torch.Tensor) -> bool:
    """Whether the bytes of a tensor lie in memory as they are, one after another."""
    dense = tensor.layout is torch.strided and not tensor.is_nested and tensor.device.type == "cpu"
    return dense and tensor.is_contiguous() and not tensor.is_conj() and not tensor.is_neg()


def _raw(value: Any) -> Any:
    """The bytes of a tensor or an array, without a copy."""
    bits = tensor_bits(value) if isinstance(value, torch.Tensor) else value
    return bits.reshape(-1).view(np.uint8)


def _version(value: Any) -> int:
    return value._version if isinstance(value, torch.Tensor) else 0


def _digest(value: Any) -> bytes:
    digest = xxhash.xxh3_128()
    if isinstance(value, np.ndarray):
        digest.update(_raw(value))
    else:
        value = value.values() if value.layout is torch.jagged else value
        raw = _raw(value) if _is_plain(value) else b""
        for start in range(0, len(raw), _SAMPLE_STRIDE):
            digest.update(raw[start : start + _SAMPLE_BYTES])
    return digest.digest()
