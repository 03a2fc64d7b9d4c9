"""``rollout-skip report`` on intact, damaged and missing recordings."""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

import pytest

from tests.arithmetic_run import make_training, record
from tests.entry_files import part_file, record_file
from tests.environment import ROOT
from tests.trainings import Training
from verl_rollout_skip import RolloutKey, RolloutStore
from verl_rollout_skip.cli import main
from verl_rollout_skip.report import Sampling, build_report, render_page


def data_of(page: Path) -> dict[str, Any]:
    """The data block of a page."""
    match = re.search(r'<script type="application/json" id="data">(.*?)</script>', page.read_text(), re.DOTALL)
    assert match
    found: dict[str, Any] = json.loads(match[1])
    return found


@pytest.fixture(scope="module")
def variant(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return record(*make_training(tmp_path_factory.mktemp("run")), range(1, 6), prompts=6)


@pytest.fixture
def copied(variant: Path, tmp_path: Path) -> Path:
    """A copy of the recording that a test may damage."""
    return Path(shutil.copytree(variant, tmp_path / "run" / variant.name))


def damage(variant: Path, step: int) -> None:
    file = part_file(variant, step)
    data = bytearray(file.read_bytes())
    data[len(data) // 2] ^= 1
    file.write_bytes(data)


def test_one_file_with_all_steps_is_written(variant: Path, tmp_path: Path) -> None:
    output = tmp_path / "report.html"
    command = [sys.executable, "-m", "verl_rollout_skip.cli", "report", str(variant), "-o", str(output)]
    done = subprocess.run(command, capture_output=True, text=True, cwd=ROOT, timeout=200)
    assert (done.returncode, done.stderr) == (0, "")
    assert "5 rollout steps, 60 of 120 responses with text" in done.stdout
    assert "Only the best and the worst response of each group are shown" in done.stdout
    found = data_of(output)
    assert [entry["step"] for entry in found["entries"]] == [1, 2, 3, 4, 5]
    assert found["head"]["run"] == variant.parent.name
    assert found["head"]["has_tokenizer"]
    assert found["head"]["left_out"] == ["Only the best and the worst response of each group are shown with text."]
    text = json.dumps(found)
    assert "boxed" in text
    assert "<|im_end|>" in text


def test_the_same_recording_gives_the_same_report(variant: Path) -> None:
    sampling = Sampling(seed=7, groups=2)
    first, again = (build_report(str(variant), sampling=sampling) for _ in range(2))
    other = build_report(str(variant), sampling=Sampling(seed=8, groups=2))
    assert first.entries == again.entries
    assert first.entries != other.entries


def test_the_report_says_what_it_omits(variant: Path, tmp_path: Path, capsys: Any) -> None:
    output = tmp_path / "report.html"
    options = ["--steps", "2-3", "--groups", "2", "--responses", "1", "--tokens", "12", "--json"]
    assert main(["report", str(variant), "-o", str(output), *options]) == 0
    printed = json.loads(capsys.readouterr().out)
    notes = data_of(output)["head"]["left_out"]
    assert printed["left_out"] == notes
    assert "3 of 5 recorded rollout steps are not selected." in notes
    assert "The charts and the table count all 48 responses. 4 of 12 groups are shown with text" in " ".join(notes)
    assert "Only the best response of each group is shown with text." in notes
    assert f"{printed['cut_texts']} texts with more than 12 tokens" in " ".join(notes)
    assert (printed["rows"], printed["groups"], printed["shown_groups"], printed["shown_responses"]) == (48, 12, 4, 4)
    assert printed["bytes"] == output.stat().st_size


def test_everything_is_shown_on_request(variant: Path) -> None:
    report = build_report(str(variant), sampling=Sampling(responses=100, tokens=100_000))
    assert report.left_out == []
    assert report.counted.shown_responses == report.counted.rows == 120


def test_a_broken_entry_is_shown_as_broken_with_exit_code_1(copied: Path, tmp_path: Path) -> None:
    damage(copied, 2)
    part_file(copied, 4).unlink()
    output = tmp_path / "report.html"
    command = [sys.executable, "-m", "verl_rollout_skip.cli", "report", str(copied), "-o", str(output)]
    done = subprocess.run(command, capture_output=True, text=True, cwd=ROOT, timeout=200)
    assert done.returncode == 1
    assert "Traceback" not in done.stderr + done.stdout
    assert "step 2, generation batch 0 is damaged" in done.stdout
    entries = {entry["step"]: entry for entry in data_of(output)["entries"]}
    assert "is damaged" in entries[2]["broken"]
    assert "is missing" in entries[4]["broken"]
    assert [step for step, entry in entries.items() if entry["broken"] is None] == [1, 3, 5]
    assert "2 of 5 rollout steps cannot be read" in " ".join(data_of(output)["head"]["left_out"])


def test_an_entry_of_a_later_version_is_broken_and_asks_for_an_upgrade(
    copied: Path, tmp_path: Path, capsys: Any
) -> None:
    file = record_file(copied, 3)
    file.write_text(file.read_text().replace('"format_version": 2', '"format_version": 99'))
    assert main(["report", str(copied), "-o", str(tmp_path / "r.html")]) == 1
    assert "Upgrade verl-rollout-skip" in capsys.readouterr().out


def test_a_bad_manifest_is_reported_and_the_rollouts_are_shown(copied: Path, tmp_path: Path, capsys: Any) -> None:
    manifest = copied / "manifest.json"
    manifest.write_text(manifest.read_text().replace("grpo", "gspo"))
    output = tmp_path / "r.html"
    assert main(["report", str(copied), "-o", str(output)]) == 0
    assert "edited or damaged" in capsys.readouterr().out
    assert "edited or damaged" in data_of(output)["head"]["problems"][0]
    assert len(data_of(output)["entries"]) == 5


def test_entries_without_read_permission_are_reported(variant: Path) -> None:
    """Runs as another user, because root can read everything."""
    with tempfile.TemporaryDirectory() as folder:
        Path(folder).chmod(0o755)
        copied = Path(shutil.copytree(variant, Path(folder, "variant")))
        part_file(copied, 2).chmod(0)
        record_file(copied, 4).chmod(0)
        script = (
            "import os, sys, json, tokenizers; from verl_rollout_skip.report import build_report\n"
            "if os.getuid() == 0: os.setgroups([]); os.setgid(65534); os.setuid(65534)\n"
            "report = build_report(sys.argv[1])\n"
            "print(json.dumps({key.step: error for key, error in report.broken}), len(report.entries))"
        )
        command = [sys.executable, "-c", script, str(copied)]
        done = subprocess.run(command, capture_output=True, text=True, cwd=ROOT, timeout=200)
    assert done.returncode == 0, done.stderr
    problems, _, entries = done.stdout.rpartition(" ")
    broken = json.loads(problems)
    assert (sorted(broken), int(entries)) == (["2", "4"], 5)
    assert all("Permission denied" in error for error in broken.values())


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["/does/not/exist"], "/does/not/exist does not exist"),
        (["{empty}"], "No recorded rollouts in"),
        (["{variant}", "--steps", "9-12"], "does not contain steps 9-12"),
        (["{variant}", "-o", "/does/not/exist/r.html"], "was not written to /does/not/exist/r.html"),
        (["{variant}", "-o", "{empty}"], "was not written to"),
        (["{variant}", "--tokenizer", "/nowhere"], "/nowhere is not a tokenizer folder"),
        (["{variant}", "--groups", "-1"], "groups is -1"),
        (["{variant}", "--seed", "-1"], "seed is -1"),
        (["nonsense://x"], "nonsense"),
    ],
)
def test_an_error_is_one_line_with_exit_code_2(
    variant: Path, tmp_path: Path, capsys: Any, arguments: list[str], words: str
) -> None:
    before = os.getcwd()
    empty = tmp_path / "empty"
    empty.mkdir()
    os.chdir(tmp_path)
    try:
        assert main(["report", *(text.format(variant=variant, empty=empty) for text in arguments)]) == 2
    finally:
        os.chdir(before)
    output = capsys.readouterr()
    assert output.out == ""
    assert output.err.startswith("rollout-skip: error: ")
    assert output.err.count("\n") == 1
    assert words in output.err
    assert sorted(path.name for path in tmp_path.iterdir()) == ["empty"], "nothing is left behind"


