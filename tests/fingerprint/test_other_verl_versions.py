"""The configurations of verl 0.6.1, 0.7.1 and 0.8.0, from their wheels, are handled like those of 0.9.1."""

from __future__ import annotations

import functools
import re
import subprocess
import sys
import zipfile
from pathlib import Path
from typing import Any

import pytest
from omegaconf import DictConfig, OmegaConf

from tests.verl_configs import compose_ppo
from verl_rollout_skip.config.modes import Mode
from verl_rollout_skip.config.run_names import run_name
from verl_rollout_skip.config.skip_config import SkipConfig, remove_skip_keys
from verl_rollout_skip.errors import ConfigError
from verl_rollout_skip.fingerprint.contents import identities_for
from verl_rollout_skip.fingerprint.fingerprint import difference, flatten, make_fingerprint, resolve_config
from verl_rollout_skip.fingerprint.layout import gpu_layout
from verl_rollout_skip.fingerprint.redact import mask
from verl_rollout_skip.fingerprint.rules import Effect, rule_for

VERSIONS = ("0.8.0", "0.7.1", "0.6.1")
CACHE = Path(sys.prefix) / "verl-wheels"
LAYOUT = re.compile(r"parallel_size|offload|nnodes|n_gpus_per_node|gpu_memory_utilization|micro_batch_size|fsdp_size")
NOT_FILES = ("resume_from_path", "record_file", "replay_file")

pytestmark = [pytest.mark.slow, pytest.mark.parametrize("version", VERSIONS)]


@functools.cache
def configs_of(version: str) -> Path:
    """The YAML files of a release, downloaded once into the virtual environment."""
    folder = CACHE / version
    if not (folder / "verl").is_dir():
        command = [
            sys.executable,
            "-m",
            "pip",
            "download",
            "--quiet",
            "--no-deps",
            f"verl=={version}",
            "-d",
            str(CACHE),
        ]
        done = subprocess.run(command, capture_output=True, text=True)
        if done.returncode:
            pytest.fail(f"verl {version} could not be downloaded, which this test needs once:\n{done.stderr}")
        with zipfile.ZipFile(next(CACHE.glob(f"verl-{version}-*.whl"))) as wheel:
            names = [name for name in wheel.namelist() if name.startswith("verl/trainer/config/")]
            wheel.extractall(folder, names)
    return folder / "verl" / "trainer" / "config"


@functools.cache
def tree_of(version: str, name: str = "ppo_trainer") -> dict[str, Any]:
    return resolve_config(compose_ppo(folder=configs_of(version), name=name))


def composed(version: str, *overrides: str) -> DictConfig:
    return compose_ppo(*overrides, folder=configs_of(version))


@pytest.mark.parametrize("name", ["ppo_trainer", "ppo_megatron_trainer"])
def test_every_setting_matches_a_rule_and_layout_settings_never_affect_rollouts(version: str, name: str) -> None:
    leaves = dict(flatten(tree_of(version, name)))
    assert len(leaves) > 400
    assert [key for key in leaves if rule_for(key).pattern == "*"] == []
    assert [key for key in leaves if LAYOUT.search(key) and rule_for(key).effect is not Effect.NEITHER] == []


@pytest.mark.parametrize("name", ["ppo_trainer", "ppo_megatron_trainer"])
def test_every_setting_that_names_a_file_is_compared_by_content(version: str, name: str) -> None:
    ends = ("path", "_file", "_files", "tokenizer", "external_lib")
    by_name_only = [
        key
        for key, _ in flatten(tree_of(version, name))
        if key.endswith(ends) and not key.endswith(NOT_FILES)
        if rule_for(key).effect is not Effect.NEITHER and not identities_for(key)
    ]
    assert by_name_only == []


def test_fingerprint_separates_rollout_training_and_layout(version: str) -> None:
    base = make_fingerprint(composed(version))
    hotter = make_fingerprint(composed(version, "actor_rollout_ref.rollout.temperature=0.7"))
    learning = make_fingerprint(composed(version, "actor_rollout_ref.actor.optim.lr=2e-6"))
    elsewhere = make_fingerprint(composed(version, "trainer.n_gpus_per_node=4", "trainer.nnodes=2"))
    assert "actor_rollout_ref.rollout.temperature: 1.0 → 0.7" in difference(base.rollout, hotter.rollout)
    assert base.training == hotter.training
    assert learning.rollout == base.rollout
    assert "actor_rollout_ref.actor.optim.lr: 1e-06 → 2e-06" in difference(base.training, learning.training)
    assert elsewhere == base


def test_run_name_layout_and_secrets_work_as_in_the_newest_version(version: str) -> None:
    config = composed(version, "trainer.experiment_name=e", "trainer.project_name=p", "data.train_batch_size=8")
    assert run_name(config) == "e_p_TrainGBS8__InferGBS8__N1"
    assert gpu_layout(config)["world_size"] == 8
    assert gpu_layout(config)["rollout"]["tensor"] == 2
    assert mask(tree_of(version)) == tree_of(version)


def test_our_block_works_with_verls_defaults(version: str, tmp_path: Path) -> None:
    config = composed(version, "+rollout_skip.mode=record", f"+rollout_skip.dump_dir={tmp_path}")
    settings = SkipConfig.from_config(config)
    assert (settings.mode, settings.dump_dir) == (Mode.RECORD, str(tmp_path))
    assert SkipConfig.from_config(composed(version)) == SkipConfig()


def test_verls_own_skip_is_translated_or_an_error(version: str, tmp_path: Path) -> None:
    ours = ("+rollout_skip.mode=cache", f"+rollout_skip.dump_dir={tmp_path}")
    if version == "0.8.0":
        with pytest.raises(ConfigError, match=r"actor_rollout_ref\.rollout\.skip\.enable is True: verl's own skip"):
            SkipConfig.from_config(composed(version, *ours, "actor_rollout_ref.rollout.skip.enable=true"))
        return
    # In 0.6.1 and 0.7.1 it has the two keys that this package uses; verl never sees them.
    old = ("actor_rollout_ref.rollout.skip_rollout=true", f"actor_rollout_ref.rollout.skip_dump_dir={tmp_path}")
    config = composed(version, *old)
    assert SkipConfig.from_config(config) == SkipConfig(mode=Mode.CACHE, dump_dir=str(tmp_path))
    remove_skip_keys(config)
    assert OmegaConf.select(config, "actor_rollout_ref.rollout.skip_rollout") is None
