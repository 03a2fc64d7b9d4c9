"""The names of run folders, in the format of verl's own skip: experiment, project, batch sizes and n."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

from omegaconf import DictConfig, OmegaConf

from verl_rollout_skip.errors import ConfigError

_RUN_NAME = re.compile(r".+_TrainGBS\d+__InferGBS\d+__N\d+")


def run_name(config: DictConfig | Mapping[str, Any]) -> str:
    """The name of a training's run folder."""
    tree = config if isinstance(config, DictConfig) else OmegaConf.create(dict(config))
    parts = {key: OmegaConf.select(tree, f"trainer.{key}") for key in ("experiment_name", "project_name")}
    for key, given in parts.items():
        value = "" if given is None else str(given)
        if not value or not value.isprintable() or {"/", "\\"} & set(value) or value.startswith("."):
            raise ConfigError(
                f"trainer.{key} is {given!r}, which cannot be part of a folder name. Use printable characters, no "
                "slashes and no leading dot, so that the dumps stay inside dump_dir."
            )
    train_gbs = _required_int(tree, "data.train_batch_size")
    gen_gbs = OmegaConf.select(tree, "data.gen_batch_size") or train_gbs
    samples = _required_int(tree, "actor_rollout_ref.rollout.n")
    name = f"{parts['experiment_name']}_{parts['project_name']}_TrainGBS{train_gbs}__InferGBS{gen_gbs}__N{samples}"
    if len(name.encode()) > 255:
        raise ConfigError(
            f"The name of the run folder is {len(name.encode())} bytes long, and file systems allow 255: {name!r}. "
            "Shorten trainer.experiment_name or trainer.project_name."
        )
    return name


def is_run_name(folder: str) -> bool:
    """Whether a folder has the name of a run folder."""
    return _RUN_NAME.fullmatch(folder) is not None


def dump_dir_of(source: str) -> str:
    """The dump_dir that contains a manifest or variant folder; raise if it is not in one."""
    dump_dir, _, rest = source.removesuffix("/").removesuffix("/manifest.json").rpartition("/")
    dump_dir, _, run = dump_dir.rpartition("/")
    if not dump_dir.strip("/") or dump_dir.endswith(":/") or not is_run_name(run):
        raise ConfigError(
            f"{source} is not at DUMP_DIR/RUN/{rest} with the name that trainings give a run folder (…_TrainGBS8__"
            f"InferGBS8__N4), so new rollouts cannot go next to it. Set rollout_skip.dump_dir."
        )
    return dump_dir


def _required_int(config: DictConfig, key: str) -> int:
    value = OmegaConf.select(config, key)
    if not isinstance(value, int):
        raise ConfigError(f"{key} is {value!r}; it must be a number, because it is part of the run folder's name.")
    return value
