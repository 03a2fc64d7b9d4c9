"""The commands of docs/quickstart.md, run as they stand."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]


def test_the_run_script_records_and_then_loads(tmp_path: Path) -> None:
    text = (ROOT / "docs" / "quickstart.md").read_text()
    (block,) = [block for block in re.findall(r"```text\n(.*?)```", text, re.DOTALL) if "run_ppo_cpu.sh" in block]
    commands = [line.split("#")[0].strip().replace("/tmp/dumps", f"{tmp_path}/dumps") for line in block.splitlines()]
    assert commands[0] == "source .venv/bin/activate"
    environment = {**os.environ, "PATH": f"{Path(sys.executable).parent}:{os.environ['PATH']}", "HOME": str(tmp_path)}
    outputs = []
    for command in commands[1:]:
        run = subprocess.run(
            command, shell=True, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=280
        )
        assert run.returncode == 0, run.stdout[-3000:] + run.stderr[-3000:]
        outputs.append(re.sub(r"\x1b\[\d+m", "", run.stdout + run.stderr))
    first, second, listed = outputs
    assert "0 loaded" in first
    assert "5 dumped" in first
    assert "5 loaded" in second
    assert "addition_cpu_TrainGBS8__InferGBS8__N4" in listed
