"""The fingerprint: everything a rollout depends on, as a flat dict that can be read, compared and hashed.

``rules.py`` says which settings count. This module collects them from a resolved configuration, replaces paths by the
identity of the files' content, and compares fingerprints.
"""

from __future__ import annotations

import hashlib
import json
import logging
import os
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from omegaconf import DictConfig, OmegaConf
from omegaconf.errors import OmegaConfBaseException

from verl_rollout_skip.config.modes import Weights
from verl_rollout_skip.errors import ConfigError
from verl_rollout_skip.fingerprint.contents import LIST_OF_ONE, identities_for
from verl_rollout_skip.fingerprint.environment import environment
from verl_rollout_skip.fingerprint.identity import SAMPLED, UNREADABLE, model_identity, sampled_model_identity
from verl_rollout_skip.fingerprint.media import media_identity
from verl_rollout_skip.fingerprint.redact import MASK, mask
from verl_rollout_skip.fingerprint.rules import Effect, rule_for, unused
from verl_rollout_skip.fingerprint.source_code import class_identity

logger = logging.getLogger(__name__)

BASELINE = "algorithm.adv_estimator adds greedy rollouts"
ABSENT = "not set"
LENGTH = ("trainer.total_epochs", "trainer.total_training_steps")
"""They only set when a training ends, unless the learning rate schedule depends on the total length."""
CHECKPOINT = "trainer.resume_from_path"
"""The weights that a training starts from. Ignored if it is one of its own checkpoints or is not used."""

TRAINER = "code of the trainer class"
"""Set for the user's own trainer class. It affects what is learned from a rollout, not what is generated."""
DATA = "data.train_files"

Flat = dict[str, Any]


@dataclass(frozen=True)
class Fingerprint:
    """The settings that tokens and rewards depend on (``rollout``), and those that only the training depends on."""

    rollout: Flat
    training: Flat

    @property
    def config_hash(self) -> str:
        return flat_hash(self.rollout)

    @property
    def training_hash(self) -> str:
        return flat_hash(self.training)


# Arguments of a user's own function, for which None differs from a missing argument.
_USER_ARGUMENTS = re.compile(r"(?<!engine_)kwargs\.")


def make_fingerprint(config: DictConfig | Mapping[str, Any], trainer: type | None = None) -> Fingerprint:
    """Compute the fingerprint of a training's configuration and trainer class. Reads the files that they name."""
    rollout: Flat = {}
    training: Flat = {}
    flat = dict(flatten(resolve_config(config)))
    flat |= environment(flat)
    sampled = flat.get("rollout_skip.weights") == Weights.SAMPLED.value
    for key, value in flat.items():
        effect = rule_for(key).effect
        if effect is Effect.NEITHER or value == {} or (value is None and not _USER_ARGUMENTS.search(key)):
            continue  # to verl, null, an empty block and a missing key mean the same
        if unused(key, flat) is None:
            (training if effect is Effect.TRAINING else rollout).update(_identities(key, value, sampled))
    media = media_identity(_as_list(flat.get(DATA)), flat)
    if media is not None:
        rollout[f"{DATA}#media"] = media
    if training.get("algorithm.adv_estimator") == "remax":
        rollout[BASELINE] = True
    if not _depends_on_length(training):
        training = {key: value for key, value in training.items() if key not in LENGTH}
    if CHECKPOINT in training and _is_own_checkpoint(flat):
        del training[CHECKPOINT]
    code = class_identity(trainer) if trainer is not None else ""
    if code:
        training[TRAINER] = code
    rollout, training = mask(rollout), mask(training)
    for key, value in {**rollout, TRAINER: code}.items():
        if UNREADABLE in str(value):
            logger.warning("%s: %s; a change to its content will not be noticed", key, value)
        elif SAMPLED in str(value):
            logger.warning("%s: %s; a change to the rest will not be noticed", key, value)
        elif MASK in str(value):
            logger.info("%s looks like a secret and is not compared: a change to it will not be noticed", key)
    return Fingerprint(dict(sorted(rollout.items())), dict(sorted(training.items())))


