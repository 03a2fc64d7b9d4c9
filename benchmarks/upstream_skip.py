"""Reproduces how verl's own skip behaves in the cases of the README's table: ``python -m benchmarks.upstream_skip``.

Real trainings of recipes/cpu with ``skip.rollout`` (V0) and ``skip.rollout_tq`` (V1), without this package; tests/e2e
cover this package in the same cases. Results go to benchmarks/results/upstream_skip.json.
"""

from __future__ import annotations

import argparse
import json
import pickle
import shutil
import tempfile
from importlib.metadata import version
from pathlib import Path
from typing import Any

from recipes.cpu import runs
from recipes.cpu.assets import make_assets

RESULTS = Path(__file__).parent / "results" / "upstream_skip.json"
STEPS = 2
FILTER = ("algorithm.filter_groups.enable=True", "algorithm.filter_groups.metric=acc")


class Trainings:
    """Runs trainings one after another on the same model and data."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.assets = make_assets(folder / "assets").folder

    def run(self, name: str, dumps: Path, steps: list[int], *overrides: str, v1: bool = False) -> runs.TrainingRun:
        print(f"{name} …", flush=True)
        block = "skip.rollout_tq" if v1 else "skip.rollout"
        settings = (
            f"trainer.use_v1={v1}",
            f"trainer.total_training_steps={STEPS}",
            *(f"{block}.enable=True", f"{block}.dump_dir={dumps}", f"{block}.steps={steps}".replace(" ", "")),
        )
        folder = self.folder / name
        options = [*settings, *overrides, "--config-dir=recipes/cpu/config"]
        runs.start("verl.trainer.main_ppo", "cpu_trainer", folder, self.assets, options).wait()
        return runs.TrainingRun(folder)


class Touch:
    """When unpickled, creates a file and returns the original batch."""

    def __init__(self, marker: Path, batch: bytes) -> None:
        self.marker = marker
        self.batch = batch

    def __reduce__(self) -> tuple[Any, ...]:
        code = "(__import__('pathlib').Path(marker).touch(), __import__('pickle').loads(batch))[1]"
        return eval, (code, {"marker": str(self.marker), "batch": self.batch})


def synchronous(trainings: Trainings, folder: Path) -> dict[str, Any]:
    """V0: a different temperature, a damaged file, code in a file, and weight syncs to an idle engine."""
    every = list(range(1, STEPS + 1))
    recorded = trainings.run("recorded", folder / "dumps", every)
    warmer = trainings.run("another temperature", folder / "dumps", every, "actor_rollout_ref.rollout.temperature=0.3")
    shutil.copytree(folder / "dumps", folder / "damaged")
    (file,) = (folder / "damaged").rglob("1/gen_batch.dp")
    content = bytearray(file.read_bytes())
    content[len(content) // 2] ^= 0xFF
    file.write_bytes(content[: len(content) * 3 // 4])
    damaged = trainings.run("damaged file", folder / "damaged", every)
    shutil.copytree(folder / "dumps", folder / "hostile")
    (file,) = (folder / "hostile").rglob("1/gen_batch.dp")
    marker = folder / "was-here"
    file.write_bytes(pickle.dumps(Touch(marker, file.read_bytes())))
    hostile = trainings.run("code in a file", folder / "hostile", every)
    return {
        "responses generated while recording": len(recorded.trace("generate")),
        "another temperature: responses generated": len(warmer.trace("generate")),
        "damaged file: steps trained": len(damaged.metrics()),
        "damaged file: last line of the error": next(
            (line for line in reversed(damaged.log.splitlines()) if "Error" in line), None
        ),
        "code in a file: ran": marker.exists(),
        "code in a file: steps trained": len(hostile.metrics()),
        "everything loaded: responses generated": len(hostile.trace("generate")),
        "everything loaded: weight syncs": len(hostile.trace("sync")),
    }


def dynamic_sampling(trainings: Trainings, folder: Path) -> dict[str, Any]:
    """V1 with filter_groups: step 1 is loaded, step 2 is generated. Does step 2 get the same prompts?"""
    first = trainings.run("dapo recorded", folder / "dapo", [1], *FILTER, v1=True)
    again = trainings.run("dapo loaded", folder / "dapo", [1], *FILTER, v1=True)
    left, right = first.results(), again.results()
    return {
        "DAPO: step 1 loaded": again.trace("generate").count(0) == 0,
        "DAPO: metrics that differ, by step": {
            step: sum(left[step].get(key) != right[step].get(key) for key in {*left[step], *right[step]})
            for step in sorted(left.keys() & right.keys())
        },
        "DAPO: steps trained": [len(left), len(right)],
    }


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.upstream_skip", description=__doc__)
    parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="rollout-skip-upstream-") as temporary:
        folder = Path(temporary)
        trainings = Trainings(folder)
        found = {"verl": version("verl"), **synchronous(trainings, folder), **dynamic_sampling(trainings, folder)}
    text = json.dumps(found, indent=2, ensure_ascii=False)
    RESULTS.write_text(text + "\n", encoding="utf-8")
    print(text)


if __name__ == "__main__":
    main()
