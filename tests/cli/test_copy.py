"""``rollout-skip copy``: exact copies despite interruptions, and nothing is overwritten."""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import fsspec
import pytest

from tests.batches import rollout_output
from tests.cli_program import ROOT, assert_one_line_error, run, run_as_nobody, run_without_torch
from tests.disks import Disk
from tests.entry_files import part_file, record_file
from tests.environment import leftovers
from tests.trainings import RUN_NAME, Engine, Training, contents, inputs_of, recorded_output
from verl_rollout_skip import RolloutKey, RolloutStore
from verl_rollout_skip.cli import main
from verl_rollout_skip.store.new_files import sealed_json

K1, K2 = RolloutKey(1), RolloutKey(2)


def copy(capsys: Any, source: Any, target: Any, *options: str, code: int = 0) -> list[dict[str, Any]]:
    assert main(["copy", str(source), str(target), *options, "--json"]) == code, capsys.readouterr().err
    return json.loads(capsys.readouterr().out)["variants"]


@pytest.fixture(scope="module")
def recorded(tmp_path_factory: pytest.TempPathFactory) -> Training:
    """Two variants with tokenizer, trainings and a pin."""
    training = Training(tmp_path_factory.mktemp("recorded"))
    training.record(K1, RolloutKey(1, 1), K2)
    training.record(K1, actor_rollout_ref__rollout__temperature=0.7)
    assert main(["pin", str(training.variants()[0]), "--steps", "1", "--note", "keep"]) == 0
    return training


@pytest.fixture
def many(tmp_path: Path) -> Path:
    with RolloutStore(tmp_path / "many") as store:
        for step in range(1, 61):
            store.put(RolloutKey(step), rollout_output(2, seed=step))
    return tmp_path / "many"


def test_a_copy_has_the_same_files_at_the_same_paths(recorded: Training, tmp_path: Path) -> None:
    done = run("copy", recorded.dumps, tmp_path / "copy")
    assert (done.returncode, done.stderr) == (0, "")
    assert contents(tmp_path / "copy") == contents(recorded.dumps)
    kinds = {path.split("/")[2] for path in contents(tmp_path / "copy")}
    assert {"manifest.json", "tokenizer", "trainings", "pins", "step_000001"} <= kinds
    assert main(["verify", str(tmp_path / "copy")]) == 0


def test_torch_is_not_imported(recorded: Training, tmp_path: Path) -> None:
    done = run_without_torch("copy", recorded.dumps, tmp_path / "copy")
    assert done.returncode == 0, done.stderr


def test_a_run_and_a_variant_can_be_copied_too(recorded: Training, tmp_path: Path, capsys: Any) -> None:
    copy(capsys, recorded.dumps / RUN_NAME, tmp_path / "run")
    assert contents(tmp_path / "run") == contents(recorded.dumps / RUN_NAME)
    [variant, _] = recorded.variants()
    for number, path in enumerate((variant, f"{variant}/", variant / "manifest.json")):
        copy(capsys, path, tmp_path / str(number))
        assert contents(tmp_path / str(number)) == contents(variant)


def test_a_training_replays_from_the_copy(recorded: Training, tmp_path: Path, capsys: Any) -> None:
    copy(capsys, recorded.dumps, tmp_path / "copy")
    with recorded.open("replay", {"dump_dir": str(tmp_path / "copy")}) as replay:
        found = replay.step(K1, inputs_of(K1), Engine())
    assert found.hit
    ours = recorded_output(K1, recorded).batch
    assert found.batch.batch["responses"].equal(ours.batch["responses"])


def test_only_some_steps(recorded: Training, tmp_path: Path, capsys: Any) -> None:
    variant = max(recorded.variants(), key=lambda path: len(list(path.glob("step_*"))))
    copy(capsys, variant, tmp_path / "a", "--steps", "2")
    copy(capsys, variant / "step_000002", tmp_path / "b")
    for name in "ab":
        assert RolloutStore(tmp_path / name).keys() == [K2]
        assert (tmp_path / name / "manifest.json").exists()


