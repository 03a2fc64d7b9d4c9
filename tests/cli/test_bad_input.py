"""Runs every command on common bad input, each in its own process.

A missing path, a damaged entry, a recording of a newer version, an unreadable folder: each is one clear line with the
exit code of docs/cli.md, never a traceback.
"""

from __future__ import annotations

import shutil
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from subprocess import CompletedProcess
from typing import Any

import pytest
from tokenizers import Tokenizer, models

from tests.cli_program import assert_one_line_error, run, run_as_nobody
from tests.entry_files import part_file, record_file
from tests.trainings import Training
from verl_rollout_skip import RolloutKey
from verl_rollout_skip.cli.program import COMMANDS

ARGUMENTS = {
    "ls": ["{path}"],
    "show": ["{path}"],
    "stats": ["{path}"],
    "report": ["{path}", "-o", "{out}/report.html"],
    "view": ["{path}", "--no-browser"],
    "diff": ["{path}", "{path}"],
    "audit": ["{path}"],
    "mismatch": ["{path}"],
    "verify": ["{path}"],
    "resume": ["{path}", "--dry-run"],
    "export": ["{path}", "-o", "{out}/texts"],
    "copy": ["{path}", "{out}/copy"],
    "import": ["{path}", "{out}/imported", "--trust-pickle"],
    "prune": ["{path}", "--keep-last", "0"],
    "pin": ["{path}", "--steps", "1"],
    "unpin": ["{path}", "--steps", "1"],
    "pins": ["{path}"],
}
# Exit codes for a broken or newer entry: commands that read only this entry fail, the others report it and continue.
BROKEN_ENTRY = {"ls": 0, "show": 2, "stats": 1, "report": 1, "diff": 2, "verify": 1, "export": 2, "copy": 1}
NEWER_MANIFEST = {"ls": 0, "verify": 1, "resume": 2, "copy": 1}


def test_every_command_is_covered() -> None:
    assert {*ARGUMENTS, "completion"} == set(COMMANDS)


@pytest.fixture(scope="module")
def variants(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """Copies of a variant, damaged in different ways."""
    folder = tmp_path_factory.mktemp("variants")
    training = Training(folder)
    words = Tokenizer(models.WordLevel({f"w{token}": token for token in range(50_000)}, unk_token="w0"))
    (folder / "inputs" / "model" / "tokenizer.json").write_text(words.to_str())
    training.record(RolloutKey(1))
    [variant] = training.variants()
    made = {}
    for name in ("broken", "newer", "newer manifest", "damaged manifest"):
        made[name] = Path(shutil.copytree(variant, folder / name.replace(" ", "_")))
    data = part_file(made["broken"])
    data.write_bytes(data.read_bytes()[:-10])
    make_newer(record_file(made["newer"]))
    make_newer(made["newer manifest"] / "manifest.json")
    (made["damaged manifest"] / "manifest.json").write_text("{")
    made["closed"] = folder / "closed"
    made["closed"].mkdir(mode=0)
    return {**made, "whole": variant, "missing": folder / "missing"}


def make_newer(path: Path) -> None:
    text = path.read_text()
    path.write_text(text.replace('"format_version": 2', '"format_version": 3'))
    assert path.read_text() != text


def arguments(command: str, path: Path, out: Path) -> list[str]:
    return [command, *(word.format(path=path, out=out) for word in ARGUMENTS[command])]


def assert_finding(done: CompletedProcess[str], code: int, *words: str) -> None:
    """Check for a one-line error, or a result that names the problem."""
    if code == 2:
        assert_one_line_error(done, *words)
        return
    assert (done.returncode, done.stderr) == (code, ""), done.stdout + done.stderr
    for word in words:
        assert word in done.stdout


@pytest.mark.parametrize("command", list(ARGUMENTS))
def test_each_command_reports_bad_input_in_one_line(variants: dict[str, Path], tmp_path: Path, command: str) -> None:
    def tried(kind: str) -> CompletedProcess[str]:
        out = tmp_path / kind
        out.mkdir()
        given = arguments(command, variants[kind], out)
        return run_as_nobody(*given) if kind == "closed" else run(*given)

    with ThreadPoolExecutor(2) as pool:
        wanted = ["missing", "closed"]
        wanted += ["broken", "newer"] if command in BROKEN_ENTRY else []
        wanted += ["newer manifest"] if command in NEWER_MANIFEST else []
        found = dict(zip(wanted, pool.map(tried, wanted), strict=True))
    missing = "There is no manifest.json in" if command == "resume" else "does not exist."
    assert_one_line_error(found["missing"], missing, str(variants["missing"]))
    assert_one_line_error(found["closed"], "Permission denied", str(variants["closed"]))
    if command in BROKEN_ENTRY:
        assert_finding(found["broken"], BROKEN_ENTRY[command], "step 1, generation batch 0 is damaged")
        assert_finding(found["newer"], BROKEN_ENTRY[command], "Upgrade verl-rollout-skip")
    if command in NEWER_MANIFEST:
        assert_finding(found["newer manifest"], NEWER_MANIFEST[command], "format version 3", "Upgrade")


@pytest.mark.parametrize(
    ("kind", "given", "words"),
    [
        ("damaged manifest", [], ["is damaged: not a JSON object"]),
        ("whole", ["trainer.total_training_steps"], ["'trainer.total_training_steps' is not a setting; use key=value"]),
        ("whole", ["a=[1"], ["'a=[1' cannot be parsed"]),
    ],
    ids=["damaged manifest", "no sign", "no value"],
)
def test_resume_explains_what_it_cannot_continue(
    variants: dict[str, Path], kind: str, given: list[str], words: list[str]
) -> None:
    assert_one_line_error(run("resume", variants[kind], *given, "--dry-run"), *words)


@pytest.mark.parametrize("path", ["manifest.json", "./manifest.json", "."])
def test_resume_dry_run_accepts_a_path_in_the_current_directory(variants: dict[str, Path], path: str) -> None:
    done = run("resume", path, "--dry-run", cwd=variants["whole"])
    assert done.returncode == 0, done.stderr
    assert f"{variants['whole']}/manifest.json: " in done.stdout
    assert "nothing was run (--dry-run)" in done.stdout
    assert "rollout steps:" not in done.stdout + done.stderr, "no training has ended"


@pytest.mark.parametrize("path", ["manifest.json", "step_000001", "step_000001/gen_000.json", "."])
def test_other_commands_accept_a_path_in_the_current_directory(
    variants: dict[str, Path], path: str, monkeypatch: Any, capsys: Any
) -> None:
    from verl_rollout_skip.cli import main

    monkeypatch.chdir(variants["whole"])
    assert main(["ls", path]) == 0, capsys.readouterr().err
    assert "generated in" in capsys.readouterr().out


def test_import_names_an_unreadable_dump(tmp_path: Path) -> None:
    (tmp_path / "x_GBS1__N1").write_bytes(b"\x80\x04garbage")
    done = run("import", tmp_path / "x_GBS1__N1", tmp_path / "imported", "--trust-pickle")
    assert_finding(done, 1, str(tmp_path / "x_GBS1__N1"))


def test_completion_rejects_an_unknown_shell() -> None:
    done = run("completion", "tcsh")
    assert_one_line_error(done, "tcsh")
