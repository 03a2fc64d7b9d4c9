"""Parses and formats sizes such as "200GB"."""

from __future__ import annotations

import re

_UNITS = {
    "": 1,
    "B": 1,
    **{unit: 1000**power for power, unit in enumerate(("KB", "MB", "GB", "TB", "PB"), 1)},
}
_UNITS |= {unit: 1024**power for power, unit in enumerate(("KIB", "MIB", "GIB", "TIB", "PIB"), 1)}


def parse_size(value: int | str, name: str) -> int:
    """The number of bytes in 1000000, "200GB" or "1.5 TiB". ``name`` is the name of the setting, for the error."""
    match = re.fullmatch(r"\s*(\d+(?:\.\d+)?)\s*([A-Za-z]*)\s*", str(value))
    unit = match[2].upper() if match else None
    if isinstance(value, bool) or match is None or unit not in _UNITS:
        raise ValueError(f'{name} is {value!r}; give a number of bytes or a size such as "200GB" or "1.5TiB".')
    return int(float(match[1]) * _UNITS[unit])


def format_size(size: float) -> str:
    """Format a size for messages: ``23.4 MB``."""
    for unit in ("B", "KB", "MB", "GB"):
        if size < 1000:
            return f"{size:.0f} {unit}" if unit == "B" else f"{size:.1f} {unit}"
        size /= 1000
    return f"{size:.1f} TB"
