"""The run scripts for GPU clusters: they cannot train here, but every setting in them must be one that verl has."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
import yaml

pytestmark = pytest.mark.slow

ROOT = Path(__file__).resolve().parents[2]
SCRIPTS = ["recipes/ppo/run_grpo_qwen3_8b.sh", "recipes/dapo/run_dapo_qwen2.5_32b.sh"]


@pytest.mark.parametrize("script", SCRIPTS)
def test_a_cluster_script_composes(script: str, tmp_path: Path) -> None:
    environment = {**os.environ, "PATH": f"{Path(sys.executable).parent}:{os.environ['PATH']}", "DUMPS": str(tmp_path)}
    command = ["bash", script, "--cfg", "job"]
    run = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=200)
    assert run.returncode == 0, run.stderr[-3000:]
    config = yaml.safe_load(run.stdout[run.stdout.index("actor_rollout_ref:") :])
    assert config["rollout_skip"]["mode"] == "cache"
    assert config["rollout_skip"]["dump_dir"] == str(tmp_path)
    assert config["actor_rollout_ref"]["rollout"]["name"] == "vllm"
    if "dapo" in script:
        assert config["algorithm"]["filter_groups"]["enable"] is True
        assert config["reward"]["reward_kwargs"]["overlong_buffer_cfg"]["len"] == 4096
        assert config["actor_rollout_ref"]["actor"]["clip_ratio_high"] == 0.28
        assert config["actor_rollout_ref"]["actor"]["loss_agg_mode"] == "token-mean"
