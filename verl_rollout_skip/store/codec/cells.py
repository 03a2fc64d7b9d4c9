"""Python objects in cells and in meta_info, as JSON text that anyone can read and that comes back exactly.

What JSON has no word for is written as ``{"$type": …}``: tuples, bytes, numpy and torch values, non-finite floats.
Bulk data (arrays, tensors, images, bytes) goes beside the text as *blobs*. A type that is not listed here is an
error that names it: there is no fallback that could run code when it is read. Torch is imported where a tensor is made
of its bits, so that cells can be shown without it.
"""

from __future__ import annotations

import base64
import json
import math
import re
import struct
from collections.abc import Callable, Hashable, Mapping
from typing import TYPE_CHECKING, Any

import numpy as np

from verl_rollout_skip.errors import CorruptEntryError, UnsupportedBatchError
from verl_rollout_skip.store.codec import images
from verl_rollout_skip.store.codec.blobs import Blob, CellBlobs, blob_view, is_tensor
from verl_rollout_skip.store.codec.dtypes import TORCH_BITS

if TYPE_CHECKING:
    import torch

TYPE = "$type"
MAX_DEPTH = 100
# Made once, because `json.dumps` makes one at each call; what contains itself is found before, by its depth.
_JSON = json.JSONEncoder(ensure_ascii=False, separators=(",", ":"), check_circular=False)
INT64 = range(-(2**63), 2**63)
# Fixed-size numpy dtypes only: no objects, no structures.
_NUMPY_DTYPE = re.compile(r"[<>|=]?([biufcSU]\d+|[mM]8\[\d*[a-zA-Z]+\])")

_Readers = Mapping[Any, Callable[[dict[str, Any], CellBlobs, "_Readers"], Any]]
"""How what was written as ``{"$type": …}`` is read, by type."""


def encode(value: Any, blobs: list[Blob], where: str) -> str:
    """JSON text of one value; its bulk data is appended to ``blobs``."""
    if type(value) is dict and not value:
        return "{}"  # what verl puts into thousands of cells if there are no images
    try:
        tree = value if _is_plain(value, MAX_DEPTH) else _tag(value, blobs, where, MAX_DEPTH)
        text = _JSON.encode(tree)
        if not text.isascii():
            text.encode()
    except UnicodeEncodeError:
        # A lone surrogate: no UTF-8, and two of them escaped side by side would be read back as one character.
        blobs.clear()
        tree = _tag(value, blobs, where, MAX_DEPTH)
        text = _JSON.encode(tree)
    return text


def decode(text: str, blobs: CellBlobs) -> Any:
    """The inverse of ``encode``. Anything malformed is a ``CorruptEntryError``; nothing in it can run code."""
    return _decode(text, blobs, _READERS)


def decode_for_people(text: str, blobs: CellBlobs) -> Any:
    """The same without torch and Pillow: a tensor or an image becomes a word such as ``(tensor float32 [3, 4])``."""
    return _decode(text, blobs, _PEOPLE)


def _decode(text: str, blobs: CellBlobs, readers: _Readers) -> Any:
    try:
        value = json.loads(text)
        return _untag(value, blobs, readers) if f'"{TYPE}"' in text else value
    except (ValueError, TypeError, KeyError, IndexError, RecursionError, OverflowError, struct.error) as error:
        raise CorruptEntryError(f"A stored cell is malformed ({error}): {text[:200]!r}") from error


def encode_inline(value: Any, where: str) -> dict[str, Any]:
    """A value with its blobs in the text itself: for meta_info, which has no column to put them in."""
    blobs: list[Blob] = []
    text = encode(value, blobs, where)
    return {"json": text, "blobs": [base64.b64encode(blob_view(blob)).decode() for blob in blobs]}


def decode_inline(stored: dict[str, Any], decode: Callable[[str, CellBlobs], Any] = decode) -> Any:
    """The inverse of ``encode_inline``; with ``decode_for_people``, the same for people."""
    try:
        blobs = CellBlobs.of([base64.b64decode(blob, validate=True) for blob in stored["blobs"]])
        text = stored["json"]
        if type(text) is not str:
            raise ValueError(f"{text!r} is not JSON text")
    except (ValueError, TypeError, KeyError) as error:
        raise CorruptEntryError(f"Stored meta_info is malformed: {error}") from error
    return decode(text, blobs)


def is_utf8(text: str) -> bool:
    try:
        text.encode()
    except UnicodeEncodeError:
        return False
    return True


