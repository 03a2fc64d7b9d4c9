"""Runs ``rollout-skip`` in its own process: normally, without permissions, or without torch."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]

# Import everything before privileges are dropped: the interpreter may be in a folder that only root can read.
_AS_NOBODY = """
import contextlib, io, json, os, sys
from verl_rollout_skip.cli import main
command, first = sys.argv[1:], json.loads(os.environ["FIRST"])
with contextlib.redirect_stdout(io.StringIO()), contextlib.redirect_stderr(io.StringIO()):
    main(first)
if os.geteuid() == 0:
    os.setgroups([])
    os.setgid(65534)
    os.setuid(65534)
sys.exit(main(command))
"""
_WITHOUT_TORCH = """
import sys
sys.modules["torch"] = sys.modules["tensordict"] = sys.modules["verl"] = None
from verl_rollout_skip.cli import main
sys.exit(main(sys.argv[1:]))
"""


def run(*arguments: Any, cwd: Path = ROOT, **environment: str) -> subprocess.CompletedProcess[str]:
    """Run the program with these arguments."""
    return _python(["-m", "verl_rollout_skip.cli", *map(str, arguments)], cwd, environment)


def run_as_nobody(*arguments: Any, first: Sequence[Any] | None = None) -> subprocess.CompletedProcess[str]:
    """Run the program as the user nobody if the tests run as root, otherwise as the current user.

    ``first`` runs before with full permissions, so that everything is imported; by default, it is the same command.
    """
    before = [str(argument) for argument in (arguments if first is None else first)]
    return _python(["-c", _AS_NOBODY, *map(str, arguments)], ROOT, {"FIRST": json.dumps(before)})


def run_without_torch(*arguments: Any) -> subprocess.CompletedProcess[str]:
    """Run the program where torch, tensordict and verl cannot be imported."""
    return _python(["-c", _WITHOUT_TORCH, *map(str, arguments)], ROOT, {})


def run_json(*arguments: Any, code: int = 0) -> Any:
    """The output of ``--json``."""
    done = run(*arguments, "--json")
    assert done.returncode == code, done.stdout + done.stderr
    return json.loads(done.stdout)


def assert_one_line_error(done: subprocess.CompletedProcess[str], *words: str) -> None:
    """Check for exit code 2, no standard output, and one line on standard error with these words."""
    assert done.returncode == 2, done.stdout + done.stderr
    assert done.stdout == ""
    assert done.stderr.startswith("rollout-skip: error: "), done.stderr
    assert done.stderr.count("\n") == 1, done.stderr
    for word in words:
        assert word in done.stderr, done.stderr


def assert_fits(text: str, width: int = 80) -> None:
    """Check that no line is wider than 80 columns."""
    too_wide = [line for line in text.splitlines() if len(line) > width]
    assert not too_wide, too_wide


def _python(arguments: list[str], cwd: Path, environment: dict[str, str]) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, *arguments],
        capture_output=True,
        text=True,
        cwd=cwd,
        env={**os.environ, "PYTHONPATH": str(ROOT), **environment},
        timeout=200,
    )
