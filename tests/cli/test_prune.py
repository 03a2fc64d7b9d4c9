"""``rollout-skip prune``, ``pin``, ``unpin`` and ``pins``: what is deleted and kept, and nothing without ``--yes``."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from tests.batches import assert_same_batch, rollout_output
from tests.cli_program import ROOT, assert_fits, assert_one_line_error, run, run_as_nobody, run_without_torch
from tests.entry_files import part_file, record_file
from tests.store.test_old_format import make_old as make_format_1
from tests.trainings import Training, contents
from verl_rollout_skip import RolloutKey, RolloutStore
from verl_rollout_skip.cli import main
from verl_rollout_skip.config.skip_config import Steps
from verl_rollout_skip.runs import checked_json
from verl_rollout_skip.runs.columns import columns_folder
from verl_rollout_skip.runs.paths import PARTIAL
from verl_rollout_skip.runs.pins import add_pin, is_pinned, read_pins
from verl_rollout_skip.store import codec, commit
from verl_rollout_skip.store.record import record_bytes
from verl_rollout_skip.store.storage.locations import open_storage
from verl_rollout_skip.tools.prune import Conditions, Plan, UnusedFile, execute, inspect_variant, make_plans

DAY = 86400.0


def recording(folder: Path, *steps: int, batches: int = 1) -> Path:
    with RolloutStore(folder) as store:
        for step in steps:
            for gen_batch in range(batches):
                store.put(RolloutKey(step, gen_batch), rollout_output(2, seed=step))
    return folder


def make_old(folder: Path, step: int, days: float) -> None:
    """Change the records so that a step appears to be some days old."""
    store = RolloutStore(folder)
    for key in store:
        if key.step == step:
            when = time.strftime("%Y-%m-%dT%H:%M:%S+00:00", time.gmtime(time.time() - days * DAY))
            record = replace(store.record(key), created_at=when)
            (folder / f"step_{step:06d}" / f"gen_{key.gen_batch:03d}.json").write_bytes(record_bytes(record))


def prune(capsys: Any, path: Any, *options: str, code: int = 0) -> dict[str, Any]:
    assert main(["prune", str(path), *options, "--json"]) == code, capsys.readouterr().err
    return json.loads(capsys.readouterr().out)


def going(found: dict[str, Any]) -> list[int]:
    return [step["step"] for variant in found["variants"] for step in variant["steps"]]


def steps_in(folder: Path) -> list[int]:
    return sorted({key.step for key in RolloutStore(folder)})


def test_without_yes_nothing_is_deleted_and_the_plan_is_shown(tmp_path: Path) -> None:
    recording(tmp_path, 1, 2, 3)
    before = contents(tmp_path)
    done = run("prune", tmp_path, "--keep-last", 1)
    assert done.returncode == 0, done.stderr
    assert contents(tmp_path) == before
    assert "Nothing was deleted. Pass --yes to delete." in done.stdout
    assert "would free " in done.stdout
    assert [line.split()[0] for line in done.stdout.splitlines()[2:4]] == ["1", "2"]
    assert_fits(done.stdout.split("\n", 1)[1])


def test_with_yes_exactly_the_plan_is_deleted(tmp_path: Path) -> None:
    recording(tmp_path, 1, 2, 3, batches=2)
    kept = contents(tmp_path / "step_000003")
    size = sum(len(data) for data in contents(tmp_path).values())
    done = run("prune", tmp_path, "--keep-last", 1, "--yes", "--json")
    assert done.returncode == 0, done.stderr
    freed = json.loads(done.stdout)["freed_bytes"]
    assert steps_in(tmp_path) == [3]
    assert contents(tmp_path / "step_000003") == kept
    assert freed == size - sum(len(data) for data in contents(tmp_path).values())
    assert sorted(path.name for path in tmp_path.iterdir()) == ["step_000003"], "empty folders are deleted too"
    assert main(["verify", str(tmp_path)]) == 0


def test_torch_is_not_imported(tmp_path: Path) -> None:
    done = run_without_torch("prune", recording(tmp_path, 1, 2), "--steps", 1, "--yes")
    assert done.returncode == 0, done.stderr
    assert steps_in(tmp_path) == [2]


@pytest.mark.parametrize(
    ("options", "gone"),
    [
        (["--steps", "2-3"], [2, 3]),
        (["--older-than", "5d"], [1, 2]),
        (["--older-than", "120h"], [1, 2]),
        (["--keep-last", "2"], [1, 2]),
        (["--keep-last", "0"], [1, 2, 3, 4]),
        (["--keep-last", "9"], []),
        (["--older-than", "5d", "--keep-last", "3"], [1]),
        (["--older-than", "5d", "--steps", "2-4"], [2]),
        (["--older-than", "5d", "--max-size", "1GB"], []),
        (["--max-size", "0"], [1, 2, 3, 4]),
        (["--max-size", "0", "--keep-last", "1"], [1, 2, 3]),
    ],
    ids=lambda value: " ".join(map(str, value)),
)
def test_a_step_is_deleted_if_it_meets_every_condition(tmp_path: Path, capsys: Any, options: Any, gone: Any) -> None:
    """Steps 1 and 2 are ten days old, steps 3 and 4 were recorded today."""
    recording(tmp_path, 1, 2, 3, 4)
    for step in (1, 2):
        make_old(tmp_path, step, 10)
    assert going(prune(capsys, tmp_path, *options)) == gone
    prune(capsys, tmp_path, *options, "--yes")
    assert steps_in(tmp_path) == [step for step in (1, 2, 3, 4) if step not in gone]


def test_max_size_deletes_the_oldest_steps_of_all_variants_first(tmp_path: Path, capsys: Any) -> None:
    one, two = recording(tmp_path / "run" / "one", 1, 2), recording(tmp_path / "run" / "two", 1, 2)
    for folder, step, days in ((one, 1, 1), (one, 2, 9), (two, 1, 5), (two, 2, 2)):
        make_old(folder, step, days)
    sizes = {
        (folder.name, step): sum(len(data) for data in contents(folder / f"step_{step:06d}").values())
        for folder in (one, two)
        for step in (1, 2)
    }
    budget = sizes["one", 1] + sizes["two", 2]
    prune(capsys, tmp_path, "--max-size", str(budget), "--yes")
    assert (steps_in(one), steps_in(two)) == ([1], [2])


def test_a_max_size_that_pins_prevent_is_reported(tmp_path: Path, capsys: Any) -> None:
    recording(tmp_path, 1, 2)
    assert main(["pin", str(tmp_path), "--steps", "1-2"]) == 0
    capsys.readouterr()
    assert main(["prune", str(tmp_path), "--max-size", "1KB", "--yes"]) == 0
    assert "above --max-size: everything else is pinned or kept" in capsys.readouterr().out
    assert steps_in(tmp_path) == [1, 2]


def test_pinned_steps_are_kept_and_listed(tmp_path: Path) -> None:
    recording(tmp_path, 1, 2, 3)
    assert run("pin", tmp_path, "--steps", "2", "--note", "baseline").returncode == 0
    done = run("prune", tmp_path, "--keep-last", 0, "--yes")
    assert done.returncode == 0, done.stderr
    assert "kept because pinned: 2" in done.stdout
    assert steps_in(tmp_path) == [2]


def test_a_pinned_variant_keeps_all_steps_including_later_ones(tmp_path: Path, capsys: Any) -> None:
    recording(tmp_path, 1)
    assert main(["pin", str(tmp_path), "--variant"]) == 0
    recording(tmp_path, 2)
    capsys.readouterr()
    prune(capsys, tmp_path, "--keep-last", "0", "--yes")
    prune(capsys, tmp_path, "--variants", "--yes")
    assert steps_in(tmp_path) == [1, 2]


def test_pins_are_listed_with_notes_and_removed(tmp_path: Path) -> None:
    recording(tmp_path, 1, 2, 3)
    assert "nothing is pinned" in run("pins", tmp_path).stdout
    run("pin", tmp_path / "step_000003", "--note", "the one with the bug")
    run("pin", tmp_path, "--steps", "1")
    shown = run("pins", tmp_path).stdout
    assert "the one with the bug" in shown
    listed = json.loads(run("pins", tmp_path, "--json").stdout)["pins"]
    assert [(pin["step"], pin["note"]) for pin in listed] == [(1, None), (3, "the one with the bug")]
    assert run("unpin", tmp_path, "--steps", "1-3").returncode == 0
    assert json.loads(run("pins", tmp_path, "--json").stdout) == {"pins": []}
    assert "nothing was pinned" in run("unpin", tmp_path, "--steps", "2").stdout
    assert steps_in(tmp_path) == [1, 2, 3]


def test_pinning_again_replaces_the_note(tmp_path: Path, capsys: Any) -> None:
    recording(tmp_path, 1)
    for note in ("old", "new"):
        assert main(["pin", str(tmp_path), "--steps", "1", "--note", note]) == 0
    assert [pin.note for pin in read_pins(open_storage(str(tmp_path)))] == ["new"]


def test_stores_and_trainings_ignore_pins(tmp_path: Path) -> None:
    training = Training(tmp_path)
    training.record(RolloutKey(1))
    [variant] = training.variants()
    add_pin(open_storage(str(variant)), 1, "x")
    assert RolloutStore(variant).keys() == [RolloutKey(1)]
    assert main(["verify", str(training.dumps)]) == 0
    training.record(RolloutKey(2))
    assert RolloutStore(variant).keys() == [RolloutKey(1), RolloutKey(2)]


@pytest.mark.parametrize("content", [b"", b"{", b"[]", b"\xff", b'{"note": 5}'])
def test_a_damaged_pin_still_protects(tmp_path: Path, capsys: Any, content: bytes) -> None:
    recording(tmp_path, 1, 2)
    (tmp_path / "pins").mkdir()
    (tmp_path / "pins" / "step_000001.json").write_bytes(content)
    prune(capsys, tmp_path, "--keep-last", "0", "--yes")
    assert steps_in(tmp_path) == [1]
    assert main(["pins", str(tmp_path)]) == 0


def test_many_processes_pin_and_unpin_at_once(tmp_path: Path) -> None:
    """Every pin is its own file, so concurrent writers do not lose pins."""
    script = (
        "import sys; from verl_rollout_skip.runs.pins import add_pin, remove_pin\n"
        "from verl_rollout_skip.store.storage.locations import open_storage\n"
        "storage, first = open_storage(sys.argv[1]), int(sys.argv[2])\n"
        "for step in range(first, first + 50):\n    add_pin(storage, step, 'x'); add_pin(storage, 999, str(step))\n"
        "for step in range(first, first + 25): remove_pin(storage, step)\n"
    )
    started = [
        subprocess.Popen([sys.executable, "-c", script, str(tmp_path), str(first)], cwd=ROOT, env={**os.environ})
        for first in (100, 200, 300)
    ]
    assert [process.wait(60) for process in started] == [0, 0, 0]
    expected = [step for first in (100, 200, 300) for step in range(first + 25, first + 50)] + [999]
    assert [pin.step for pin in read_pins(open_storage(str(tmp_path)))] == expected


def test_a_step_pinned_after_planning_is_kept(tmp_path: Path) -> None:
    recording(tmp_path, 1, 2)
    variant = inspect_variant(str(tmp_path), str(tmp_path.parent), open_storage(str(tmp_path)))
    [plan] = make_plans([variant], Conditions(steps=Steps(), keep_last=0))
    add_pin(variant.storage, 2)
    assert [step.step for step in execute(plan).steps] == [2]
    assert steps_in(tmp_path) == [2]


@pytest.mark.parametrize("url", ["local", "memory://refreshed"])
@pytest.mark.parametrize("whole", [False, True], ids=["steps", "whole variant"])
def test_a_step_recorded_again_after_planning_is_kept(tmp_path: Path, url: str, whole: bool) -> None:
    path = str(tmp_path / "run" / "variant") if url == "local" else f"{url}/{whole}"
    with RolloutStore(path, background=False) as store:
        for step in (1, 2):
            for gen_batch in (0, 1):
                store.put(RolloutKey(step, gen_batch), rollout_output(2))
        variant = inspect_variant(path, path, open_storage(path))
        [plan] = make_plans([variant], Conditions(steps=Steps(), keep_last=0, whole_variants=whole))
        assert len(plan.steps) == 2
        store.put(RolloutKey(2, 1), rollout_output(2, seed=9), replace=True)
        kept = execute(plan)
        assert [step.step for step in kept.recorded_again] == [2]
        assert store.keys() == [RolloutKey(2, 0), RolloutKey(2, 1)], "a step is kept as a whole"
        assert_same_batch(rollout_output(2, seed=9), store.get(RolloutKey(2, 1)))
        store.verify(RolloutKey(2, 0))


def test_prune_names_steps_recorded_again_and_does_not_count_them(
    tmp_path: Path, capsys: Any, monkeypatch: Any
) -> None:
    recording(tmp_path, 1)

    def refresh_first(plan: Plan, done: Any) -> Any:
        with RolloutStore(tmp_path, background=False) as store:
            store.put(RolloutKey(1), rollout_output(2, seed=9), replace=True)
        return execute(plan, done)

    monkeypatch.setattr("verl_rollout_skip.cli.commands.prune.execute", refresh_first)
    assert main(["prune", str(tmp_path), "--steps", "1", "--yes"]) == 0
    shown = capsys.readouterr().out
    assert "kept because recorded again in the meantime: 1" in shown
    assert "freed 0 B of" in shown
    assert "0 steps" in shown


@pytest.mark.parametrize("url", ["local", "memory://upload"])
def test_a_running_upload_keeps_the_variant_and_completes(tmp_path: Path, url: str) -> None:
    """The parts are written, but the record is not."""
    path = str(tmp_path / "variant") if url == "local" else url
    storage: Any = open_storage(path)
    publish = storage.publish
    with RolloutStore(path, background=False) as store:
        store.put(RolloutKey(1), rollout_output(2))
        variant = inspect_variant(path, path, open_storage(path))
        [plan] = make_plans([variant], Conditions(steps=Steps(), whole_variants=True))
        reasons = []

        def prune_before_the_record(staged: Any, name: str, replace: bool = False) -> None:
            if name.endswith(".json"):
                reasons.extend(execute(plan).reasons)
            publish(staged, name, replace)

        storage.publish = prune_before_the_record
        commit.commit(storage, RolloutKey(2), codec.prepare(rollout_output(4)), {})
        assert reasons == ["something is being written to it"]
        assert_same_batch(rollout_output(4), store.get(RolloutKey(2)))


def test_a_whole_variant_of_format_1_is_deleted_with_its_parquet_files(tmp_path: Path) -> None:
    training = Training(tmp_path)
    training.record(RolloutKey(1))
    [variant] = training.variants()
    make_format_1(variant)
    assert (variant / "step_000001" / "gen_000.parquet").exists()
    assert execute(planned_whole(variant)).reasons == []
    assert not variant.exists()


def planned_whole(folder: Path) -> Plan:
    variant = inspect_variant(str(folder), str(folder.parent), open_storage(str(folder)))
    [plan] = make_plans([variant], Conditions(steps=Steps(), whole_variants=True))
    assert plan.whole
    return plan


@pytest.mark.parametrize("pinned", [None, 2, 9])
def test_any_pin_added_after_planning_keeps_the_whole_variant(tmp_path: Path, pinned: int | None) -> None:
    variant = recording(tmp_path / "variant", 1, 2)
    plan = planned_whole(variant)
    add_pin(plan.variant.storage, pinned)
    before = contents(variant)
    kept = execute(plan)
    assert [step.step for step in kept.steps] == [1, 2]
    assert "pinned in the meantime" in kept.reasons[0]
    assert contents(variant) == before


def test_steps_recorded_after_planning_are_kept_with_their_manifest(tmp_path: Path) -> None:
    training = Training(tmp_path)
    training.record(RolloutKey(1))
    [variant] = training.variants()
    plan = planned_whole(variant)
    recording(variant, 3)
    kept = execute(plan)
    assert kept.reasons == ["step 3, generation batch 0 was recorded in the meantime"]
    assert steps_in(variant) == [3]
    assert {"manifest.json", "trainings", "tokenizer"} <= {path.name for path in variant.iterdir()}
    assert main(["verify", str(variant)]) == 0


def test_a_whole_variant_is_deleted_with_the_finished_prompts_of_an_incomplete_step(tmp_path: Path) -> None:
    training = Training(tmp_path)
    training.record(RolloutKey(1))
    [variant] = training.variants()
    partial = RolloutStore(variant / PARTIAL, background=False)
    partial.put(RolloutKey(2), RolloutStore(variant).get(RolloutKey(1)))
    partial.put(RolloutKey(3), RolloutStore(variant).get(RolloutKey(1)))
    partial.set_aside(RolloutKey(3), readable=True)
    assert execute(planned_whole(variant)).reasons == []
    assert not variant.exists()


def test_a_variant_with_an_active_writer_is_kept_and_the_writer_finishes(tmp_path: Path) -> None:
    training = Training(tmp_path)
    training.record(RolloutKey(1))
    [variant] = training.variants()
    plan = planned_whole(variant)
    with plan.variant.storage.stage("step_000002") as staged:
        staged.write(b"x")
        assert execute(plan).reasons == ["something is being written to it"]
        plan.variant.storage.publish(staged, "gen_000.json")
    assert (variant / "manifest.json").exists()


def test_prune_says_which_variant_is_kept_and_why(tmp_path: Path, capsys: Any, monkeypatch: Any) -> None:
    """The pin is added between planning and deleting."""
    variant = recording(tmp_path / "variant", 1)

    def pin_first(plan: Plan, done: Any) -> Any:
        add_pin(plan.variant.storage, None)
        return execute(plan, done)

    monkeypatch.setattr("verl_rollout_skip.cli.commands.prune.execute", pin_first)
    assert main(["prune", str(variant), "--variants", "--yes"]) == 0
    shown = capsys.readouterr().out
    assert "the variant is kept: the whole variant was pinned in the meantime" in shown
    assert "freed 0 B of" in shown
    assert steps_in(variant) == [1]


def begin(training: Training, days: float = 0, **changes: Any) -> Path:
    """A variant with a manifest that is some days old and without any step."""
    before = set(training.dumps.glob("*/*"))
    training.record(RolloutKey(1), **changes)
    [variant] = set(training.dumps.glob("*/*")) - before
    prune_steps(variant)
    when = time.time() - days * DAY
    fields = json.loads((variant / "manifest.json").read_text())
    del fields["checksum"]
    fields["created_at"] = time.strftime("%Y-%m-%dT%H:%M:%S+00:00", time.gmtime(when))
    (variant / "manifest.json").write_bytes(checked_json.render(fields))
    for path in variant.rglob("*"):
        os.utime(path, (when, when))
    return variant


def prune_steps(variant: Path) -> None:
    with RolloutStore(variant) as store:
        for key in list(store):
            store.delete(key)


def test_a_run_that_has_just_started_does_not_count_as_old(tmp_path: Path) -> None:
    training = Training(tmp_path)
    begun = begin(training)
    old = begin(training, days=100, actor_rollout_ref__rollout__temperature=0.7)
    done = run("prune", training.dumps, "--variants", "--older-than", "90d", "--yes", "--json")
    assert done.returncode == 0, done.stderr
    found = {variant["path"]: variant["whole"] for variant in json.loads(done.stdout)["variants"]}
    assert found == {str(begun): False, str(old): True}
    assert (begun.exists(), old.exists()) == (True, False)


def test_the_newest_variant_is_kept_even_if_it_is_empty(tmp_path: Path, capsys: Any) -> None:
    training = Training(tmp_path)
    begun = begin(training)
    old = begin(training, days=3, actor_rollout_ref__rollout__temperature=0.7)
    prune(capsys, training.dumps, "--variants", "--keep-last", "1", "--yes")
    assert (begun.exists(), old.exists()) == (True, False)


def test_max_size_keeps_a_variant_whose_deletion_frees_nothing(tmp_path: Path, capsys: Any) -> None:
    training = Training(tmp_path)
    empty = begin(training, days=3)
    training.record(RolloutKey(1), actor_rollout_ref__rollout__temperature=0.7)
    prune(capsys, training.dumps, "--variants", "--max-size", "0", "--yes")
    assert training.variants() == [empty]


def test_deleting_a_variant_that_has_just_started_is_reported(tmp_path: Path, capsys: Any) -> None:
    training = Training(tmp_path)
    begin(training)
    assert main(["prune", str(training.dumps), "--variants"]) == 0
    assert "a training may be using it" in capsys.readouterr().out


def test_variants_are_deleted_with_everything_in_them(tmp_path: Path, capsys: Any) -> None:
    training = Training(tmp_path)
    training.record(RolloutKey(1))
    training.record(RolloutKey(1), actor_rollout_ref__rollout__temperature=0.7)
    one, two = training.variants()
    found = prune(capsys, one, "--variants", "--yes")
    assert found["variants"][0]["whole"]
    assert training.variants() == [two]
    prune(capsys, training.dumps, "--variants", "--yes")
    assert list(training.dumps.iterdir()) == [], "the empty run folder is deleted too"


def test_the_newest_variants_can_be_kept(tmp_path: Path, capsys: Any) -> None:
    old, new = recording(tmp_path / "run" / "old", 1), recording(tmp_path / "run" / "new", 1)
    make_old(old, 1, 3)
    prune(capsys, tmp_path, "--variants", "--keep-last", "1", "--yes")
    assert (old.exists(), steps_in(new)) == (False, [1])


def test_files_of_other_programs_are_kept(tmp_path: Path, capsys: Any) -> None:
    recording(tmp_path / "variant", 1)
    (tmp_path / "variant" / "notes.txt").write_text("mine")
    (tmp_path / "variant" / "step_000001" / "plot.png").write_text("mine too")
    prune(capsys, tmp_path / "variant", "--variants", "--yes")
    assert sorted(contents(tmp_path)) == ["variant/notes.txt", "variant/step_000001/plot.png"]


def test_leftovers_of_crashed_writers_are_deleted_but_not_those_of_running_ones(tmp_path: Path, capsys: Any) -> None:
    recording(tmp_path, 1)
    with open_storage(str(tmp_path)).stage("step_000001") as living:
        living.stream.write(b"x")
        script = (
            "import os, sys; from verl_rollout_skip.store.storage.locations import open_storage\n"
            "for folder in ('step_000001', '.'):\n"
            "    staged = open_storage(sys.argv[1]).stage(folder)\n    staged.stream.write(b'abc')\n"
            "os._exit(0)"
        )
        subprocess.run([sys.executable, "-c", script, str(tmp_path)], cwd=ROOT, check=True)
        hidden = sorted(path for path in tmp_path.rglob(".tmp-*"))
        assert len(hidden) == 3
        found = prune(capsys, tmp_path, "--leftovers")
        assert len(found["variants"][0]["files"]) == 2
        assert sorted(tmp_path.rglob(".tmp-*")) == hidden, "a dry run"
        prune(capsys, tmp_path, "--leftovers", "--yes")
        assert len(list(tmp_path.rglob(".tmp-*"))) == 1
    assert steps_in(tmp_path) == [1]


def test_a_part_listed_by_a_record_after_planning_is_kept(tmp_path: Path) -> None:
    """An interrupted copy has left a part when the plan is made, and is completed before the plan is executed."""
    with RolloutStore(tmp_path, background=False) as store:
        store.put(RolloutKey(1), rollout_output(4))
        variant = inspect_variant(str(tmp_path), str(tmp_path), store._storage)
        folder = tmp_path / "step_000001"
        found = store._storage.files(folder.name)
        files = tuple(UnusedFile(folder.name, file) for file in found if file.name.endswith(".parquet"))
        assert files
        execute(Plan(variant, files=files))
        store.verify(RolloutKey(1))


def test_a_part_written_again_after_planning_is_kept(tmp_path: Path) -> None:
    """Another process copies the same entry again: it has written the part, and is about to publish the record."""
    with RolloutStore(tmp_path, background=False) as store:
        store.put(RolloutKey(1), rollout_output(4))
        variant = inspect_variant(str(tmp_path), str(tmp_path), store._storage)
        part, record = part_file(tmp_path), record_file(tmp_path)
        committed = record.read_bytes()
        record.unlink()
        seen = store._storage.info(part.parent.name, part.name)
        assert seen is not None
        shutil.copy(part, tmp_path / "again")
        (tmp_path / "again").replace(part)
        execute(Plan(variant, files=(UnusedFile(part.parent.name, seen),)))
        record.write_bytes(committed)
        store.verify(RolloutKey(1))


def test_entries_that_were_set_aside_are_deleted_only_on_request(tmp_path: Path, capsys: Any) -> None:
    recording(tmp_path, 1, 2)
    data = part_file(tmp_path)
    data.write_bytes(data.read_bytes()[:-10])
    RolloutStore(tmp_path).set_aside(RolloutKey(1))
    prune(capsys, tmp_path, "--leftovers", "--yes")
    assert len(list(tmp_path.rglob("*.corrupt"))) == 2
    found = prune(capsys, tmp_path, "--set-aside", "--yes")
    assert found["freed_bytes"] > 0
    assert list(tmp_path.rglob("*.corrupt")) == []
    assert steps_in(tmp_path) == [2]


def test_an_entry_with_a_damaged_record_can_be_deleted(tmp_path: Path, capsys: Any) -> None:
    recording(tmp_path, 1, 2)
    record_file(tmp_path).write_text("{")
    prune(capsys, tmp_path, "--steps", "1", "--yes")
    assert steps_in(tmp_path) == [2]


def test_prune_does_not_disturb_a_recording_training(tmp_path: Path, capsys: Any) -> None:
    """prune deletes each step and its folder while the next generation batch of that step is written."""
    recording(tmp_path, 1)
    stop = threading.Event()
    failures: list[Exception] = []

    def write() -> None:
        gen_batch = 1
        try:
            while not stop.is_set():
                with RolloutStore(tmp_path, background=False) as store:
                    store.put(RolloutKey(1, gen_batch), rollout_output(1))
                gen_batch += 1
        except Exception as error:
            failures.append(error)

    writer = threading.Thread(target=write)
    writer.start()
    try:
        for _ in range(25):
            prune(capsys, tmp_path, "--keep-last", "0", "--yes")
            (tmp_path / "step_000009").mkdir(exist_ok=True)
    finally:
        stop.set()
        writer.join()
    assert not failures
    assert main(["verify", str(tmp_path)]) == 0


def test_a_variant_that_is_being_recorded_is_reported(tmp_path: Path, capsys: Any) -> None:
    recording(tmp_path, 1, 2)
    assert main(["prune", str(tmp_path), "--keep-last", "1"]) == 0
    assert "a training may be using it" in capsys.readouterr().out


def test_an_object_store_works_like_a_folder(capsys: Any) -> None:
    url = "memory://prune/run"
    with RolloutStore(url) as store:
        for step in (1, 2):
            store.put(RolloutKey(step), rollout_output(2))
    assert main(["pin", url, "--steps", "1"]) == 0
    assert is_pinned(open_storage(url), 1)
    capsys.readouterr()
    prune(capsys, url, "--keep-last", "0", "--yes")
    assert RolloutStore(url).keys() == [RolloutKey(1)]


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["prune", "{path}"], "Choose what to delete"),
        (["prune", "/does/not/exist", "--keep-last", "1"], "/does/not/exist does not exist."),
        (["prune", "{path}", "--older-than", "yesterday"], "'yesterday' is not an age. Use a number"),
        (["prune", "{path}", "--max-size", "much"], "--max-size is 'much'"),
        (["prune", "{path}", "--keep-last", "-1"], "--keep-last is -1"),
        (["prune", "{path}", "--variants", "--steps", "1"], "cannot be combined with steps"),
        (["prune", "{path}/step_000001/gen_000.json"], "only whole steps are deleted"),
        (["pin", "{path}"], "Use either steps"),
        (["pin", "{path}", "--steps", "7"], "does not contain steps 7; it contains steps 1"),
        (["unpin", "{path}", "--steps", "1", "--variant"], "Use either steps"),
        (["pins", "/does/not/exist"], "/does/not/exist does not exist."),
    ],
)
def test_bad_input_is_a_one_line_error_with_exit_code_2(
    tmp_path: Path, capsys: Any, arguments: Any, words: str
) -> None:
    recording(tmp_path, 1)
    assert main([text.format(path=tmp_path) for text in arguments]) == 2
    output = capsys.readouterr()
    assert (output.out, output.err.count("\n")) == ("", 1)
    assert words in output.err
    assert steps_in(tmp_path) == [1]


@pytest.fixture
def visible() -> Iterator[Path]:
    """A folder that every user can read. Only one user can read pytest's temporary folders."""
    with tempfile.TemporaryDirectory() as folder:
        os.chmod(folder, 0o755)
        yield Path(folder)


