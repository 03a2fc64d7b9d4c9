"""The trace of an engine: one line of JSON per request and per weight sync, in the folder of CPU_ROLLOUT_TRACE."""

from __future__ import annotations

import json
import os
from pathlib import Path

from recipes.cpu.environment import TRACE_VARIABLE


def trace_file(engine: str) -> Path | None:
    """The file that this process writes to; None if nothing is traced."""
    folder = os.environ.get(TRACE_VARIABLE)
    if not folder:
        return None
    Path(folder).mkdir(parents=True, exist_ok=True)
    return Path(folder) / f"{engine}_{os.getpid()}.jsonl"


def write(file: Path | None, kind: str, version: int | None, number: int) -> None:
    """``version`` is the global step of the weights, None if the engine does not know it."""
    if file is not None:
        with file.open("a") as lines:
            lines.write(json.dumps({"kind": kind, "version": version, "number": number}) + "\n")
