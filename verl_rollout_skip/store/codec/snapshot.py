"""The snapshot of a rollout step that ``put`` takes on the training thread: later changes by the trainer never reach
the recording.

A copy of a large batch costs the training thread more than everything else together, because fresh memory has to be
mapped page by page. So a snapshot copies small data and verifies the rest:

- Rewards are copied, because trainers shape them in place. An outcome reward is on one token of a response, so only
  the nonzero blocks are kept (``NonZero``). Small tensors and arrays are copied as they are; Python objects are encoded
  immediately.
- Large tensors are shared, and checked after encoding and before the commit. torch counts the writes to a tensor and
  all its views. A sample of the bytes catches writes that torch cannot see (through numpy or ``.data``). Large arrays
  have no such counter, so all of their bytes are digested.

A changed tensor fails the dump; the store copies everything from then on. Copy-on-write tensors
(``torch._lazy_clone``) would avoid this, but they are private to torch, and any ``numpy()`` call of the trainer would
then make the whole copy on the training thread.
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
from verl_rollout_skip.store.codec.numbers import dtype_name, refuse_unsupported, tensor_bits, tensor_from_bits
from verl_rollout_skip.store.codec.objects import ObjectColumn, encode_objects
from verl_rollout_skip.store.sizes import format_size

_SMALL_TENSOR = 1 << 20
# There may be thousands of cells.
_SMALL_CELL = 4 << 10
_BLOCK = 1 << 10
# A sample of each megabyte or so; the stride is not a multiple of a row, so that samples come from all columns.
_SAMPLE_STRIDE, _SAMPLE_BYTES = 1_000_003, 4 << 10
# The description of a file contains the meta_info of both batches (see ``encoder._MAX_DESCRIPTION_BYTES``).
_MAX_META_BYTES = 48_000_000

Proof = Callable[[Mapping[str, Any]], str | None]
"""Returns the names of the columns of a batch that have changed, or None."""


class Copy(Enum):
    """How much of a batch ``put`` copies."""

    NOTHING = "nothing"
    """The batch is written before ``put`` returns."""
    CHEAP = "cheap"
    ALL = "all"


@dataclass(frozen=True)
class NonZero:
    """A copy of a mostly zero dense tensor: the nonzero blocks of its bytes, and the incomplete last block."""

    shape: torch.Size
    dtype: str
    positions: np.ndarray
    blocks: np.ndarray
    end: np.ndarray

    @classmethod
    def of(cls, tensor: torch.Tensor) -> NonZero:
        raw = _raw(tensor)
        whole = len(raw) - len(raw) % _BLOCK
        # As words, because numpy reduces these fastest; all bits count, so -0.0 is not zero.
        words = raw[:whole].view(np.int64).reshape(-1, _BLOCK // 8)
        positions = np.flatnonzero(np.bitwise_or.reduce(words, axis=1))
        return cls(tensor.shape, dtype_name(tensor), positions, words[positions], raw[whole:].copy())

    def restore(self) -> torch.Tensor:
        """The full tensor, in new memory."""
        array = np.zeros(self.shape, TORCH_BITS[self.dtype])
        raw = array.reshape(-1).view(np.uint8)
        whole = len(raw) - len(self.end)
        raw[:whole].view(np.int64).reshape(-1, _BLOCK // 8)[self.positions] = self.blocks
        raw[whole:] = self.end
        return tensor_from_bits(array, self.dtype)


@dataclass(frozen=True)
class _Shared:
    """A value that the caller may still write to, and the state that reveals a write."""

    name: str
    value: Any
    version: int
    digest: bytes

    def is_changed(self) -> bool:
        return (self.version, self.digest) != (_version(self.value), _digest(self.value))


class _Copier:
    """Copies the tensors and the bulk data of a batch, or lists them as shared."""

    def __init__(self, copy: Copy, whose: str) -> None:
        self._copy, self._whose = copy, whose
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
                # Detached, so that `tensor.data = …` does not affect it. A nested tensor would lose its counter.
                return self._share(name, tensor if tensor.is_nested else tensor.detach())
        return tensor.detach().clone()

    def blobs(self, name: str, rows: list[list[Any]]) -> None:
        """Copy or share the bulk data of the cells of a column, in place."""
        if self._copy is Copy.NOTHING:
            return
        lists = {id(blobs): (row, blobs) for row, blobs in enumerate(rows)}  # rows with the same object share one list
        for row, blobs in lists.values():
            for index, blob in enumerate(blobs):
                if isinstance(blob, np.ndarray | torch.Tensor):
                    if id(blob) not in self._blobs:
                        self._blobs[id(blob)] = blob, self._blob(f"{name}[{row}]", blob)
                    blobs[index] = self._blobs[id(blob)][1]

    def _blob(self, name: str, blob: Any) -> Any:
        copied = self._copy is Copy.ALL or blob.nbytes <= _SMALL_CELL
        if isinstance(blob, np.ndarray):
            return blob.copy() if copied or not blob.flags.c_contiguous else self._share(name, blob)
        return blob.detach().clone() if copied or blob.is_inference() else self._share(name, blob.detach())

    def _share(self, name: str, value: Any) -> Any:
        self.shared.append(_Shared(f"{self._whose}{name}", value, _version(value), _digest(value)))
        return value


@dataclass
class BatchSnapshot:
    """The output of a rollout step, or its input: everything that is written for one batch.

    ``tensors`` are those of the batch, or copies; ``shared`` are the values that the caller may still write to.
    ``meta`` is the encoded meta_info, ``lasting_meta`` the same without the keys that differ from run to run.
    """

    batch: Batch
    tensors: dict[Path, Any]
    shared: list[_Shared]
    objects: list[ObjectColumn]
    meta: dict[str, Any]
    lasting_meta: dict[str, Any]

    def restore(self) -> dict[Path, torch.Tensor]:
        """The tensors, with their zeros filled in again."""
        for path, tensor in self.tensors.items():
            if isinstance(tensor, NonZero):
                self.tensors[path] = tensor.restore()
        return self.tensors

    def blobs(self) -> Iterator[cells.Blob]:
        """The bulk data of all cells."""
        return (blob for column in self.objects for row in column.blobs or () for blob in row)

    @property
    def held_bytes(self) -> int:
        """The memory that the batch keeps alive while it waits; a storage that several tensors share counts once."""
        numbers = [array for array in self.batch.arrays.values() if array.dtype.kind not in "OUS"]
        storages: dict[int, int] = {}
        held = sum(len(text) for column in self.objects for text in column.values if type(text) is str)
        for value in {id(value): value for value in (*self.tensors.values(), *numbers, *self.blobs())}.values():
            if isinstance(value, torch.Tensor):
                storage = (value.values() if value.layout is torch.jagged else value).untyped_storage()
                storages[storage.data_ptr()] = storage.nbytes()
            else:
                held += cells.blob_size(value.blocks if isinstance(value, NonZero) else value)
        return sum(storages.values()) + held


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
        """Raise ``ChangedBatchError`` if any shared value was written to since the snapshot."""
        names = [shared.name for batch in self.batches for shared in batch.shared if shared.is_changed()]
        if not names and self.proof is not None:
            # Rewards that only some rows have are objects in a TensorDict; a DataProto keeps objects separate.
            is_tensordict = self.output.batch.kind is BatchKind.TENSORDICT
            columns = {**(self.output.batch.arrays if is_tensordict else {}), **self.output.restore()}
            named = self.proof({path[0]: column for path, column in columns.items() if len(path) == 1})
            names = [] if named is None else [named]
        if names:
            raise ChangedBatchError(names)


def prepare(batch: Any, inputs: Any = None, copy: Copy = Copy.NOTHING, proof: Proof | None = None) -> Prepared:
    """Take snapshots of a rollout step's output and, if given, its input. Either may already be a snapshot."""
    output = batch if isinstance(batch, BatchSnapshot) else take_snapshot(batch, copy)
    given = inputs
    if inputs is not None and not isinstance(inputs, BatchSnapshot):
        given = take_snapshot(inputs, copy, "the input's ")
    if given is not None and given.batch.rows != output.batch.rows:
        raise StoreError(
            f"The input has {given.batch.rows} rows and the output {output.batch.rows}; a rollout is stored with one "
            "input row for each trajectory (repeat the input as the generate call does)."
        )
    return Prepared(output, given, proof)


