"""Runs every example in docs/cli.md, docs/audit.md and in ``--help``.

The ``console`` blocks of these documents, including the reference with the ``--help`` of each command, run in order
on a test recording and must print what the document shows. Names, digests, sizes, dates and times may differ.
Set ``UPDATE_DOCS=1`` to update the documents.
"""

from __future__ import annotations

import os
import pty
import re
import shlex
import shutil
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import fsspec
import pytest
from omegaconf import OmegaConf

from tests.arithmetic_run import SAMPLES, conversation, encode, make_training
from tests.cli_program import ROOT, assert_fits, run
from tests.training_columns import add_columns
from tests.trainings import Training
from tests.written_ledgers import RECORDING, write, write_examples
from verl_rollout_skip import RolloutKey
from verl_rollout_skip.cli import main
from verl_rollout_skip.cli.command import Command
from verl_rollout_skip.cli.program import COMMANDS, EXIT_CODES, load_command

DOCUMENT = ROOT / "docs" / "cli.md"
DOCUMENTS = (DOCUMENT, ROOT / "docs" / "audit.md", ROOT / "docs" / "mismatch.md")
BLOCK = re.compile(r"^```console\n(?P<session>.*?)^```$", re.DOTALL | re.MULTILINE)
NAMES = ("0123456789ab", "ba9876543210")
ELSEWHERE = {"view": "is a server", "resume": "starts a training; has its own tests"}


def record(training: Training, tokenizer: Any, steps: range, temperature: float, seed: int) -> Path:
    before = set(training.dumps.glob("*/*"))
    changes = {"actor_rollout_ref__rollout__n": SAMPLES, "actor_rollout_ref__rollout__temperature": temperature}
    with training.open("record", data__max_response_length=160, **changes) as skip:
        for step in steps:
            inputs, _, _ = conversation(step, 2, seed=step)
            _, texts, scores = conversation(step + seed, 2, seed=step)
            output = encode(tokenizer, inputs, texts, scores)
            skip.step(RolloutKey(step), inputs, lambda _, output=output: output)
    [made] = set(training.dumps.glob("*/*")) - before
    return made


@pytest.fixture(scope="module")
def recorded(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, str, str]:
    """The recording for the document, and the real names of its two variants."""
    folder = tmp_path_factory.mktemp("recorded")
    training, tokenizer = make_training(folder)
    first = record(training, tokenizer, range(1, 4), 1.0, seed=0)
    time.sleep(1.1)  # variants are sorted by age in whole seconds
    second = record(training, tokenizer, range(1, 2), 0.7, seed=40)
    write_examples(first, range(1, 4))
    write(second, RECORDING, range(1, 2))
    add_columns(first)
    shutil.copytree(ROOT / "tests" / "upstream_dumps" / "verl-0.8.0", folder / "verl_dumps")
    OmegaConf.save(training.config("off"), folder / "config.yaml")
    return folder, first.name, second.name


@pytest.fixture
def data(recorded: tuple[Path, str, str], tmp_path: Path) -> dict[str, str]:
    """The names in the document, mapped to those of a copy of the recording."""
    folder, first, second = recorded
    shutil.copytree(folder, tmp_path, dirs_exist_ok=True)
    return {NAMES[0]: first, NAMES[1]: second, "/data": str(tmp_path)}


class Session:
    """Runs the commands of the document: ``rollout-skip`` in this process, everything else in a shell."""

    def __init__(self, data: dict[str, str], capsys: Any) -> None:
        self._data, self._capsys, self._code = data, capsys, 0

    def run(self, command: str) -> str:
        """The output of a command, with the names that the document uses."""
        for shown, real in self._data.items():
            command = command.replace(shown, real)
        self._capsys.readouterr()
        if command == "echo $?":
            return f"{self._code}\n"
        if command.startswith("rollout-skip "):
            self._code = main(shlex.split(command)[1:])
            printed = self._capsys.readouterr()
            output = printed.out + printed.err
        else:
            done = subprocess.run(command, shell=True, capture_output=True, text=True)
            self._code, output = done.returncode, done.stdout + done.stderr
        for shown, real in self._data.items():
            output = output.replace(real, shown)
        return output


def played(text: str, session: Session) -> str:
    """The document with the current output of its commands."""

    def play(block: re.Match[str]) -> str:
        commands = [line for line in block["session"].splitlines() if line.startswith("$ ")]
        outputs = [session.run(command.removeprefix("$ ")) for command in commands]
        shown = "".join(f"{command}\n{output}" for command, output in zip(commands, outputs, strict=True))
        return f"```console\n{shown.rstrip()}\n```"

    return BLOCK.sub(play, text)


