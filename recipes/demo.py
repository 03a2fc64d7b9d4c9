"""The demonstration, ``make demo``: record a short training on CPU, train again from the dumps, and compare.

Real trainings of verl with Ray and FSDP2, as a user starts them; only the model, the data and the engine are tiny.
"""

from __future__ import annotations

import argparse
import subprocess
import sys
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path

import psutil
from rich.console import Console
from rich.table import Table

from recipes.cpu import runs
from recipes.cpu.assets import make_assets
from verl_rollout_skip.sizes import format_size

console = Console()
SERVER = "ray::CPUServer"


@dataclass(frozen=True)
class Plan:
    """A training to run: ``like`` names the one whose metrics it must repeat."""

    name: str
    recipe: str
    mode: str
    like: str | None = None


@dataclass(frozen=True)
class Outcome:
    """A training that was run, how long it took, and whether an inference server was seen among its processes."""

    plan: Plan
    run: runs.TrainingRun
    seconds: float
    engine: bool

    def row(self, others: dict[str, Outcome]) -> list[str]:
        metrics = self.run.metrics()
        last = metrics[max(metrics)]
        return [
            self.plan.name,
            f"{self.seconds:.0f} s",
            "yes" if self.engine else "no",
            f"{sum(self.run.timing('gen').values()):.2f} s",
            f"{len(self.run.hits())} of {len(metrics)}",
            str(len(self.run.trace("sync"))),
            f"{last['critic/score/mean']:.3f}",
            self._identical(others),
        ]

    def _identical(self, others: dict[str, Outcome]) -> str:
        if self.plan.like is None:
            return ""
        return "yes" if self.run.results() == others[self.plan.like].run.results() else "NO"


PLANS = [
    Plan("ppo record", "ppo", "record"),
    Plan("ppo cache", "ppo", "cache", like="ppo record"),
    Plan("ppo replay", "ppo", "replay", like="ppo record"),
    Plan("dapo record", "dapo", "record"),
    Plan("dapo replay", "dapo", "replay", like="dapo record"),
]


def main() -> None:
    parser = argparse.ArgumentParser(prog="make demo", description=__doc__)
    parser.add_argument("--folder", type=Path, help="where to put everything (default: a new temporary folder)")
    parser.add_argument("--steps", type=int, default=4, help="training steps of each run (default: 4)")
    options = parser.parse_args()
    folder = (options.folder or Path(tempfile.mkdtemp(prefix="rollout-skip-demo-"))).resolve()
    dumps = folder / "dumps"
    console.print(f"Everything goes to {folder}", highlight=False)
    assets = make_assets(folder / "assets").folder
    outcomes: dict[str, Outcome] = {}
    for number, plan in enumerate(PLANS, start=1):
        title = f"{number}/{len(PLANS)} {plan.name}"
        outcomes[plan.name] = train(title, plan, folder / plan.name.replace(" ", "-"), assets, dumps, options.steps)
    show(outcomes)
    size = sum(file.stat().st_size for file in dumps.rglob("*.parquet"))
    console.print(f"The dumps ({format_size(size)}) are in {dumps}", highlight=False, soft_wrap=True)
    console.print(
        f"Look at them:  {Path(sys.executable).parent}/rollout-skip ls {dumps}", highlight=False, soft_wrap=True
    )
    if any("NO" in outcome.row(outcomes) for outcome in outcomes.values()):
        sys.exit("A training that was repeated from its dumps gave other metrics. That is a bug: please report it.")


def train(title: str, plan: Plan, folder: Path, assets: Path, dumps: Path, steps: int) -> Outcome:
    overrides = [
        "trainer.use_v1=False",
        f"trainer.total_training_steps={steps}",
        f"rollout_skip.mode={plan.mode}",
        f"rollout_skip.dump_dir={dumps}",
    ]
    started = time.monotonic()
    process = runs.start(f"recipes.{plan.recipe}.main_{plan.recipe}", f"{plan.recipe}_cpu", folder, assets, overrides)
    run = runs.TrainingRun(folder)
    try:
        engine = follow(title, run, process, steps)
    finally:
        if process.poll() is None:
            process.terminate()
            process.wait()
    if process.returncode != 0:
        console.print(run.log[-4000:], markup=False, highlight=False)
        sys.exit(f"{plan.name} ended with {process.returncode}; all that it printed is in {folder}/log")
    return Outcome(plan, run, time.monotonic() - started, engine)


def follow(title: str, run: runs.TrainingRun, process: subprocess.Popen[bytes], steps: int) -> bool:
    """Show how far a training is until it ends: on a terminal in place, otherwise a line for each change.

    Returns whether an inference server was among its processes.
    """
    started, shown, engine = time.monotonic(), "", False
    with console.status(title) as status:
        while process.poll() is None:
            done = run.metrics()
            if done:
                loaded = " (loaded)" if max(done) in run.hits() else ""
                text = f"step {max(done)} of {steps}{loaded}"
            else:
                text = "verl starts Ray, the workers and the engine (about half a minute)"
            status.update(f"{title}: {text}, {time.monotonic() - started:.0f} s")
            if text != shown and not console.is_terminal:
                console.print(f"{title}: {text}", highlight=False)
            shown = text
            engine = engine or has_engine(process)
            time.sleep(0.5)
    console.print(
        f"{title}: {max(run.metrics(), default=0)} steps in {time.monotonic() - started:.0f} s", highlight=False
    )
    return engine


def has_engine(process: subprocess.Popen[bytes]) -> bool:
    try:
        return any(
            SERVER in " ".join(child.cmdline()) for child in psutil.Process(process.pid).children(recursive=True)
        )
    except psutil.Error:
        return False  # one of them has just ended; there is a next time


def show(outcomes: dict[str, Outcome]) -> None:
    table = Table(title="The same training, recorded and from its dumps")
    for name in ("run", "total", "engine", "in rollout", "loaded", "weight syncs", "final reward", "identical metrics"):
        table.add_column(name, justify="left" if name == "run" else "right")
    for outcome in outcomes.values():
        table.add_row(*outcome.row(outcomes))
    console.print(table)


if __name__ == "__main__":
    main()
