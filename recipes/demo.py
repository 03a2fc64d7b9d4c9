"""``make demo``: records short trainings on CPU, replays them without an engine, and compares the results.

These are real verl trainings with Ray and FSDP2, started the way a user starts them. Only the model, the data and the
engine are tiny.
"""

from __future__ import annotations

import argparse
import shlex
import signal
import subprocess
import sys
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path
from types import FrameType

from rich import box
from rich.console import Console
from rich.table import Table

from recipes.cpu import runs
from recipes.cpu.assets import make_assets
from recipes.cpu.environment import REPOSITORY, cpu_environment
from recipes.cpu.processes import Usage, end_descendants, keep_descendants
from verl_rollout_skip.sizes import format_size

console = Console(highlight=False)
MODES = ("record", "replay")
STARTS = {
    "record": "starting Ray, the workers and the inference engine",
    "replay": "starting Ray and the workers, no inference engine",
}
DONE = {"record": "generated and recorded", "replay": "loaded"}


@dataclass(frozen=True)
class Training:
    """A training to record and replay. ``block`` is the prefix of this package's settings on its command line."""

    name: str
    module: str
    config: str
    setting: str
    block: str = "rollout_skip"
    options: tuple[str, ...] = ()


TRAININGS = {
    "ppo": Training("PPO", "recipes.ppo.main_ppo", "ppo_cpu", "trainer.use_v1=False"),
    "dapo": Training("DAPO", "recipes.dapo.main_dapo", "dapo_cpu", "trainer.use_v1=False"),
    # verl's own entry point: settings alone make it record.
    "v1": Training(
        "V1",
        "verl.trainer.main_ppo",
        "cpu_trainer",
        "trainer.v1.trainer_mode=skip_sync",
        block="+rollout_skip",
        options=(f"--config-dir={REPOSITORY}/recipes/cpu/config",),
    ),
}


@dataclass(frozen=True)
class Outcome:
    """The cost of one run of a training, and the metrics that must be identical in both runs."""

    seconds: float
    rollout_seconds: float
    cpu_seconds: float
    peak_bytes: int
    engine: bool
    metrics: dict[int, dict[str, object]]


def main() -> None:
    parser = argparse.ArgumentParser(prog="make demo", description=__doc__)
    parser.add_argument("--folder", type=Path, help="where to put everything (default: a new temporary folder)")
    parser.add_argument("--steps", type=int, default=4, help="training steps per run (default: 4)")
    parser.add_argument("--only", choices=TRAININGS, help="run one of the trainings instead of all three")
    options = parser.parse_args()
    folder = (options.folder or Path(tempfile.mkdtemp(prefix="skip-demo-"))).resolve()
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, interrupt)
    keep_descendants()
    try:
        outcomes = train_all([options.only] if options.only else list(TRAININGS), folder, options.steps)
    except KeyboardInterrupt:
        console.print(f"Interrupted. All processes of the demo have ended; its files are in {folder}", soft_wrap=True)
        sys.exit(130)
    show(outcomes)
    show_commands(folder, options.steps)
    if differing := [name for name, pair in outcomes.items() if not identical(pair)]:
        sys.exit(f"The metrics of {', '.join(differing)} differ between recording and replay. Please report this bug.")


def interrupt(number: int, frame: FrameType | None) -> None:
    raise KeyboardInterrupt


def train_all(names: list[str], folder: Path, steps: int) -> dict[str, dict[str, Outcome]]:
    """By name and mode."""
    console.print(f"Real verl trainings on CPU with a tiny model. All files go to {folder}", soft_wrap=True)
    assets = make_assets(folder / "assets").folder
    write_environment(folder, assets)
    outcomes: dict[str, dict[str, Outcome]] = {name: {} for name in names}
    for index, name in enumerate(names):
        for mode in MODES:
            number = index * len(MODES) + MODES.index(mode) + 1
            title = f"{number}/{len(names) * len(MODES)} {TRAININGS[name].name} {mode}"
            outcomes[name][mode] = train(title, TRAININGS[name], mode, folder, assets, steps)
    return outcomes