def _is_plain(value: Any, depth: int) -> bool:
    """Whether JSON returns exactly this value, type for type."""
    kind = type(value)
    if kind is str or value is None or kind is bool:
        return True
    if kind is int:
        return value in INT64
    if kind is float:
        return math.isfinite(value)
    if depth == 0:
        return False
    if kind is list:
        return all(_is_plain(item, depth - 1) for item in value)
    if kind is dict:
        return all(type(key) is str and key != TYPE and _is_plain(item, depth - 1) for key, item in value.items())
    return False


def _tag(value: Any, blobs: list[Blob], where: str, depth: int) -> Any:
    kind = type(value)
    if kind is str:
        return value if is_utf8(value) else {TYPE: "str", "hex": value.encode("utf-8", "surrogatepass").hex()}
    if value is None or kind is bool:
        return value
    if kind is int:
        return value if value in INT64 else {TYPE: "int", "hex": hex(value)}
    if kind is float:
        return value if math.isfinite(value) else {TYPE: "float", "hex": struct.pack(">d", value).hex()}
    if depth == 0:
        raise UnsupportedBatchError(
            f"Cannot store {where}: it is nested more than {MAX_DEPTH} levels deep, or contains itself."
        )
    if kind in (list, tuple):
        items = [_tag(item, blobs, f"{where}[{index}]", depth - 1) for index, item in enumerate(value)]
        return items if kind is list else {TYPE: "tuple", "items": items}
    if kind is dict:
        pairs = [
            (
                _tag(key, blobs, f"{where} key {key!r}", depth - 1),
                _tag(item, blobs, f"{where}[{key!r}]", depth - 1),
            )
            for key, item in value.items()
        ]
        if all(type(key) is str and key != TYPE for key, _ in pairs):
            return dict(pairs)
        return {TYPE: "dict", "items": [list(pair) for pair in pairs]}
    return _tag_bulk(value, blobs, where, depth)


def _tag_bulk(value: Any, blobs: list[Blob], where: str, depth: int) -> Any:
    def blob(reference: Blob) -> int:
        blobs.append(reference)
        return len(blobs) - 1

    if type(value) is bytes:
        return {TYPE: "bytes", "blob": blob(value)}
    if type(value) is np.str_:
        return {TYPE: "numpy", "dtype": "U", "hex": value.encode("utf-8", "surrogatepass").hex()}
    if type(value) is np.bytes_:
        return {TYPE: "numpy", "dtype": "S", "hex": value.hex()}
    if isinstance(value, np.generic) and _NUMPY_DTYPE.fullmatch(value.dtype.str):
        return {TYPE: "numpy", "dtype": value.dtype.str, "hex": value.tobytes().hex()}
    if type(value) is np.ndarray:
        shape = list(value.shape)
        if value.dtype == object:
            items = [_tag(item, blobs, f"{where}[{index}]", depth - 1) for index, item in enumerate(value.ravel())]
            return {TYPE: "ndarray", "dtype": "O", "shape": shape, "items": items}
        if _NUMPY_DTYPE.fullmatch(value.dtype.str):
            return {TYPE: "ndarray", "dtype": value.dtype.str, "shape": shape, "blob": blob(value)}
    if is_tensor(value) and str(value.layout) == "torch.strided" and not value.is_nested:
        dtype = str(value.dtype).removeprefix("torch.")
        if dtype in TORCH_BITS:
            return {TYPE: "tensor", "dtype": dtype, "shape": list(value.shape), "blob": blob(value)}
    if images.is_image(value):
        if value.mode not in images.MODES:
            raise UnsupportedBatchError(
                f"Cannot store {where}: a PIL image of mode {value.mode!r}. Convert it to one of "
                f'{", ".join(images.MODES)}, for example with image.convert("RGB").'
            )
        tag = {TYPE: "image", **images.describe(value, blob)}
        info = images.plain_info(value)
        return {**tag, "info": _tag(info, blobs, f"{where}.info", depth)} if info else tag
    raise UnsupportedBatchError(
        f"Cannot store {where}: {_describe(value)} has no exact representation on disk. Convert it to plain Python, "
        "numpy or torch values (dict, list, tuple, str, bytes, int, float, bool, None, arrays, tensors, PIL images)."
    )


def _describe(value: Any) -> str:
    name = f"{type(value).__module__}.{type(value).__qualname__}"
    dtype = getattr(value, "dtype", None)
    return f"a {name}" if dtype is None else f"a {name} of dtype {dtype}"


def _untag(value: Any, blobs: CellBlobs, readers: _Readers) -> Any:
    if type(value) is list:
        return [_untag(item, blobs, readers) for item in value]
    if type(value) is not dict:
        return value
    if TYPE not in value:
        return {key: _untag(item, blobs, readers) for key, item in value.items()}
    reader = readers.get(value[TYPE])
    if reader is None:
        raise ValueError(f"unknown $type {value[TYPE]!r}")
    return reader(value, blobs, readers)


