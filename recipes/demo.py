"""``make demo``: records short trainings on CPU, replays them without an engine, and compares the results.

These are real verl trainings with Ray and FSDP2, started the way a user starts them. Only the model, the data and the
engine are tiny. ``make demo-vllm`` does the same with vLLM as the engine.
"""

from __future__ import annotations

import argparse
import itertools
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
from verl_rollout_skip.store.sizes import format_size

console = Console(highlight=False)
STARTS = {
    "record": "starting Ray, the workers and the inference engine",
    "cache": "starting Ray, the workers and the inference engine",
    "replay": "starting Ray and the workers, no inference engine",
}
DONE = {"record": "generated and recorded", "cache": "loaded", "replay": "loaded"}


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

# With vLLM a training takes twice as long.
DEFAULT = {"cpu": ("ppo", "dapo", "v1"), "vllm": ("ppo", "v1")}


@dataclass(frozen=True)
class Stage:
    """One run of a training, with this interpreter or another one."""

    name: str
    mode: str
    python: str = sys.executable


@dataclass(frozen=True)
class Outcome:
    """The cost of one run of a training, and the metrics that must be identical in all of its runs."""

    seconds: float
    rollout_seconds: float
    cpu_seconds: float
    peak_bytes: int
    engines: frozenset[str]
    syncs: int
    metrics: dict[int, dict[str, object]]


def main() -> None:
    parser = argparse.ArgumentParser(prog="make demo", description=__doc__)
    parser.add_argument("--folder", type=Path, help="where to put everything (default: a new temporary folder)")
    parser.add_argument("--steps", type=int, default=4, help="training steps per run (default: 4)")
    parser.add_argument("--only", choices=TRAININGS, help="run one of the trainings instead of all of them")
    parser.add_argument("--engine", choices=("cpu", "vllm"), default="cpu", help="the inference engine (default: cpu)")
    parser.add_argument("--plain-python", help="an interpreter without vLLM, to replay there as well")
    options = parser.parse_args()
    folder = (options.folder or Path(tempfile.mkdtemp(prefix="skip-demo-"))).resolve()
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, interrupt)
    keep_descendants()
    names = [options.only] if options.only else [name for name in TRAININGS if name in DEFAULT[options.engine]]
    plan = stages_of(options.engine, options.plain_python)
    try:
        outcomes = train_all(names, plan, options.engine, folder, options.steps)
    except KeyboardInterrupt:
        console.print(f"Interrupted. All processes of the demo have ended; its files are in {folder}", soft_wrap=True)
        sys.exit(130)
    show(outcomes)
    show_commands(folder, options.steps)
    if differing := [
        name
        for name, stages in outcomes.items()
        if not all(identical(outcome, stages["record"]) for outcome in stages.values())
    ]:
        sys.exit(f"The metrics of {', '.join(differing)} differ between recording and replay. Please report this bug.")


def stages_of(engine: str, plain_python: str | None) -> list[Stage]:
    """The runs of each training. The first one is the recording that the others are compared with."""
    stages = [Stage("record", "record"), Stage("replay", "replay")]
    if engine == "vllm":
        stages.insert(1, Stage("cache", "cache"))
    if plain_python:
        stages.append(Stage("replay without vLLM", "replay", plain_python))
    return stages


def interrupt(number: int, frame: FrameType | None) -> None:
    raise KeyboardInterrupt


def train_all(
    names: list[str], stages: list[Stage], engine: str, folder: Path, steps: int
) -> dict[str, dict[str, Outcome]]:
    """Run every stage of every training. Returns the outcomes by training and stage."""
    console.print(f"Real verl trainings on CPU with a tiny model. All files go to {folder}", soft_wrap=True)
    assets = make_assets(folder / "assets").folder
    write_environment(folder, assets)
    outcomes: dict[str, dict[str, Outcome]] = {name: {} for name in names}
    for number, (name, stage) in enumerate(itertools.product(names, stages), 1):
        title = f"{number}/{len(names) * len(stages)} {TRAININGS[name].name} {stage.name}"
        outcomes[name][stage.name] = train(title, TRAININGS[name], stage, engine, folder, assets, steps)
    return outcomes


def train(title: str, training: Training, stage: Stage, engine: str, folder: Path, assets: Path, steps: int) -> Outcome:
    run = runs.TrainingRun(folder / f"{training.name} {stage.name}".lower().replace(" ", "-"))
    settings = [
        training.setting,
        f"cpu_engine={engine}",
        f"trainer.experiment_name={training.name.lower()}",
        f"trainer.total_training_steps={steps}",
        f"{training.block}.mode={stage.mode}",
        f"{training.block}.dump_dir={folder}/dumps",
    ]
    started = time.monotonic()
    try:
        process = runs.start(
            training.module, training.config, run.folder, assets, settings, training.options, stage.python
        )
        usage = follow(title, stage.mode, run, process, steps)
        seconds = time.monotonic() - started
    finally:
        before = signal.signal(signal.SIGINT, signal.SIG_IGN)
        end_descendants()
        signal.signal(signal.SIGINT, before)
    if process.returncode != 0:
        console.print(run.log[-4000:], markup=False)
        sys.exit(f"{title} failed with exit code {process.returncode}; the full output is in {run.folder}/log")
    return Outcome(
        seconds,
        rollout_seconds=sum(run.timing("gen").values()),
        cpu_seconds=usage.cpu_seconds,
        peak_bytes=usage.peak_bytes,
        engines=frozenset(usage.engines),
        syncs=len(run.trace("sync")),
        metrics=run.results(),
    )


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
    table = Table(box=box.SIMPLE_HEAD, pad_edge=False, padding=(0, 1, 0, 0))
    for name in ("", "engine", "syncs", "total", "rollouts", "CPU", "memory", "identical"):
        table.add_column(name, justify="right", no_wrap=True)
    for name, stages in outcomes.items():
        (first, record), *others = stages.items()
        table.add_row(f"{TRAININGS[name].name} {first}", *cells(record), "")
        for stage, outcome in others:
            table.add_row(stage, *cells(outcome), "yes" if identical(outcome, record) else "NO")
        table.add_row(*ratios(record, stages["replay"]), "", end_section=True)
    console.print(table)
    engines = sorted(set().union(*(outcome.engines for stages in outcomes.values() for outcome in stages.values())))
    console.print(f"engine: whether {' and '.join(engines)} ran; syncs: how often it received the actor's weights")
    console.print("identical: whether all metrics except timings match the recording to the last bit")
    console.print("The model is tiny, so most of the time is startup. With a real model, most of it is rollouts.")


def cells(outcome: Outcome) -> list[str]:
    return [
        "yes" if outcome.engines else "no",
        str(outcome.syncs),
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
    return ["saving", "", "", *(f"{before / after:.1f}×" for before, after in pairs)]


def identical(outcome: Outcome, recorded: Outcome) -> bool:
    return outcome.metrics == recorded.metrics


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
