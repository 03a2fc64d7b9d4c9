"""Watch a model learn on CPU: ``python -m recipes.cpu.learn`` trains the tiny model with GRPO and plots its rewards.

The base model answers an addition with a number near the sum; only the exact sum is rewarded.
"""

from __future__ import annotations

import argparse
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import IO

from recipes.cpu import runs
from recipes.cpu.assets import make_assets
from recipes.cpu.curve import Curve, draw
from recipes.cpu.environment import RECIPE, REPOSITORY

REWARD = "critic/score/mean"
ACCURACY = "val-core/addition/acc/mean@1"
BAR = 40


def overrides(steps: int, seed: int) -> list[str]:
    """Changes to the CPU configuration: more samples per prompt, each used twice."""
    return [
        "trainer.use_v1=False",
        "actor_rollout_ref.rollout.n=8",
        "actor_rollout_ref.actor.ppo_epochs=2",
        f"trainer.total_training_steps={steps}",
        "trainer.val_before_train=True",
        "trainer.test_freq=10",
        f"data.seed={seed}",
        f"actor_rollout_ref.rollout.seed={seed}",
    ]


def learn(folder: Path, steps: int, seed: int, out: IO[str] = sys.stdout) -> runs.TrainingRun:
    """Train in a new folder and print the progress; raise if the training fails."""
    assets = make_assets(folder / "assets", seed)
    run = runs.TrainingRun(folder / "run")
    environment = runs.prepare(run.folder, assets.folder)
    command = [sys.executable, "-m", "verl.trainer.main_ppo", f"--config-dir={RECIPE}/config"]
    command += [*runs.arguments(run.folder, "cpu_trainer"), *overrides(steps, seed)]
    print(f"Starting verl, which takes most of a minute; its log is {run.folder / 'log'}", file=out)
    with open(run.folder / "log", "wb") as log:
        process = subprocess.Popen(command, cwd=REPOSITORY, env=environment, stdout=log, stderr=subprocess.STDOUT)
    try:
        for line in _progress(run, process, steps):
            print(line, file=out, flush=True)
        code = process.wait()
    finally:
        process.terminate()
    if code != 0:
        raise RuntimeError(f"The training failed with exit code {code}. The end of its log:\n{run.log[-3000:]}")
    return run


def _progress(run: runs.TrainingRun, process: subprocess.Popen[bytes], steps: int) -> Iterator[str]:
    """One line per step, as soon as it is done."""
    shown = 0
    while True:
        ended = process.poll() is not None
        rewards = curve_of(run).rewards
        for step in sorted(step for step in rewards if step > shown):
            yield f"step {step:>3}/{steps}  mean reward {rewards[step]:.2f}  {'█' * round(BAR * rewards[step])}"
            shown = step
        if ended:
            return
        time.sleep(0.2)


def curve_of(run: runs.TrainingRun) -> Curve:
    metrics = run.metrics()
    return Curve(
        rewards={step: values[REWARD] for step, values in metrics.items() if REWARD in values},
        accuracies={step: values[ACCURACY] for step, values in metrics.items() if ACCURACY in values},
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--folder", type=Path, help="a new folder for everything (default: outputs/learn/TIME)")
    parser.add_argument("--steps", type=int, default=50)
    parser.add_argument("--seed", type=int, default=0, help="determines the model, the data and the samples")
    arguments = parser.parse_args()
    folder = (arguments.folder or Path("outputs/learn") / time.strftime("%Y-%m-%d_%H-%M-%S")).resolve()
    if folder.exists():
        parser.error(f"{folder} already exists: use a new folder")
    # raises SystemExit, which also ends the training
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(128 + signal.SIGTERM))
    curve = curve_of(learn(folder, arguments.steps, arguments.seed))
    picture = folder / "curve.svg"
    picture.write_text(draw(curve, f"GRPO on CPU: additions, seed {arguments.seed}"))
    print(curve.summary())
    print(f"The curve: {picture}")


if __name__ == "__main__":
    main()
