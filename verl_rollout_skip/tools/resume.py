"""Continues a training from its manifest: the recorded configuration, with some settings changed.

Recorded steps are loaded; later steps are generated and recorded into the same run. Asynchronous trainings continue
from their last checkpoint. The folder may have been moved or copied: the manifest's current location counts, and the
content of model and data, not their paths.
"""

from __future__ import annotations

import copy
import sys
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from importlib import import_module
from importlib.util import find_spec
from typing import Any

from omegaconf import DictConfig, OmegaConf, open_dict
from omegaconf.errors import OmegaConfBaseException
from yaml import YAMLError

from verl_rollout_skip.config.run_names import dump_dir_of
from verl_rollout_skip.config.skip_config import BLOCK, override, remove_skip_keys
from verl_rollout_skip.errors import ConfigError, UnsupportedTrainerError
from verl_rollout_skip.fingerprint.fingerprint import TRAINER
from verl_rollout_skip.fingerprint.redact import masked_keys
from verl_rollout_skip.replay.steps import find_checkpoint
from verl_rollout_skip.runs.manifest import Manifest

# The settings of this package that carry over; the others say where and how the recorded training was started.
_KEPT = ("steps", "max_dump_steps", "prompts", "background", "on_dump_error", "max_disk")


@dataclass(frozen=True)
class Resumption:
    """The training to run. ``remapped`` are settings that changed because another one with the same value did."""

    manifest: Manifest
    config: DictConfig
    remapped: dict[str, str]


def plan_resumption(path: str, overrides: Sequence[str]) -> Resumption:
    """Build the configuration that continues a training; raise if a required setting is missing."""
    manifest = Manifest.load(path)
    config = OmegaConf.create(copy.deepcopy(manifest.config))
    remove_skip_keys(config)
    given = _parse(overrides)
    remapped = _apply(config, given)
    _check_secrets(config)
    _check_whole(manifest, given)
    recorded = {key: value for key, value in (manifest.config.get(BLOCK) or {}).items() if key in _KEPT}
    with open_dict(config):
        config[BLOCK] = {**_resume_settings(manifest, config), **recorded, **(config.get(BLOCK) or {})}
    return Resumption(manifest, config, remapped)


def check_environment() -> None:
    """Raise if no training can run here, such as on a laptop that is only used to look at recordings."""
    missing = [name for name in ("verl", "ray") if find_spec(name) is None]
    if missing:
        raise UnsupportedTrainerError(
            f"Resuming a training needs {' and '.join(missing)}, not installed here ({sys.executable}). Run this "
            "command in the environment of the training. All other commands work without it."
        )


def run_resumption(resumption: Resumption) -> None:
    """Run the training in this process and the Ray workers that it starts."""
    from verl_rollout_skip.trainers.runner import SkipTaskRunner, train

    uses_v1 = resumption.config.trainer.get("use_v1", False)

    class ResumingTaskRunner(SkipTaskRunner):
        trainer_class = SkipTaskRunner.trainer_class if uses_v1 else _trainer_class(resumption.manifest)

    train(resumption.config, ResumingTaskRunner)


def own_trainer(manifest: Manifest) -> type | None:
    """The user's own trainer class that recorded a manifest, whose code is compared; None for any other class."""
    return _trainer_class(manifest) if TRAINER in manifest.training else None


def _resume_settings(manifest: Manifest, config: DictConfig) -> dict[str, str]:
    """Load the recorded steps and record the rest. The steps of an asynchronous training are not independent, so it
    continues from a checkpoint and records every later step again."""
    given = OmegaConf.select(config, f"{BLOCK}.mode")
    if not _is_asynchronous(config) or given not in (None, "refresh"):
        return {"mode": "cache", "source": manifest.path}
    if given is None and find_checkpoint(config.trainer) is None:
        raise ConfigError(
            f"{manifest.path} was recorded by an asynchronous training, which can only continue from a checkpoint, and "
            f"there is none: trainer.resume_mode is {config.trainer.get('resume_mode', 'disable')!r}, "
            f"trainer.default_local_dir is {config.trainer.get('default_local_dir')!r}. Set "
            f"trainer.resume_mode=resume_path and trainer.resume_from_path=…, or {BLOCK}.mode=replay to train on the "
            f"recorded rollouts, or {BLOCK}.mode=refresh to record everything again."
        )
    dump_dir = OmegaConf.select(config, f"{BLOCK}.dump_dir") or dump_dir_of(manifest.path)
    return {"mode": "refresh", "source": manifest.path, "dump_dir": dump_dir}


