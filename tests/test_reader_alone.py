"""Code that only reads recordings uses ``store.reader``, imports nothing below it, and never imports torch."""

from __future__ import annotations

import ast
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import verl_rollout_skip

PACKAGE = Path(verl_rollout_skip.__file__).parent
READERS = [
    *sorted(PACKAGE.glob("cli/**/*.py")),
    *sorted(PACKAGE.glob("report/*.py")),
    *sorted(PACKAGE.glob("runs/*.py")),
    *(
        PACKAGE / "tools" / f"{name}.py"
        for name in (
            "audit",
            "columns",
            "decoding",
            "diff",
            "differing_rows",
            "export",
            "ledgers",
            "stats",
            "trajectories",
        )
    ),
    *sorted(PACKAGE.glob("tools/mismatch/*.py")),
    PACKAGE / "replay" / "explain.py",
]
STORE = "verl_rollout_skip.store"
# ``RolloutStore`` is allowed because it is built on the reader.
ALLOWED = (
    *(f"{STORE}.{name}" for name in ("reader", "storage", "format", "sizes", "new_files")),
    f"{STORE}.store.RolloutStore",
)


def imported(file: Path) -> Iterator[str]:
    for node in ast.walk(ast.parse(file.read_text())):
        if isinstance(node, ast.ImportFrom):
            yield from (f"{node.module}.{alias.name}" for alias in node.names)
        elif isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)


def test_code_that_reads_recordings_imports_nothing_below_the_reader() -> None:
    assert all(file.exists() for file in READERS)
    found = [
        f"{file.relative_to(PACKAGE)}: {name}"
        for file in READERS
        for name in imported(file)
        if name.startswith(f"{STORE}.") and not name.startswith(ALLOWED)
    ]
    assert found == []


def test_the_reader_and_its_users_do_not_import_torch() -> None:
    modules = [
        "store.reader",
        *(
            f"tools.{name}"
            for name in ("audit", "diff", "differing_rows", "export", "mismatch", "stats", "trajectories")
        ),
        "report",
        "report.audit_page",
        "cli.selection",
    ]
    names = ", ".join(f"verl_rollout_skip.{module}" for module in modules)
    subprocess.run([sys.executable, "-c", f"import sys, {names}; assert 'torch' not in sys.modules"], check=True)


def test_only_the_codec_reads_cell_tags() -> None:
    found = [file for file in PACKAGE.rglob("*.py") if '"$type"' in file.read_text()]
    assert found == [PACKAGE / "store" / "codec" / "cells.py"]
