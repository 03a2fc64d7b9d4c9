"""Runs trainings on CPU as processes, and reads their output folder: metrics, the engine's trace, a log.

Used by the demo, the benchmarks and the end-to-end tests.
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

# Metrics that depend on the machine and on time. All others must be the same in two runs of a training.
_MEASURED = re.compile(r"timing_|perf/|.*/perf/|.*mfu|rollout_skip/")


@dataclass(frozen=True)
class TrainingRun:
    """The folder of a training, during or after its run."""

    folder: Path

    def metrics(self) -> dict[int, dict[str, Any]]:
        """All metrics by step, as verl's file logger wrote them."""
        file = self.folder / "metrics.jsonl"
        text = file.read_text() if file.exists() else ""
        steps: dict[int, dict[str, Any]] = {}
        for line in text[: text.rfind("\n") + 1].splitlines():  # the last line may be incomplete
            logged = json.loads(line)
            steps.setdefault(logged["step"], {}).update(logged["data"])
        return steps

    def results(self) -> dict[int, dict[str, Any]]:
        """The metrics that must be bit-identical in every run."""
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

    def trace(self, kind: str) -> list[int | None]:
        """The weight version at each event of the engine (``generate``, ``sync``).

        vLLM's workers trace only syncs, and do not know the version.
        """
        events = [
            json.loads(line)
            for file in sorted((self.folder / "trace").glob("*.jsonl"))
            for line in file.read_text().splitlines()
        ]
        return [event["version"] for event in events if event["kind"] == kind]

    @property
    def log(self) -> str:
        """The output of the training, without colors."""
        return re.sub(r"\x1b\[\d+m", "", (self.folder / "log").read_text(errors="replace"))


def prepare(folder: Path, assets: Path) -> dict[str, str]:
    """Create the folder of a training and return the environment to start it in."""
    (folder / "trace").mkdir(parents=True)
    return {
        **os.environ,
        **cpu_environment(assets),
        "VERL_FILE_LOGGER_PATH": str(folder / "metrics.jsonl"),
        TRACE_VARIABLE: str(folder / "trace"),
    }


def arguments(folder: Path, config: str) -> list[str]:
    """The arguments for a recipe's entry point that send all output to the folder."""
    return [
        f"--config-name={config}",
        f"hydra.run.dir={folder}/hydra",
        "trainer.logger=[console,file]",
        f"trainer.default_local_dir={folder}/checkpoints",
    ]


def start(
    module: str,
    config: str,
    folder: Path,
    assets: Path,
    overrides: list[str],
    options: tuple[str, ...] = (),
    python: str = sys.executable,
) -> subprocess.Popen[bytes]:
    """Start a recipe; its output goes to the file ``log`` in its folder.

    Ctrl-C in the terminal does not reach it; the caller must end it. ``options`` are for Hydra itself;
    ``python`` may be the interpreter of another environment.
    """
    environment = prepare(folder, assets)
    command = [python, "-m", module, *options, *arguments(folder, config), *overrides]
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
