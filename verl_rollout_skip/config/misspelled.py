"""Finds misspelled or misplaced settings of this package, which would otherwise be ignored silently.

It reports a block with a name close to ``rollout_skip`` and with our keys, at the top level or inside one of verl's
blocks, and keys close to the two old ones. Anything else, such as a preset that a user keeps under a longer name, is
left alone.
"""

from __future__ import annotations

import difflib
import re
from collections.abc import Collection, Iterator, Mapping
from typing import Any

_NEAR = 0.8
# rollout_clip and rollout_stop, which may belong to other code, have a similarity of 0.82 to rollout_skip.
_NEAR_NAME = 0.85
_BLOCKS = ("rollout_skip", "skip_rollout")
_OLD_KEYS = ("skip_rollout", "skip_dump_dir")
_OLD_PARENT = ("actor_rollout_ref", "rollout")
_BLOCKS_OF_VERL = ("actor_rollout_ref", "algorithm", "data", "skip", "trainer")
# Other blocks also have keys such as mode, steps and source; these keys are unique to this package.
_OURS_ALONE = (
    "dump_dir",
    "max_dump_steps",
    "on_mismatch",
    "on_dump_error",
    "max_disk",
    "log_samples",
    "part_bytes",
    "shadow_min_match",
)


def find_misspelled(config: Mapping[Any, Any], block: str, settings: Collection[str], modes: Collection[str]) -> str:
    """Describe the misspelled setting in a configuration and what was probably meant; empty if there is none.

    ``settings`` are the keys of ``block``, ``modes`` the values of its key ``mode``.
    """
    for path, value in _walk(config, block):
        name, parent = path[-1], path[:-1]
        dotted = ".".join(path)
        if isinstance(value, Mapping):
            if _misspelled(name, _BLOCKS) is not None and _has_our_settings(value, settings, modes):
                found = ", ".join(f"{dotted}.{key}={value[key]}" for key in value)
                return f"Nothing reads {dotted}: did you mean {block!r} at the top level? It contains {found}."
            continue
        old = _misspelled(name, _OLD_KEYS) if parent in ((), _OLD_PARENT[:1], _OLD_PARENT) else None
        if old is not None and path != (*_OLD_PARENT, old) and value not in (None, False):
            meant = ".".join((*_OLD_PARENT, old))
            return f"Nothing reads {dotted}={value}: did you mean {meant}?"
    return ""


def _walk(tree: Mapping[Any, Any], skipped: str, path: tuple[str, ...] = ()) -> Iterator[tuple[tuple[str, ...], Any]]:
    for key, value in tree.items():
        here = (*path, str(key))
        if here == (skipped,):
            continue
        yield here, value
        if isinstance(value, Mapping) and here[0] in _BLOCKS_OF_VERL:
            yield from _walk(value, skipped, here)


def _misspelled(name: str, names: Collection[str]) -> str | None:
    """The name that was probably meant; None for an unrelated name, or one of ours with an added prefix or suffix."""
    if any(re.fullmatch(rf".+_{known}|(.+_)?{known}_.+", name) for known in names):
        return None
    return _closest(name, names, _NEAR_NAME)


def _closest(name: str, names: Collection[str], near: float = _NEAR) -> str | None:
    """The closest match in ``names``, ignoring word separators; None if nothing is close enough."""
    ratios = {known: difflib.SequenceMatcher(None, _squash(name), _squash(known)).ratio() for known in names}
    best = max(ratios, key=lambda known: ratios[known])
    return best if ratios[best] >= near else None


def _squash(name: str) -> str:
    return re.sub(r"[^a-z0-9]", "", name.lower())


def _has_our_settings(block: Mapping[Any, Any], settings: Collection[str], modes: Collection[str]) -> bool:
    keys = {key: _closest(str(key), settings) for key in block}
    ours = [known for known in keys.values() if known is not None]
    if len(ours) * 2 < len(keys):
        return False
    turns_on = any(known == "mode" and _closest(str(block[key]), modes) for key, known in keys.items())
    return turns_on or any(known in _OURS_ALONE for known in ours) or len(ours) > 1
