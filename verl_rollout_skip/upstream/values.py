"""Builds containers, arrays and tensors from the inert tree of a pickle, using only the code in this module.

Each kind of call has one function, which checks the arguments and builds the value from bytes. Objects that the pickle
shares between rows stay shared. A few bytes can refer to a shared object any number of times, so all work is counted
against a ``Budget`` that depends on the file's size. No value is compared, hashed or printed before its type is known.
"""

from __future__ import annotations

import io
import math
import re
from collections.abc import Callable, Container, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from verl_rollout_skip.upstream.pickles import (
    Call,
    DamagedDumpError,
    Name,
    Persistent,
    check_key,
    read_pickle,
    shortened,
)

_MAX_DEPTH = 100
_MAX_DIMENSIONS = 32
_FREE_WEIGHT = 2_000_000
# Rollouts of one prompt share its data, so an honest file costs a multiple of its size.
_WEIGHT_PER_BYTE = 64
# Any number of calls can share the same pairs, and each pair is visited several times.
_PAIR_WEIGHT = 8
_FREE_ROWS = 1 << 20
# The header of a storage has about fifty instructions.
_MAX_HEADER_OPCODES = 1000
_NODES = (dict, list, tuple, Call, Persistent, Name)
_WITH_SIZE = (str, bytes, int)
_DTYPE = re.compile(r"[biufcSU?O][0-9]{0,9}")
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
_IMAGES = (
    "PIL.Image.Image",
    "PIL.PngImagePlugin.PngImageFile",
    "PIL.JpegImagePlugin.JpegImageFile",
    "PIL.WebPImagePlugin.WebPImageFile",
)
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


Make = Callable[["Builder", Call], Any]


class Builder:
    """Builds the values of one tree.

    ``calls`` maps function names to the code that builds their results. ``find_storage`` returns storages outside the
    pickle, and ``read_torch`` reads a torch file embedded in it, on the same budget.
    """

    def __init__(
        self,
        calls: Mapping[str, Make],
        budget: Budget,
        read_torch: Callable[[bytes, Budget], Any],
        find_storage: Callable[[Any], Storage] | None = None,
    ) -> None:
        self._calls = calls
        self.budget = budget
        self._read_torch = read_torch
        self._find_storage = find_storage
        self._made: dict[int, tuple[Any, Any, int]] = {}
        self._depth = 0

    def build(self, node: Any) -> Any:
        """The value of a node; the same node always gives the same value."""
        if not isinstance(node, _NODES):
            if isinstance(node, _WITH_SIZE):
                self.budget.weigh(_words(node))
            return node
        known = self._made.get(id(node))
        if known is not None:
            self.budget.weigh(known[2])
            return known[1]
        self._depth += 1
        if self._depth > _MAX_DEPTH:
            raise DamagedDumpError("It is nested too deeply, or within itself.")
        before = self.budget.spent
        value = self._build(node)
        self._depth -= 1
        self.budget.weigh(1 + _words(value))
        # Keeps the node alive too, so that its id is not reused.
        self._made[id(node)] = (node, value, self.budget.spent - before)
        return value

    def read_torch(self, data: bytes) -> Any:
        """The value of a torch file embedded in this one. A dump has one; more could be nested without end."""
        self.budget.torch_files += 1
        if self.budget.torch_files > 1:
            raise DamagedDumpError("It contains several torch files.")
        return self._read_torch(data, self.budget)

    def shape(self, node: Any) -> tuple[int, ...]:
        """The shape of an array or batch, checked against the size of the file."""
        sizes = self.build(node)
        if not isinstance(sizes, list | tuple) or len(sizes) > _MAX_DIMENSIONS:
            raise ValueError(f"a {type(sizes).__name__} is not a shape of at most {_MAX_DIMENSIONS} dimensions")
        found = tuple(natural(size) for size in sizes)
        if any(size > self.budget.max_rows for size in found):
            raise ValueError(f"size {list(found)} exceeds the file")
        return found

    def _build(self, node: Any) -> Any:
        if isinstance(node, dict):
            return {key: self.build(value) for key, value in node.items()}
        if isinstance(node, list | tuple):
            return type(node)(self.build(item) for item in node)
        if isinstance(node, Persistent):
            if self._find_storage is None:
                raise DamagedDumpError("It refers to data outside the file.")
            return self._find_storage(node.identity)
        if isinstance(node, Name):
            if node.module == "torch" and node.name in DTYPES:
                return DTYPES[node.name]
            raise DamagedDumpError(f"It contains {node} as a value.")
        try:
            make = self._calls[str(node.function)]
        except KeyError:
            raise DamagedDumpError(
                f"It contains a {node.function}, which cannot be stored as part of a rollout."
            ) from None
        self.budget.weigh(_given(node))
        try:
            return make(self, node)
        except (TypeError, ValueError, KeyError, IndexError, RuntimeError, AttributeError) as error:
            raise DamagedDumpError(f"A {node.function} in it is malformed ({shortened(error)}).") from error


def _words(value: Any) -> int:
    if isinstance(value, str | bytes):
        return len(value) // 8
    if isinstance(value, int):
        return value.bit_length() // 64
    return int(value.nbytes) // 8 if isinstance(value, torch.Tensor | np.ndarray) else 0


def _given(call: Call) -> int:
    """The size of a call's arguments: any number of calls can share them, and each call visits them."""
    state = call.state if isinstance(call.state, list | tuple) else (call.state,)
    given = [call.arguments, state, *call.arguments[:8], *state[:8]]
    return sum(len(part) for part in given if isinstance(part, list | tuple | dict | str | bytes))


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
    if not isinstance(strides, list | tuple) or len(strides) > _MAX_DIMENSIONS:
        raise ValueError(f"a {type(strides).__name__} is not a stride")
    return _view(elements, natural(offset), list(builder.shape(size)), [natural(step) for step in strides])


def _built_storage(builder: Builder, node: Any) -> Storage:
    storage = builder.build(node)
    if not isinstance(storage, Storage):
        raise ValueError(f"a {type(storage).__name__} is not a storage")
    return storage


def _view(elements: torch.Tensor, offset: int, sizes: list[int], strides: list[int]) -> torch.Tensor:
    count = math.prod(sizes)
    last = offset + sum((length - 1) * step for length, step in zip(sizes, strides, strict=True)) if count else 0
    if count > len(elements) or last >= max(len(elements), 1):
        raise ValueError(f"size {sizes} with stride {strides} exceeds {len(elements)} elements")
    return elements.as_strided(sizes, strides, offset).clone() if count else elements.new_empty(sizes)


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


def make_jagged(values: Any, offsets: Any, lengths: Any, dim: int = 1) -> torch.Tensor:
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


def natural(value: Any) -> int:
    """A size or an index: a non-negative number that fits in 63 bits."""
    if type(value) is not int:
        raise ValueError(f"a {type(value).__name__} is not a size")
    if not 0 <= value < 2**63:
        raise ValueError("a size is negative or has more than 63 bits")
    return value


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