def resolve_config(config: DictConfig | Mapping[str, Any]) -> dict[str, Any]:
    """The resolved configuration as JSON values. Infinities and NaN become strings."""
    try:
        container = OmegaConf.to_container(config, resolve=True) if isinstance(config, DictConfig) else config
    except OmegaConfBaseException as error:
        raise ConfigError(f"The configuration cannot be resolved: {error}") from error
    return json.loads(json.dumps(container, default=str), parse_constant=str)


def flatten(tree: Any, path: str = "") -> Iterator[tuple[str, Any]]:
    """The leaves of a configuration by their dotted keys. Lists and empty dicts are leaves."""
    if isinstance(tree, Mapping) and (tree or not path):
        for key, value in tree.items():
            yield from flatten(value, f"{path}.{key}" if path else str(key))
    else:
        yield path, tree


def difference(recorded: Flat, current: Flat, without_reward: bool = False) -> list[str]:
    """One line for each field that differs: ``actor_rollout_ref.rollout.temperature: 1.0 → 0.7``."""
    lines = []
    for key in sorted({*recorded, *current}):
        if without_reward and rule_for(_base(key)).part == "reward":
            continue
        old, new = (_show(flat[key]) if key in flat else ABSENT for flat in (recorded, current))
        if key not in recorded or key not in current or _canonical(recorded[key]) != _canonical(current[key]):
            lines.append(f"{key}: {old} → {new}")
    return lines


def flat_hash(flat: Flat) -> str:
    """A hash that does not depend on the machine or the order of keys. 1 and 1.0 hash the same."""
    return hashlib.sha256(_canonical(flat).encode()).hexdigest()


def _canonical(value: Any) -> str:
    return json.dumps(_whole_numbers(value), sort_keys=True, ensure_ascii=True)


def _whole_numbers(value: Any) -> Any:
    if isinstance(value, Mapping):
        return {key: _whole_numbers(item) for key, item in value.items()}
    if isinstance(value, list):
        return [_whole_numbers(item) for item in value]
    return int(value) if isinstance(value, float) and value.is_integer() else value


def _identities(key: str, value: Any, sampled: bool) -> Flat:
    if not identities_for(key):
        return {key: value}
    if key in LIST_OF_ONE and isinstance(value, list) and len(value) == 1:
        value = value[0]
    found: Flat = {}
    for part, identify in identities_for(key).items():
        if sampled and identify is model_identity:
            identify = sampled_model_identity
        identities = [identify(str(name)) for name in _as_list(value)]
        found[f"{key}#{part}" if part else key] = identities if isinstance(value, list) else identities[0]
    return found


def _as_list(value: Any) -> list[Any]:
    return value if isinstance(value, list) else [value]


def _is_own_checkpoint(config: Flat) -> bool:
    if config.get("trainer.resume_mode", "resume_path") != "resume_path":
        return True
    own = os.path.abspath(str(config.get("trainer.default_local_dir") or ""))
    return os.path.abspath(str(config[CHECKPOINT])).startswith(f"{own}{os.sep}")


def _depends_on_length(training: Flat) -> bool:
    """Whether the learning rate of a step depends on the total number of steps. Unknown schedules count as such."""
    blocks = {key.rpartition(".")[0] for key in training if key.rpartition(".")[0].endswith(".optim")}
    return any(
        _has_schedule({key.rpartition(".")[2]: training[key] for key in training if key.startswith(f"{block}.")})
        for block in blocks
    )


def _has_schedule(optim: Flat) -> bool:
    styles = {optim[name] for name in ("lr_scheduler_type", "lr_decay_style", "warmup_style") if name in optim}
    warms_up_by_share = (optim.get("lr_warmup_steps") or 0) <= 0 and (optim.get("lr_warmup_steps_ratio") or 0) > 0
    return styles != {"constant"} or warms_up_by_share


def _base(key: str) -> str:
    return key.split("#", 1)[0]


def _show(value: Any) -> str:
    return value if isinstance(value, str) else json.dumps(value, ensure_ascii=False)
