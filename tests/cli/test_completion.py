"""``rollout-skip completion``: completions as Click's scripts request them, and in a real bash."""

from __future__ import annotations

import os
import pty
import select
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tests.cli_program import ROOT, assert_one_line_error, run, run_json, run_without_torch
from verl_rollout_skip.cli import main
from verl_rollout_skip.cli.program import COMMANDS, load_command

SHELLS = ("bash", "fish", "zsh")


@pytest.fixture
def offered(monkeypatch: Any, capsys: Any) -> Callable[[str, list[str]], list[str]]:
    """The completions of the last word, or ``<file>`` if the shell completes a path."""

    def ask(shell: str, words: list[str]) -> list[str]:
        monkeypatch.setenv("_ROLLOUT_SKIP_COMPLETE", f"{shell}_complete")
        monkeypatch.setenv("COMP_WORDS", " ".join(words))
        monkeypatch.setenv("COMP_CWORD", words[-1] if shell == "fish" else str(len(words) - 1))
        assert main([]) == 0
        lines = capsys.readouterr().out.strip().splitlines()
        if shell == "zsh":  # three lines per completion: kind, word, help
            pairs = list(zip(lines[::3], lines[1::3], strict=True))
        else:
            pairs = [tuple(line.split("\t")[0].split(",", 1)) for line in lines]
        return sorted("<file>" if kind == "file" else word for kind, word in pairs)

    return ask


@pytest.mark.parametrize(
    ("words", "fitting"),
    [
        (["rollout-skip", "st"], ["stats"]),
        (["rollout-skip", "pi"], ["pin", "pins"]),
        (["rollout-skip", "stats", "--st"], ["--steps"]),
        (["rollout-skip", "export", "x", "--format", ""], ["dataset", "jsonl", "parquet"]),
        (["rollout-skip", "prune", "--max-size", ""], []),
        (["rollout-skip", "completion", ""], ["bash", "fish", "zsh"]),
        (["rollout-skip", "ls", "du"], ["<file>"]),
        (["rollout-skip", "show", "x", "--tokenizer", "du"], ["<file>"]),
    ],
    ids=lambda words: " ".join(words),
)
@pytest.mark.parametrize("shell", SHELLS)
def test_completion_offers_matching_commands_options_and_paths(
    shell: str, words: list[str], fitting: list[str], offered: Any
) -> None:
    assert offered(shell, words) == fitting


def test_completing_a_command_does_not_import_it() -> None:
    """Every press of the Tab key starts the program, so it must be fast."""
    script = (
        "import sys; from verl_rollout_skip.cli import main; assert main([]) == 0\n"
        "assert not {'torch', 'numpy', 'pyarrow', 'rich'} & set(sys.modules)"
    )
    asked = {"_ROLLOUT_SKIP_COMPLETE": "bash_complete", "COMP_WORDS": "rollout-skip ", "COMP_CWORD": "1"}
    done = subprocess.run(
        [sys.executable, "-c", script], capture_output=True, text=True, cwd=ROOT, env={**os.environ, **asked}
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout.splitlines() == [f"plain,{name}" for name in COMMANDS]


@pytest.mark.parametrize("name", COMMANDS)
def test_every_path_argument_is_completed_as_a_path(name: str) -> None:
    """Arguments and options that are paths in the help are completed as paths."""
    paths = {"PATH", "A", "B", "SRC", "DST", "DIR", "FILE", "OUT", "MANIFEST"}
    for parameter in load_command(name).params:
        assert ((parameter.metavar or "").strip("[]") in paths) == (parameter.type.name == "path"), parameter.name


def test_bash_completes_commands_options_and_paths(tmp_path: Path) -> None:
    """Runs an interactive bash in a pseudo-terminal, set up as docs/cli.md says."""
    (tmp_path / "dumps of mine").mkdir()
    program = tmp_path / "bin" / "rollout-skip"
    program.parent.mkdir()
    program.write_text(f'#!/bin/sh\nPYTHONPATH={ROOT} exec {sys.executable} -m verl_rollout_skip.cli "$@"\n')
    program.chmod(0o755)
    pid, terminal = pty.fork()
    if pid == 0:
        os.chdir(tmp_path)
        path = f"{program.parent}:{os.environ['PATH']}"
        os.execvpe("bash", ["bash", "--norc", "-i"], {**os.environ, "PATH": path, "TERM": "dumb", "PS1": "> "})
    try:
        type_in(terminal, 'eval "$(rollout-skip completion bash)"; echo rea""dy\n', "ready")
        type_in(terminal, "rollout-skip sta\t", "rollout-skip stats ")
        type_in(terminal, "du\t", "dumps\\ of\\ mine/")
        type_in(terminal, " --st\t", "--steps ")
    finally:
        os.close(terminal)
        os.waitpid(pid, 0)


def type_in(terminal: int, text: str, expected: str) -> None:
    """Type text and wait until the terminal shows the expected output."""
    os.write(terminal, text.encode())
    shown, deadline = "", time.monotonic() + 60
    while expected not in shown and time.monotonic() < deadline:
        if select.select([terminal], [], [], 1)[0]:
            shown += os.read(terminal, 4096).decode(errors="replace")
    assert expected in shown


def test_torch_is_not_imported() -> None:
    done = run_without_torch("completion", "bash")
    assert done.returncode == 0, done.stderr
    assert "_ROLLOUT_SKIP_COMPLETE=bash_complete" in done.stdout


def test_json_and_errors() -> None:
    assert "complete --no-files --command rollout-skip" in run_json("completion", "fish")["script"]
    assert_one_line_error(run("completion", "tcsh"), "'tcsh' is not one of 'bash', 'fish', 'zsh'.")
