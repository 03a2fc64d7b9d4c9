"""Converts verl's two kinds of batch to one neutral, flat ``Batch`` and back.

``DataProto`` is recognized by its attributes, so this module works without verl, which is imported only to rebuild a
``DataProto``. Tensor data is never copied: a flattened batch shares storage with the original.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from enum import Enum
from typing import Any

import numpy as np
import torch
from tensordict import NonTensorData, NonTensorStack, TensorDict

from verl_rollout_skip.errors import UnsupportedBatchError
from verl_rollout_skip.store.codec.cells import describe_type

Path = tuple[str, ...]


class BatchKind(str, Enum):
    """The type of a batch object."""

    DATAPROTO = "DataProto"
    """verl's DataProto: tensors, numpy arrays and meta_info."""
    TENSORDICT = "TensorDict"
    """A TensorDict, which verl's V1 trainers and TransferQueue use. It can be read without verl."""


@dataclass
class Batch:
    """A flattened batch.

    ``tensors`` and ``arrays`` have one row per trajectory. Their keys are paths, with several components in nested
    TensorDicts. ``meta`` belongs to the whole batch. ``order`` is the order of all keys of a TensorDict, including
    nested ones. ``nodes`` maps the path of each nested TensorDict to its batch size. The root has the empty path; it is
    missing if a DataProto has no tensors.
    """

    kind: BatchKind
    rows: int
    tensors: dict[Path, torch.Tensor] = field(default_factory=dict)
    arrays: dict[Path, np.ndarray] = field(default_factory=dict)
    meta: dict[Any, Any] = field(default_factory=dict)
    order: list[Path] = field(default_factory=list)
    nodes: dict[Path, tuple[int, ...]] = field(default_factory=dict)
    device: str | None = None


def flatten(batch: Any) -> Batch:
    """Turn a DataProto or a TensorDict into a ``Batch`` that shares its storage."""
    if isinstance(batch, TensorDict):
        flat = _flatten_tensordict(batch)
    elif all(hasattr(batch, name) for name in ("batch", "non_tensor_batch", "meta_info")):
        flat = _flatten_dataproto(batch)
    else:
        raise UnsupportedBatchError(
            f"Cannot store {describe_type(batch)} as a rollout. Pass verl's DataProto or a tensordict.TensorDict."
        )
    for path in [*flat.order, *flat.arrays, *flat.nodes]:
        try:
            "".join(path).encode()
        except UnicodeEncodeError:
            raise UnsupportedBatchError(f"Cannot store the key {path!r}: it is not valid Unicode text.") from None
    return flat


def unflatten(batch: Batch, kind: BatchKind | None = None) -> Any:
    """The inverse of ``flatten``; ``kind`` overrides the original type."""
    if (kind or batch.kind) is BatchKind.DATAPROTO:
        if batch.kind is not BatchKind.DATAPROTO:
            raise UnsupportedBatchError(
                "This rollout was recorded as a TensorDict and cannot be returned as a DataProto. "
                "Omit `kind` to get a TensorDict."
            )
        return _make_dataproto(batch)
    return _make_tensordict(batch)


def _flatten_dataproto(proto: Any) -> Batch:
    if proto.batch is not None:
        batch = _flatten_tensordict(proto.batch)
        if batch.arrays or batch.meta:
            keys = [".".join(path) for path in [*batch.arrays, *batch.meta]]
            raise UnsupportedBatchError(
                f"DataProto.batch contains values other than tensors under {keys}. Move them to non_tensor_batch."
            )
    else:
        first = next(iter(proto.non_tensor_batch.values()), None)
        batch = Batch(BatchKind.DATAPROTO, 0 if first is None else len(first))
    batch.kind = BatchKind.DATAPROTO
    for key, array in proto.non_tensor_batch.items():
        if not isinstance(key, str) or not isinstance(array, np.ndarray):
            raise UnsupportedBatchError(
                f"non_tensor_batch[{key!r}] is {describe_type(array)}. Only numpy arrays under string keys are stored."
            )
        if array.ndim == 0 or len(array) != batch.rows:
            raise UnsupportedBatchError(
                f"non_tensor_batch[{key!r}] has shape {array.shape}, but the batch has {batch.rows} rows. Its first "
                "dimension must be the rows."
            )
        batch.arrays[(key,)] = array
    batch.meta = dict(proto.meta_info)
    return batch


