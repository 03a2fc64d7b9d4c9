"""The values in verl's dumps: containers, arrays, tensors and images. Each kind of call has one function.

It checks the arguments of the call and builds the value from bytes.
"""

from __future__ import annotations

import io
import math
import re
from collections.abc import Container
from typing import Any

import numpy as np
import torch

from verl_rollout_skip.tools.upstream.builder import MAX_DIMENSIONS, Builder, Make
from verl_rollout_skip.tools.upstream.pickles import Call, Name, Persistent, check_key, read_pickle
from verl_rollout_skip.tools.upstream.tensors import (
    DTYPES,
    STORAGES,
    Storage,
    make_jagged,
    natural,
    storage_identity,
    storage_of,
    view,
)

# Any number of calls can share the same pairs, and each pair is visited several times.
_PAIR_WEIGHT = 8
# The header of a storage has about fifty instructions.
_MAX_HEADER_OPCODES = 1000
_DTYPE = re.compile(r"[biufcSU?O][0-9]{0,9}")
_IMAGES = (
    "PIL.Image.Image",
    "PIL.PngImagePlugin.PngImageFile",
    "PIL.JpegImagePlugin.JpegImageFile",
    "PIL.WebPImagePlugin.WebPImageFile",
)


def _ordered_dict(builder: Builder, call: Call) -> dict[Any, Any]:
    pairs = call.arguments[0] if call.arguments else []
    if not isinstance(pairs, list | tuple) or any(type(pair) not in (list, tuple) or len(pair) != 2 for pair in pairs):
        raise ValueError("it does not consist of pairs")
    builder.budget.weigh(_PAIR_WEIGHT * len(pairs))
    return {check_key(key): builder.build(value) for key, value in [*pairs, *call.items]}


def _encoded_bytes(builder: Builder, call: Call) -> bytes:
    text, encoding = call.arguments
    if not isinstance(text, str) or encoding != "latin1":
        raise ValueError("it is not a latin1 string")
    return text.encode("latin1")


def _no_bytes(builder: Builder, call: Call) -> bytes:
    """Old protocols have no opcode for bytes and request empty bytes by a call."""
    if call.arguments:
        raise ValueError("bytes with arguments")
    return b""


def _size(builder: Builder, call: Call) -> tuple[int, ...]:
    [sizes] = call.arguments
    return builder.shape(sizes)


def _device(builder: Builder, call: Call) -> None:
    """Everything is loaded to the CPU."""


def _dtype(builder: Builder, call: Call) -> np.dtype:
    code, state = call.arguments[0], call.state or (3, "|")
    if not isinstance(code, str) or not _DTYPE.fullmatch(code) or any(part is not None for part in state[2:5]):
        raise ValueError("it is not a plain dtype")
    if not isinstance(state[1], str) or state[1] not in ("<", ">", "|", "="):
        raise ValueError("it has no byte order")
    return np.dtype("O" if code.startswith("O") else f"{state[1]}{code}")


def _array(builder: Builder, call: Call) -> np.ndarray:
    _, shape, dtype_node, is_fortran, data = call.state
    dtype, sizes = _built_dtype(builder, dtype_node), builder.shape(shape)
    count = math.prod(sizes)
    if dtype.kind == "O":
        if not isinstance(data, list) or len(data) != count:
            raise ValueError(f"it does not have {count} objects")
        flat = np.empty(count, dtype=object)
        for index, item in enumerate(data):
            flat[index] = builder.build(item)
    else:
        flat = _elements(builder.build(data), dtype, count)
    return flat.reshape(sizes, order="F" if is_fortran else "C")


def _array_from_buffer(builder: Builder, call: Call) -> np.ndarray:
    data, dtype_node, shape, order = call.arguments
    dtype, sizes = _built_dtype(builder, dtype_node), builder.shape(shape)
    if not isinstance(order, str) or order not in ("C", "F"):
        raise ValueError("its elements are in an unknown order")
    return _elements(builder.build(data), dtype, math.prod(sizes)).reshape(sizes, order="F" if order == "F" else "C")


def _scalar(builder: Builder, call: Call) -> Any:
    dtype, data = call.arguments
    return _elements(builder.build(data), _built_dtype(builder, dtype), 1)[0]


def _built_dtype(builder: Builder, node: Any) -> np.dtype:
    dtype = builder.build(node)
    if not isinstance(dtype, np.dtype):
        raise ValueError(f"a {type(dtype).__name__} is not an array dtype")
    return dtype


def _elements(data: Any, dtype: np.dtype, count: int) -> np.ndarray:
    if not isinstance(data, bytes) or len(data) != count * dtype.itemsize or dtype.kind == "O":
        raise ValueError(f"it does not have {count} elements of {dtype}")
    return np.frombuffer(data, dtype).copy() if count else np.empty(0, dtype)


def _tensor(builder: Builder, call: Call) -> torch.Tensor:
    storage, offset, size, stride = call.arguments[:4]
    elements = _built_storage(builder, storage).elements
    if str(call.function).endswith("_v3"):
        dtype = builder.build(call.arguments[6])
        if not isinstance(dtype, torch.dtype):
            raise ValueError(f"a {type(dtype).__name__} is not a tensor dtype")
        elements = elements.view(dtype)
    strides = builder.build(stride)
    if not isinstance(strides, list | tuple) or len(strides) > MAX_DIMENSIONS:
        raise ValueError(f"a {type(strides).__name__} is not a stride")
    return view(elements, natural(offset), list(builder.shape(size)), [natural(step) for step in strides])