def comparable(text: str) -> list[str]:
    for pattern, word in (
        (r"\b\d{8}T\d{6}\.\d{3}Z-[0-9a-f]{8}\b", "<training>"),
        (r"\b[0-9a-f]{16,}\b", "<digest>"),
        (r'"\d{8}T\d{6}\.\d{3}Z-[0-9a-f]{8}"', "<training>"),
        (r"\d{4}-\d\d-\d\d(?:[T ][\d:+]*\d)?", "<date>"),
        (r"\d+(?:\.\d+)? [KMG]?B\b", "<size>"),
        (r"\d+(?:\.\d+)? ?s\b", "<time>"),
        (r"\b0\.0\d{3,}\b|\b\d+ bytes", "<number>"),
        (r'(\b(?:bytes|encode_s|generate_s)"?:?) +[\d.e-]+', r"\1 <number>"),
        (r"(with digest|says) \S+", r"\1 <…>"),
    ):
        text = re.sub(pattern, word, text)
    return [" ".join(line.split()) for line in text.splitlines()]


@pytest.mark.parametrize("document", DOCUMENTS, ids=lambda path: path.name)
def test_the_examples_in_a_document_print_what_it_shows(document: Path, data: dict[str, str], capsys: Any) -> None:
    text = document.read_text(encoding="utf-8")
    now = played(text, Session(data, capsys))
    if os.environ.get("UPDATE_DOCS"):
        document.write_text(now, encoding="utf-8")
    else:
        assert comparable(now) == comparable(text)


def test_cli_md_documents_every_command_and_exit_code() -> None:
    text = DOCUMENT.read_text(encoding="utf-8")
    for name in COMMANDS:
        assert f"\n### {name}\n\n```console\n$ rollout-skip {name} --help\n" in text
    for code, meaning in EXIT_CODES.items():
        assert f"\n| {code} | {meaning} |\n" in text


def examples() -> Iterator[tuple[str, str]]:
    for name in COMMANDS:
        command = load_command(name)
        assert isinstance(command, Command)
        found = [line for line in command.examples.splitlines() if line.startswith("rollout-skip ")]
        assert found, f"--help of {name} has no example"
        if name not in ELSEWHERE:
            yield from ((name, line) for line in found)


@pytest.mark.parametrize(("name", "example"), list(examples()), ids=lambda value: value)
def test_the_examples_in_help_work(
    name: str, example: str, data: dict[str, str], capsys: Any, monkeypatch: Any
) -> None:
    folder = Path(data["/data"])
    monkeypatch.chdir(folder)
    run_folder = next((folder / "dumps").iterdir()).name
    words = {
        "/RUN/VARIANT": f"/RUN/{data[NAMES[0]]}",
        "/RUN/OTHER": f"/RUN/{data[NAMES[1]]}",
        "/RUN": f"/{run_folder}",
        "/data/": f"{folder}/",
        "/backup/": f"{folder}/backup/",
        "s3://": "memory://",
    }
    command = example
    for word, real in words.items():
        command = command.replace(word, real)
    assert main([name, *shlex.split(command)[2:]]) in (0, 1), capsys.readouterr().err
    fsspec.filesystem("memory").store.clear()


def test_help_shows_exit_codes_and_fits_80_columns(capsys: Any) -> None:
    for arguments in ([], *([name] for name in COMMANDS)):
        assert main([*arguments, "--help"]) == 0
        shown = capsys.readouterr().out
        assert_fits(shown)
        assert not re.search(r"--\w+-$", shown, re.MULTILINE), "the name of an option is not split"
        if not arguments:
            assert "Exit codes:" in shown
            for name in COMMANDS:
                assert re.search(rf"^  {name}\s", shown, re.MULTILINE)


def on_a_terminal(*arguments: str, **environment: str) -> str:
    """The output of the program in a pseudo-terminal."""
    leader, terminal = pty.openpty()
    with open(leader, "rb", buffering=0) as shown, open(terminal, "wb") as end:
        command = [sys.executable, "-m", "verl_rollout_skip.cli", *arguments]
        subprocess.run(command, stdout=end, cwd=ROOT, env={**os.environ, "TERM": "xterm", **environment}, check=True)
        return shown.read(100_000).decode()


def test_help_is_colored_only_on_a_terminal() -> None:
    assert "\x1b[1mUsage: \x1b[0m" in on_a_terminal("--help")
    assert "\x1b" not in on_a_terminal("--help", NO_COLOR="1")
    assert "\x1b" not in run("--help").stdout