def _is_asynchronous(config: DictConfig) -> bool:
    trainer = config.trainer
    mode = str(OmegaConf.select(trainer, "v1.trainer_mode", default="")).removeprefix("skip_")
    return bool(trainer.get("use_v1", False)) and mode in ("colocate_async", "separate_async")


def _trainer_class(manifest: Manifest) -> type:
    name = manifest.trainer
    advice = f"Start the training from its own entry point with {override(f'{BLOCK}.source', manifest.path)}"
    if name is None:
        raise UnsupportedTrainerError(f"{manifest.path} does not say which trainer recorded it. {advice}")
    module, _, kind = name.rpartition(".")
    if module == "__main__" or "<locals>" in name:
        raise UnsupportedTrainerError(
            f"The trainer {name} is defined in a script, so it cannot be imported here. {advice}"
        )
    try:
        found = getattr(import_module(module), kind)
    except (ImportError, AttributeError) as error:
        raise UnsupportedTrainerError(f"The trainer {name} cannot be imported here: {error}. {advice}") from error
    assert isinstance(found, type)
    return found


def _parse(overrides: Sequence[str]) -> dict[str, Any]:
    """Parse ``key=value`` as on verl's command line; a leading plus sign is allowed and ignored."""
    given = {}
    for text in overrides:
        key, sign, value = text.lstrip("+").partition("=")
        if not sign or not key.strip():
            raise ConfigError(f"{text!r} is not a setting; use key=value, e.g. trainer.total_training_steps=20.")
        try:
            given[key.strip()] = OmegaConf.from_dotlist([f"value={value}"])["value"]
        except (OmegaConfBaseException, YAMLError) as error:
            raise ConfigError(f"{text!r} cannot be parsed: {error}") from error
    return given


def _apply(config: DictConfig, given: Mapping[str, Any]) -> dict[str, str]:
    """Override settings in a configuration. Other settings with the same old path change too, unless they are given."""
    remapped = {}
    for key, value in given.items():
        old = OmegaConf.select(config, key)
        OmegaConf.update(config, key, value, force_add=True)
        if not isinstance(old, str) or "/" not in old or not isinstance(value, str):
            continue
        for other, leaf in list(_leaves(config)):
            if leaf == old and other not in given:
                OmegaConf.update(config, other, value)
                remapped[other] = value
    return remapped


def _check_whole(manifest: Manifest, given: Mapping[str, Any]) -> None:
    """Raise if the training loaded some rollouts from elsewhere, unless the setting that did so is overridden."""
    block = manifest.config.get(BLOCK) or {}
    defaults = {"source": None, "reward": "recorded", "on_mismatch": "new"}
    for key, default in defaults.items():
        value = block.get(key, default)
        if value not in (None, default, "error") and f"{BLOCK}.{key}" not in given:
            raise ConfigError(
                f"The training of {manifest.path} was started with {BLOCK}.{key}={value}: it loaded rollouts from "
                f"elsewhere, and only those that it generated itself are recorded here. Run its own command again "
                f"with {BLOCK}.mode=cache, or resume from these alone with {BLOCK}.{key}="
                f"{'null' if default is None else default}."
            )


def _check_secrets(config: DictConfig) -> None:
    missing = list(dict.fromkeys(masked_keys(OmegaConf.to_container(config))))
    if missing:
        commands = " ".join(f"{key}=…" for key in missing)
        raise ConfigError(
            f"A manifest contains no secrets, so you must give them again: {', '.join(missing)}. Add to the command: "
            f"{commands}"
        )


def _leaves(tree: Any, path: str = "") -> Iterator[tuple[str, Any]]:
    if isinstance(tree, DictConfig):
        for key in tree:
            if OmegaConf.is_missing(tree, key):
                continue  # verl leaves unneeded settings at ???
            yield from _leaves(tree[key], f"{path}.{key!s}" if path else str(key))
    else:
        yield path, tree
