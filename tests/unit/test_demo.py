"""The demo's table and its exit code, without a training."""

from __future__ import annotations

import sys
from dataclasses import replace
from pathlib import Path

import pytest

from recipes import demo

RECORD = demo.Outcome(46.0, 2.7, 38.0, 4_600_000_000, True, {1: {"actor/loss": 0.5}, 2: {"actor/loss": 0.25}})
REPLAY = replace(RECORD, seconds=23.0, rollout_seconds=0.1, cpu_seconds=19.0, peak_bytes=2_300_000_000, engine=False)


def run_demo(monkeypatch: pytest.MonkeyPatch, folder: Path, replayed: demo.Outcome) -> None:
    """With trainings that took what they are said to have taken."""
    for name in demo.TRAININGS:
        variant = folder / "dumps" / f"{name}_run" / "variant"
        variant.mkdir(parents=True)
        (variant / "manifest.json").touch()
    monkeypatch.setattr(sys, "argv", ["demo", "--folder", str(folder)])
    monkeypatch.setattr(demo.signal, "signal", lambda number, handler: None)
    monkeypatch.setattr(demo, "keep_descendants", lambda: None)
    pair = {"record": RECORD, "replay": replayed}
    monkeypatch.setattr(demo, "train_all", lambda names, folder, steps: dict.fromkeys(names, pair))
    demo.main()


def test_the_table_gives_the_savings_as_ratios(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run_demo(monkeypatch, tmp_path, REPLAY)
    output = capsys.readouterr().out
    assert f"rollout-skip report {tmp_path}/dumps/ppo_run/variant -o " in output
    lines = [line.split() for line in output.splitlines()]
    assert ["DAPO", "record", "yes", "46", "s", "2.70", "s", "38", "s", "4.6", "GB"] in lines
    assert ["replay", "no", "23", "s", "0.10", "s", "19", "s", "2.3", "GB", "yes"] in lines
    assert lines.count(["saving", "2.0×", "27.0×", "2.0×", "2.0×"]) == len(demo.TRAININGS)


def test_other_metrics_are_shown_and_end_with_an_error(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    differing = replace(REPLAY, metrics={1: {"actor/loss": 0.5}, 2: {"actor/loss": 0.2500001}})
    with pytest.raises(SystemExit, match="The metrics of ppo, dapo, v1 differ between recording and replay"):
        run_demo(monkeypatch, tmp_path, differing)
    assert sum(line.split()[-1:] == ["NO"] for line in capsys.readouterr().out.splitlines()) == len(demo.TRAININGS)
