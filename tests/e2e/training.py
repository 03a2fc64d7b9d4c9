"""Real trainings for the end-to-end tests: processes that run verl on Ray, FSDP2 and an engine of recipes/cpu."""

from __future__ import annotations

import fcntl
import re
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, field
from pathlib import Path

import psutil
import torch

from recipes.cpu import runs
from tests import cli_program

ROOT = Path(__file__).resolve().parents[2]
TIMEOUT = 400
# Ray waits 30 s for its own processes, which a busy machine may exceed.
RAY_GAVE_UP = "The current node timed out during startup."
ROLLOUT_SKIP = Path(sys.executable).parent / "rollout-skip"


@dataclass(frozen=True)
class EntryPoint:
    """A program that trains: ``python -m module options --config-name=config settings``."""

    module: str
    config: str
    settings: tuple[str, ...]
    options: tuple[str, ...] = ()
    env: dict[str, str] = field(default_factory=dict)
    python: str = sys.executable


PPO = EntryPoint("recipes.ppo.main_ppo", "ppo_cpu", ("trainer.use_v1=False",))
DAPO = EntryPoint("recipes.dapo.main_dapo", "dapo_cpu", ("trainer.use_v1=False",))
# verl's own entry point: only this package's plugin and the trainer that trainer_mode names are involved.
CONFIGS = f"--config-dir={ROOT}/recipes/cpu/config"
VERL_V0 = EntryPoint("verl.trainer.main_ppo", "cpu_trainer", ("trainer.use_v1=False",), (CONFIGS,))
VERL_V1 = EntryPoint("verl.trainer.main_ppo", "cpu_trainer", ("trainer.use_v1=True",), (CONFIGS,))

# With two of them, the order in which responses finish varies from run to run.
TWO_AGENT_LOOPS = "actor_rollout_ref.rollout.agent.num_workers=2"


def skip(mode: str, dumps: Path) -> tuple[str, ...]:
    """The settings to record or replay with the V0 trainers."""
    return (f"rollout_skip.mode={mode}", f"rollout_skip.dump_dir={dumps}")


def skip_v1(mode: str, dumps: Path, trainer_mode: str = "skip_sync") -> tuple[str, ...]:
    """The same with verl's own entry point, whose configuration has no ``rollout_skip`` block."""
    return (f"trainer.v1.trainer_mode={trainer_mode}", *(f"+{setting}" for setting in skip(mode, dumps)))


@dataclass(frozen=True)
class Finished(runs.TrainingRun):
    """The results of a training, and the names of the Ray actors and engine processes that ran."""

    exit_code: int
    actors: frozenset[str] = frozenset()

    @property
    def messages(self) -> list[str]:
        """What this package logged, one item per message, with the indented lines that belong to it."""
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
    """Starts trainings on the same model and data with the same engine, each in its own folder."""

    def __init__(self, folder: Path, assets: Path, engine: str = "cpu") -> None:
        self.folder = folder
        self.assets = assets
        self.engine = engine

    def run(self, entry_point: EntryPoint, name: str, *settings: str, fails: bool = False) -> Finished:
        """Train to the end, which must be an error if ``fails``."""
        finished = self._run(entry_point, name, settings, lambda _: False)
        if (finished.exit_code != 0) is not fails:
            raise AssertionError(f"{name} ended with {finished.exit_code}:\n{finished.log[-8000:]}")
        return finished

    def run_until(self, entry_point: EntryPoint, name: str, moment: Callable[[Path], bool], *settings: str) -> Finished:
        """Train until ``moment`` is true for its folder, then kill it with SIGKILL, as a crash would."""
        finished = self._run(entry_point, name, settings, moment)
        if finished.exit_code != -9:
            raise AssertionError(f"{name} ended with {finished.exit_code} too early:\n{finished.log[-8000:]}")
        return finished

    def _run(
        self, entry_point: EntryPoint, name: str, settings: tuple[str, ...], moment: Callable[[Path], bool]
    ) -> Finished:
        folder = self.folder / name
        command = [
            *(entry_point.python, "-m", entry_point.module),
            *entry_point.options,
            *runs.arguments(folder, entry_point.config),
            f"cpu_engine={self.engine}",
            f"trainer.rollout_data_dir={folder}/rollout_data",
            *entry_point.settings,
            *settings,
        ]
        # Ray lowers the priority of its workers, but tests wait for them.
        env = {**runs.prepare(folder, self.assets), "RAY_worker_niceness": "0", **entry_point.env}
        starts_vllm = self.engine == "vllm" and not any(setting.endswith("mode=replay") for setting in settings)
        with alone() if starts_vllm else nullcontext():
            finished = run_process(command, folder, env, moment)
        if finished.exit_code > 0 and RAY_GAVE_UP in finished.log and not name.endswith("-again-for-ray"):
            return self._run(entry_point, f"{name}-again-for-ray", settings, moment)
        return finished


