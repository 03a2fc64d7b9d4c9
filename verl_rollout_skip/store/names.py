"""File names of a run folder. They are computed from keys and digests and parsed strictly."""

from __future__ import annotations

import re

from verl_rollout_skip.key import RolloutKey

TEMPORARY = ".tmp-"
_FOLDER = re.compile(r"step_(\d{6,})")
_RECORD = re.compile(r"gen_(\d{3,})\.json")
_DIGEST = re.compile(r"[0-9a-f]{32}")
_PART = re.compile(rf"gen_(\d{{3,}})\.({_DIGEST.pattern})\.parquet")
_SET_ASIDE = re.compile(rf"gen_\d{{3,}}(\.json|\.{_DIGEST.pattern}\.parquet)\.[0-9a-f]+\.corrupt")


def folder_name(key: RolloutKey) -> str:
    return f"step_{key.step:06d}"


def record_name(key: RolloutKey) -> str:
    """The record: where it is, the entry is committed."""
    return f"gen_{key.gen_batch:03d}.json"


def part_name(key: RolloutKey, digest: str) -> str:
    """A Parquet file of the entry, named after its content."""
    return f"gen_{key.gen_batch:03d}.{digest}.parquet"


def parse_folder(name: str) -> int | None:
    """The step of a folder name, or None if it is not one that ``folder_name`` gives."""
    match = _FOLDER.fullmatch(name)
    step = int(match[1]) if match else None
    return step if step is not None and folder_name(RolloutKey(step)) == name else None


def parse_record(name: str) -> int | None:
    """The generation batch of a record's name, or None."""
    match = _RECORD.fullmatch(name)
    key = RolloutKey(0, int(match[1])) if match else None
    return key.gen_batch if key and record_name(key) == name else None


def parse_part(name: str) -> int | None:
    """The generation batch of a part's name, or None."""
    match = _PART.fullmatch(name)
    gen_batch = int(match[1]) if match else None
    return (
        gen_batch if match and gen_batch is not None and part_name(RolloutKey(0, gen_batch), match[2]) == name else None
    )


def is_digest(text: object) -> bool:
    return isinstance(text, str) and _DIGEST.fullmatch(text) is not None


def is_set_aside(name: str) -> bool:
    """Whether it is a file of an entry that was set aside because it could not be read."""
    return _SET_ASIDE.fullmatch(name) is not None