def train(title: str, training: Training, mode: str, folder: Path, assets: Path, steps: int) -> Outcome:
    run = runs.TrainingRun(folder / f"{training.name.lower()}-{mode}")
    settings = [
        training.setting,
        f"trainer.experiment_name={training.name.lower()}",
        f"trainer.total_training_steps={steps}",
        f"{training.block}.mode={mode}",
        f"{training.block}.dump_dir={folder}/dumps",
    ]
    started = time.monotonic()
    try:
        process = runs.start(training.module, training.config, run.folder, assets, settings, training.options)
        usage = follow(title, mode, run, process, steps)
        seconds = time.monotonic() - started
    finally:
        before = signal.signal(signal.SIGINT, signal.SIG_IGN)
        end_descendants()
        signal.signal(signal.SIGINT, before)
    if process.returncode != 0:
        console.print(run.log[-4000:], markup=False)
        sys.exit(f"{title} failed with exit code {process.returncode}; the full output is in {run.folder}/log")
    rollout_seconds = sum(run.timing("gen").values())
    return Outcome(seconds, rollout_seconds, usage.cpu_seconds, usage.peak_bytes, usage.engine, run.results())


def follow(title: str, mode: str, run: runs.TrainingRun, process: subprocess.Popen[bytes], steps: int) -> Usage:
    """Show the progress of a training until it ends: in place on a terminal, otherwise one line per change."""
    started, shown, usage = time.monotonic(), "", Usage(process.pid)
    with console.status(title) as status:
        while process.poll() is None:
            done = max(run.metrics(), default=0)
            text = f"{title}: step {done} of {steps} {DONE[mode]}" if done else f"{title}: {STARTS[mode]}"
            status.update(f"{text}, {time.monotonic() - started:.0f} s")
            if text != shown and not console.is_terminal:
                console.print(text, soft_wrap=True)
            shown = text
            usage.sample()
            time.sleep(0.5)
    console.print(f"{title}: {max(run.metrics(), default=0)} steps in {time.monotonic() - started:.0f} s")
    return usage


def show(outcomes: dict[str, dict[str, Outcome]]) -> None:
    table = Table(box=box.SIMPLE_HEAD, pad_edge=False)
    for name in ("", "engine", "total", "rollouts", "CPU", "memory", "identical metrics"):
        table.add_column(name, justify="left" if name == "" else "right")
    for name, pair in outcomes.items():
        record, replay = pair["record"], pair["replay"]
        table.add_row(f"{TRAININGS[name].name} record", *cells(record), "")
        table.add_row("replay".rjust(len(TRAININGS[name].name) + 7), *cells(replay), "yes" if identical(pair) else "NO")
        table.add_row(*ratios(record, replay), "", end_section=True)
    console.print(table)
    console.print("The model is tiny, so most of the time is startup. With a real model, most of it is rollouts.")


def cells(outcome: Outcome) -> list[str]:
    return [
        "yes" if outcome.engine else "no",
        f"{outcome.seconds:.0f} s",
        f"{outcome.rollout_seconds:.2f} s",
        f"{outcome.cpu_seconds:.0f} s",
        format_size(outcome.peak_bytes),
    ]


def ratios(record: Outcome, replay: Outcome) -> list[str]:
    pairs = [
        (record.seconds, replay.seconds),
        (record.rollout_seconds, replay.rollout_seconds),
        (record.cpu_seconds, replay.cpu_seconds),
        (record.peak_bytes, replay.peak_bytes),
    ]
    return ["saving", "", *(f"{before / after:.1f}×" for before, after in pairs)]


def identical(pair: dict[str, Outcome]) -> bool:
    return pair["record"].metrics == pair["replay"].metrics


def write_environment(folder: Path, assets: Path) -> None:
    """Write the file that a shell must source before it continues a training of the demo."""
    variables = {**cpu_environment(assets), "VERL_FILE_LOGGER_PATH": f"{folder}/resumed.jsonl"}
    lines = [f"export {name}={shlex.quote(value)}\n" for name, value in variables.items()]
    (folder / "environment").write_text("".join(lines))


def show_commands(folder: Path, steps: int) -> None:
    program, dumps = Path(sys.executable).with_name("rollout-skip"), folder / "dumps"
    if program.is_relative_to(Path.cwd()):
        program = program.relative_to(Path.cwd())
    run = next(dumps.glob("ppo_*"), None) or next(dumps.iterdir())
    manifest = next(run.glob("*/manifest.json"))
    console.print("\nList the recordings, look at the rollouts of the first training, or continue it:\n")
    for command in (
        f"{program} ls {dumps}",
        f"{program} report {manifest.parent} -o {folder}/report.html",
        f"(. {folder}/environment; {program} resume {manifest} trainer.total_training_steps={steps + 2})",
    ):
        console.print(f"  {command}", soft_wrap=True)


if __name__ == "__main__":
    main()
