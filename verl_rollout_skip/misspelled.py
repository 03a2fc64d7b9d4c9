"""Finds settings of this package under a wrong name, where they would be silently ignored.

Only what looks like our settings counts: a block whose name is close to ours and whose keys are ours, at the top level
or in a block of verl's where somebody may look for it, and keys close to the two old ones. Everything else, such as
presets that a user keeps elsewhere or under a longer name, is left alone.
"""

from __future__ import annotations

import difflib
import re
from collections.abc import Collection, Iterator, Mapping
from typing import Any

_NEAR = 0.8
# rollout_clip and rollout_stop, which others may have, are 0.82 near to rollout_skip.
_NEAR_NAME = 0.85
_BLOCKS = ("rollout_skip", "skip_rollout")
_OLD_KEYS = ("skip_rollout", "skip_dump_dir")
_OLD_PLACE = ("actor_rollout_ref", "rollout")
_BLOCKS_OF_VERL = ("actor_rollout_ref", "algorithm", "data", "skip", "trainer")
# Other blocks have keys such as mode, steps and source as well; nobody else has these.
_OURS_ALONE = ("dump_dir", "max_dump_steps", "on_mismatch", "on_dump_error", "max_disk", "log_samples")


def find_misspelled(config: Mapping[Any, Any], block: str, settings: Collection[str], modes: Collection[str]) -> str:
    """What is misspelled in a configuration, and what was probably meant; empty if nothing is.

    ``settings`` are the keys of ``block``, ``modes`` the values of its key ``mode``.
    """
    for path, value in _walk(config, block):
        name, place = path[-1], path[:-1]
        dotted = ".".join(path)
        if isinstance(value, Mapping):
            if _misspelled(name, _BLOCKS) is not None and _has_our_settings(value, settings, modes):
                found = ", ".join(f"{dotted}.{key}={value[key]}" for key in value)
                return f"{dotted} is not read by anything: did you mean {block!r}, at the top level? It has {found}."
            continue
        old = _misspelled(name, _OLD_KEYS) if place in ((), _OLD_PLACE[:1], _OLD_PLACE) else None
        if old is not None and path != (*_OLD_PLACE, old) and value not in (None, False):
            meant = ".".join((*_OLD_PLACE, old))
            return f"{dotted}={value} is not read by anything: did you mean {meant}?"
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
    """Which of our names is meant; None if it is another one, such as one of ours with a word before or after it."""
    if any(re.fullmatch(rf".+_{known}|(.+_)?{known}_.+", name) for known in names):
        return None
    return _closest(name, names, _NEAR_NAME)


def _closest(name: str, names: Collection[str], near: float = _NEAR) -> str | None:
    """The closest of some names, whatever separates the words; None if none is close."""
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