def test_several_variants_are_an_error(tmp_path: Path, capsys: Any) -> None:
    training = Training(tmp_path)
    training.record(RolloutKey(1))
    training.record(RolloutKey(1), actor_rollout_ref__rollout__temperature=0.7)
    assert main(["report", str(training.dumps), "-o", str(tmp_path / "r.html")]) == 2
    assert "contains 2 variants. Choose one" in capsys.readouterr().err
    [one, _] = training.variants()
    assert main(["report", str(one), "-o", str(tmp_path / "r.html")]) == 0


def test_without_a_tokenizer_token_ids_are_shown(tmp_path: Path) -> None:
    training = Training(tmp_path)
    training.record(RolloutKey(1))
    report = build_report(str(training.variants()[0]))
    assert not report.head["has_tokenizer"]
    shown = dict(report.head["facts"])["tokenizer"]
    assert shown.startswith(
        f"none, so token ids are shown: The tokenizer in {training.variants()[0]}/tokenizer cannot be"
    )
    tokens = RolloutStore(training.variants()[0]).get(RolloutKey(1)).batch["responses"]
    assert f'"{int(tokens[0, 0])}"' in report.entries[0]


def test_a_url_works_like_a_folder(tmp_path: Path) -> None:
    training, tokenizer = make_training(tmp_path)
    del tokenizer
    url = "memory://report/rollouts"
    training.record(RolloutKey(1), skip={"dump_dir": url})
    assert main(["report", url, "-o", str(tmp_path / "r.html")]) == 0
    found = data_of(tmp_path / "r.html")
    assert found["head"]["path"].startswith("memory://")
    assert found["head"]["has_tokenizer"]


