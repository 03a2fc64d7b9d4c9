"""The file names in a store's folder: made from keys and digests, and parsed strictly."""

from __future__ import annotations

import re

from verl_rollout_skip.key import RolloutKey

TEMPORARY = ".tmp-"
"""The prefix of files that are still being written."""
_STEP = r"step_([0-9]{6}|[1-9][0-9]{6,})"
_BATCH = r"gen_([0-9]{3}|[1-9][0-9]{3,})"
_DIGEST = r"[0-9a-f]{32}"


def folder_name(key: RolloutKey) -> str:
    return f"step_{key.step:06d}"


def record_name(key: RolloutKey) -> str:
    """The record of an entry. If this file exists, the entry is committed."""
    return f"gen_{key.gen_batch:03d}.json"


def part_name(key: RolloutKey, digest: str) -> str:
    """A Parquet file of an entry, named after the digest of its content."""
    return f"gen_{key.gen_batch:03d}.{digest}.parquet"


def set_aside_name(name: str, token: str) -> str:
    """The name of a record or a part once its entry has been set aside."""
    return f"{name}.{token}.corrupt"


def parse_folder(name: str) -> int | None:
    """The step of a step folder, or None if the name is not that of a step folder."""
    return _match_number(_STEP, name)


def parse_record(name: str) -> int | None:
    """The generation batch of a record, or None if the name is not that of a record."""
    return _match_number(rf"{_BATCH}\.json", name)


def parse_part(name: str) -> int | None:
    """The generation batch of a part, or None if the name is not that of a part."""
    return _match_number(rf"{_BATCH}\.{_DIGEST}\.parquet", name)


def is_set_aside(name: str) -> bool:
    return re.fullmatch(rf"{_BATCH}(\.json|\.{_DIGEST}\.parquet)\.[0-9a-f]+\.corrupt", name) is not None


def is_old_part(name: str) -> bool:
    """Whether a file is a Parquet file of format 1, which had exactly one per entry."""
    return _match_number(rf"{_BATCH}\.parquet", name) is not None


def is_digest(text: object) -> bool:
    return isinstance(text, str) and re.fullmatch(_DIGEST, text) is not None


def _match_number(pattern: str, name: str) -> int | None:
    match = re.fullmatch(pattern, name)
    return int(match[1]) if match else None