def _flatten_tensordict(tensordict: TensorDict) -> Batch:
    if tensordict.batch_dims < 1:
        raise UnsupportedBatchError("Cannot store a TensorDict without a batch dimension: give it batch_size=[rows].")
    batch = Batch(BatchKind.TENSORDICT, int(tensordict.batch_size[0]))
    batch.device = None if tensordict.device is None else "cpu"
    for path, value in _leaves(tensordict, (), batch.nodes):
        batch.order.append(path)
        if isinstance(value, TensorDict):
            continue
        if isinstance(value, torch.Tensor):
            batch.tensors[path] = value
        elif isinstance(value, NonTensorStack) and tensordict.batch_dims == 1:
            cells = np.empty(batch.rows, dtype=object)
            for row, cell in enumerate(value.tolist()):
                cells[row] = cell
            batch.arrays[path] = cells
        elif isinstance(value, NonTensorData):
            batch.meta[path] = value.data
        else:
            raise UnsupportedBatchError(
                f"TensorDict key {'.'.join(path)!r} is {describe_type(value)}. Only tensors, nested TensorDicts, "
                "NonTensorData and, with one batch dimension, NonTensorStack can be stored."
            )
    return batch


def _leaves(node: TensorDict, path: Path, nodes: dict[Path, tuple[int, ...]]) -> Iterator[tuple[Path, Any]]:
    nodes[path] = tuple(int(size) for size in node.batch_size)
    # `items` and `[]` would unwrap NonTensorData; `get` does not.
    for key in node.keys():  # noqa: SIM118 - iterating over a TensorDict yields its rows
        value = node.get(key)
        child_path = (*path, key)
        yield child_path, value
        if isinstance(value, TensorDict):
            yield from _leaves(value, child_path, nodes)


def _make_dataproto(batch: Batch) -> Any:
    try:
        from verl import DataProto
    except ImportError as error:
        message = f'verl is installed but cannot be imported ({error}). kind="TensorDict" works without verl.'
        raise ImportError(message) from error
    tensors = _nest(batch) if () in batch.nodes else None
    return DataProto(
        batch=tensors,
        non_tensor_batch={path[0]: array for path, array in batch.arrays.items()},
        meta_info=dict(batch.meta),
    )


def _make_tensordict(batch: Batch) -> TensorDict:
    if batch.kind is BatchKind.TENSORDICT:
        return _nest(batch)
    # Like verl's DataProto.to_tensordict: a NonTensorStack for an array, NonTensorData for meta_info.
    meta = {(str(key),): value for key, value in batch.meta.items()}
    order = [*batch.order, *batch.arrays, *((str(key),) for key in batch.meta)]
    duplicates = [path for path, count in Counter(order).items() if count > 1]
    if duplicates:
        name = ".".join(duplicates[0])
        raise UnsupportedBatchError(
            f"{name!r} is in more than one of batch, non_tensor_batch and meta_info, but a TensorDict has unique keys. "
            "Read it as a DataProto."
        )
    return _nest(replace(batch, order=order, meta=meta))


def _value_at(batch: Batch, path: Path) -> Any:
    if path in batch.nodes:
        return TensorDict({}, batch_size=batch.nodes[path], device=batch.device)
    if path in batch.tensors:
        return batch.tensors[path]
    return _stack(batch.arrays[path]) if path in batch.arrays else NonTensorData(batch.meta[path])


def _stack(array: np.ndarray) -> NonTensorStack:
    if len(array) == 0:
        raise UnsupportedBatchError("A TensorDict of 0 rows can only contain tensors. Read it as a DataProto.")
    return NonTensorStack.from_list([NonTensorData(cell) for cell in array])


def _nest(batch: Batch) -> TensorDict:
    """Build a TensorDict and the nested ones in it. In ``order``, a nested TensorDict precedes its own keys."""
    root = TensorDict({}, batch_size=batch.nodes.get((), (batch.rows,)), device=batch.device)
    built: dict[Path, TensorDict] = {(): root}
    for path in batch.order:
        parent = built[path[:-1]]
        parent.set(path[-1], _value_at(batch, path))
        if path in batch.nodes:
            built[path] = parent.get(path[-1])
    return root
