"""The batches in verl's dumps: TensorDict in each of its pickle formats, and DataProto around it."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from tensordict import NonTensorData, NonTensorStack, TensorDict

from verl_rollout_skip.tools.upstream import values
from verl_rollout_skip.tools.upstream.builder import Builder, Make
from verl_rollout_skip.tools.upstream.pickles import Call, Name, shortened
from verl_rollout_skip.tools.upstream.tensors import DTYPES, make_jagged, natural


@dataclass
class DataProtoParts:
    """The contents of verl's DataProto, without importing verl; the store treats it as one."""

    batch: TensorDict | None
    non_tensor_batch: dict[str, np.ndarray]
    meta_info: dict[str, Any]


def _consolidated(builder: Builder, call: Call) -> TensorDict:
    metadata, storage = call.arguments
    data = builder.build(storage)
    if not isinstance(data, torch.Tensor) or data.dtype != torch.uint8 or data.dim() != 1:
        raise ValueError("its storage is not a tensor of bytes")
    return _from_metadata(builder, metadata, data, set())


def _from_metadata(builder: Builder, metadata: Any, data: torch.Tensor, seen: set[int]) -> TensorDict:
    if id(metadata) in seen:
        raise ValueError("it contains the same part twice")
    seen.add(id(metadata))
    rest = dict(_dict(metadata))
    _tensordict_class(rest.pop("cls"))
    leaves, described = _dict(rest.pop("leaves")), _dict(rest.pop("cls_metadata"))
    others = _dict(rest.pop("non_tensors"))
    rest.pop("size", None)
    builder.budget.weigh(len(leaves) + len(others) + len(rest))
    made = TensorDict({}, batch_size=builder.shape(described["batch_size"]))
    for key, (value, batch_size, _) in others.items():
        _set(made, key, NonTensorData(builder.build(value), batch_size=builder.shape(batch_size)))
    parts: dict[str, torch.Tensor] = {}
    for key, (dtype, shape, start, stop, _) in leaves.items():
        tensor = _leaf(builder, data, _dtype(dtype), shape, natural(start), natural(stop))
        if key.startswith(("<NJT_VALUES>", "<NJT_LENGTHS>")):
            parts[key] = tensor
        elif key.startswith("<NJT_OFFSETS>"):
            name = key.removeprefix("<NJT_OFFSETS>")
            lengths = parts.get(f"<NJT_LENGTHS>{name}")
            _set(made, name, make_jagged(parts[f"<NJT_VALUES>{name}"], tensor, lengths))
        else:
            _set(made, key, tensor)
    for key, below in rest.items():
        _set(made, key, _from_metadata(builder, below, data, seen))
    return made


