"""verl's real configurations, composed by hydra as in its entry point, from the installed package or a wheel."""

from __future__ import annotations

import importlib.util
from pathlib import Path

from hydra import compose, initialize_config_dir
from hydra.core.global_hydra import GlobalHydra
from omegaconf import DictConfig


def installed_configs() -> Path:
    """The folder of verl's YAML files. verl itself is not imported."""
    spec = importlib.util.find_spec("verl")
    assert spec is not None, "verl is not installed: pip install -e '.[verl]'"
    return Path(str(spec.origin)).parent / "trainer" / "config"


def compose_ppo(*overrides: str, folder: Path | None = None, name: str = "ppo_trainer") -> DictConfig:
    """Compose ``ppo_trainer.yaml``, or another file, with overrides as on the command line."""
    GlobalHydra.instance().clear()
    with initialize_config_dir(config_dir=str(folder or installed_configs()), version_base=None):
        return compose(name, overrides=["actor_rollout_ref.rollout.name=vllm", *overrides])
