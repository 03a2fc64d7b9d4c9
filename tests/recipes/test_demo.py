"""The table and exit code of the demo, without a training."""

from __future__ import annotations

import sys
from dataclasses import replace
from pathlib import Path

import pytest

from recipes import demo
from recipes.cpu.assets import Assets

METRICS = {1: {"actor/loss": 0.5}, 2: {"actor/loss": 0.25}}
RECORD = demo.Outcome(46.0, 2.7, 38.0, 4_600_000_000, frozenset({"CPUServer"}), 5, METRICS)
REPLAY = demo.Outcome(23.0, 0.1, 19.0, 2_300_000_000, frozenset(), 0, METRICS)


def run_demo(monkeypatch: pytest.MonkeyPatch, folder: Path, replayed: demo.Outcome, *options: str) -> None:
    """Run the demo with simulated trainings, the last of which is ``replayed``."""
    for name in demo.TRAININGS:
        variant = folder / "dumps" / f"{name}_run" / "variant"
        variant.mkdir(parents=True)
        (variant / "manifest.json").touch()
    monkeypatch.setattr(sys, "argv", ["demo", "--folder", str(folder), *options])
    monkeypatch.setattr(demo.signal, "signal", lambda number, handler: None)
    monkeypatch.setattr(demo, "keep_descendants", lambda: None)

    def train(title: str, training: demo.Training, stage: demo.Stage, engine: str, *rest: object) -> demo.Outcome:
        assert f"--engine {engine}" in " ".join(("--engine cpu", *options))
        return {"record": RECORD, "cache": replace(RECORD, rollout_seconds=0.2, syncs=0)}.get(stage.mode, replayed)

    monkeypatch.setattr(demo, "make_assets", Assets)
    monkeypatch.setattr(demo, "train", train)
    demo.main()


def test_the_table_shows_savings_as_ratios(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run_demo(monkeypatch, tmp_path, REPLAY)
    output = capsys.readouterr().out
    assert f"rollout-skip report {tmp_path}/dumps/ppo_run/variant -o " in output
    lines = [line.split() for line in output.splitlines()]
    assert ["DAPO", "record", "yes", "5", "46", "s", "2.70", "s", "38", "s", "4.6", "GB"] in lines
    assert ["replay", "no", "0", "23", "s", "0.10", "s", "19", "s", "2.3", "GB", "yes"] in lines
    assert lines.count(["saving", "2.0×", "27.0×", "2.0×", "2.0×"]) == len(demo.TRAININGS)


def test_different_metrics_are_an_error(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    differing = replace(REPLAY, metrics={1: {"actor/loss": 0.5}, 2: {"actor/loss": 0.2500001}})
    with pytest.raises(SystemExit, match="The metrics of ppo, dapo, v1 differ between recording and replay"):
        run_demo(monkeypatch, tmp_path, differing)
    assert sum(line.split()[-1:] == ["NO"] for line in capsys.readouterr().out.splitlines()) == len(demo.TRAININGS)


def test_with_vllm_each_training_is_loaded_with_and_without_its_engine_and_where_it_is_not_installed(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run_demo(monkeypatch, tmp_path, REPLAY, "--engine", "vllm", "--plain-python", "/plain/python")
    lines = [line.split() for line in capsys.readouterr().out.splitlines()]
    for row in (
        ["PPO", "record", "yes", "5", "46", "s", "2.70", "s", "38", "s", "4.6", "GB"],
        ["V1", "record", "yes", "5", "46", "s", "2.70", "s", "38", "s", "4.6", "GB"],
        ["cache", "yes", "0", "46", "s", "0.20", "s", "38", "s", "4.6", "GB", "yes"],
        ["replay", "no", "0", "23", "s", "0.10", "s", "19", "s", "2.3", "GB", "yes"],
        ["replay", "without", "vLLM", "no", "0", "23", "s", "0.10", "s", "19", "s", "2.3", "GB", "yes"],
    ):
        assert row in lines
    assert [stage.python for stage in demo.stages_of("vllm", "/plain/python")] == [
        *[sys.executable] * 3,
        "/plain/python",
    ]
