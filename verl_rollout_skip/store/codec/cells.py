"""Python objects in cells and in meta_info, as readable JSON text that round-trips exactly.

Values that JSON cannot represent are written as ``{"$type": …}``: tuples, bytes, numpy and torch values, non-finite
floats. Bulk data (arrays, tensors, images, bytes) is stored separately from the text, as *blobs*. Any other type raises
an error that names it: there is no fallback that could run code at load time. Torch is imported only to rebuild a
tensor, and Pillow only to rebuild an image, so cells can be displayed without either.
"""

from __future__ import annotations

import base64
import json
import math
import re
import struct
import sys
from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from verl_rollout_skip.errors import CorruptEntryError, UnsupportedBatchError
from verl_rollout_skip.store.codec.dtypes import TORCH_BITS, checked_size

TYPE = "$type"
MAX_DEPTH = 100
# Created once, because `json.dumps` creates one per call. MAX_DEPTH detects values that contain themselves.
_JSON = json.JSONEncoder(ensure_ascii=False, separators=(",", ":"), check_circular=False)
INT64 = range(-(2**63), 2**63)
# Fixed-size numpy dtypes only: no objects, no structs.
_NUMPY_DTYPE = re.compile(r"[<>|=]?([biufcSU]\d+|[mM]8\[\d*[a-zA-Z]+\])")
_BYTES_PER_PIXEL = {
    **dict.fromkeys(("L", "P"), 1),
    **dict.fromkeys(("LA", "La", "PA", "I;16", "I;16B", "I;16L", "I;16N"), 2),
    **dict.fromkeys(("RGB", "YCbCr", "LAB", "HSV"), 3),
    **dict.fromkeys(("RGBA", "RGBX", "RGBa", "CMYK", "I", "F"), 4),
}
_IMAGE_MODES = ("1", *_BYTES_PER_PIXEL)
_PALETTE_MODES = ("P", "PA")

Blob = Any
"""A reference to bulk data: bytes, a numpy array, a tensor or an image. ``blob_view`` returns its bytes."""


@dataclass(frozen=True)
class CellBlobs:
    """The blobs of one cell, in the order of its JSON text. ``numbers`` are their numbers in the part."""

    build_blob: Callable[[int, Hashable, Callable[[Any], Any]], Any]
    numbers: Sequence[int]

    @classmethod
    def of(cls, blobs: Sequence[bytes]) -> CellBlobs:
        """Wrap the blobs of a single cell that is not in a part."""
        return cls(lambda number, kind, build: build(blobs[number]), range(len(blobs)))

    def make(self, tag: dict[str, Any], kind: Hashable, build: Callable[[Any], Any]) -> Any:
        """Return ``build(blob)`` for the blob of a tag. Cells that request the same ``kind`` may share the result."""
        return self.build_blob(self.numbers[checked_size(tag["blob"])], kind, build)


def encode(value: Any, blobs: list[Blob], where: str) -> str:
    """Encode a value as JSON text, and append its bulk data to ``blobs``."""
    if type(value) is dict and not value:
        return "{}"  # common: verl fills thousands of cells with it if there are no images
    try:
        tree = value if _is_plain(value, MAX_DEPTH) else _tag(value, blobs, where, MAX_DEPTH)
        text = _JSON.encode(tree)
        if not text.isascii():
            text.encode()
    except UnicodeEncodeError:
        # A lone surrogate is not valid UTF-8. Escaping is not exact either: two in a row would decode as one character.
        blobs.clear()
        tree = _tag(value, blobs, where, MAX_DEPTH)
        text = _JSON.encode(tree)
    return text


def decode(text: str, blobs: CellBlobs, for_display: bool = False) -> Any:
    """The inverse of ``encode``. Malformed text raises ``CorruptEntryError``. Decoding never runs code.

    With ``for_display``, tensors and images become placeholders such as ``(tensor float32 [3, 4])``.
    """
    try:
        value = json.loads(text)
        return _untag(value, blobs, for_display) if f'"{TYPE}"' in text else value
    except (ValueError, TypeError, KeyError, IndexError, RecursionError, OverflowError, struct.error) as error:
        raise CorruptEntryError(f"A stored cell is malformed ({error}): {text[:200]!r}") from error


def encode_inline(value: Any, where: str) -> dict[str, Any]:
    """Encode a value together with its blobs, for meta_info, which has no column for them."""
    blobs: list[Blob] = []
    text = encode(value, blobs, where)
    return {"json": text, "blobs": [base64.b64encode(blob_view(blob)).decode() for blob in blobs]}


