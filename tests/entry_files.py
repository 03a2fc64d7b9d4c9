"""The files of a recorded entry, for tests that read or damage them."""

from __future__ import annotations

from pathlib import Path


def record_file(variant: str | Path, step: int = 1, gen_batch: int = 0) -> Path:
    return Path(variant) / f"step_{step:06d}" / f"gen_{gen_batch:03d}.json"


def part_files(variant: str | Path, step: int = 1, gen_batch: int = 0) -> list[Path]:
    """The Parquet files of an entry, in no particular order."""
    return sorted((Path(variant) / f"step_{step:06d}").glob(f"gen_{gen_batch:03d}.*.parquet"))


def part_file(variant: str | Path, step: int = 1, gen_batch: int = 0) -> Path:
    """The only Parquet file of an entry."""
    (found,) = part_files(variant, step, gen_batch)
    return found