def test_a_store_without_a_manifest_can_be_reported(tmp_path: Path) -> None:
    from tests.batches import rollout_input, rollout_output

    RolloutStore(tmp_path / "plain", background=False).put(RolloutKey(1), rollout_output(), inputs=rollout_input())
    page = render_page(build_report(str(tmp_path / "plain")))
    assert b"What is" in page


def test_it_works_without_verl(variant: Path, tmp_path: Path) -> None:
    script = (
        "import sys, importlib.util as u; real = u.find_spec\n"
        "sys.modules['verl'] = None; u.find_spec = lambda name, *a: None if name == 'verl' else real(name, *a)\n"
        "from verl_rollout_skip.cli import main; sys.exit(main(['report', sys.argv[1], '-o', sys.argv[2]]))"
    )
    command = [sys.executable, "-c", script, str(variant), str(tmp_path / "r.html")]
    done = subprocess.run(command, capture_output=True, text=True, cwd=ROOT, timeout=200)
    assert done.returncode == 0, done.stdout + done.stderr


def test_the_files_of_the_page_are_installed_with_the_package(tmp_path: Path) -> None:
    """The wheel contains them, not only this checkout."""
    source = tmp_path / "source"
    kept = shutil.ignore_patterns("__pycache__", "*.pyc")
    shutil.copytree(ROOT / "verl_rollout_skip", source / "verl_rollout_skip", ignore=kept)
    for name in ("setup.cfg", "setup.py", "pyproject.toml", "README.md", "LICENSE"):
        shutil.copy(ROOT / name, source / name)
    script = "import setuptools, sys; sys.argv = ['setup.py', '-q', 'build_py', '-d', sys.argv[1]]; setuptools.setup()"
    done = subprocess.run(
        [sys.executable, "-c", script, str(tmp_path / "built")], cwd=source, capture_output=True, text=True
    )
    assert done.returncode == 0, done.stderr
    built = {path.name for path in (tmp_path / "built" / "verl_rollout_skip" / "report" / "static").iterdir()}
    assert built == {path.name for path in (ROOT / "verl_rollout_skip" / "report" / "static").iterdir()}