def decode_inline(stored: dict[str, Any], for_display: bool = False) -> Any:
    """The inverse of ``encode_inline``."""
    try:
        blobs = CellBlobs.of([base64.b64decode(blob, validate=True) for blob in stored["blobs"]])
        text = stored["json"]
        if type(text) is not str:
            raise ValueError(f"{text!r} is not JSON text")
    except (ValueError, TypeError, KeyError) as error:
        raise CorruptEntryError(f"The stored meta_info is malformed: {error}") from error
    return decode(text, blobs, for_display)


def blob_view(blob: Blob) -> Any:
    """The bytes of a blob, without a copy where possible."""
    if isinstance(blob, bytes):
        return blob
    if _is_tensor(blob):
        from verl_rollout_skip.store.codec.numbers import tensor_bits

        blob = tensor_bits(blob)
    if not isinstance(blob, np.ndarray):
        return blob.tobytes()
    return np.ascontiguousarray(blob).reshape(-1).view(np.uint8) if blob.nbytes else b""


def blob_size(blob: Blob) -> int:
    """The number of bytes that ``blob_view`` would return."""
    if isinstance(blob, bytes):
        return len(blob)
    if isinstance(blob, np.ndarray) or _is_tensor(blob):
        return int(blob.nbytes)
    return _pixel_bytes(blob.mode, *blob.size)


def is_utf8(text: str) -> bool:
    try:
        text.encode()
    except UnicodeEncodeError:
        return False
    return True


def _is_plain(value: Any, depth: int) -> bool:
    """Whether JSON preserves a value and all types in it exactly."""
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
            f"Cannot store {where}: it is nested more than {MAX_DEPTH} levels deep, or contains itself. Flatten it."
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
    if _is_tensor(value) and str(value.layout) == "torch.strided" and not value.is_nested:
        dtype = str(value.dtype).removeprefix("torch.")
        if dtype in TORCH_BITS:
            return {TYPE: "tensor", "dtype": dtype, "shape": list(value.shape), "blob": blob(value)}
    if type(value).__module__.startswith("PIL.") and hasattr(value, "mode"):
        return _tag_image(value, blobs, where, depth)
    raise UnsupportedBatchError(
        f"Cannot store {where}: {describe_type(value)} has no exact representation on disk. Convert it to plain "
        "Python, numpy or torch values (dict, list, tuple, str, bytes, int, float, bool, None, array, tensor) or PIL "
        "images."
    )


def _tag_image(image: Any, blobs: list[Blob], where: str, depth: int) -> dict[str, Any]:
    """Encode the pixels, the palette, and the plain values in ``info``, which affect how an image is processed (its
    transparent color, the orientation in its Exif data). An image from a file is restored as a plain ``Image``."""
    if image.mode not in _IMAGE_MODES:
        raise UnsupportedBatchError(
            f"Cannot store {where}: it is a PIL image of mode {image.mode!r}. Convert it to one of "
            f'{", ".join(_IMAGE_MODES)}, for example with image.convert("RGB").'
        )
    copy = image.copy()  # also reads the pixels of an image that was only opened
    tag = {TYPE: "image", "mode": copy.mode, "size": list(copy.size), "blob": len(blobs)}
    blobs.append(copy)
    if copy.mode in _PALETTE_MODES:
        tag["palette"] = {"mode": copy.palette.mode, "blob": len(blobs)}
        blobs.append(bytes(copy.palette.palette))
    info = {key: value for key, value in image.info.items() if type(key) is str and _is_plain_info(value)}
    return {**tag, "info": _tag(info, blobs, f"{where}.info", depth)} if info else tag


def _is_plain_info(value: Any) -> bool:
    if type(value) in (list, tuple):
        return all(_is_plain_info(item) for item in value)
    return type(value) in (str, bytes, int, float, bool, type(None))


def _is_tensor(value: Any) -> bool:
    torch = sys.modules.get("torch")  # no value is a tensor if torch has not been imported
    return torch is not None and isinstance(value, torch.Tensor)


def describe_type(value: Any) -> str:
    name = f"{type(value).__module__}.{type(value).__qualname__}"
    dtype = getattr(value, "dtype", None)
    return f"a {name}" if dtype is None else f"a {name} of dtype {dtype}"