def _built_storage(builder: Builder, node: Any) -> Storage:
    storage = builder.build(node)
    if not isinstance(storage, Storage):
        raise ValueError(f"a {type(storage).__name__} is not a storage")
    return storage


def _tensor_of_type(builder: Builder, call: Call) -> Any:
    """A tensor with attributes, which are dropped, or a jagged tensor."""
    function, kind, arguments = call.arguments[:3]
    known = {
        "torch._utils._rebuild_tensor_v2": ("torch.Tensor", _tensor),
        "torch._utils._rebuild_tensor_v3": ("torch.Tensor", _tensor),
        "torch.nested._internal.nested_tensor._rebuild_njt": (
            "torch.nested._internal.nested_tensor.NestedTensor",
            _jagged,
        ),
    }
    if not isinstance(function, Name) or not isinstance(kind, Name) or not isinstance(arguments, tuple):
        raise ValueError("it is not created by a named function")
    expected, make = known[str(function)]
    if str(kind) != expected:
        raise ValueError(f"{kind} created by {function}")
    return make(builder, Call(function, arguments))


def _jagged(builder: Builder, call: Call) -> torch.Tensor:
    fields = call.arguments[0]
    values, offsets = builder.build(fields["values"]), builder.build(fields["offsets"])
    lengths, dim = builder.build(fields.get("lengths")), natural(fields.get("_ragged_idx", 1))
    made = make_jagged(values, offsets, lengths, dim)
    builder.budget.weigh(len(offsets))
    return made


def _storage_from_bytes(builder: Builder, call: Call) -> Storage:
    """A standalone storage, which torch writes into ordinary pickles in its old format from before zip files."""
    [data] = call.arguments
    stream = io.BytesIO(builder.build(data))
    for expected in (0x1950A86A20F9469CFC6C, 1001):
        if _header(stream) != expected:
            raise ValueError("it is not a torch storage")
    system = _header(stream)
    if not isinstance(system, dict) or system.get("little_endian") is not True:
        raise ValueError("it was written on a big-endian machine")
    found, keys = _header(stream, _STORAGE_NAMES), _header(stream)
    if not isinstance(found, Persistent):
        raise ValueError("it is not a torch storage")
    dtype, key, count = storage_identity(found.identity)
    if not isinstance(keys, list) or len(keys) != 1 or not isinstance(keys[0], str) or keys[0] != key:
        raise ValueError("it has more than one storage")
    width = torch.empty(0, dtype=dtype).element_size()
    if int.from_bytes(stream.read(8), "little") not in (count, count * width):
        raise ValueError("its size is not the one it claims")
    return storage_of(stream.read(), dtype, count, builder.budget)


def _header(stream: io.BytesIO, allowed: Container[str] = ()) -> Any:
    return read_pickle(stream, allowed, _MAX_HEADER_OPCODES)


def _image(builder: Builder, call: Call) -> Any:
    from PIL import Image

    _, mode, size, palette, data = call.state[:5]
    width, height = builder.shape(size)
    if palette is not None or not isinstance(data, bytes) or width * height > 8 * len(data):
        raise ValueError("an image with a palette, or without its pixels")
    if not isinstance(mode, str):
        raise ValueError("an image without a mode")
    builder.budget.weigh(width * height // 2)
    return Image.frombytes(mode, (width, height), data)


CALLS: dict[str, Make] = {
    "collections.OrderedDict": _ordered_dict,
    "_codecs.encode": _encoded_bytes,
    "__builtin__.bytes": _no_bytes,
    "builtins.bytes": _no_bytes,
    "torch.Size": _size,
    "torch.device": _device,
    "numpy.dtype": _dtype,
    "numpy.core.multiarray._reconstruct": _array,
    "numpy._core.multiarray._reconstruct": _array,
    "numpy.core.numeric._frombuffer": _array_from_buffer,
    "numpy._core.numeric._frombuffer": _array_from_buffer,
    "numpy.core.multiarray.scalar": _scalar,
    "numpy._core.multiarray.scalar": _scalar,
    "torch._utils._rebuild_tensor_v2": _tensor,
    "torch._utils._rebuild_tensor_v3": _tensor,
    "torch._tensor._rebuild_from_type_v2": _tensor_of_type,
    "torch.storage._load_from_bytes": _storage_from_bytes,
    **dict.fromkeys(_IMAGES, _image),
}
_STORAGE_NAMES = frozenset({f"torch.{name}" for name in STORAGES} | {"torch.storage.UntypedStorage"})
NAMES = _STORAGE_NAMES | frozenset(CALLS) | {f"torch.{name}" for name in DTYPES}
# Only in the attributes of tensors, which are dropped.
NAMES |= {"builtins.set", "__builtin__.set", "torch._dynamo.decorators._DimRange"}
# Only as arguments of the calls above.
NAMES |= {
    "numpy.ndarray",
    "torch.Tensor",
    "torch.nested._internal.nested_tensor.NestedTensor",
    "torch.nested._internal.nested_tensor._rebuild_njt",
}
"""Every name that is allowed in a pickle of containers, arrays and tensors."""
