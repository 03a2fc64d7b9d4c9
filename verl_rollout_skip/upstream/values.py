"""From the inert tree of a pickle to containers, arrays and tensors, each made by code that stands here.

Every kind of call has one function below, which checks its arguments and makes the value from bytes. Objects that the
pickle shares between rows are shared again.
"""

from __future__ import annotations

import io
import math
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from verl_rollout_skip.upstream.pickles import Call, DamagedDumpError, Name, Persistent, read_pickle

_MAX_DEPTH = 100
_MAX_WEIGHT = 500_000_000
_DTYPE = re.compile(r"[biufcSU?O]\d*")
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
    """The elements of a torch storage, one dimension."""

    elements: torch.Tensor


Make = Callable[["Builder", Call], Any]


class Builder:
    """Makes the values of one tree.

    ``calls`` says how what is called is made. ``find_storage`` gives the storages that lie outside the pickle, and
    ``read_torch`` reads a file of torch that lies within it.
    """

    def __init__(
        self,
        calls: Mapping[str, Make],
        read_torch: Callable[[bytes], Any],
        find_storage: Callable[[Any], Storage] | None = None,
    ) -> None:
        self._calls = calls
        self.read_torch = read_torch
        self._find_storage = find_storage
        self._made: dict[int, tuple[Any, Any, int]] = {}
        self._depth = 0
        self._weight = 0

    def build(self, node: Any) -> Any:
        """The value of a node; the same node always gives the same value."""
        if not isinstance(node, dict | list | tuple | Call | Persistent | Name):
            return node
        known = self._made.get(id(node))
        if known is not None:
            self._weigh(known[2])
            return known[1]
        self._depth += 1
        if self._depth > _MAX_DEPTH:
            raise DamagedDumpError("It is nested too deeply, or within itself.")
        before = self._weight
        value = self._build(node)
        self._depth -= 1
        self._weigh(1 + getattr(value, "nbytes", 0) // 8)
        self._made[id(node)] = (node, value, self._weight - before)  # the node too, so that its id stays its own
        return value

    def _weigh(self, amount: int) -> None:
        """Count what was made as if nothing in it were shared: a small file can share itself into any size."""
        self._weight += amount
        if self._weight > _MAX_WEIGHT:
            raise DamagedDumpError("It repeats parts of itself so often that it would not fit into memory.")

    def _build(self, node: Any) -> Any:
        if isinstance(node, dict):
            return {key_of(key): self.build(value) for key, value in node.items()}
        if isinstance(node, list | tuple):
            return type(node)(self.build(item) for item in node)
        if isinstance(node, Persistent):
            if self._find_storage is None:
                raise DamagedDumpError("It speaks of data outside the file.")
            return self._find_storage(node.identity)
        if isinstance(node, Name):
            if node.module == "torch" and node.name in DTYPES:
                return DTYPES[node.name]
            raise DamagedDumpError(f"It holds {node} as a value.")
        try:
            make = self._calls[str(node.function)]
        except KeyError:
            raise DamagedDumpError(
                f"It holds a {node.function}, which cannot be stored as part of a rollout."
            ) from None
        try:
            return make(self, node)
        except (TypeError, ValueError, KeyError, IndexError, RuntimeError) as error:
            raise DamagedDumpError(f"A {node.function} in it is malformed ({error}).") from error


def key_of(key: Any) -> Any:
    if not isinstance(key, str | int | float | bool | bytes | None):
        raise DamagedDumpError(f"A dict in it has a {type(key).__name__} as a key.")
    return key


def _ordered_dict(builder: Builder, call: Call) -> dict[Any, Any]:
    pairs = [tuple(pair) for pair in call.arguments[0]] if call.arguments else []
    return {key_of(key): builder.build(value) for key, value in [*pairs, *call.items]}


def _encoded_bytes(builder: Builder, call: Call) -> bytes:
    text, encoding = call.arguments
    if encoding != "latin1":
        raise ValueError(f"encoding {encoding!r}")
    return str(text).encode("latin1")


def _no_bytes(builder: Builder, call: Call) -> bytes:
    """Old protocols have no word for bytes; the empty ones are asked for like this."""
    if call.arguments:
        raise ValueError("bytes made of something")
    return b""


def _size(builder: Builder, call: Call) -> tuple[int, ...]:
    [sizes] = call.arguments
    return tuple(natural(size) for size in sizes)


def _device(builder: Builder, call: Call) -> None:
    """Everything comes to the CPU."""


def _dtype(builder: Builder, call: Call) -> np.dtype:
    code, state = call.arguments[0], call.state or (3, "|")
    if not isinstance(code, str) or not _DTYPE.fullmatch(code) or any(part is not None for part in state[2:5]):
        raise ValueError(f"dtype {code!r}")
    order = state[1] if state[1] in ("<", ">", "|", "=") else "|"
    return np.dtype("O" if code.startswith("O") else f"{order}{code}")


def _array(builder: Builder, call: Call) -> np.ndarray:
    _, shape, dtype_node, is_fortran, data = call.state
    dtype, sizes = builder.build(dtype_node), tuple(natural(size) for size in shape)
    count = math.prod(sizes)
    if dtype.kind == "O":
        if not isinstance(data, list) or len(data) != count:
            raise ValueError(f"{count} objects are announced")
        flat = np.empty(count, dtype=object)
        for place, item in enumerate(data):
            flat[place] = builder.build(item)
    else:
        flat = _elements(builder.build(data), dtype, count)
    return flat.reshape(sizes, order="F" if is_fortran else "C")


def _array_from_buffer(builder: Builder, call: Call) -> np.ndarray:
    data, dtype_node, shape, order = call.arguments
    sizes = tuple(natural(size) for size in shape)
    dtype = builder.build(dtype_node)
    return _elements(builder.build(data), dtype, math.prod(sizes)).reshape(sizes, order="F" if order == "F" else "C")


def _scalar(builder: Builder, call: Call) -> Any:
    dtype, data = builder.build(call.arguments[0]), builder.build(call.arguments[1])
    return _elements(data, dtype, 1)[0]


def _elements(data: Any, dtype: np.dtype, count: int) -> np.ndarray:
    if not isinstance(data, bytes) or len(data) != count * dtype.itemsize or dtype.kind == "O":
        raise ValueError(f"{count} elements of {dtype} are announced")
    return np.frombuffer(data, dtype).copy() if count else np.empty(0, dtype)


def _tensor(builder: Builder, call: Call) -> torch.Tensor:
    storage, offset, size, stride = call.arguments[:4]
    elements = builder.build(storage).elements
    if str(call.function).endswith("_v3"):
        elements = elements.view(builder.build(call.arguments[6]))
    return _view(elements, natural(offset), builder.build(size), builder.build(stride))


def _view(elements: torch.Tensor, offset: int, size: Any, stride: Any) -> torch.Tensor:
    sizes, strides = [natural(item) for item in size], [natural(item) for item in stride]
    count = math.prod(sizes)
    last = offset + sum((length - 1) * step for length, step in zip(sizes, strides, strict=True)) if count else 0
    if count > len(elements) or last >= max(len(elements), 1):
        raise ValueError(f"size {sizes} with stride {strides} does not lie within {len(elements)} elements")
    return elements.as_strided(sizes, strides, offset).clone() if count else elements.new_empty(sizes)


def _tensor_of_type(builder: Builder, call: Call) -> Any:
    """A tensor with attributes, which are left out, or a jagged tensor."""
    function, kind, arguments = call.arguments[:3]
    known = {
        "torch._utils._rebuild_tensor_v2": ("torch.Tensor", _tensor),
        "torch._utils._rebuild_tensor_v3": ("torch.Tensor", _tensor),
        "torch.nested._internal.nested_tensor._rebuild_njt": (
            "torch.nested._internal.nested_tensor.NestedTensor",
            _jagged,
        ),
    }
    expected, make = known[str(function)]
    if str(kind) != expected:
        raise ValueError(f"{kind} made by {function}")
    return make(builder, Call(function, tuple(arguments)))


def _jagged(builder: Builder, call: Call) -> torch.Tensor:
    fields = call.arguments[0]
    values, offsets = builder.build(fields["values"]), builder.build(fields["offsets"])
    lengths, dim = builder.build(fields.get("lengths")), natural(fields.get("_ragged_idx", 1))
    return make_jagged(values, offsets, lengths, dim)


def make_jagged(values: torch.Tensor, offsets: torch.Tensor, lengths: Any, dim: int = 1) -> torch.Tensor:
    places = offsets.tolist()
    if offsets.dim() != 1 or not 1 <= dim <= values.dim() or places != sorted(places) or (places and places[0] < 0):
        raise ValueError("offsets that are none")
    ends = places[-1] if lengths is None else max([0, *(a + b for a, b in zip(places, lengths.tolist(), strict=False))])
    if ends > values.shape[dim - 1]:
        raise ValueError("rows beyond the values")
    return torch.nested.nested_tensor_from_jagged(values, offsets=offsets, lengths=lengths, jagged_dim=dim)


def _storage_from_bytes(builder: Builder, call: Call) -> Storage:
    """A storage on its own, as torch writes it into ordinary pickles: its format from before zip files."""
    [data] = call.arguments
    stream = io.BytesIO(builder.build(data))
    for expected in (0x1950A86A20F9469CFC6C, 1001):
        if read_pickle(stream, ()) != expected:
            raise ValueError("it is no storage of torch")
    system = read_pickle(stream, ())
    if system.get("little_endian") is not True:
        raise ValueError("it was written by a big-endian machine")
    found = read_pickle(stream, _STORAGE_NAMES)
    keys = read_pickle(stream, ())
    if not isinstance(found, Persistent) or keys != [found.identity[2]]:
        raise ValueError("it is more than one storage")
    _, kind, _, _, count = found.identity[:5]
    dtype, count = STORAGES[kind.name], natural(count)
    width = torch.empty(0, dtype=dtype).element_size()
    if int.from_bytes(stream.read(8), "little") not in (count, count * width):
        raise ValueError("it has another size than it says")
    return storage_of(stream.read(), dtype, count)


def storage_of(data: Any, dtype: torch.dtype, count: int) -> Storage:
    """A storage from its bytes."""
    if len(data) != count * torch.empty(0, dtype=dtype).element_size():
        raise ValueError(f"{count} elements of {dtype} are announced and {len(data)} bytes are there")
    return Storage(torch.frombuffer(bytearray(data), dtype=dtype) if count else torch.empty(0, dtype=dtype))


def _image(builder: Builder, call: Call) -> Any:
    from PIL import Image

    _, mode, size, palette, data = call.state[:5]
    width, height = (natural(length) for length in size)
    if palette is not None or not isinstance(data, bytes) or width * height > 8 * len(data):
        raise ValueError("an image with a palette, or without its pixels")
    return Image.frombytes(str(mode), (width, height), data)


def natural(value: Any) -> int:
    if type(value) is not int or value < 0:
        raise ValueError(f"{value!r} is no size")
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
# Only within what is left out: the attributes of tensors.
NAMES |= {"builtins.set", "__builtin__.set", "torch._dynamo.decorators._DimRange"}
# Only as arguments of the calls above.
NAMES |= {
    "numpy.ndarray",
    "torch.Tensor",
    "torch.nested._internal.nested_tensor.NestedTensor",
    "torch.nested._internal.nested_tensor._rebuild_njt",
}
"""Every name that may stand in a pickle of containers, arrays and tensors."""