def _untag(value: Any, blobs: CellBlobs, for_display: bool) -> Any:
    if type(value) is list:
        return [_untag(item, blobs, for_display) for item in value]
    if type(value) is not dict:
        return value
    if TYPE not in value:
        return {key: _untag(item, blobs, for_display) for key, item in value.items()}
    match value[TYPE]:
        case "str":
            return bytes.fromhex(value["hex"]).decode("utf-8", "surrogatepass")
        case "int":
            return int(value["hex"], 16)
        case "float":
            return struct.unpack(">d", bytes.fromhex(value["hex"]))[0]
        case "bytes":
            return blobs.make(value, "bytes", bytes)
        case "tuple":
            return tuple(_untag(_items(value), blobs, for_display))
        case "dict":
            return dict(_untag(_items(value), blobs, for_display))
        case "numpy":
            return _read_numpy(value)
        case "ndarray" if value["dtype"] == "O":
            items = _untag(_items(value), blobs, for_display)
            return np.fromiter(items, object, len(items)).reshape([checked_size(size) for size in value["shape"]])
        case "ndarray":
            return _read_array(value, numpy_dtype(value["dtype"]), blobs)
        case "tensor" if for_display:
            return f"(tensor {value['dtype']} {value['shape']})"
        case "image" if for_display:
            return f"(image {value['mode']} {value['size']})"
        case "tensor":
            return _read_array(value, TORCH_BITS[value["dtype"]], blobs)
        case "image":
            return _read_image(value, blobs, _untag(value.get("info", {}), blobs, for_display))
    raise ValueError(f"unknown $type {value[TYPE]!r}")


def _read_numpy(tag: dict[str, Any]) -> Any:
    data = bytes.fromhex(tag["hex"])
    if tag["dtype"] == "U":
        return np.str_(data.decode("utf-8", "surrogatepass"))
    return np.bytes_(data) if tag["dtype"] == "S" else _array_from_bytes(data, numpy_dtype(tag["dtype"]), ())[()]


def _read_array(tag: dict[str, Any], dtype: np.dtype, blobs: CellBlobs) -> Any:
    """Build an array or a tensor from the bytes of its blob."""
    shape = tuple(checked_size(size) for size in tag["shape"])

    def build(data: Any) -> Any:
        if tag[TYPE] == "ndarray":
            return _array_from_bytes(data, dtype, shape)
        from verl_rollout_skip.store.codec.numbers import tensor_from_bits

        return tensor_from_bits(_array_from_bytes(data, dtype, shape), tag["dtype"])

    return blobs.make(tag, (tag[TYPE], tag["dtype"], shape), build)


def _array_from_bytes(data: Any, dtype: np.dtype, shape: tuple[int, ...]) -> np.ndarray:
    """Copy bytes into a new array. Raises ValueError unless their size is exactly right."""
    if len(data) != math.prod(shape) * dtype.itemsize:
        raise ValueError(f"an array of shape {shape} and dtype {dtype} cannot have {len(data)} bytes")
    return np.frombuffer(data, dtype).reshape(shape).copy() if len(data) else np.empty(shape, dtype)


def _read_image(tag: dict[str, Any], blobs: CellBlobs, info: Any) -> Any:
    mode, palette, size = tag["mode"], tag.get("palette"), tuple(checked_size(size) for size in tag["size"])
    if type(info) is not dict or len(size) != 2 or (palette is not None) != (mode in _PALETTE_MODES):
        raise ValueError(f"an image of size {size} and mode {mode} cannot have palette {palette} and info {info!r}")
    colors = b"" if palette is None else blobs.make(palette, "bytes", bytes)
    palette_mode = "" if palette is None else palette["mode"]
    if palette is not None and (palette_mode not in ("RGB", "RGBA") or len(colors) > 256 * len(palette_mode)):
        raise ValueError(f"a palette of mode {palette_mode!r} cannot have {len(colors)} bytes")

    def build(data: Any) -> Any:
        expected = _pixel_bytes(mode, *size)  # checked before Pillow allocates
        if expected != len(data):
            raise ValueError(f"an image of size {size} and mode {mode} cannot have {len(data)} bytes")
        from PIL import Image

        image = Image.frombytes(mode, size, bytes(data))
        if palette is not None:
            image.putpalette(colors, palette_mode)
        image.info = info
        return image

    # An image is shared together with its info, so the info is part of the kind.
    return blobs.make(tag, ("image", mode, size, palette_mode, colors, repr(info)), build)


def _pixel_bytes(mode: str, width: int, height: int) -> int:
    # A 1-bit image packs eight pixels into a byte, row by row.
    return height * ((width + 7) // 8) if mode == "1" else width * height * _BYTES_PER_PIXEL[mode]


def _items(tag: dict[str, Any]) -> list[Any]:
    if type(tag["items"]) is not list:
        raise ValueError(f"items is {tag['items']!r}, not a list")
    return tag["items"]


def numpy_dtype(name: Any) -> np.dtype:
    if not isinstance(name, str) or not _NUMPY_DTYPE.fullmatch(name):
        raise ValueError(f"{name!r} is not a numpy dtype of numbers or text")
    return np.dtype(name)
