"""Compares whole trainings: the cost of recording and of a hit, and the savings of a replay.

Real trainings of recipes/cpu, one after another in the same run: off, record, cache, replay without an engine, and
verl's own skip. Results go to benchmarks/results/trainings.json.
"""

from __future__ import annotations

import argparse
import json
import statistics
import tempfile
import time
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

from benchmarks import report
from recipes.cpu import runs
from recipes.cpu.assets import make_assets
from recipes.cpu.processes import Usage

RESULTS = Path(__file__).parent / "results" / "trainings.json"
LEDGER_WAITED = "rollout_skip/ledger_s"
console = Console()


@dataclass(frozen=True)
class Measured:
    """One training: seconds until its first step, medians over the second half of its steps, and its peak memory.

    The first half is excluded: on a small machine, steps in the first ten seconds or so are slower, most likely because
    Ray is still starting processes.
    """

    name: str
    start_s: float
    step_s: float
    rollout_s: float
    peak_bytes: int
    hits: int


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.trainings", description=__doc__)
    parser.add_argument("--steps", type=int, default=20, help="training steps per run (default: 20)")
    parser.add_argument("--v1", action="store_true", help="verl's V1 trainers instead of V0")
    parser.add_argument(
        "--recording", action="store_true", help="measure only the cost of recording, within one training"
    )
    parser.add_argument(
        "--ledger", action="store_true", help="measure only the cost of the ledger, within one training"
    )
    options = parser.parse_args()
    if options.ledger:
        measure_ledger(options.steps)
        return
    if options.recording:
        measure_recording(options.steps)
        return
    with tempfile.TemporaryDirectory(prefix="rollout-skip-bench-") as folder:
        machine = report.machine(Path(folder))
        measured = measure_all(Path(folder), options.steps, options.v1)
    show(measured)
    ratios = compare(measured)
    for name, value in ratios.items():
        console.print(f"{name}: {value:.2f}", highlight=False)
    result = {
        "machine": machine,
        "steps": options.steps,
        "runs": {name: asdict(values) for name, values in measured.items()},
        "ratios": {name: round(value, 3) for name, value in ratios.items()},
    }
    write("v1" if options.v1 else "v0", result)


def write(part: str, result: dict[str, Any]) -> None:
    results = json.loads(RESULTS.read_text()) if RESULTS.exists() else {}
    results[part] = result
    RESULTS.write_text(json.dumps(results, indent=2) + "\n")
    console.print(f"written to {RESULTS}", highlight=False)