@pytest.mark.parametrize("command", [["prune", "--steps", "1", "--yes"], ["pin", "--steps", "1"]])
def test_an_unwritable_folder_is_a_one_line_error(visible: Path, tmp_path: Path, command: list[str]) -> None:
    recording(visible, 1, 2)
    for path in [visible, *visible.iterdir()]:
        path.chmod(0o555)
    before = contents(visible)
    name, *options = command
    done = run_as_nobody(name, visible, *options, first=[name, recording(tmp_path, 1), *options])
    for path in [visible, *visible.iterdir()]:
        path.chmod(0o755)
    assert_one_line_error(done, "Permission denied")
    assert contents(visible) == before


def add_columns(folder: Path, training: str, *steps: int) -> Path:
    """Training columns of some steps, as a training writes them."""
    with RolloutStore(columns_folder(str(folder), training)) as store:
        for step in steps:
            store.put(RolloutKey(step), rollout_output(2, seed=step), info={"role": "actor"})
    return folder / "columns" / training


def test_columns_go_with_their_steps(tmp_path: Path, capsys: Any) -> None:
    folder = recording(tmp_path, 1, 2, 3)
    first, second = add_columns(folder, "first", 1, 2, 3), add_columns(folder, "second", 2)
    used = sum(file.stat().st_size for file in folder.rglob("*") if file.is_file())
    found = prune(capsys, folder, "--steps", "2", "--yes")
    assert going(found) == [2]
    assert found["total_bytes"] == used
    assert found["freed_bytes"] == used - sum(file.stat().st_size for file in folder.rglob("*") if file.is_file())
    assert (steps_in(folder), steps_in(first)) == ([1, 3], [1, 3])
    assert not second.exists()


