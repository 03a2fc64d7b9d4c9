"""PIL images in cells: every mode that Pillow has, with pixels, palette, and what the file said of the image.

``info`` decides what becomes of an image (a transparent color, the orientation in its Exif data), so its plain entries
are kept. An image that was opened from a file comes back as a plain ``Image``. Pillow is imported only to make one.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

_BYTES_PER_PIXEL = {
    **dict.fromkeys(("L", "P"), 1),
    **dict.fromkeys(("LA", "La", "PA", "I;16", "I;16B", "I;16L", "I;16N"), 2),
    **dict.fromkeys(("RGB", "YCbCr", "LAB", "HSV"), 3),
    **dict.fromkeys(("RGBA", "RGBX", "RGBa", "CMYK", "I", "F"), 4),
}
MODES = ("1", *_BYTES_PER_PIXEL)
_WITH_PALETTE = ("P", "PA")
_PALETTE_COLORS = 256


def is_image(value: Any) -> bool:
    return type(value).__module__.startswith("PIL.") and hasattr(value, "mode")


def image_bytes(image: Any) -> int:
    """How many bytes the pixels of an image have."""
    return _pixel_bytes(image.mode, image.width, image.height)


def describe(image: Any, blob: Callable[[Any], int]) -> dict[str, Any]:
    """The fields of an image's tag, but for its ``info``; ``blob`` takes bulk data and returns its number."""
    copy = image.copy()  # which also loads what was only opened
    tag = {"mode": copy.mode, "size": list(copy.size), "blob": blob(copy)}
    if copy.mode in _WITH_PALETTE:
        tag["palette"] = {"mode": copy.palette.mode, "blob": blob(bytes(copy.palette.palette))}
    return tag


def plain_info(image: Any) -> dict[str, Any]:
    """The entries of an image's ``info`` that are plain values."""
    return {key: value for key, value in image.info.items() if type(key) is str and _is_plain(value)}


def make_image(
    mode: str, size: tuple[int, int], data: bytes, palette: tuple[str, bytes] | None, info: dict[Any, Any]
) -> Any:
    """The inverse of ``describe``, for data that cannot be trusted."""
    needed = _pixel_bytes(mode, *size)  # checked before Pillow allocates
    if needed != len(data):
        raise ValueError(f"an image of {size} in mode {mode} needs {needed} bytes, {len(data)} are stored")
    if (palette is not None) != (mode in _WITH_PALETTE):
        raise ValueError(f"an image in mode {mode} with the palette {palette}")
    from PIL import Image

    image = Image.frombytes(mode, size, data)
    if palette is not None:
        kind, colors = palette
        if kind not in ("RGB", "RGBA") or len(colors) > _PALETTE_COLORS * len(kind):
            raise ValueError(f"a palette of {len(colors)} bytes in mode {kind!r}")
        image.putpalette(colors, kind)
    image.info = info
    return image


def _pixel_bytes(mode: str, width: int, height: int) -> int:
    # A bit image packs eight pixels in a byte, row by row.
    return height * ((width + 7) // 8) if mode == "1" else width * height * _BYTES_PER_PIXEL[mode]


def _is_plain(value: Any) -> bool:
    if type(value) in (list, tuple):
        return all(_is_plain(item) for item in value)
    return type(value) in (str, bytes, int, float, bool, type(None))
