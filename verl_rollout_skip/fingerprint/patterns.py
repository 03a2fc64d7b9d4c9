"""Patterns of dotted keys: ``*`` matches anything, dots included."""

from __future__ import annotations

import functools
import re


def matches(key: str, pattern: str) -> bool:
    """Whether a key is one of those that a pattern names."""
    return _compiled(pattern).fullmatch(key) is not None


@functools.lru_cache(maxsize=2048)
def _compiled(pattern: str) -> re.Pattern[str]:
    return re.compile(re.escape(pattern).replace(r"\*", ".*"), re.DOTALL)
