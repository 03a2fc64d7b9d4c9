"""Finds the dumps of verl's own rollout skip in the folder layout of each version."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from dataclasses import dataclass
from enum import Enum
from pathlib import Path
from typing import Any

from verl_rollout_skip.errors import StoreError

_ONE_FILE = re.compile(r".*_GBS\d+__N\d+")
_GEN_STEP = re.compile(r"genstep_\d{6,}")
_OUTPUT, _INPUT, _META, _SAMPLED = "gen_batch.dp", "new_batch.dp", "meta.json", "tq_batch.pt"
_DEPTH = 3


class Layout(str, Enum):
    """The verl version that wrote the dumps, identified by their folder layout."""

    ONE_FILE = "0.6 and 0.7"
    """One file for all steps, with the output of the first generate call."""
    GEN_STEPS = "0.8"
    """One folder per generate call, with its input and output."""
    STEPS = "0.9"
    """One folder per step, with its output."""
    SAMPLED = "0.9, V1"
    """One folder per step, with one subfolder per sampled batch."""


@dataclass(frozen=True)
class Dump:
    """One dump: its files, its step, and its number within the step."""

    layout: Layout
    step: int
    number: int
    output: Path
    input: Path | None = None


def find_dumps(path: Path, step: int = 1) -> tuple[list[Dump], list[str]]:
    """The dumps below a path, in order, and messages about incomplete folders. Several recordings are an error.

    ``step`` is used for a dump that does not store its own.
    """
    if path.is_file():
        return [Dump(Layout.ONE_FILE, step, 0, path)], []
    if not path.is_dir():
        raise StoreError(f"{path} does not exist.")
    found = {folder: dumps for folder in _folders(path, _DEPTH) for dumps in [_dumps_in(folder)] if any(dumps)}
    files = [file for folder in _folders(path, 1) for file in sorted(folder.iterdir()) if _is_one_file(file)]
    if len(found) + len(files) > 1:
        listed = ", ".join(str(recording) for recording in [*found, *files])
        raise StoreError(f"{path} contains several recordings, choose one: {listed}")
    if files:
        return [Dump(Layout.ONE_FILE, step, 0, files[0])], []
    if not found:
        raise StoreError(
            f"{path} contains no dumps of verl's rollout skip: no *_GBS…__N… file (0.6, 0.7), genstep_…/{_OUTPUT} "
            f"(0.8), STEP/{_OUTPUT} (0.9) or STEP/NUMBER/{_SAMPLED} (0.9, V1)."
        )
    [(dumps, incomplete)] = found.values()
    return sorted(dumps, key=lambda dump: (dump.step, dump.number)), incomplete


def _folders(path: Path, depth: int) -> Iterator[Path]:
    yield path
    if depth:
        for child in sorted(path.iterdir()):
            if (
                child.is_dir()
                and not child.is_symlink()
                and not (child.name.isdecimal() or _GEN_STEP.fullmatch(child.name))
            ):
                yield from _folders(child, depth - 1)


def _is_one_file(file: Path) -> bool:
    return bool(_ONE_FILE.fullmatch(file.name)) and file.is_file()


def _dumps_in(folder: Path) -> tuple[list[Dump], list[str]]:
    dumps: list[Dump] = []
    incomplete: list[str] = []
    for child in sorted(folder.iterdir()):
        if not child.is_dir():
            continue
        if _GEN_STEP.fullmatch(child.name):
            _add(dumps, incomplete, child, _gen_step(child))
        elif child.name.isdecimal():
            below = [inner for inner in sorted(child.iterdir()) if inner.is_dir() and inner.name.isdecimal()]
            for inner in below:
                _add(dumps, incomplete, inner, _sampled(inner))
            if not below:
                _add(dumps, incomplete, child, _step(child))
    return dumps, incomplete


def _add(dumps: list[Dump], incomplete: list[str], folder: Path, dump: Dump | None) -> None:
    if dump is None:
        incomplete.append(f"{folder}: files are missing, so verl itself would not read it either")
    else:
        dumps.append(dump)


def _gen_step(folder: Path) -> Dump | None:
    meta = _meta(folder)
    if meta is None or not all((folder / name).is_file() for name in (_OUTPUT, _INPUT)):
        return None
    number = int(folder.name.removeprefix("genstep_"))
    step = meta.get("global_steps")
    if type(step) is not int or not 0 <= step < 2**63:
        step = number
    return Dump(Layout.GEN_STEPS, step, number, folder / _OUTPUT, folder / _INPUT)


def _step(folder: Path) -> Dump | None:
    if _meta(folder) is None or not (folder / _OUTPUT).is_file():
        return None
    return Dump(Layout.STEPS, int(folder.name), 0, folder / _OUTPUT)


def _sampled(folder: Path) -> Dump | None:
    if _meta(folder) is None or not (folder / _SAMPLED).is_file():
        return None
    return Dump(Layout.SAMPLED, int(folder.parent.name), int(folder.name), folder / _SAMPLED)


def _meta(folder: Path) -> dict[str, Any] | None:
    """The content of meta.json, which verl writes last; None if it is missing or invalid, so the dump is incomplete."""
    try:
        meta = json.loads((folder / _META).read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError):
        return None
    return meta if isinstance(meta, dict) else None
