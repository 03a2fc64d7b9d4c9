"""``rollout-skip audit``: exit codes, the table, JSON, the page, and errors for everything that cannot be compared."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from tests.cli_program import assert_fits, assert_one_line_error, run_without_torch
from tests.written_ledgers import OTHER_REPLAY, RECORDING, REPLAY, ledger_path, with_metric, write
from verl_rollout_skip.cli import main

SLOWER = {"training_hash": "u" * 64, "training_settings": {"actor_rollout_ref.actor.optim.lr": 1e-07}}


@pytest.fixture
def variant(tmp_path: Path) -> Path:
    """A recorded variant with the ledger of its recording."""
    folder = tmp_path / "run" / "variant"
    (folder / "step_000001").mkdir(parents=True)
    write(folder, RECORDING, range(1, 6))
    return folder


def audit(capsys: Any, *arguments: Any) -> tuple[int, str]:
    """The exit code and the output."""
    code = main(["audit", *map(str, arguments)])
    return code, capsys.readouterr().out


def audit_json(capsys: Any, *arguments: Any) -> dict[str, Any]:
    _, printed = audit(capsys, *arguments, "--json")
    found: dict[str, Any] = json.loads(printed)
    return found


def error(capsys: Any, *arguments: Any) -> str:
    """The line on standard error of a command that fails."""
    assert main(["audit", *map(str, arguments)]) == 2
    printed = capsys.readouterr()
    assert printed.out == ""
    assert printed.err.startswith("rollout-skip: error: ")
    assert printed.err.count("\n") == 1
    return str(printed.err)


def test_an_identical_replay_ends_with_0_and_prints_no_table(variant: Path, capsys: Any) -> None:
    write(variant, REPLAY, range(1, 6), RECORDING)
    assert audit(capsys, variant) == (
        0,
        f"a: {RECORDING} (record, steps 1-5)\nb: {REPLAY} (replay, steps 1-5)\nidentical in all 5 steps, 9 figures\n",
    )


def test_a_different_replay_ends_with_1_and_the_table_names_the_figure(variant: Path, capsys: Any) -> None:
    write(variant, REPLAY, range(1, 6), RECORDING, with_metric("actor/pg_loss", lambda value: value * (1 + 1e-6), 2))
    code, printed = audit(capsys, variant)
    assert code == 1
    assert "different from step 2 on: 1 of 9 figures" in printed
    assert "first difference: step 2, update: actor/pg_loss is " in printed
    header, row = printed.splitlines()[-2:]
    assert header.split() == ["stage", "figure", "first", "step", "differ", "max", "abs", "max", "rel"]
    assert row.split()[:6] == ["update", "actor/pg_loss", "2", "4", "of", "5"]
    assert row.split()[-1] == "1e-06"


def test_all_lists_figures_that_are_the_same_too(variant: Path, capsys: Any) -> None:
    write(variant, REPLAY, range(1, 6), RECORDING, with_metric("x" * 500, lambda _: 1.0))
    _, printed = audit(capsys, variant, "--all")
    assert len([line for line in printed.splitlines() if " same " in line]) == 9
    assert_fits("\n".join(line for line in printed.splitlines() if not line.startswith("  first difference")))
    assert len(audit_json(capsys, variant, "--all")["audits"][0]["figures"]) == 10


def test_one_replay_that_differs_makes_the_result_different(variant: Path, capsys: Any) -> None:
    write(variant, REPLAY, range(1, 6), RECORDING)
    write(variant, OTHER_REPLAY, range(1, 6), RECORDING, with_metric("actor/pg_loss", lambda _: 0.0, 5))
    code, printed = audit(capsys, variant)
    assert code == 1
    assert "identical in all 5 steps" in printed
    assert "different from step 5 on" in printed
    assert audit(capsys, f"{variant}/ledgers/{REPLAY}")[0] == 0
    assert audit(capsys, f"{variant}/ledgers/{OTHER_REPLAY}.jsonl")[0] == 1
    assert audit(capsys, f"{variant}/ledgers/20261119T22", f"{variant}/ledgers/20261119T23")[0] == 1
    assert audit(capsys, f"{variant}/manifest.json", f"{variant}/ledgers/20261119T22")[0] == 0


def test_a_tolerance_accepts_last_bits_of_another_layout(variant: Path, capsys: Any) -> None:
    layout = {"nnodes": 1, "n_gpus_per_node": 2, "world_size": 2}
    change = with_metric("actor/pg_loss", lambda value: value * (1 + 1e-6))
    write(variant, REPLAY, range(1, 6), RECORDING, change, gpu_layout=layout)
    for options, code in (
        ((), 1),
        (("--rtol", "1e-5"), 0),
        (("--rtol", "1e-7"), 1),
        (("--atol", "1e-4"), 0),
        (("--tolerance", "actor/*=1e-5"), 0),
        (("--tolerance", "actor/*=0,1e-4"), 0),
        (("--tolerance", "critic/*=1e-5"), 1),
        (("--tolerance", "actor/*=0", "--atol", "1e-4"), 0),
        (("--ignore", "actor/pg_*"), 0),
    ):
        found, printed = audit(capsys, variant, *options)
        assert found == code, options
        assert "layout, which may change last bits: n_gpus_per_node: 1 → 2; world_size: 1 → 2" in printed
    assert audit_json(capsys, variant, "--rtol", "1e-5")["audits"][0]["verdict"] == "within tolerance"


def test_an_off_policy_replay_says_what_was_compared(variant: Path, capsys: Any) -> None:
    write(variant, REPLAY, range(1, 6), RECORDING, with_metric("actor/pg_loss", lambda _: 0.0), **SLOWER)
    code, printed = audit(capsys, variant)
    assert code == 0
    assert "identical, 6 figures" in printed
    assert "step 1: compared only up to the update, because the settings of the training differ" in printed
    assert "steps 2-5: not compared" in printed
    assert "settings: actor_rollout_ref.actor.optim.lr: 1e-06 → 1e-07" in printed
    assert audit(capsys, variant, "--all-steps")[0] == 1


def test_json_has_the_numbers_of_the_table(variant: Path, capsys: Any) -> None:
    write(variant, RECORDING.replace("a", "d"), range(1, 3))
    write(variant, REPLAY, range(1, 4), RECORDING, with_metric("actor/pg_loss", lambda _: float("nan"), 2))
    data = audit_json(capsys, variant)
    assert (data["same"], data["exact"]) == (False, True)
    [found] = data["audits"]
    assert (found["steps"], found["only_in_a"], found["only_in_b"]) == ([1, 2, 3], [4, 5], [])
    [figure] = found["figures"]
    assert figure == {
        "stage": "update",
        "kind": "metric",
        "name": "actor/pg_loss",
        "compared": 3,
        "differing": 2,
        "beyond": 2,
        "first_step": 2,
        "max_absolute": "NaN",
        "max_relative": "NaN",
    }
    assert (found["first"]["step"], found["first"]["stage"], found["first"]["current"]) == (2, "update", "NaN")


def test_the_page_is_written_beside_the_result(variant: Path, tmp_path: Path, capsys: Any) -> None:
    write(variant, REPLAY, range(1, 6), RECORDING)
    code, printed = audit(capsys, variant, "-o", tmp_path / "audit.html")
    assert code == 0
    assert printed.splitlines()[-1].startswith(f"{tmp_path}/audit.html: ")
    assert (tmp_path / "audit.html").read_text(encoding="utf-8").startswith("<!doctype html>")
    assert "The audit was not written to" in error(capsys, variant, "-o", tmp_path / "missing" / "audit.html")


def test_audits_work_without_torch_and_on_urls(variant: Path) -> None:
    write(variant, REPLAY, range(1, 6), RECORDING)
    done = run_without_torch("audit", f"file://{variant}", "-o", variant / "audit.html")
    assert (done.returncode, done.stderr) == (0, "")
    assert "identical in all 5 steps" in done.stdout


def test_ledgers_in_an_object_store_are_compared(tmp_path: Path, capsys: Any) -> None:
    url = f"memory://{tmp_path.name}/run/variant"
    write(url, RECORDING, range(1, 6))
    write(url, REPLAY, range(1, 6), RECORDING)
    assert audit(capsys, f"{url}/ledgers/{REPLAY}")[0] == 0


def test_with_nothing_to_compare_the_error_says_what_to_do(variant: Path, tmp_path: Path, capsys: Any) -> None:
    assert "Replay it with rollout_skip.mode=replay, or name two recordings." in error(capsys, variant)
    assert "Name a second training." in error(capsys, f"{variant}/ledgers/{RECORDING}")
    (tmp_path / "old" / "step_000001").mkdir(parents=True)
    assert "rollout_skip.audit=auto" in error(capsys, tmp_path / "old")
    assert "audit compares trainings" in error(capsys, variant / "step_000001")
    assert "does not exist" in error(capsys, tmp_path / "missing")
    assert "none of them begins with 'x'" in error(capsys, variant / "ledgers" / "x")
    write(variant, REPLAY, range(1, 6), OTHER_REPLAY)
    assert f"there is no ledger of {OTHER_REPLAY}, which recorded their rollouts" in error(capsys, variant)
    write(tmp_path / "later", RECORDING, range(7, 9))
    nothing = error(capsys, variant, f"{tmp_path}/later/ledgers/{RECORDING}")
    assert "There is nothing to compare. only in a: steps 1-5; only in b: steps 7-8" in nothing


def test_a_wrong_tolerance_is_an_error(variant: Path, capsys: Any) -> None:
    for wrong in ("actor/*", "=1", "actor/*=x", "actor/*=1,2,3", "actor/*=-1", "actor/*=nan"):
        assert "is not PATTERN=RTOL" in error(capsys, variant, "--tolerance", wrong)
    for wrong in ("-1", "nan", "inf"):
        assert "not a finite number of 0 or more" in error(capsys, variant, "--rtol", wrong)


HOSTILE_LINES = {
    "not JSON": b"{",
    "not an object": b"[1]",
    "deeply nested": b'{"step": 9, "metrics": ' + b"[" * 100_000 + b"]" * 100_000 + b"}",
    "a text for a number": b'{"step": 9, "metrics": {"actor/pg_loss": "1"}}',
    "a step that is no number": b'{"step": true}',
    "no digest": b'{"step": 9, "metrics": {}, "tensors": {}, "critic_tensors": {}, "weights": {"actor": 1}}',
    "an earlier step": b'{"step":1,"metrics":{},"tensors":{},"critic_tensors":{},"weights":{},"rollouts":[]}',
    "control characters": b'{"ledger": "\\u001b[31m"}',
    "a line without an end": b"x" * (5 << 20),
}


@pytest.mark.parametrize("line", HOSTILE_LINES.values(), ids=HOSTILE_LINES)
def test_a_hostile_ledger_is_an_error_that_names_file_and_line(variant: Path, line: bytes, capsys: Any) -> None:
    write(variant, REPLAY, range(1, 6), RECORDING, end=None)
    path = ledger_path(variant, REPLAY)
    path.write_bytes(path.read_bytes() + line + b"\n")
    text = error(capsys, variant)
    assert f"{path} is damaged in line 7: " in text
    assert "\x1b" not in text
    assert len(text) < 1000


def test_a_ledger_of_a_later_version_is_an_error(variant: Path, capsys: Any) -> None:
    write(variant, REPLAY, range(1, 6), RECORDING)
    path = ledger_path(variant, REPLAY)
    path.write_bytes(path.read_bytes().replace(b'{"ledger":1,', b'{"ledger":2,'))
    assert "Upgrade verl_rollout_skip." in error(capsys, variant)


def test_a_huge_ledger_is_refused_without_reading_it_into_memory(variant: Path) -> None:
    write(variant, REPLAY, range(1, 6), RECORDING, end=None)
    with open(ledger_path(variant, REPLAY), "ab") as file:
        file.truncate(8 << 30)  # zeros that take no space on disk
    assert_one_line_error(run_without_torch("audit", variant), f"{REPLAY}.jsonl", "which no training writes")


def test_long_settings_are_cut(variant: Path, capsys: Any) -> None:
    write(variant, REPLAY, range(1, 6), RECORDING, training_settings={f"setting {i}": "x" * 300 for i in range(100)})
    _, printed = audit(capsys, variant)
    assert max(len(line) for line in printed.splitlines()) < 1100
    assert "settings: " in printed


def test_control_characters_in_names_do_not_reach_the_terminal(variant: Path, capsys: Any) -> None:
    write(variant, REPLAY, range(1, 6), RECORDING, with_metric("\x1b]0;owned\x07", lambda _: 1.0), mode="\x1b[31m")
    code, printed = audit(capsys, variant)
    assert code == 1
    assert "\x1b" not in printed
    assert "\\x1b]0;owned\\x07" in printed