def test_copying_again_copies_only_new_entries(tmp_path: Path, capsys: Any) -> None:
    training = Training(tmp_path)
    training.record(K1)
    copy(capsys, training.dumps, tmp_path / "copy")
    training.record(K2)
    [variant] = copy(capsys, training.dumps, tmp_path / "copy")
    assert (variant["copied"], variant["present"]) == (1, 1)
    assert contents(tmp_path / "copy") == contents(training.dumps)


def test_copying_to_an_object_store_and_back(recorded: Training, tmp_path: Path, s3_options: Any, capsys: Any) -> None:
    fsspec.filesystem("s3", **s3_options).mkdir("copies")
    fsspec.config.conf["s3"] = s3_options
    try:
        copy(capsys, recorded.dumps, "s3://copies/dumps", "--read-back")
        assert main(["verify", "s3://copies/dumps"]) == 0
        capsys.readouterr()
        assert [variant["copied"] for variant in copy(capsys, recorded.dumps, "s3://copies/dumps")] == [0, 0]
        copy(capsys, "s3://copies/dumps", tmp_path / "back")
    finally:
        del fsspec.config.conf["s3"]
    assert contents(tmp_path / "back") == contents(recorded.dumps)


@pytest.mark.parametrize("how", [signal.SIGKILL, signal.SIGINT], ids=["killed", "interrupted"])
def test_an_interrupted_copy_has_only_complete_entries_and_continues(
    many: Path, tmp_path: Path, how: int, capsys: Any
) -> None:
    """The first process is killed as soon as some entries are copied. The next one completes the copy."""
    target = tmp_path / "copy"
    command = [sys.executable, "-m", "verl_rollout_skip.cli", "copy", str(many), str(target), "--jobs", "2"]
    process = subprocess.Popen(command, cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    deadline = time.monotonic() + 60
    while len(list(target.glob("step_*/gen_*.json"))) < 3:
        assert time.monotonic() < deadline
        time.sleep(0.005)
    process.send_signal(how)
    _, errors = process.communicate(timeout=60)
    there = len(RolloutStore(target))
    assert there >= 3
    if how == signal.SIGINT and there < 60:
        assert (process.returncode, errors) == (130, "rollout-skip: interrupted\n")
        assert leftovers(target) == []
    assert main(["verify", str(target)]) == 0
    capsys.readouterr()
    [variant] = copy(capsys, many, target)
    assert variant["copied"] + variant["present"] == 60
    assert main(["prune", str(target), "--leftovers", "--yes"]) == 0
    assert leftovers(target) == []
    assert contents(many).items() <= contents(target).items()
    there, expected = RolloutStore(target), RolloutStore(many)
    assert [there.record(key) for key in expected] == [expected.record(key) for key in expected]


def test_a_damaged_entry_is_skipped_and_the_others_are_copied(many: Path, tmp_path: Path, capsys: Any) -> None:
    data = part_file(many, 7)
    data.write_bytes(data.read_bytes()[:-1] + b"x")
    [variant] = copy(capsys, many, tmp_path / "copy", code=1)
    assert (variant["copied"], [problem["step"] for problem in variant["problems"]]) == (59, [7])
    assert variant["problems"][0]["outcome"] == "damaged"
    assert not (tmp_path / "copy" / "step_000007").exists()
    assert main(["verify", str(tmp_path / "copy")]) == 0


def test_a_different_rollout_at_the_destination_is_kept_and_reported(many: Path, tmp_path: Path) -> None:
    with RolloutStore(tmp_path / "copy") as store:
        store.put(K1, rollout_output(4, seed=77))
    kept = contents(tmp_path / "copy")
    done = run("copy", many, tmp_path / "copy", "--steps", "1-2")
    assert done.returncode == 1, done.stderr
    assert "conflict: step 1, generation batch 0 is already recorded with a different rollout" in done.stdout
    assert kept.items() <= contents(tmp_path / "copy").items()
    assert RolloutStore(tmp_path / "copy").keys() == [K1, K2]


def test_a_damaged_entry_at_the_destination_is_reported_and_kept(many: Path, tmp_path: Path, capsys: Any) -> None:
    copy(capsys, many, tmp_path / "copy", "--steps", "1")
    data = part_file(tmp_path / "copy")
    data.write_bytes(data.read_bytes()[:-10])
    [variant] = copy(capsys, many, tmp_path / "copy", "--steps", "1", code=1)
    assert variant["problems"][0]["error"].startswith("At the destination: ")


def test_read_back_checks_existing_entries_too(many: Path, tmp_path: Path, capsys: Any) -> None:
    """One byte is changed, while name, size and record stay valid."""
    copy(capsys, many, tmp_path / "copy", "--steps", "1-2")
    data = part_file(tmp_path / "copy")
    content = bytearray(data.read_bytes())
    content[len(content) // 2] ^= 1
    data.write_bytes(content)
    [variant] = copy(capsys, many, tmp_path / "copy", "--steps", "1-2")
    assert (variant["present"], variant["problems"]) == (2, [])
    [variant] = copy(capsys, many, tmp_path / "copy", "--steps", "1-2", "--read-back", code=1)
    assert (variant["present"], [problem["step"] for problem in variant["problems"]]) == (1, [1])
    assert variant["problems"][0]["error"].startswith("At the destination: The entry of step 1")
    assert data.read_bytes() == content, "nothing is overwritten"


def test_the_same_rollout_recorded_at_another_time_is_not_a_conflict(tmp_path: Path, capsys: Any) -> None:
    for name in ("a", "b"):
        batch = rollout_output(2)
        batch.meta_info["timing"] = {"generate": 1.0 if name == "a" else 2.0}
        with RolloutStore(tmp_path / name) as store:
            store.put(K1, batch)
    [variant] = copy(capsys, tmp_path / "a", tmp_path / "b")
    assert (variant["copied"], variant["present"]) == (0, 1)


def test_a_variant_with_other_settings_at_the_destination_is_refused(
    recorded: Training, tmp_path: Path, capsys: Any
) -> None:
    one, two = recorded.variants()
    copy(capsys, one, tmp_path / "copy")
    before = contents(tmp_path / "copy")
    done = run("copy", two, tmp_path / "copy")
    assert (done.returncode, done.stderr) == (1, "")
    assert "belongs to rollouts with different settings" in done.stdout
    assert contents(tmp_path / "copy") == before


@pytest.mark.parametrize("which", [0, 1])
def test_a_variant_with_a_bad_manifest_is_skipped_and_the_others_are_copied(
    recorded: Training, tmp_path: Path, capsys: Any, which: int
) -> None:
    shutil.copytree(recorded.dumps, tmp_path / "dumps")
    variants = sorted((tmp_path / "dumps" / RUN_NAME).iterdir())
    bad, good = variants[which], variants[1 - which]
    (bad / "manifest.json").write_text("{")
    found = {one["name"]: one for one in copy(capsys, tmp_path / "dumps", tmp_path / "copy", code=1)}
    [problem] = found[bad.name]["problems"]
    assert (problem["outcome"], problem["step"]) == ("manifest", None)
    assert "not a JSON object" in problem["error"]
    assert found[bad.name]["copied"] == 0
    assert found[bad.name]["not_copied"] == len(RolloutStore(bad))
    assert not (tmp_path / "copy" / RUN_NAME / bad.name).exists()
    assert contents(tmp_path / "copy" / RUN_NAME / good.name) == contents(good)


def test_a_copied_record_keeps_unknown_fields(tmp_path: Path, capsys: Any) -> None:
    """Later versions may add fields to a record without a new format version."""
    with RolloutStore(tmp_path / "a") as store:
        store.put(K1, rollout_output(2))
    path = record_file(tmp_path / "a")
    fields = json.loads(path.read_text())
    del fields["checksum"]
    path.write_bytes(sealed_json({**fields, "colour": "blue"}))
    copy(capsys, tmp_path / "a", tmp_path / "b")
    assert contents(tmp_path / "b") == contents(tmp_path / "a")


def test_too_little_disk_space_is_an_error_before_anything_is_copied(
    many: Path, small_disk: Callable[..., Disk], monkeypatch: Any, capsys: Any
) -> None:
    disk = small_disk(256 << 10)
    monkeypatch.setattr("verl_rollout_skip.cli.commands.copy.free_bytes", lambda path: disk.free())
    assert main(["copy", str(many), str(disk.path / "copy")]) == 2
    assert "is free in" in capsys.readouterr().err
    assert not (disk.path / "copy").exists()


def test_a_disk_that_fills_up_during_a_copy_leaves_only_complete_entries(
    many: Path, small_disk: Callable[..., Disk], monkeypatch: Any, capsys: Any
) -> None:
    disk = small_disk(256 << 10)
    monkeypatch.setattr("verl_rollout_skip.cli.commands.copy.free_bytes", lambda path: 1 << 40)
    assert main(["copy", str(many), str(disk.path / "copy"), "--jobs", "1"]) == 2
    error = capsys.readouterr().err
    assert "No space left on device" in error
    assert "Run the same command again to continue" in error
    store = RolloutStore(disk.path / "copy")
    assert 0 < len(store) < 60
    for key in store:
        store.verify(key)


@pytest.fixture
def visible() -> Iterator[Path]:
    """A folder that every user can read. Only one user can read pytest's temporary folders."""
    with tempfile.TemporaryDirectory() as folder:
        os.chmod(folder, 0o755)
        yield Path(folder)


def test_bad_input_is_a_one_line_error_with_exit_code_2(many: Path, tmp_path: Path, visible: Path) -> None:
    cases: list[tuple[list[Any], str]] = [
        (["/does/not/exist", tmp_path / "x"], "/does/not/exist does not exist."),
        ([many, many / "inside"], "contains the other. Choose"),
        ([many, many], "contains the other. Choose"),
        ([many, many.parent], "contains the other. Choose"),
        ([many, tmp_path / "x", "--jobs", "0"], "--jobs is 0"),
        ([many, "nonsense://x"], "nonsense"),
    ]
    for arguments, words in cases:
        assert main(["copy", *map(str, arguments)]) == 2, words
    assert_one_line_error(run("copy", *cases[1][0]), cases[1][1])
    with RolloutStore(visible / "a") as store:
        store.put(K1, rollout_output(2))
    visible.chmod(0o555)
    done = run_as_nobody("copy", visible / "a", visible / "b", first=["copy", many, tmp_path / "first"])
    visible.chmod(0o755)
    assert_one_line_error(done, "Permission denied")


def test_training_columns_of_the_selected_steps_are_copied_with_them(many: Path, tmp_path: Path, capsys: Any) -> None:
    with RolloutStore(many / "columns" / "a") as store:
        for step in (1, 2, 3):
            store.put(RolloutKey(step), rollout_output(2, seed=step))
    [copied] = copy(capsys, many, tmp_path / "some", "--steps", "2-3")
    assert (copied["copied"], copied["columns"]) == (2, 2)
    assert not (tmp_path / "some" / "columns" / "a" / "step_000001").exists()
    [copied] = copy(capsys, many, tmp_path / "all", "--read-back")
    assert (copied["copied"], copied["columns"]) == (60, 3)
    assert contents(tmp_path / "all") == contents(many)
    record_file(many / "columns" / "a", 1).write_text("{}")
    [copied] = copy(capsys, many, tmp_path / "other", "--steps", "1", code=1)
    assert [problem["outcome"] for problem in copied["problems"]] == ["damaged"]
