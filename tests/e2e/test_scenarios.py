"""docs/scenarios.md, docs/quickstart.md and docs/regression-tests.md, run as written."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path

import pytest

from tests.documents import blocks_of
from tests.e2e.training import ROOT

pytestmark = pytest.mark.slow

ACTIVATE = "source .venv/bin/activate"


def run_document(name: str, folder: Path, env: Mapping[str, str]) -> list[str]:
    """Run all bash blocks of a document in one shell, with another ``/tmp``, and return the output of each."""
    lines = ["set -euo pipefail"]
    blocks = [block for block in blocks_of(ROOT / name) if block.language == "bash"]
    assert blocks[0].text.startswith(ACTIVATE), "the first block sets up the environment"
    for block in blocks:
        lines += ["echo '=== a block begins'", block.text.replace(ACTIVATE, "").replace("/tmp/", f"{folder}/")]
    done = subprocess.run(
        ["bash", "-c", "\n".join(lines)],
        cwd=ROOT,
        env={**env, "PATH": f"{Path(sys.executable).parent}:{env['PATH']}"},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        errors="replace",
    )
    assert done.returncode == 0, done.stdout[-6000:]
    output = re.sub(r"\x1b\[\d+m", "", done.stdout)
    return output.split("=== a block begins\n")[1:]


def test_every_command_of_the_scenarios_does_what_the_page_says(tmp_path: Path) -> None:
    sections = run_document("docs/scenarios.md", tmp_path, os.environ)
    _, debug, layout, repeat, losses, reward, shadow, strict_shadow, resume, colleague, dry_run = sections
    recorded, replayed = debug.split("3 dumped")
    assert "0 loaded" in recorded
    assert "3 loaded" in replayed
    assert "world_size: 1 → 2" in layout
    assert "3 loaded" in layout
    assert "5 loaded" in repeat
    assert "actor_rollout_ref.actor.clip_ratio_high: 0.2 → 0.28" in losses
    assert "off-policy from the second step on" in losses
    assert "3 loaded" in losses
    assert "reward.custom_reward_function.path" in reward
    assert "3 loaded" in reward
    identical = "shadow: all 96 rows of 3 steps are identical to the recording"
    assert f"{identical}; log-probs before the first difference differ by at most 0 " in shadow
    assert identical in strict_shadow
    assert "3 loaded" in resume
    assert "1 dumped" in resume
    assert "addition_cpu_TrainGBS8__InferGBS8__N4" in colleague
    assert "4 rollout steps" in colleague
    assert (tmp_path / "report.html").stat().st_size > 10_000
    assert f"critic.model.path is now {tmp_path}/my-model too" in dry_run
    assert "nothing was run" in dry_run


def test_the_quick_start_records_and_then_loads(tmp_path: Path) -> None:
    (section,) = run_document("docs/quickstart.md", tmp_path, {**os.environ, "CPU_ASSETS": f"{tmp_path}/assets"})
    first, second = section.split("5 dumped")
    assert "0 loaded" in first
    assert "5 loaded" in second
    assert "addition_cpu_TrainGBS8__InferGBS8__N4" in second


def test_the_regression_test_passes_without_a_change_and_names_the_changed_loss(tmp_path: Path) -> None:
    golden, unchanged, changed = run_document("docs/regression-tests.md", tmp_path, os.environ)
    assert "3 dumped" in golden
    assert "identical in all 3 steps" in unchanged
    assert (tmp_path / "audit.html").stat().st_size > 10_000
    assert "different from step 1 on" in changed
    assert "first difference: step 1, update: " in changed
    assert "the job fails with exit code 1" in changed
    assert "layout" not in changed.partition("different from step 1 on")[2]
