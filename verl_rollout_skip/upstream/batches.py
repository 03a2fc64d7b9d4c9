"""The batches in dumps of verl: TensorDict in the shapes in which it is pickled, and DataProto around it."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from tensordict import NonTensorData, NonTensorStack, TensorDict

from verl_rollout_skip.upstream import values
from verl_rollout_skip.upstream.pickles import Call
from verl_rollout_skip.upstream.values import DTYPES, Builder, Make, make_jagged, natural


@dataclass
class DataProtoParts:
    """What verl's DataProto holds, without verl; the store takes it for one."""

    batch: TensorDict | None
    non_tensor_batch: dict[str, np.ndarray]
    meta_info: dict[str, Any]


def _consolidated(builder: Builder, call: Call) -> TensorDict:
    metadata, storage = call.arguments
    return _from_metadata(builder, metadata, builder.build(storage))


def _from_metadata(builder: Builder, metadata: dict[str, Any], data: torch.Tensor) -> TensorDict:
    rest = dict(metadata)
    _tensordict_class(rest.pop("cls"))
    leaves, described = rest.pop("leaves"), rest.pop("cls_metadata")
    rest.pop("size", None)
    made = TensorDict({}, batch_size=builder.build(described["batch_size"]))
    for key, (value, batch_size, _) in rest.pop("non_tensors").items():
        made.set(key, NonTensorData(builder.build(value), batch_size=builder.build(batch_size)))
    parts: dict[str, torch.Tensor] = {}
    for key, (dtype, shape, start, stop, _) in leaves.items():
        tensor = _leaf(data, DTYPES[dtype.removeprefix("torch.")], shape, natural(start), natural(stop))
        if key.startswith(("<NJT_VALUES>", "<NJT_LENGTHS>")):
            parts[key] = tensor
        elif key.startswith("<NJT_OFFSETS>"):
            name = key.removeprefix("<NJT_OFFSETS>")
            lengths = parts.get(f"<NJT_LENGTHS>{name}")
            made.set(name, make_jagged(parts[f"<NJT_VALUES>{name}"], tensor, lengths))
        else:
            made.set(key, tensor)
    for key, below in rest.items():
        made.set(key, _from_metadata(builder, below, data))
    return made


def _leaf(data: torch.Tensor, dtype: torch.dtype, shape: Any, start: int, stop: int) -> torch.Tensor:
    sizes = [natural(size) for size in shape]
    count = math.prod(sizes)
    width = count * torch.empty(0, dtype=dtype).element_size()
    if not start + width <= stop <= len(data):
        raise ValueError(f"a tensor of size {sizes} does not lie within its storage")
    return data[start : start + width].clone().view(dtype).view(sizes)


def _plain_tensordict(builder: Builder, call: Call) -> TensorDict:
    kind, state = call.arguments
    _tensordict_class(kind)
    made = TensorDict({}, batch_size=builder.build(state["_batch_size"]))
    for key, node in state["_tensordict"].items():
        made.set(key, builder.build(node))
    return made


def _tensordict_class(kind: Any) -> None:
    if str(kind) not in ("TensorDict", "tensordict._td.TensorDict"):
        raise ValueError(f"a {kind} instead of a TensorDict")


def _non_tensor(builder: Builder, call: Call) -> NonTensorData:
    batch_size = builder.build(call.state["tensordict"]).batch_size
    return NonTensorData(builder.build(call.state["non_tensordict"]["data"]), batch_size=batch_size)


def _non_tensor_stack(builder: Builder, call: Call) -> NonTensorStack:
    if call.state["stack_dim"] != 0:
        raise ValueError("it is not stacked along the rows")
    return NonTensorStack(*(builder.build(item) for item in call.state["tensordicts"]))


def _data_proto(builder: Builder, call: Call) -> DataProtoParts:
    batch, columns, meta = call.state
    if isinstance(batch, bytes):
        tensors = builder.read_torch(batch)
    else:
        tensors = None if batch is None else _from_numpy(builder, batch)
    columns, meta = builder.build(columns), builder.build(meta)
    if not isinstance(tensors, TensorDict | None) or not isinstance(columns, dict) or not isinstance(meta, dict):
        raise ValueError("it does not hold tensors, arrays and meta_info")
    return DataProtoParts(tensors, columns, meta)


def _from_numpy(builder: Builder, state: Any) -> TensorDict:
    """What verl writes with ``VERL_DATAPROTO_SERIALIZATION_METHOD=numpy``."""
    batch_size, _, items = state
    made = TensorDict({}, batch_size=builder.build(batch_size))
    for key, item in items.items():
        if len(item) == 3:
            made.set(key, _from_bytes(builder, item))
        else:
            layout, rows = item
            tensors = [_from_bytes(builder, row) for row in rows]
            made.set(
                key, torch.nested.nested_tensor(tensors, layout={"jagged": torch.jagged}.get(layout, torch.strided))
            )
    return made


def _from_bytes(builder: Builder, item: Any) -> torch.Tensor:
    dtype, shape, data = item
    elements = torch.from_numpy(np.ascontiguousarray(builder.build(data)))
    return _leaf(elements, DTYPES[dtype], builder.build(shape), 0, len(elements))


CALLS: dict[str, Make] = {
    **values.CALLS,
    "tensordict._reductions._rebuild_tensordict_files_consolidated": _consolidated,
    "tensordict._reductions._make_td": _plain_tensordict,
    "tensordict.tensorclass.NonTensorData": _non_tensor,
    "tensordict.tensorclass.NonTensorStack": _non_tensor_stack,
    "verl.protocol.DataProto": _data_proto,
}
NAMES = values.NAMES | frozenset(CALLS) | {"tensordict._td.TensorDict"}
"""Every name that may stand in a dump of rollouts."""