def _read_ndarray(tag: dict[str, Any], blobs: CellBlobs, readers: _Readers) -> np.ndarray:
    shape = tuple(_size(size) for size in tag["shape"])
    if tag["dtype"] == "O":
        items = _items(tag)
        array = np.empty(len(items), dtype=object)
        for index, item in enumerate(items):
            array[index] = _untag(item, blobs, readers)
        return array.reshape(shape)
    dtype = numpy_dtype(tag["dtype"])
    return _bulk(tag, blobs, ("ndarray", dtype.str, shape), lambda data: _array(data, dtype, shape))


def _read_tensor(tag: dict[str, Any], blobs: CellBlobs, readers: _Readers) -> torch.Tensor:
    from verl_rollout_skip.store.codec.tensors import tensor_from_bits

    shape, name = tuple(_size(size) for size in tag["shape"]), tag["dtype"]
    bits = TORCH_BITS[name]
    return _bulk(tag, blobs, ("tensor", name, shape), lambda data: tensor_from_bits(_array(data, bits, shape), name))


def _bulk(tag: dict[str, Any], blobs: CellBlobs, kind: Hashable, make: Callable[[Any], Any]) -> Any:
    return blobs.make(_size(tag["blob"]), kind, make)


def _read_numpy(tag: dict[str, Any], blobs: CellBlobs, readers: _Readers) -> Any:
    data = bytes.fromhex(tag["hex"])
    if tag["dtype"] == "U":
        return np.str_(data.decode("utf-8", "surrogatepass"))
    return np.bytes_(data) if tag["dtype"] == "S" else _array(data, numpy_dtype(tag["dtype"]), ())[()]


def _array(data: Any, dtype: np.dtype, shape: tuple[int, ...]) -> np.ndarray:
    """An array of its own memory from bytes of exactly its size."""
    if len(data) != math.prod(shape) * dtype.itemsize:
        raise ValueError(f"{len(data)} bytes are not an array of shape {shape} and dtype {dtype}")
    return np.frombuffer(data, dtype).reshape(shape).copy() if len(data) else np.empty(shape, dtype)


def _read_image(tag: dict[str, Any], blobs: CellBlobs, readers: _Readers) -> Any:
    size = tuple(_size(size) for size in tag["size"])
    width, height = size
    palette, info = tag.get("palette"), _untag(tag.get("info", {}), blobs, readers)
    if type(info) is not dict:
        raise ValueError(f"{info!r} is not the info of an image")
    colors = None if palette is None else (palette["mode"], _bulk(palette, blobs, "bytes", bytes))
    # An image is shared with its info, whose blobs other cells may count in another way.
    kind = ("image", tag["mode"], size, colors, repr(info))
    return _bulk(
        tag, blobs, kind, lambda data: images.make_image(tag["mode"], (width, height), bytes(data), colors, info)
    )


def _size(value: Any) -> int:
    if type(value) is not int or not 0 <= value < 2**48:
        raise ValueError(f"{value!r} is not a size")
    return value


def _items(tag: dict[str, Any]) -> list[Any]:
    if type(tag["items"]) is not list:
        raise ValueError(f"{tag['items']!r} is not a list of items")
    return tag["items"]


def numpy_dtype(name: Any) -> np.dtype:
    if not isinstance(name, str) or not _NUMPY_DTYPE.fullmatch(name):
        raise ValueError(f"{name!r} is not a dtype of plain numbers or text")
    return np.dtype(name)


_READERS: _Readers = {
    "str": lambda tag, *_: bytes.fromhex(tag["hex"]).decode("utf-8", "surrogatepass"),
    "int": lambda tag, *_: int(tag["hex"], 16),
    "float": lambda tag, *_: struct.unpack(">d", bytes.fromhex(tag["hex"]))[0],
    "bytes": lambda tag, blobs, _: _bulk(tag, blobs, "bytes", bytes),
    "tuple": lambda tag, blobs, readers: tuple(_untag(item, blobs, readers) for item in _items(tag)),
    "dict": lambda tag, blobs, readers: {
        _untag(key, blobs, readers): _untag(item, blobs, readers) for key, item in _items(tag)
    },
    "numpy": _read_numpy,
    "ndarray": _read_ndarray,
    "tensor": _read_tensor,
    "image": _read_image,
}
_PEOPLE: _Readers = {
    **_READERS,
    "tensor": lambda tag, *_: f"(tensor {tag['dtype']} {tag['shape']})",
    "image": lambda tag, *_: f"(image {tag['mode']} {tag['size']})",
}