def _leaf(builder: Builder, data: torch.Tensor, dtype: torch.dtype, shape: Any, start: int, stop: int) -> torch.Tensor:
    sizes = builder.shape(shape)
    count = math.prod(sizes)
    width = count * torch.empty(0, dtype=dtype).element_size()
    if not start + width <= stop <= len(data):
        raise ValueError(f"a tensor of size {list(sizes)} exceeds its storage")
    builder.budget.weigh(width // 8)
    return data[start : start + width].clone().view(dtype).view(sizes)


def _dtype(name: Any) -> torch.dtype:
    if not isinstance(name, str) or name.removeprefix("torch.") not in DTYPES:
        raise ValueError("it has an unknown dtype")
    return DTYPES[name.removeprefix("torch.")]


def _dict(value: Any) -> dict[Any, Any]:
    if not isinstance(value, dict):
        raise ValueError(f"a {type(value).__name__} instead of a dict")
    return value


def _set(made: TensorDict, key: Any, value: Any) -> None:
    if not isinstance(key, str) or not isinstance(value, torch.Tensor | TensorDict | NonTensorData | NonTensorStack):
        raise ValueError(f"a {type(value).__name__} under a {type(key).__name__}")
    made.set(key, value)


def _plain_tensordict(builder: Builder, call: Call) -> TensorDict:
    kind, state = call.arguments
    _tensordict_class(kind)
    items = _dict(_dict(state)["_tensordict"])
    builder.budget.weigh(len(items))
    made = TensorDict({}, batch_size=builder.shape(state["_batch_size"]))
    for key, node in items.items():
        _set(made, key, builder.build(node))
    return made


def _tensordict_class(kind: Any) -> None:
    if not isinstance(kind, str | Name) or str(kind) not in ("TensorDict", "tensordict._td.TensorDict"):
        raise ValueError("its class is not TensorDict")


def _non_tensor(builder: Builder, call: Call) -> NonTensorData:
    inner = builder.build(call.state["tensordict"])
    if not isinstance(inner, TensorDict):
        raise ValueError(f"a {type(inner).__name__} instead of a TensorDict")
    return NonTensorData(builder.build(call.state["non_tensordict"]["data"]), batch_size=inner.batch_size)


def _non_tensor_stack(builder: Builder, call: Call) -> NonTensorStack:
    dim, items = call.state["stack_dim"], call.state["tensordicts"]
    if type(dim) is not int or dim != 0 or not isinstance(items, list | tuple):
        raise ValueError("it is not stacked along the rows")
    builder.budget.weigh(len(items))
    cells = [builder.build(item) for item in items]
    if not all(isinstance(cell, NonTensorData) for cell in cells):
        raise ValueError("it contains something other than cells")
    return NonTensorStack(*cells)


def _data_proto(builder: Builder, call: Call) -> DataProtoParts:
    batch, columns, meta = call.state
    if isinstance(batch, bytes):
        tensors = builder.read_torch(batch)
    else:
        tensors = None if batch is None else _from_numpy(builder, batch)
    columns, meta = builder.build(columns), builder.build(meta)
    if not isinstance(tensors, TensorDict | None) or not isinstance(columns, dict) or not isinstance(meta, dict):
        raise ValueError("it does not consist of tensors, arrays and meta_info")
    if tensors is not None and len(tensors.batch_size) != 1:
        raise ValueError(f"the batch size of its tensors has {len(tensors.batch_size)} dimensions instead of 1")
    _check_columns(columns, None if tensors is None else int(tensors.batch_size[0]))
    return DataProtoParts(tensors, columns, meta)


def _check_columns(columns: dict[Any, Any], rows: int | None) -> None:
    for name, column in columns.items():
        if not isinstance(name, str) or not isinstance(column, np.ndarray) or column.ndim == 0:
            raise ValueError(f"column {shortened(name)} is a {type(column).__name__}, not an array with rows")
        rows = len(column) if rows is None else rows
        if len(column) != rows:
            raise ValueError(f"column {shortened(name)} has {len(column)} rows instead of {rows}")


def _from_numpy(builder: Builder, state: Any) -> TensorDict:
    """The format that verl writes with ``VERL_DATAPROTO_SERIALIZATION_METHOD=numpy``."""
    batch_size, _, items = state
    made = TensorDict({}, batch_size=builder.shape(batch_size))
    builder.budget.weigh(len(_dict(items)))
    for key, item in items.items():
        if len(item) == 3:
            _set(made, key, _from_bytes(builder, item))
        else:
            layout, rows = item
            builder.budget.weigh(len(rows))
            tensors = [_from_bytes(builder, row) for row in rows]
            kind = torch.jagged if isinstance(layout, str) and layout == "jagged" else torch.strided
            _set(made, key, torch.nested.nested_tensor(tensors, layout=kind))
    return made


def _from_bytes(builder: Builder, item: Any) -> torch.Tensor:
    dtype, shape, data = item
    array = builder.build(data)
    if not isinstance(array, np.ndarray) or array.dtype != np.uint8 or array.ndim != 1:
        raise ValueError("a tensor without its bytes")
    return _leaf(builder, torch.from_numpy(array), _dtype(dtype), shape, 0, len(array))


CALLS: dict[str, Make] = {
    **values.CALLS,
    "tensordict._reductions._rebuild_tensordict_files_consolidated": _consolidated,
    "tensordict._reductions._make_td": _plain_tensordict,
    "tensordict.tensorclass.NonTensorData": _non_tensor,
    "tensordict.tensorclass.NonTensorStack": _non_tensor_stack,
    "verl.protocol.DataProto": _data_proto,
}
NAMES = values.NAMES | frozenset(CALLS) | {"tensordict._td.TensorDict"}
"""Every name that is allowed in a dump of rollouts."""
