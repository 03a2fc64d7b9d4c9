"""The run scripts. Those for GPU clusters cannot train here, but verl must accept every setting in them."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
import yaml
from hydra import compose, initialize_config_dir
from hydra.core.global_hydra import GlobalHydra
from hydra.errors import ConfigCompositionException
from omegaconf import DictConfig, OmegaConf, open_dict
from verl.trainer.ppo.utils import need_critic, need_reference_policy
from verl.utils.config import omega_conf_to_dataclass, validate_config

from recipes.cpu.environment import cpu_environment
from verl_rollout_skip import Mode, SkipConfig

# verl logs this for every training without a critic.
pytestmark = pytest.mark.filterwarnings("ignore:Disabled critic")

ROOT = Path(__file__).resolve().parents[2]
SCRIPTS = ["recipes/ppo/run_grpo_qwen3_8b.sh", "recipes/dapo/run_dapo_qwen2.5_32b.sh"]
ALL_SCRIPTS = sorted(str(path.relative_to(ROOT)) for path in ROOT.glob("recipes/*/run_*.sh"))
V1 = ("trainer.use_v1=True", "trainer.v1.trainer_mode=skip_sync")


def composed(script: str, folder: Path, *arguments: str) -> DictConfig:
    """The configuration of a script, from the arguments that it would start Python with."""
    calls, python = folder / "calls", folder / "python3"
    python.write_text(f"#!/bin/sh\nprintf '%s\\n' \"$@\" >{calls}\n")
    python.chmod(0o755)
    environment = {**os.environ, "PATH": f"{folder}:{os.environ['PATH']}", "DUMPS": f"{folder}/dumps"}
    subprocess.run(["bash", script, *arguments], cwd=ROOT, env=environment, check=True, timeout=60)
    _, module, *settings = calls.read_text().splitlines()
    recipe = module.split(".")[1]
    name = settings.pop(0).removeprefix("--config-name=") if settings[0].startswith("--config-name=") else recipe
    GlobalHydra.instance().clear()
    with initialize_config_dir(config_dir=str(ROOT / "recipes" / recipe / "config"), version_base=None):
        return compose(name, overrides=settings)


def test_these_are_all_the_scripts() -> None:
    assert set(SCRIPTS) < set(ALL_SCRIPTS)
    assert len(ALL_SCRIPTS) == 4


@pytest.mark.parametrize("arguments", [(), V1], ids=["V0", "V1"])
@pytest.mark.parametrize("script", ALL_SCRIPTS)
def test_verl_and_this_package_accept_every_setting(
    script: str, arguments: tuple[str, ...], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name, value in cpu_environment(tmp_path).items():
        monkeypatch.setenv(name, value)
    config = composed(script, tmp_path, *arguments)
    OmegaConf.resolve(config)
    skip = SkipConfig.from_config(config)
    assert (skip.mode, skip.dump_dir) == (Mode.CACHE, f"{tmp_path}/dumps")
    validate_config(config, need_reference_policy(config), need_critic(config))
    rollout = config.actor_rollout_ref.rollout
    with open_dict(rollout):  # as the trainers of this package do before verl's workers see them
        del rollout.skip_rollout, rollout.skip_dump_dir
    for block in (rollout, config.actor_rollout_ref.actor, config.algorithm):
        omega_conf_to_dataclass(block)


def test_a_setting_that_verl_does_not_have_is_noticed(tmp_path: Path) -> None:
    with pytest.raises(ConfigCompositionException, match=r"Could not override .*no_such_setting"):
        composed(SCRIPTS[0], tmp_path, "actor_rollout_ref.rollout.no_such_setting=1")
    too_large = composed(SCRIPTS[0], tmp_path, "actor_rollout_ref.actor.ppo_mini_batch_size=2048")
    with pytest.raises(ValueError, match=r"must be >= actor\.ppo_mini_batch_size"):
        validate_config(too_large, need_reference_policy(too_large), need_critic(too_large))


@pytest.mark.slow
@pytest.mark.parametrize("script", SCRIPTS)
def test_the_settings_of_a_cluster_script_compose(script: str, tmp_path: Path) -> None:
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