def measure_recording(pairs: int) -> None:
    """Record every other step of one training, because two trainings differ by more than the cost of recording."""
    steps = range(1, 4 * pairs + 1)
    recorded = [step for step in steps if step % 2]
    with tempfile.TemporaryDirectory(prefix="rollout-skip-bench-") as temporary:
        folder = Path(temporary)
        overrides = [
            "trainer.use_v1=False",
            f"trainer.total_training_steps={len(steps)}",
            *("rollout_skip.mode=record", f"rollout_skip.dump_dir={folder}/dumps"),
            f"rollout_skip.steps=[{','.join(map(str, recorded))}]",
        ]
        assets = make_assets(folder / "assets").folder
        measure("recording", folder / "run", assets, overrides)
        seconds = runs.TrainingRun(folder / "run").timing("step")
    later = [step for step in steps if step > len(steps) // 2]
    with_s, without_s = ([seconds[step] for step in later if (step in recorded) is kept] for kept in (True, False))
    ratios = [one / other for one, other in zip(with_s, without_s, strict=True)]
    result = {
        "pairs": len(ratios),
        "recorded_step_s": statistics.median(with_s),
        "other_step_s": statistics.median(without_s),
        "ratio": round(statistics.median(with_s) / statistics.median(without_s), 3),
        "ratios of neighbors, quartiles": [round(value, 3) for value in statistics.quantiles(ratios, n=4)],
    }
    console.print(result)
    write("recording", result)


def has_ledger(step: int) -> bool:
    """Whether ``benchmarks.every_other_ledger`` writes a ledger in this step."""
    return (step - 1) // 2 % 2 == 0


def measure_ledger(pairs: int) -> None:
    """Write a ledger in every other pair of steps of one training, and compare the second steps of the pairs."""
    steps = range(1, 8 * pairs + 1)
    with tempfile.TemporaryDirectory(prefix="rollout-skip-bench-") as temporary:
        folder = Path(temporary)
        overrides = [
            "trainer.use_v1=False",
            f"trainer.total_training_steps={len(steps)}",
            *("rollout_skip.mode=record", f"rollout_skip.dump_dir={folder}/dumps"),
        ]
        assets = make_assets(folder / "assets").folder
        measure("ledger", folder / "run", assets, overrides, module="benchmarks.every_other_ledger")
        run = runs.TrainingRun(folder / "run")
        seconds = run.timing("step")
        waited = {step: values[LEDGER_WAITED] for step, values in run.metrics().items()}
    later = [step for step in steps if step > len(steps) // 2 and step % 2 == 0]
    with_s, without_s = ([seconds[step] for step in later if has_ledger(step) is kept] for kept in (True, False))
    ratios = [one / other for one, other in zip(with_s, without_s, strict=True)]
    waits = [waited[step] / seconds[step] for step in later if has_ledger(step)]
    result = {
        "pairs": len(ratios),
        "step_with_ledger_s": statistics.median(with_s),
        "other_step_s": statistics.median(without_s),
        "ratio": round(statistics.median(with_s) / statistics.median(without_s), 3),
        "ratios of neighbors, quartiles": [round(value, 3) for value in statistics.quantiles(ratios, n=4)],
        "share of a step that waits for the ledger": round(statistics.median(waits), 5),
    }
    console.print(result)
    write("ledger", result)


def measure_all(folder: Path, steps: int, v1: bool) -> dict[str, Measured]:
    assets = make_assets(folder / "assets").folder
    ours = f"rollout_skip.dump_dir={folder}/dumps"
    block = "skip.rollout_tq" if v1 else "skip.rollout"
    upstream = [
        f"{block}.enable=True",
        f"{block}.dump_dir={folder}/upstream",
        f"{block}.steps=[{','.join(str(step) for step in range(1, steps + 1))}]",
    ]
    plans = {
        "off": ["rollout_skip.mode=off"],
        "record": ["rollout_skip.mode=record", ours],
        "cache": ["rollout_skip.mode=cache", ours],
        "replay": ["rollout_skip.mode=replay", ours],
        "verl's skip, recording": upstream,
        "verl's skip, loading": upstream,
    }
    common = [f"trainer.use_v1={v1}", f"trainer.total_training_steps={steps}"]
    if v1:
        common.append("trainer.v1.trainer_mode=skip_sync")
    measured = {}
    for number, (name, overrides) in enumerate(plans.items()):
        started = time.monotonic()
        measured[name] = measure(name, folder / f"run-{number}", assets, [*common, *overrides])
        console.print(f"{name}: {time.monotonic() - started:.0f} s", highlight=False)
    return measured


def measure(
    name: str, folder: Path, assets: Path, overrides: list[str], module: str = "recipes.ppo.main_ppo"
) -> Measured:
    process = runs.start(module, "ppo_cpu", folder, assets, overrides)
    run = runs.TrainingRun(folder)
    usage = Usage(process.pid, memory_interval=0.0)
    started, first = time.monotonic(), 0.0
    try:
        while process.poll() is None:
            usage.sample()
            if not first and run.metrics():
                first = time.monotonic()
            time.sleep(0.25 if not first else 2.0)  # reading a process's memory usage slows it down
    finally:
        if process.poll() is None:
            process.terminate()
    if process.returncode != 0:
        raise SystemExit(f"{name} ended with {process.returncode}:\n{run.log[-4000:]}")
    steps = list(run.timing("step").values())
    rollouts = list(run.timing("gen").values())
    return Measured(
        name,
        start_s=first - started - steps[0],
        step_s=statistics.median(steps[len(steps) // 2 :]),
        rollout_s=statistics.median(rollouts[len(rollouts) // 2 :]),
        peak_bytes=usage.peak_bytes,
        hits=len(run.hits()),
    )


def compare(measured: dict[str, Measured]) -> dict[str, float]:
    off, record, cache, replay = (measured[name] for name in ("off", "record", "cache", "replay"))
    upstream = measured["verl's skip, loading"]
    return {
        "a step while recording, against one without": record.step_s / off.step_s,
        "a loaded step, against a generated one": cache.step_s / off.step_s,
        "a replayed step, against a generated one": replay.step_s / off.step_s,
        "the rollout of a hit, against a generated one": cache.rollout_s / off.rollout_s,
        "the rollout of a hit, against a hit of verl's skip": cache.rollout_s / upstream.rollout_s,
        "a step from the dumps, against one of verl's skip": cache.step_s / upstream.step_s,
        "start of a replay, against a recording": replay.start_s / record.start_s,
        "memory of a replay, against a recording": replay.peak_bytes / record.peak_bytes,
    }


def show(measured: dict[str, Measured]) -> None:
    table = Table(title="Trainings")
    for name in ("run", "start", "step", "rollout", "memory", "loaded"):
        table.add_column(name, justify="left" if name == "run" else "right")
    for values in measured.values():
        cells = [f"{values.start_s:.1f} s", f"{values.step_s:.2f} s", f"{values.rollout_s * 1e3:.0f} ms"]
        table.add_row(values.name, *cells, f"{values.peak_bytes / 1e9:.1f} GB", str(values.hits))
    console.print(table)


if __name__ == "__main__":
    main()