@contextmanager
def alone() -> Iterator[None]:
    """Wait until no other test runs a training with vLLM, of which only one can run at a time: see recipes/cpu."""
    with open(Path(tempfile.gettempdir()) / "verl-rollout-skip-test-vllm.lock", "w") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        yield


def resume(arguments: list[str], folder: Path, assets: Path) -> Finished:
    """``rollout-skip resume`` in another working directory, with everything that it writes below ``folder``."""
    environment = runs.prepare(folder, assets)
    return run_process([str(ROLLOUT_SKIP), "resume", *arguments], folder, environment, cwd=folder)


def run_process(
    command: list[str],
    folder: Path,
    env: dict[str, str],
    moment: Callable[[Path], bool] = lambda _: False,
    cwd: Path = ROOT,
) -> Finished:
    """Run a training until it ends or is killed."""
    with open(folder / "log", "wb") as log:
        process = subprocess.Popen(command, cwd=cwd, env=env, stdout=log, stderr=subprocess.STDOUT)
    deadline = time.monotonic() + TIMEOUT
    actors: set[str] = set()
    look = 0.0
    try:
        while process.poll() is None and not moment(folder):
            assert time.monotonic() < deadline, f"running after {TIMEOUT} s:\n{(folder / 'log').read_text()[-8000:]}"
            if time.monotonic() > look:
                actors |= actors_of(process)
                look = time.monotonic() + 1
            time.sleep(0.02)
    finally:
        kill(process)
    return Finished(folder, process.wait(), frozenset(actors))


def actors_of(process: subprocess.Popen[bytes]) -> set[str]:
    """The classes of its Ray actors, and vLLM's EngineCore.

    Ray names processes ``ray::CLASS``, or ``ray::CLASS.METHOD`` while busy; vLLM names its own ``VLLM::EngineCore``.
    """
    found = set()
    for member in family_of(process):
        try:
            title = " ".join(member.cmdline())
        except psutil.Error:
            continue
        if name := re.match(r"(?:ray|VLLM)::([^.\s]+)", title):
            found.add(name[1])
    return found


def family_of(process: subprocess.Popen[bytes]) -> list[psutil.Process]:
    try:
        return psutil.Process(process.pid).children(recursive=True)
    except psutil.NoSuchProcess:
        return []


def kill(process: subprocess.Popen[bytes]) -> None:
    """Kill a training and all of its Ray processes, which outlive a killed driver for a while."""
    if process.poll() is not None:
        return
    family = family_of(process)
    process.kill()
    for member in family:
        try:
            member.kill()
        except psutil.NoSuchProcess:
            pass
    psutil.wait_procs(family, timeout=20)


def assert_same_results(one: Finished, other: Finished, steps: list[int] | None = None) -> None:
    """Every metric except timings is equal to the last bit in both runs, step by step."""
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


def assert_proved(finished: Finished, steps: int) -> None:
    """Its own ledger proves that it was the recorded training, while it ran and afterward. Call this after its end,
    before another training writes a ledger."""
    assert f"identical to the recording in all {steps} steps" in finished.summary
    settings = (finished.folder / "hydra" / ".hydra" / "overrides.yaml").read_text()
    (dumps,) = re.findall(r"dump_dir=(\S+)", settings)
    newest = max((variant_in(Path(dumps)) / "ledgers").iterdir())
    audited = cli_program.run("audit", newest)
    assert audited.returncode == 0, audited.stdout + audited.stderr
    assert f"identical in all {steps} steps" in audited.stdout


def variant_in(dumps: Path) -> Path:
    """The folder of the only variant below a dump_dir."""
    (manifest,) = dumps.glob("*/*/manifest.json")
    return manifest.parent
