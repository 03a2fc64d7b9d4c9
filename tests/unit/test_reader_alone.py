"""What only reads recorded rollouts goes through ``store.reader``: nothing below it is imported, and never torch."""

from __future__ import annotations

import ast
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import verl_rollout_skip

PACKAGE = Path(verl_rollout_skip.__file__).parent
LOOKS = [
    *sorted(PACKAGE.glob("cli/*.py")),
    *sorted(PACKAGE.glob("report/*.py")),
    *(PACKAGE / f"{name}.py" for name in ("analysis", "comparison", "decoding", "exporting", "manifest", "missing")),
    *(PACKAGE / f"{name}.py" for name in ("neighbors", "pins", "tokenizer", "trajectories", "variants")),
]
STORE = "verl_rollout_skip.store"
# The storage that a folder is on, the version of the format, and the store for whole batches, built on the reader.
ALLOWED = (f"{STORE}.reader", f"{STORE}.storage", f"{STORE}.format", f"{STORE}.store.RolloutStore")


def imported(file: Path) -> Iterator[str]:
    for node in ast.walk(ast.parse(file.read_text())):
        if isinstance(node, ast.ImportFrom):
            yield from (f"{node.module}.{alias.name}" for alias in node.names)
        elif isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)


def test_nothing_that_looks_at_recordings_imports_below_the_reader() -> None:
    assert all(file.exists() for file in LOOKS)
    found = [
        f"{file.relative_to(PACKAGE)}: {name}"
        for file in LOOKS
        for name in imported(file)
        if name.startswith(f"{STORE}.") and not name.startswith(ALLOWED)
    ]
    assert found == []


def test_the_reader_and_all_that_use_it_import_no_torch() -> None:
    modules = ["store.reader", "analysis", "comparison", "exporting", "trajectories", "report", "cli.folders"]
    names = ", ".join(f"verl_rollout_skip.{module}" for module in modules)
    subprocess.run([sys.executable, "-c", f"import sys, {names}; assert 'torch' not in sys.modules"], check=True)


def test_tags_of_cells_are_read_by_the_codec_alone() -> None:
    found = [file for file in PACKAGE.rglob("*.py") if '"$type"' in file.read_text()]
    assert found == [PACKAGE / "store" / "codec" / "cells.py"]
