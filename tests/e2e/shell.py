"""Commands of the documents and the log, run in a shell as a user would, without waiting for imports each time."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path

from recipes.cpu.environment import cpu_environment
from tests import zygote
from tests.documents import blocks_of
from tests.e2e.training import ROOT

ACTIVATE = "source .venv/bin/activate"


def command_environment(folder: Path, env: Mapping[str, str]) -> dict[str, str]:
    """``env`` with a path on which ``python`` and ``rollout-skip`` are this environment's; trainings are forked."""
    binaries = folder / "bin"
    binaries.mkdir(parents=True)
    python = zygote.ready({**env, **cpu_environment()}).python if zygote.enabled() else sys.executable
    commands = {"python": str(python), "python3": str(python), "rollout-skip": f"{python} -m verl_rollout_skip.cli"}
    for name, command in commands.items():
        (binaries / name).write_text(f'#!/bin/sh\nexec {command} "$@"\n')
        (binaries / name).chmod(0o755)
    path = [str(binaries), str(Path(sys.executable).parent), env.get("PATH", os.defpath)]
    return {**env, "PATH": os.pathsep.join(path)}


def run_document(name: str, folder: Path, env: Mapping[str, str]) -> list[str]:
    """Run all blocks of bash in a document in one shell, with ``/tmp`` elsewhere; returns what each of them printed."""
    lines = ["set -euo pipefail"]
    blocks = [block for block in blocks_of(ROOT / name) if block.language == "bash"]
    assert blocks[0].text.startswith(ACTIVATE), "the environment is what everything begins with"
    for block in blocks:
        lines += ["echo '=== a block begins'", block.text.replace(ACTIVATE, "").replace("/tmp/", f"{folder}/")]
    done = subprocess.run(
        ["bash", "-c", "\n".join(lines)],
        cwd=ROOT,
        env=command_environment(folder, env),
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        errors="replace",
    )
    assert done.returncode == 0, done.stdout[-6000:]
    output = re.sub(r"\x1b\[\d+m", "", done.stdout)
    return output.split("=== a block begins\n")[1:]
