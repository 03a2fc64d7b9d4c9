"""Trainings on CPU as processes, and what they leave behind in a folder: metrics, the trace of the engine, a log.

Used by the demonstration, the benchmarks and the end-to-end tests.
"""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from recipes.cpu.environment import REPOSITORY, TRACE_VARIABLE, cpu_environment

# What depends on the machine and the moment: everything else must be the same in two runs of the same training.
_MEASURED = re.compile(r"timing_|perf/|.*/perf/|.*mfu|rollout_skip/")


@dataclass(frozen=True)
class TrainingRun:
    """The folder of a training, while it runs or after it."""

    folder: Path

    def metrics(self) -> dict[int, dict[str, Any]]:
        """All metrics by step, as verl's file logger wrote them."""
        file = self.folder / "metrics.jsonl"
        text = file.read_text() if file.exists() else ""
        steps: dict[int, dict[str, Any]] = {}
        for line in text[: text.rfind("\n") + 1].splitlines():  # the last line may still be in the making
            logged = json.loads(line)
            steps.setdefault(logged["step"], {}).update(logged["data"])
        return steps

    def results(self) -> dict[int, dict[str, Any]]:
        """The metrics that must repeat to the last bit."""
        return {
            step: {key: value for key, value in values.items() if not _MEASURED.match(key)}
            for step, values in self.metrics().items()
        }

    def timing(self, name: str) -> dict[int, Any]:
        return {step: values.get(f"timing_s/{name}") for step, values in self.metrics().items()}

    def hits(self) -> list[int]:
        """The steps whose rollouts were loaded."""
        name = "rollout_skip/hit"
        return [step for step, values in self.metrics().items() if values.get(name, values.get(f"timing_s/{name}"))]

    def trace(self, kind: str) -> list[int]:
        """What the engine did (``generate``, ``sync``): for each time the version of its weights."""
        events = [
            json.loads(line)
            for file in sorted((self.folder / "trace").glob("*.jsonl"))
            for line in file.read_text().splitlines()
        ]
        return [event["version"] for event in events if event["kind"] == kind]

    @property
    def log(self) -> str:
        """What the training printed, without colours."""
        return re.sub(r"\x1b\[\d+m", "", (self.folder / "log").read_text(errors="replace"))


def prepare(folder: Path, assets: Path) -> dict[str, str]:
    """Make the folder of a training, and the environment in which it is to be started."""
    (folder / "trace").mkdir(parents=True)
    return {
        **os.environ,
        **cpu_environment(assets),
        "VERL_FILE_LOGGER_PATH": str(folder / "metrics.jsonl"),
        TRACE_VARIABLE: str(folder / "trace"),
    }


def arguments(folder: Path, config: str) -> list[str]:
    """What a recipe's entry point is to be given so that everything goes into the folder."""
    return [
        f"--config-name={config}",
        f"hydra.run.dir={folder}/hydra",
        "trainer.logger=[console,file]",
        f"trainer.default_local_dir={folder}/checkpoints",
    ]


def start(
    module: str, config: str, folder: Path, assets: Path, overrides: list[str], options: tuple[str, ...] = ()
) -> subprocess.Popen[bytes]:
    """Start a recipe; what it prints goes to the file ``log`` in its folder.

    A Ctrl-C in the terminal does not reach it: the caller ends it. ``options`` go to hydra itself.
    """
    environment = prepare(folder, assets)
    command = [sys.executable, "-m", module, *options, *arguments(folder, config), *overrides]
    with open(folder / "log", "wb") as log:
        return subprocess.Popen(
            command,
            cwd=REPOSITORY,
            env=environment,
            stdin=subprocess.DEVNULL,
            stdout=log,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )
