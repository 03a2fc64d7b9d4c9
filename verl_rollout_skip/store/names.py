"""File names of a run folder. They are computed from keys and parsed strictly, never read out of a file."""

from __future__ import annotations

import re

from verl_rollout_skip.key import RolloutKey

TEMPORARY = ".tmp-"
_FOLDER = re.compile(r"step_(\d{6,})")
_DATA = re.compile(r"gen_(\d{3,})\.parquet")
_PENDING = re.compile(r"\.(gen_\d{3,})\.[0-9a-f]{32}\.[0-9a-f]+\.json")


def folder_name(key: RolloutKey) -> str:
    return f"step_{key.step:06d}"


def data_name(key: RolloutKey) -> str:
    """The Parquet file: where it is, the entry is committed."""
    return f"gen_{key.gen_batch:03d}.parquet"


def record_name(key: RolloutKey) -> str:
    return f"gen_{key.gen_batch:03d}.json"


def pending_prefix(key: RolloutKey, digest: str) -> str:
    """How the names of records begin that have not got their own name: with the digest of their Parquet file."""
    return f".gen_{key.gen_batch:03d}.{digest}."


def parse_folder(name: str) -> int | None:
    """The step of a folder name, or None if it is not one that ``folder_name`` gives."""
    match = _FOLDER.fullmatch(name)
    step = int(match[1]) if match else None
    return step if step is not None and folder_name(RolloutKey(step)) == name else None


def parse_data(name: str) -> int | None:
    """The generation batch of a Parquet file's name, or None."""
    match = _DATA.fullmatch(name)
    gen_batch = int(match[1]) if match else None
    return gen_batch if gen_batch is not None and data_name(RolloutKey(0, gen_batch)) == name else None


def parse_pending(name: str) -> int | None:
    """The generation batch of a pending record's name, or None."""
    match = _PENDING.fullmatch(name)
    return int(match[1].removeprefix("gen_")) if match else None
