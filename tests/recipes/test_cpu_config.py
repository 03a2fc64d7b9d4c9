"""The configuration, environment and learning curve of recipes/cpu."""

from __future__ import annotations

import os
import subprocess
import sys
import xml.etree.ElementTree as ElementTree
from pathlib import Path

import pytest
from hydra import compose, initialize_config_module
from omegaconf import DictConfig, OmegaConf

from recipes.cpu.curve import Curve, draw
from recipes.cpu.environment import REPOSITORY, cpu_environment


def composed(monkeypatch: pytest.MonkeyPatch, assets: Path, *overrides: str) -> DictConfig:
    for name, value in cpu_environment(assets).items():
        monkeypatch.setenv(name, value)
    searchpath = "hydra.searchpath=[pkg://verl.trainer.config,pkg://recipes.cpu.config]"
    with initialize_config_module("recipes.cpu.config", version_base=None):
        config = compose("cpu_trainer", overrides=[searchpath, *overrides])
    OmegaConf.resolve(config)
    return config


def test_the_overlay_composes_with_verls_trainer(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    config = composed(monkeypatch, tmp_path)
    assert config.actor_rollout_ref.model.path == config.critic.model.path == f"{tmp_path}/model"
    assert config.data.train_files == f"{tmp_path}/train.parquet"
    assert config.actor_rollout_ref.rollout.name == "cpu"
    strategies = {
        config.actor_rollout_ref.actor.strategy,
        config.actor_rollout_ref.actor.fsdp_config.strategy,
        config.actor_rollout_ref.ref.fsdp_config.strategy,
        config.critic.fsdp.strategy,
    }
    assert strategies == {"fsdp2"}
    # the overlay must not undo what makes a reference a reference
    assert config.actor_rollout_ref.ref.fsdp_config.forward_only is True
    assert config.trainer.use_v1 is True
    assert config.actor_rollout_ref.model.external_lib is None


def test_files_named_in_the_configuration_exist(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    config = composed(monkeypatch, tmp_path)
    (loop,) = OmegaConf.load(config.actor_rollout_ref.rollout.agent.agent_loop_config_path)
    assert loop.name == config.actor_rollout_ref.rollout.agent.default_agent_loop
    for module in (config.reward.custom_reward_function.path, config.trainer.v1.sampler.custom_sampler.path):
        assert (REPOSITORY / f"{module.removeprefix('pkg://').replace('.', '/')}.py").exists()


def test_sizes_follow_the_users_overrides(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    changes = ["data.train_batch_size=16", "trainer.n_gpus_per_node=2", "algorithm.filter_groups.enable=True"]
    config = composed(monkeypatch, tmp_path, *changes)
    assert config.actor_rollout_ref.actor.ppo_mini_batch_size == config.critic.ppo_mini_batch_size == 16
    assert config.ray_kwargs.ray_init.num_gpus == 2
    sampler = config.trainer.v1.sampler.sampler_kwargs
    assert (sampler.train_batch_size, sampler.filter_groups.enable) == (16, True)


def test_existing_environment_variables_are_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join(["/mine", str(REPOSITORY)]))
    monkeypatch.setenv("VERL_USE_EXTERNAL_MODULES", "my.module")
    variables = cpu_environment()
    assert variables["PYTHONPATH"] == os.pathsep.join([str(REPOSITORY), "/mine"])
    assert variables["VERL_USE_EXTERNAL_MODULES"] == "recipes.cpu.plugin,my.module"
    assert variables["VERL_PLATFORM"] == "cpu"
    assert "CPU_ASSETS" not in variables
    assert cpu_environment("some/folder")["CPU_ASSETS"] == os.path.abspath("some/folder")


def test_a_shell_can_evaluate_the_environment() -> None:
    command = f'eval "$({sys.executable} -m recipes.cpu.environment "/a folder")" && env'
    found = subprocess.run(["bash", "-c", command], cwd=REPOSITORY, capture_output=True, text=True, check=True)
    assert {"CPU_ASSETS=/a folder", "VERL_PLATFORM=cpu", "OMP_NUM_THREADS=1"} <= set(found.stdout.splitlines())


def test_the_environment_module_imports_neither_torch_nor_verl() -> None:
    code = "import recipes.cpu.environment, sys; print({'torch', 'verl', 'ray', 'transformers'} & set(sys.modules))"
    found = subprocess.run([sys.executable, "-c", code], cwd=REPOSITORY, capture_output=True, text=True, check=True)
    assert found.stdout.strip() == "set()"


def test_the_curve_states_its_first_and_last_value() -> None:
    curve = Curve({step: step / 20 for step in range(1, 21)}, {0: 0.1, 20: 0.6})
    assert curve.summary() == (
        "Mean reward: 0.15 in the first 5 steps, 0.90 in the last 5. "
        "Accuracy on additions that are not in the training data: 10% after step 0, 60% after step 20."
    )
    assert Curve({}, {}).summary() == "No step was finished."


def test_the_plot_shows_every_step_inside_its_frame() -> None:
    curve = Curve({step: step / 20 for step in range(1, 21)}, {0: 0.0, 20: 1.0})
    root = ElementTree.fromstring(draw(curve, "a < b"))
    space = {"svg": "http://www.w3.org/2000/svg"}
    circles = root.findall("svg:circle", space)
    assert len(circles) == 22
    assert all(0 < float(each.attrib["cx"]) < 640 and 0 < float(each.attrib["cy"]) < 360 for each in circles)
    (line,) = root.findall("svg:polyline", space)
    heights = [float(point.split(",")[1]) for point in line.attrib["points"].split()]
    assert heights == sorted(heights, reverse=True), "the reward rises, so the line goes up"
    assert "a < b" in [text.text for text in root.findall("svg:text", space)]
    ElementTree.fromstring(draw(Curve({}, {}), "nothing yet"))
