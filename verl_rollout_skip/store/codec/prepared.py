"""What a rollout step hands over to be written, taken on the training thread: only what cannot wait."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch

from verl_rollout_skip.errors import ChangedBatchError, StoreError, UnsupportedBatchError
from verl_rollout_skip.sizes import format_size
from verl_rollout_skip.store.codec import cells
from verl_rollout_skip.store.codec.batch import Batch, BatchKind, Path, flatten
from verl_rollout_skip.store.codec.blobs import Blob
from verl_rollout_skip.store.codec.cell_columns import CellColumn, encode_column
from verl_rollout_skip.store.codec.encodings import Encoding
from verl_rollout_skip.store.codec.padding import Spans
from verl_rollout_skip.store.codec.snapshot import Copy, NonZero, Snapshot, held_bytes
from verl_rollout_skip.store.codec.tensors import refuse_unsupported

# Parquet readers refuse a description of more than 100 MB.
_MAX_META_BYTES = 48 << 20


@dataclass
class Numbers:
    """A numeric column with its encoding: ``bits`` is what the encoding stores."""

    path: Path
    encoding: Encoding
    bits: Any

    @property
    def is_tensor(self) -> bool:
        return self.encoding.element.holder == "torch"


@dataclass
class Objects:
    """A column of Python objects, encoded; ``shape`` and ``dtype`` of the numpy array it came from."""

    path: Path
    cells: CellColumn
    shape: tuple[int, ...]
    dtype: str


@dataclass
class TakenBatch:
    """The output of a rollout step, or its input: everything that is written of one batch.

    ``tensors`` are those of the batch, or copies: ``snapshot`` knows whether anything that is shared was changed.
    ``meta`` is its encoded meta_info, ``lasting_meta`` the same without what differs from run to run.
    """

    batch: Batch
    tensors: dict[Path, torch.Tensor | NonZero]
    snapshot: Snapshot | None
    objects: list[Objects]
    meta: dict[str, Any]
    lasting_meta: dict[str, Any]
    numbers: list[Numbers] = field(default_factory=list)
    spans: Spans | None = None

    def restore(self) -> None:
        """Make whole tensors of those that were kept without their zeros."""
        for path, tensor in self.tensors.items():
            if isinstance(tensor, NonZero):
                self.tensors[path] = tensor.restore()

    def blobs(self) -> Iterator[Blob]:
        """The bulk data of all cells."""
        return (blob for column in self.objects for row in column.cells.blobs or () for blob in row)

    @property
    def held_bytes(self) -> int:
        """The memory that it keeps alive while it waits."""
        numbers = [array for array in self.batch.arrays.values() if array.dtype.kind not in "OUS"]
        texts = (text for column in self.objects for text in column.cells.values if type(text) is str)
        return held_bytes([*self.tensors.values(), *numbers, *self.blobs()]) + sum(map(len, texts))


Proof = Callable[[Mapping[str, Any]], str | None]
"""Names the columns of a batch that are not what they were; None if all are."""


@dataclass(frozen=True)
class Prepared:
    """A rollout step that is ready to be written."""

    output: TakenBatch
    input: TakenBatch | None
    proof: Proof | None = None

    @property
    def batches(self) -> list[TakenBatch]:
        return [self.output] if self.input is None else [self.output, self.input]

    def raise_if_changed(self) -> None:
        """Raise ``ChangedBatchError`` if anything in it was written into since it was taken."""
        names = [name for batch in self.batches if batch.snapshot is not None for name in batch.snapshot.changed()]
        if not names and self.proof is not None:
            self.output.restore()
            # Rewards that only some rows have are objects in a TensorDict; a DataProto keeps objects apart.
            is_tensordict = self.output.batch.kind is BatchKind.TENSORDICT
            columns = {**(self.output.batch.arrays if is_tensordict else {}), **self.output.tensors}
            named = self.proof({path[0]: column for path, column in columns.items() if len(path) == 1})
            names = [] if named is None else [named]
        if names:
            raise ChangedBatchError(names)


def prepare(batch: Any, inputs: Any = None, copy: Copy = Copy.NOTHING, proof: Proof | None = None) -> Prepared:
    """Take a rollout step's output and, if given, its input: a batch, or what ``take`` made of one before."""
    output = batch if isinstance(batch, TakenBatch) else take(batch, copy)
    given = inputs if inputs is None or isinstance(inputs, TakenBatch) else take(inputs, copy, "the input's ")
    if given is not None and given.batch.rows != output.batch.rows:
        raise StoreError(
            f"The input has {given.batch.rows} rows and the output {output.batch.rows}; a rollout is stored with one "
            "input row for each trajectory (repeat the input as the generate call does)."
        )
    return Prepared(output, given, proof)


def take(given: Any, copy: Copy = Copy.NOTHING, whose: str = "") -> TakenBatch:
    """Take from a batch what is written of it. ``whose`` goes before the names of its tensors in an error.

    This runs on the training thread, so it does only what cannot wait; ``choose_encodings`` does the rest.
    """
    batch = given if isinstance(given, Batch) else flatten(given)
    snapshot = None if copy is Copy.NOTHING else Snapshot(copy, whose)
    objects = []
    tensors: dict[Path, torch.Tensor | NonZero] = {}
    for path, tensor in batch.tensors.items():
        refuse_unsupported(tensor, ".".join(path))
        tensors[path] = tensor if snapshot is None else snapshot.tensor(".".join(path), tensor)
    batch.tensors = {}
    for path, array in batch.arrays.items():
        where = ".".join(path)
        if array.dtype.kind not in "OUS":
            refuse_unsupported(array, where)
            batch.arrays[path] = array if snapshot is None else snapshot.array(array)
            continue
        flat = array.tolist() if array.ndim == 1 else [row.ravel().tolist() for row in array]
        encoded = encode_column(where, flat)
        if snapshot is not None and encoded.blobs is not None:
            snapshot.cells(where, encoded.blobs)
        objects.append(Objects(path, encoded, array.shape[1:], array.dtype.str))
    lasting = {key: value for key, value in batch.meta.items() if key != "timing"}
    # Paths of a TensorDict are tuples; as pairs, both kinds of meta are stored the same way.
    meta, lasting_meta = (
        cells.encode_inline([[key, value] for key, value in entries.items()], "meta_info")
        for entries in (batch.meta, lasting)
    )
    size = len(meta["json"]) + sum(map(len, meta["blobs"]))
    if size > _MAX_META_BYTES:
        raise UnsupportedBatchError(
            f"Cannot store meta_info of {format_size(size)}: up to {format_size(_MAX_META_BYTES)} go into the "
            "description of the file. What has one row per trajectory belongs in the batch."
        )
    return TakenBatch(batch, tensors, snapshot, objects, meta, lasting_meta)
