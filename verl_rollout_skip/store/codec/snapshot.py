"""The snapshot of a rollout step that ``put`` takes on the training thread, so that later changes are not recorded.

Copying a large batch would cost the training thread more than everything else together, because new memory has to be
mapped page by page. So a snapshot copies small data and verifies the rest:

- Rewards are copied, because trainers shape them in place. An outcome reward is on a single token of the response, so
  only the nonzero blocks are kept (``NonZero``). Small tensors and arrays are copied completely. Python objects are
  encoded immediately.
- Large tensors are shared, and checked after encoding and before the commit. torch counts the writes to a tensor and
  all its views. A sample of the bytes detects writes that torch does not see (through numpy or ``.data``). Large arrays
  have no such counter, so all of their bytes are digested.

If a tensor has changed, the dump fails, and the store copies everything from then on. Copy-on-write tensors
(``torch._lazy_clone``) would avoid this, but they are private to torch, and the first ``numpy()`` call in the trainer
would copy the whole tensor on the training thread.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from enum import Enum
from typing import Any

import numpy as np
import torch
import xxhash

from verl_rollout_skip.errors import ChangedBatchError, StoreError, UnsupportedBatchError
from verl_rollout_skip.store.codec import cells
from verl_rollout_skip.store.codec.batch import Batch, BatchKind, Path, flatten
from verl_rollout_skip.store.codec.dtypes import TORCH_BITS
from verl_rollout_skip.store.codec.numbers import dtype_name, reject_unsupported, tensor_bits, tensor_from_bits
from verl_rollout_skip.store.codec.objects import ObjectColumn, encode_objects
from verl_rollout_skip.store.sizes import format_size

_SMALL_TENSOR = 1 << 20
# Smaller than for tensors, because there can be thousands of cells.
_SMALL_CELL = 4 << 10
_BLOCK = 1 << 10
# About one sample per megabyte. The stride is not a multiple of a row, so the samples come from different columns.
_SAMPLE_STRIDE, _SAMPLE_BYTES = 1_000_003, 4 << 10
# The description of a part contains the meta_info of both batches (see ``encoder._MAX_DESCRIPTION_BYTES``).
_MAX_META_BYTES = 48_000_000

Proof = Callable[[Mapping[str, Any]], str | None]
"""Compares the columns of a batch with what was generated. Returns the names of changed columns, or None."""


class Copy(Enum):
    """How much of a batch ``put`` copies."""

    NOTHING = "nothing"
    """The batch is written before ``put`` returns."""
    CHEAP = "cheap"
    ALL = "all"


@dataclass(frozen=True)
class NonZero:
    """A copy of a dense tensor that is mostly zero: the nonzero blocks of its bytes, and the incomplete last block."""

    shape: torch.Size
    dtype: str
    positions: np.ndarray
    blocks: np.ndarray
    tail: np.ndarray

    @classmethod
    def of(cls, tensor: torch.Tensor) -> NonZero:
        raw = _raw_bytes(tensor)
        blocks_end = len(raw) - len(raw) % _BLOCK
        # As 64-bit words, because numpy reduces those fastest. All bits count, so -0.0 is not zero.
        words = raw[:blocks_end].view(np.int64).reshape(-1, _BLOCK // 8)
        positions = np.flatnonzero(np.bitwise_or.reduce(words, axis=1))
        return cls(tensor.shape, dtype_name(tensor), positions, words[positions], raw[blocks_end:].copy())

    def restore(self) -> torch.Tensor:
        """Rebuild the full tensor in new memory."""
        array = np.zeros(self.shape, TORCH_BITS[self.dtype])
        raw = array.reshape(-1).view(np.uint8)
        blocks_end = len(raw) - len(self.tail)
        raw[:blocks_end].view(np.int64).reshape(-1, _BLOCK // 8)[self.positions] = self.blocks
        raw[blocks_end:] = self.tail
        return tensor_from_bits(array, self.dtype)


@dataclass(frozen=True)
class _Shared:
    """A value that the caller may still write to, and the state by which a write is detected."""

    name: str
    value: Any
    version: int
    digest: bytes

    def is_changed(self) -> bool:
        return (self.version, self.digest) != (_version(self.value), _digest(self.value))


class _Copier:
    """Copies the tensors and the bulk data of a batch, or registers them as shared."""

    def __init__(self, copy: Copy, name_prefix: str) -> None:
        self._copy, self._name_prefix = copy, name_prefix
        self.shared: list[_Shared] = []
        self._blobs: dict[int, tuple[Any, Any]] = {}

    def tensor(self, name: str, tensor: torch.Tensor) -> torch.Tensor | NonZero:
        """Share a tensor of the batch, or copy it."""
        is_reward = any(word in name.rpartition(".")[2].lower() for word in ("score", "reward"))
        if self._copy is Copy.NOTHING:
            return tensor
        if self._copy is Copy.CHEAP and tensor.numel() * tensor.element_size() > _SMALL_TENSOR:
            if is_reward and _is_plain(tensor):
                return NonZero.of(tensor)
            if not is_reward and not tensor.is_inference():
                # Detached, so that `tensor.data = …` has no effect. A nested tensor would lose its counter.
                return self._share(name, tensor if tensor.is_nested else tensor.detach())
        return tensor.detach().clone()

    def blobs(self, name: str, rows: list[list[Any]]) -> None:
        """Copy or share the bulk data in the cells of a column. Changes ``rows`` in place."""
        if self._copy is Copy.NOTHING:
            return
        lists = {id(blobs): (row, blobs) for row, blobs in enumerate(rows)}  # rows with one object share a list
        for row, blobs in lists.values():
            for index, blob in enumerate(blobs):
                if isinstance(blob, np.ndarray | torch.Tensor):
                    if id(blob) not in self._blobs:
                        self._blobs[id(blob)] = blob, self._blob(f"{name}[{row}]", blob)
                    blobs[index] = self._blobs[id(blob)][1]

    def _blob(self, name: str, blob: Any) -> Any:
        should_copy = self._copy is Copy.ALL or blob.nbytes <= _SMALL_CELL
        if isinstance(blob, np.ndarray):
            return blob.copy() if should_copy or not blob.flags.c_contiguous else self._share(name, blob)
        return blob.detach().clone() if should_copy or blob.is_inference() else self._share(name, blob.detach())

    def _share(self, name: str, value: Any) -> Any:
        self.shared.append(_Shared(f"{self._name_prefix}{name}", value, _version(value), _digest(value)))
        return value


@dataclass
class BatchSnapshot:
    """Everything that is written for one batch: the output of a rollout step, or its input.

    ``tensors`` are the tensors of the batch or copies of them. ``shared`` are the values that the caller may still
    write to. ``meta`` is the encoded meta_info, ``stable_meta`` the same without timings, which differ between runs.
    """

    batch: Batch
    tensors: dict[Path, Any]
    shared: list[_Shared]
    objects: list[ObjectColumn]
    meta: dict[str, Any]
    stable_meta: dict[str, Any]

    def restore(self) -> dict[Path, torch.Tensor]:
        """The tensors, with those stored as ``NonZero`` rebuilt."""
        for path, tensor in self.tensors.items():
            if isinstance(tensor, NonZero):
                self.tensors[path] = tensor.restore()
        return self.tensors

    def blobs(self) -> Iterator[cells.Blob]:
        """The bulk data of all cells."""
        return (blob for column in self.objects for row in column.blobs or () for blob in row)

    @property
    def held_bytes(self) -> int:
        """The memory that the batch keeps alive while it is queued. Shared storage counts once."""
        numbers = [array for array in self.batch.arrays.values() if array.dtype.kind not in "OUS"]
        storages: dict[int, int] = {}
        cell_bytes = sum(len(text) for column in self.objects for text in column.values if type(text) is str)
        for value in {id(value): value for value in (*self.tensors.values(), *numbers, *self.blobs())}.values():
            if isinstance(value, torch.Tensor):
                storage = (value.values() if value.layout is torch.jagged else value).untyped_storage()
                storages[storage.data_ptr()] = storage.nbytes()
            else:
                cell_bytes += cells.blob_size(value.blocks if isinstance(value, NonZero) else value)
        return sum(storages.values()) + cell_bytes


@dataclass(frozen=True)
class Prepared:
    """A rollout step that is ready to be written."""

    output: BatchSnapshot
    input: BatchSnapshot | None
    proof: Proof | None = None

    @property
    def batches(self) -> list[BatchSnapshot]:
        return [self.output] if self.input is None else [self.output, self.input]

    def raise_if_changed(self) -> None:
        """Raise ``ChangedBatchError`` if a shared value has been written to since the snapshot."""
        names = [shared.name for batch in self.batches for shared in batch.shared if shared.is_changed()]
        if not names and self.proof is not None:
            # In a TensorDict, rewards that only some rows have are objects. A DataProto stores objects separately.
            is_tensordict = self.output.batch.kind is BatchKind.TENSORDICT
            columns = {**(self.output.batch.arrays if is_tensordict else {}), **self.output.restore()}
            changed = self.proof({path[0]: column for path, column in columns.items() if len(path) == 1})
            names = [] if changed is None else [changed]
        if names:
            raise ChangedBatchError(names)


def prepare(batch: Any, inputs: Any = None, copy: Copy = Copy.NOTHING, proof: Proof | None = None) -> Prepared:
    """Take snapshots of the output of a rollout step and, optionally, its input. Either may already be a snapshot."""
    output = batch if isinstance(batch, BatchSnapshot) else take_snapshot(batch, copy)
    input_snapshot = inputs
    if inputs is not None and not isinstance(inputs, BatchSnapshot):
        input_snapshot = take_snapshot(inputs, copy, "the input's ")
    if input_snapshot is not None and input_snapshot.batch.rows != output.batch.rows:
        raise StoreError(
            f"The input has {input_snapshot.batch.rows} rows, and the output has {output.batch.rows}. A rollout "
            "needs one input row per trajectory: repeat the input as the generate call does."
        )
    return Prepared(output, input_snapshot, proof)


def take_snapshot(source: Any, copy: Copy = Copy.NOTHING, name_prefix: str = "") -> BatchSnapshot:
    """Take a snapshot of a batch. ``name_prefix`` is put before tensor names in errors.

    This runs on the training thread, so it only does the work that cannot wait. The encoder does the rest.
    """
    batch = source if isinstance(source, Batch) else flatten(source)
    copier = _Copier(copy, name_prefix)
    objects = []
    tensors: dict[Path, Any] = {}
    for path, tensor in batch.tensors.items():
        reject_unsupported(tensor, ".".join(path))
        tensors[path] = copier.tensor(".".join(path), tensor)
    batch.tensors = {}
    for path, array in batch.arrays.items():
        if array.dtype.kind in "OUS":
            objects.append(encode_objects(path, array))
            copier.blobs(".".join(path), objects[-1].blobs or [])
        else:
            reject_unsupported(array, ".".join(path))
            # Numeric arrays are small: extra rewards, numbers of turns.
            batch.arrays[path] = array if copy is Copy.NOTHING else array.copy()
    stable = {key: value for key, value in batch.meta.items() if key != "timing"}
    # Keys are paths (tuples) in a TensorDict and strings in a DataProto. A list of pairs can store both.
    meta, stable_meta = (
        cells.encode_inline([[key, value] for key, value in entries.items()], "meta_info")
        for entries in (batch.meta, stable)
    )
    size = len(json.dumps(meta))  # its size in the description, which is ASCII with escapes
    if size > _MAX_META_BYTES:
        raise UnsupportedBatchError(
            f"Cannot store meta_info of {format_size(size)}: the description of the file has room for "
            f"{format_size(_MAX_META_BYTES)}. Move values with one row per trajectory to the batch."
        )
    return BatchSnapshot(batch, tensors, copier.shared, objects, meta, stable_meta)


def _is_plain(tensor: torch.Tensor) -> bool:
    """Whether a tensor is contiguous in CPU memory, without a pending lazy operation."""
    dense = tensor.layout is torch.strided and not tensor.is_nested and tensor.device.type == "cpu"
    return dense and tensor.is_contiguous() and not tensor.is_conj() and not tensor.is_neg()


def _raw_bytes(value: Any) -> Any:
    """The bytes of a tensor or an array, without copying them."""
    bits = tensor_bits(value) if isinstance(value, torch.Tensor) else value
    return bits.reshape(-1).view(np.uint8)


def _version(value: Any) -> int:
    return value._version if isinstance(value, torch.Tensor) else 0


def _digest(value: Any) -> bytes:
    digest = xxhash.xxh3_128()
    if isinstance(value, np.ndarray):
        digest.update(_raw_bytes(value))
    else:
        value = value.values() if value.layout is torch.jagged else value
        raw = _raw_bytes(value) if _is_plain(value) else b""
        for start in range(0, len(raw), _SAMPLE_STRIDE):
            digest.update(raw[start : start + _SAMPLE_BYTES])
    return digest.digest()
