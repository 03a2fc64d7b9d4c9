"""Real trainings for the end-to-end tests: verl on Ray with FSDP2 and the engine of recipes/cpu."""

from __future__ import annotations

import re
import signal
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import psutil
import torch

from recipes.cpu import runs
from tests import zygote

ROOT = Path(__file__).resolve().parents[2]
TIMEOUT = 400
# Ray waits 30 s for its own processes, which a machine that is busy with something else may exceed.
RAY_GAVE_UP = "The current node timed out during startup."


@dataclass(frozen=True)
class Finished(runs.TrainingRun):
    """What a training left behind."""

    exit_code: int

    @property
    def messages(self) -> list[str]:
        """What this package said, one item a message; what follows a message on lines of its own belongs to it."""
        lines = [re.sub(r"^\(\w+ pid=\d+\) ", "", line) for line in re.split(r"[\n\r]", self.log)]
        found: list[str] = []
        for line in lines:
            start = line.find("[rollout_skip] ")
            if start >= 0:
                found.append(line[start:])
            elif found and line.startswith("  "):
                found[-1] += f"\n{line}"
        return found

    @property
    def summary(self) -> str:
        return next(text for text in reversed(self.messages) if "rollout steps:" in text)

    def weights(self, step: int, role: str = "actor") -> dict[str, torch.Tensor]:
        """The parameters that were saved at a step."""
        files = sorted((self.folder / "checkpoints" / f"global_step_{step}" / role).glob("model_world_size_*.pt"))
        assert files, f"no checkpoint of step {step} in {self.folder}"
        found = {}
        for file in files:
            for name, value in torch.load(file, weights_only=False).items():
                found[f"{file.name}:{name}"] = value.to_local() if hasattr(value, "to_local") else value
        return found

    def rollout_data(self) -> dict[str, list[str]]:
        """The rows that each step trained on, as verl writes them (trainer.rollout_data_dir), in a fixed order."""
        files = sorted((self.folder / "rollout_data").glob("*.jsonl"))
        return {file.stem: sorted(file.read_text().splitlines()) for file in files}


class Trainings:
    """Starts trainings whose folders are below one folder, on the same model and data."""

    def __init__(
        self,
        folder: Path,
        assets: Path,
        module: str = "recipes.ppo.main_ppo",
        config: str = "ppo_cpu",
        options: tuple[str, ...] = (),
    ) -> None:
        self.folder = folder
        self.assets = assets
        self.module = module
        self.config = config
        self.options = options

    def start(self, name: str, *overrides: str, env: dict[str, str] | None = None) -> tuple[Path, zygote.Process]:
        folder = self.folder / name
        # The workers are what a test waits for.
        environment = {**runs.prepare(folder, self.assets), "RAY_worker_niceness": "0", **(env or {})}
        arguments = [
            *self.options,
            *runs.arguments(folder, self.config),
            f"trainer.rollout_data_dir={folder}/rollout_data",
            "trainer.use_v1=False",
            *overrides,
        ]
        with open(folder / "log", "wb") as log:
            return folder, zygote.run(self.module, arguments, env=environment, cwd=ROOT, stdout=log)

    def run(self, name: str, *overrides: str, fails: bool = False, env: dict[str, str] | None = None) -> Finished:
        """Train to the end. ``fails``: that it ends with an error is what the test is about."""
        folder, process = self.start(name, *overrides, env=env)
        try:
            finished = Finished(folder, process.wait(TIMEOUT))
        finally:
            end(process)
        if finished.exit_code != 0 and RAY_GAVE_UP in finished.log and not name.endswith("-again-for-ray"):
            return self.run(f"{name}-again-for-ray", *overrides, fails=fails, env=env)
        if (finished.exit_code != 0) is not fails:
            raise AssertionError(f"{name} ended with {finished.exit_code}:\n{finished.log[-8000:]}")
        return finished

    def run_until(self, name: str, moment: Callable[[Path], bool], *overrides: str) -> Finished:
        """Train until something is seen in its folder, then end it with SIGKILL, as a crash would."""
        folder, process = self.start(name, *overrides)
        deadline = time.monotonic() + TIMEOUT
        try:
            while not moment(folder):
                code = process.poll()
                if code is not None and RAY_GAVE_UP in (folder / "log").read_text(errors="replace"):
                    folder, process = self.start(f"{name}-again-for-ray", *overrides)
                    continue
                if code is not None or time.monotonic() > deadline:
                    raise AssertionError(f"{name} ended with {code} too early:\n{(folder / 'log').read_text()[-8000:]}")
                time.sleep(0.02)
        finally:
            end(process)
        return Finished(folder, process.wait())


def end(process: zygote.Process) -> None:
    """Kill a training with all of its Ray processes, which outlive a killed driver for a while."""
    if process.poll() is not None:
        return
    try:
        family = psutil.Process(process.pid).children(recursive=True)
    except psutil.NoSuchProcess:
        family = []
    process.send_signal(signal.SIGKILL)
    process.wait()
    for member in family:
        try:
            member.kill()
        except psutil.NoSuchProcess:
            pass
    psutil.wait_procs(family, timeout=20)


def assert_same_results(one: Finished, other: Finished, steps: list[int] | None = None) -> None:
    """Every metric but timings is equal to the last bit in both runs, step by step."""
    left, right = one.results(), other.results()
    for step in steps if steps is not None else sorted({*left, *right}):
        keys = {*left.get(step, {}), *right.get(step, {})}
        assert len(keys) > 30, f"step {step} has {len(keys)} metrics: {sorted(keys)}"
        different = {
            key: (left[step].get(key), right[step].get(key))
            for key in keys
            if left[step].get(key) != right[step].get(key)
        }
        assert not different, f"step {step}: {different}"


def assert_same_weights(one: Finished, other: Finished, step: int, role: str = "actor") -> None:
    left, right = one.weights(step, role), other.weights(step, role)
    assert left.keys() == right.keys()
    different = [name for name in left if not torch.equal(left[name], right[name])]
    assert not different, f"{len(different)} of {len(left)} tensors differ after step {step}: {different[:3]}"


def variant_in(dumps: Path) -> Path:
    """The folder of the only variant below a dump_dir."""
    (manifest,) = dumps.glob("*/*/manifest.json")
    return manifest.parent
