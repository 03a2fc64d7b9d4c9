"""``rollout-skip completion``: the Tab key in real shells. Those that are not installed are left out."""

from __future__ import annotations

import os
import pty
import select
import shutil
import subprocess
import time
from pathlib import Path

import pytest

from tests.cli_program import assert_one_line_error, run, run_json, run_without_torch
from verl_rollout_skip.cli.command import make_parser
from verl_rollout_skip.cli.commands import COMMANDS
from verl_rollout_skip.cli.completion import subparsers_of

SHELLS = ("bash", "fish", "zsh")


@pytest.fixture(scope="module")
def scripts(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    folder = tmp_path_factory.mktemp("completion")
    made = {}
    for shell in SHELLS:
        made[shell] = folder / f"completion.{shell}"
        made[shell].write_text(run("completion", shell).stdout)
    return made


def needs(shell: str) -> str:
    found = shutil.which(shell)
    if found is None:
        pytest.skip(f"{shell} is not installed")
    return found


def bash(script: Path, words: list[str], cwd: Path) -> list[str]:
    """What bash offers for the last word."""
    listed = " ".join(f"'{word}'" for word in words)
    program = (
        f"source {script}; COMP_WORDS=({listed}); COMP_CWORD={len(words) - 1}; _rollout_skip; "
        'printf "%s\\n" "${COMPREPLY[@]}"'
    )
    done = subprocess.run([needs("bash"), "--norc", "-c", program], capture_output=True, text=True, cwd=cwd)
    assert (done.returncode, done.stderr) == (0, "")
    return sorted(word for word in done.stdout.splitlines() if word)


def fish(script: Path, line: str, cwd: Path) -> list[str]:
    program = f"source {script}; complete -C '{line}'"
    done = subprocess.run([needs("fish"), "--no-config", "-c", program], capture_output=True, text=True, cwd=cwd)
    assert (done.returncode, done.stderr) == (0, "")
    return sorted(offered.split("\t")[0] for offered in done.stdout.splitlines())


def zsh(script: Path, typed: str, cwd: Path) -> str:
    """What stands on the line after Tab, in an interactive zsh on a terminal of its own."""
    shell = needs("zsh")
    pid, terminal = pty.fork()
    if pid == 0:
        os.chdir(cwd)
        os.execve(shell, [shell, "-f", "-i"], {**os.environ, "TERM": "dumb", "PS1": "ready> "})
    try:
        _type(terminal, f"autoload -Uz compinit; compinit -u -D; source {script}; unsetopt zle_bracketed_paste\n", 3)
        _type(terminal, "print loa''ded\n", 2, until="loaded")
        return _type(terminal, f"{typed}\t", 2)
    finally:
        os.close(terminal)
        os.waitpid(pid, 0)


def _type(terminal: int, text: str, quiet_s: float, until: str | None = None) -> str:
    """Type something and return what the terminal shows until it has been quiet for a while."""
    os.write(terminal, text.encode())
    shown, deadline = b"", time.monotonic() + 30
    while time.monotonic() < deadline:
        if not select.select([terminal], [], [], quiet_s)[0] and (until is None or until.encode() in shown):
            break
        if select.select([terminal], [], [], 0)[0]:
            shown += os.read(terminal, 4096)
    return shown.decode(errors="replace")


@pytest.mark.parametrize("shell", SHELLS)
def test_the_script_is_valid(shell: str, scripts: dict[str, Path]) -> None:
    done = subprocess.run([needs(shell), "-n", str(scripts[shell])], capture_output=True, text=True)
    assert (done.returncode, done.stderr) == (0, "")


@pytest.mark.parametrize("shell", SHELLS)
def test_every_command_and_every_option_is_in_it(shell: str, scripts: dict[str, Path]) -> None:
    script = scripts[shell].read_text()
    parsers = subparsers_of(make_parser())
    assert set(parsers) == {command.name for command in COMMANDS}
    for name, parser in parsers.items():
        assert name in script
        for action in parser._actions:
            for option in action.option_strings:
                assert option in script or f"-l {option[2:]}" in script or f"-s {option[1:]}" in script, (name, option)


@pytest.mark.parametrize(
    ("words", "offered"),
    [
        (["rollout-skip", "st"], ["stats"]),
        (["rollout-skip", "pi"], ["pin", "pins"]),
        (["rollout-skip", "stats", "--st"], ["--steps"]),
        (["rollout-skip", "export", "x", "--format", ""], ["dataset", "jsonl", "parquet"]),
        (["rollout-skip", "prune", "--max-size", ""], []),
        (["rollout-skip", "completion", ""], ["bash", "fish", "zsh"]),
        (["rollout-skip", "ls", "du"], ["dumps", "dumps of mine"]),
        (["rollout-skip", "show", "x", "--tokenizer", "dumps o"], ["dumps of mine"]),
    ],
)
def test_bash_offers_what_fits(words: list[str], offered: list[str], scripts: dict[str, Path], tmp_path: Path) -> None:
    for name in ("dumps", "dumps of mine", "other"):
        (tmp_path / name).mkdir()
    assert bash(scripts["bash"], words, tmp_path) == offered


def test_fish_offers_what_fits(scripts: dict[str, Path], tmp_path: Path) -> None:
    (tmp_path / "dumps").mkdir()
    assert fish(scripts["fish"], "rollout-skip st", tmp_path) == ["stats"]
    assert fish(scripts["fish"], "rollout-skip export x --format ", tmp_path) == ["dataset", "jsonl", "parquet"]
    assert "--steps" in fish(scripts["fish"], "rollout-skip stats --", tmp_path)
    assert fish(scripts["fish"], "rollout-skip ls du", tmp_path) == ["dumps/"]


def test_zsh_completes_commands_options_and_paths(scripts: dict[str, Path], tmp_path: Path) -> None:
    (tmp_path / "dumps").mkdir()
    assert "rollout-skip stats " in zsh(scripts["zsh"], "rollout-skip sta", tmp_path)
    assert "--older-than" in zsh(scripts["zsh"], "rollout-skip prune --old", tmp_path)
    assert "dumps/" in zsh(scripts["zsh"], "rollout-skip ls du", tmp_path)


def test_it_needs_no_torch() -> None:
    done = run_without_torch("completion", "bash")
    assert done.returncode == 0, done.stderr


def test_json_and_errors() -> None:
    assert run_json("completion", "fish")["script"].startswith("complete -c rollout-skip")
    done = run("completion", "tcsh")
    assert done.returncode == 2
    assert "invalid choice: 'tcsh'" in done.stderr
    assert_one_line_error(run("ls", "/does/not/exist"), "does not exist")