def test_columns_alone_are_deleted_on_request_and_pins_protect_them(tmp_path: Path, capsys: Any) -> None:
    folder = recording(tmp_path, 1, 2, 3)
    columns = add_columns(folder, "first", 1, 2, 3)
    add_pin(open_storage(str(folder)), 2, "golden")
    assert going(prune(capsys, folder, "--columns")) == [1, 3]
    assert steps_in(columns) == [1, 2, 3]
    assert going(prune(capsys, folder, "--columns", "--yes")) == [1, 3]
    assert (steps_in(folder), steps_in(columns)) == ([1, 2, 3], [2])
    assert main(["prune", str(folder), "--columns", "--variants"]) == 2
    assert "cannot be combined with --columns" in capsys.readouterr().err


def test_columns_go_with_a_whole_variant_even_those_of_steps_that_it_does_not_have(tmp_path: Path, capsys: Any) -> None:
    folder = recording(tmp_path / "run" / "variant", 1)
    add_columns(folder, "first", 1, 7)
    used = sum(file.stat().st_size for file in folder.rglob("*") if file.is_file())
    found = prune(capsys, folder, "--variants", "--yes")
    assert found["freed_bytes"] == found["total_bytes"] == used
    assert not folder.exists()


def test_leftovers_of_columns_are_found(tmp_path: Path, capsys: Any) -> None:
    folder = recording(tmp_path, 1)
    columns = add_columns(folder, "first", 1)
    left = columns / "step_000001" / ".tmp-0-0-dead"
    left.write_bytes(b"half")
    os.utime(left, (time.time() - 2 * DAY,) * 2)
    found = prune(capsys, folder, "--leftovers", "--yes")
    assert [file["path"] for variant in found["variants"] for file in variant["files"]] == [str(left)]
    assert not left.exists()