def take_snapshot(given: Any, copy: Copy = Copy.NOTHING, whose: str = "") -> BatchSnapshot:
    """Take a snapshot of a batch. ``whose`` is the prefix of its tensor names in errors.

    This runs on the training thread, so it does only the work that cannot wait; the encoder does the rest.
    """
    batch = given if isinstance(given, Batch) else flatten(given)
    copier = _Copier(copy, whose)
    objects = []
    tensors: dict[Path, Any] = {}
    for path, tensor in batch.tensors.items():
        refuse_unsupported(tensor, ".".join(path))
        tensors[path] = copier.tensor(".".join(path), tensor)
    batch.tensors = {}
    for path, array in batch.arrays.items():
        if array.dtype.kind in "OUS":
            objects.append(encode_objects(path, array))
            copier.blobs(".".join(path), objects[-1].blobs or [])
        else:
            refuse_unsupported(array, ".".join(path))
            # Numeric columns are small: reward extras, turn counts.
            batch.arrays[path] = array if copy is Copy.NOTHING else array.copy()
    lasting = {key: value for key, value in batch.meta.items() if key != "timing"}
    # Paths of a TensorDict are tuples; as pairs, both kinds of meta are stored the same way.
    meta, lasting_meta = (
        cells.encode_inline([[key, value] for key, value in entries.items()], "meta_info")
        for entries in (batch.meta, lasting)
    )
    size = len(json.dumps(meta))  # as in the description: escaped, in ASCII
    if size > _MAX_META_BYTES:
        raise UnsupportedBatchError(
            f"Cannot store meta_info of {format_size(size)}: up to {format_size(_MAX_META_BYTES)} go into the "
            "description of the file. What has one row per trajectory belongs in the batch."
        )
    return BatchSnapshot(batch, tensors, copier.shared, objects, meta, lasting_meta)


def _is_plain(tensor: torch.Tensor) -> bool:
    """Whether the bytes of a tensor are contiguous in CPU memory, with no lazy operation pending."""
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
