"""Parses and validates the ``rollout_skip`` block of a training's configuration.

All checks that need only the configuration and the file system are here; they run before any worker starts.
``variants.py`` decides whether recorded rollouts match.
"""

from __future__ import annotations

import math
import os
import re
import shlex
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, fields, replace
from pathlib import Path
from typing import Any

from omegaconf import DictConfig, ListConfig, OmegaConf, open_dict

from verl_rollout_skip.config.misspelled import find_misspelled
from verl_rollout_skip.config.modes import (
    Audit,
    Engine,
    Mode,
    OnDumpError,
    OnMismatch,
    Prompts,
    Reward,
    Tasks,
    Weights,
    choose,
    suggest,
)
from verl_rollout_skip.config.run_names import dump_dir_of
from verl_rollout_skip.errors import ConfigError
from verl_rollout_skip.store.sizes import parse_size
from verl_rollout_skip.store.storage.locations import is_url

BLOCK = "rollout_skip"
OLD_SWITCH = "actor_rollout_ref.rollout.skip_rollout"
OLD_FOLDER = "actor_rollout_ref.rollout.skip_dump_dir"
# verl's own skip: 0.9.1 (V0, V1, fully async) and 0.8.0. verl 0.6.1 and 0.7.1 use the two old keys above.
_UPSTREAM = ("skip.rollout", "skip.rollout_tq", "skip.async_rollout", "actor_rollout_ref.rollout.skip")
_EQUIVALENTS = {"dump_dir": "dump_dir", "action": "mode", "steps": "steps", "max_dump_step": "max_dump_steps"}
_RANGE = re.compile(r"\s*(\d+)\s*(?:-\s*(\d+)\s*)?")
_RAY_SESSION = re.compile(r"session_(latest|\d{4}-\d{2}-\d{2}_\d{2}-\d{2}-\d{2}_\d+_\d+)")
# The default of skip_dump_dir in verl 0.6.1 and 0.7.1, present even if the skip is off.
_UPSTREAM_FOLDER = "/tmp/rollout_dump"


PART_BYTES = 256 << 20
"""The target size in memory of the rows that one Ray task handles."""


@dataclass(frozen=True)
class Steps:
    """A selection of training steps: all steps, or inclusive ranges."""

    ranges: tuple[tuple[int, int], ...] | None = None

    def __contains__(self, step: int) -> bool:
        return self.ranges is None or any(first <= step <= last for first, last in self.ranges)

    def __str__(self) -> str:
        if self.ranges is None:
            return "all"
        return ", ".join(str(first) if first == last else f"{first}-{last}" for first, last in self.ranges)


@dataclass(frozen=True)
class SkipConfig:
    """The validated settings. docs/configuration.md documents each key."""

    mode: Mode = Mode.OFF
    dump_dir: str | None = None
    steps: Steps = Steps()
    max_dump_steps: int | None = None
    on_mismatch: OnMismatch = OnMismatch.NEW
    prompts: Prompts = Prompts.AUTO
    source: str | None = None
    reward: Reward = Reward.RECORDED
    engine: Engine = Engine.AUTO
    weights: Weights = Weights.FULL
    background: bool = True
    on_dump_error: OnDumpError = OnDumpError.AUTO
    max_disk: int | None = None
    log_samples: int = 4
    audit: Audit = Audit.AUTO
    tasks: Tasks = Tasks.AUTO
    part_bytes: int = PART_BYTES
    partial_every: float | None = 30.0
    shadow_min_match: float | None = None

    @property
    def fails_on_dump_error(self) -> bool:
        if self.on_dump_error is OnDumpError.AUTO:
            return self.mode is Mode.RECORD
        return self.on_dump_error is OnDumpError.FAIL

    @property
    def starts_engine(self) -> bool:
        if self.engine is Engine.AUTO or self.mode is Mode.OFF:
            return self.mode is not Mode.REPLAY
        return self.engine is Engine.ON

    @property
    def defers_weight_syncs(self) -> bool:
        """Whether weights are sent to the engine only before it generates. In mode shadow, it generates every step."""
        return self.mode.reads and self.mode is not Mode.SHADOW

    @property
    def loads_rewards(self) -> bool:
        """Whether every reward comes from disk, so that no reward function or model is needed."""
        return not self.mode.generates and self.reward is Reward.RECORDED

    @classmethod
    def from_config(cls, config: DictConfig | Mapping[str, Any]) -> SkipConfig:
        """Read the ``rollout_skip`` block and the two old keys; raise ``ConfigError`` if anything is wrong."""
        tree = config if isinstance(config, DictConfig) else OmegaConf.create(dict(config))
        refuse_misspelled(tree)
        settings = cls._parse(_merge_old_keys(_block(tree), tree))._with_default_dump_dir()
        if settings.mode is not Mode.OFF:
            _refuse_upstream(tree)
            settings._check_folders()
            settings._check_shadow()
        return settings

    @classmethod
    def _parse(cls, block: Mapping[str, Any]) -> SkipConfig:
        names = [field.name for field in fields(cls)]
        for key in block:
            if key not in names:
                raise ConfigError(f"{BLOCK}.{key} is not a setting. {suggest(str(key), names)}")
        values = dict(block)
        return cls(
            mode=choose(Mode, values.get("mode", Mode.OFF), f"{BLOCK}.mode"),
            dump_dir=_parse_path(values.get("dump_dir"), f"{BLOCK}.dump_dir"),
            steps=parse_steps(values.get("steps", "all"), f"{BLOCK}.steps"),
            max_dump_steps=_parse_count(values.get("max_dump_steps"), f"{BLOCK}.max_dump_steps"),
            on_mismatch=choose(OnMismatch, values.get("on_mismatch", OnMismatch.NEW), f"{BLOCK}.on_mismatch"),
            prompts=choose(Prompts, values.get("prompts", Prompts.AUTO), f"{BLOCK}.prompts"),
            source=_parse_path(values.get("source"), f"{BLOCK}.source"),
            reward=choose(Reward, values.get("reward", Reward.RECORDED), f"{BLOCK}.reward"),
            engine=choose(Engine, values.get("engine", Engine.AUTO), f"{BLOCK}.engine"),
            weights=choose(Weights, values.get("weights", Weights.FULL), f"{BLOCK}.weights"),
            background=_parse_bool(values.get("background", True), f"{BLOCK}.background"),
            on_dump_error=choose(OnDumpError, values.get("on_dump_error", "auto"), f"{BLOCK}.on_dump_error"),
            max_disk=_parse_size(values.get("max_disk"), f"{BLOCK}.max_disk"),
            log_samples=_parse_count(values.get("log_samples", 4) or None, f"{BLOCK}.log_samples") or 0,
            audit=choose(Audit, values.get("audit", Audit.AUTO), f"{BLOCK}.audit"),
            tasks=choose(Tasks, values.get("tasks", Tasks.AUTO), f"{BLOCK}.tasks"),
            part_bytes=_parse_size(values.get("part_bytes"), f"{BLOCK}.part_bytes") or PART_BYTES,
            partial_every=_parse_seconds(values.get("partial_every", 30), f"{BLOCK}.partial_every"),
            shadow_min_match=_parse_ratio(values.get("shadow_min_match"), f"{BLOCK}.shadow_min_match"),
        )

    def _with_default_dump_dir(self) -> SkipConfig:
        """In mode cache, new rollouts go into the run of ``source`` unless ``dump_dir`` is set."""
        if self.source is None or self.dump_dir is not None or self.mode is not Mode.CACHE:
            return self
        return replace(self, dump_dir=dump_dir_of(self.source))

    def _check_folders(self) -> None:
        if self.dump_dir is None and not (self.source is not None and not self.mode.writes):
            raise ConfigError(
                f"{BLOCK}.dump_dir is not set and mode is {self.mode.value!r}. Set it to an absolute path "
                f"(or a URL such as s3://bucket/dumps), e.g. {BLOCK}.dump_dir=/data/rollout_dumps."
            )
        if self.dump_dir is not None and not is_url(self.dump_dir):
            _check_folder(Path(self.dump_dir), writes=self.mode.writes)
        if self.mode is Mode.REPLAY and self.steps.ranges is not None and self.engine is not Engine.ON:
            raise ConfigError(
                f"{BLOCK}.steps is {self.steps} and mode is 'replay': the other steps need to be generated, but "
                f"replay starts no engine. Use {BLOCK}.engine=on or mode cache."
            )
        if self.engine is Engine.OFF and self.mode.generates:
            raise ConfigError(
                f"{BLOCK}.engine is 'off', but mode {self.mode.value!r} generates steps that are not recorded. Use "
                "engine 'auto' or a mode that only loads: replay, repeat, repeat_last."
            )

    def _check_shadow(self) -> None:
        if self.mode is Mode.SHADOW and self.engine is Engine.OFF:
            raise ConfigError(
                f"{BLOCK}.engine is 'off', but mode 'shadow' generates every step to compare it with the recording. "
                "Use engine 'auto', or mode replay, which only loads."
            )
        if self.mode is not Mode.SHADOW and self.shadow_min_match is not None:
            raise ConfigError(
                f"{BLOCK}.shadow_min_match is {self.shadow_min_match:g}, but mode is {self.mode.value!r}, which "
                f"compares nothing with the recording. Set {BLOCK}.mode=shadow, or remove {BLOCK}.shadow_min_match."
            )


def override(key: str, value: str) -> str:
    """A setting as you type it on a command line, quoted for Hydra and the shell where needed."""
    if not re.fullmatch(r"[\w./:@%+-]+", value, re.ASCII):
        value = '"' + value.replace('"', '\\"') + '"'
    return shlex.quote(f"{key}={value}")


def remove_skip_keys(config: DictConfig) -> None:
    """Remove the settings of this package from a configuration: verl's workers reject unknown keys."""
    with open_dict(config):
        config.pop(BLOCK, None)
        rollout = OmegaConf.select(config, "actor_rollout_ref.rollout")
        if rollout is not None:
            with open_dict(rollout):
                for key in (OLD_SWITCH, OLD_FOLDER):
                    rollout.pop(key.rsplit(".", 1)[-1], None)


def parse_steps(value: Any, key: str) -> Steps:
    """``all``, or steps and ranges: ``[1, 2, "10-20"]``, ``"1, 2, 10-20"``, ``5``."""
    if value is None or value == "all":
        return Steps()
    items = value if isinstance(value, Sequence | ListConfig) and not isinstance(value, str) else str(value).split(",")
    ranges = []
    for item in items:
        match = _RANGE.fullmatch(str(item))
        if isinstance(item, bool) or match is None:
            raise ConfigError(f'{key} has {item!r}; use "all", or steps and ranges such as [1, 2, "10-20"].')
        first, last = int(match[1]), int(match[2] or match[1])
        if first < 1 or last < first:
            reason = "steps start at 1" if first < 1 else "the range ends before it begins"
            raise ConfigError(f"{key} has {item!r}: {reason}.")
        ranges.append((first, last))
    if not ranges:
        raise ConfigError(f'{key} is empty, so no step would be recorded or replayed. Use "all" or list some steps.')
    return Steps(tuple(ranges))


def describe_steps(steps: Iterable[int]) -> str:
    """Steps in ranges: ``1-3, 7``."""
    ranges: list[tuple[int, int]] = []
    for step in sorted(steps):
        if ranges and step == ranges[-1][1] + 1:
            ranges[-1] = (ranges[-1][0], step)
        else:
            ranges.append((step, step))
    return str(Steps(tuple(ranges)))


def _block(config: DictConfig) -> dict[str, Any]:
    block = OmegaConf.select(config, BLOCK)
    if block is None:
        return {}
    if not isinstance(block, DictConfig):
        raise ConfigError(f"{BLOCK} is {block!r}; it must be a block of settings, e.g. {BLOCK}.mode=cache.")
    plain = OmegaConf.to_container(block, resolve=True)
    assert isinstance(plain, dict)
    return {str(key): value for key, value in plain.items()}


def refuse_misspelled(config: DictConfig) -> None:
    """Raise if settings of this package are under a name that nothing reads."""
    plain = OmegaConf.to_container(config, resolve=False)
    assert isinstance(plain, dict)
    names = [field.name for field in fields(SkipConfig)]
    found = find_misspelled(plain, BLOCK, names, [mode.value for mode in Mode])
    if found:
        raise ConfigError(
            f"{found} It would have no effect: nothing would be recorded or replayed. Rename or remove it."
        )


def _merge_old_keys(block: dict[str, Any], config: DictConfig) -> dict[str, Any]:
    switch, folder = OmegaConf.select(config, OLD_SWITCH), OmegaConf.select(config, OLD_FOLDER)
    if switch is not None and not isinstance(switch, bool):
        raise ConfigError(f"{OLD_SWITCH} is {switch!r}; it must be True (mode cache) or False.")
    if folder == _UPSTREAM_FOLDER and (not switch or block.get("dump_dir") is not None):
        folder = None  # verl's default, not chosen by the user
    merged = dict(block)
    # The block of a recipe has mode off until the user turns it on.
    defaults: dict[str, tuple[Any, ...]] = {"mode": (None, False, "off"), "dump_dir": (None,)}
    for old, key, value in ((OLD_SWITCH, "mode", "cache" if switch else None), (OLD_FOLDER, "dump_dir", folder)):
        given = block.get(key)
        if value is not None and given not in (*defaults[key], value):
            raise ConfigError(
                f"{old} means {BLOCK}.{key}={value!r}, but {BLOCK}.{key} is {given!r}. Set only one of the two."
            )
        if value is not None:
            merged[key] = value
    return merged


def _refuse_upstream(config: DictConfig) -> None:
    for key in _UPSTREAM:
        block = OmegaConf.select(config, key)
        if not isinstance(block, DictConfig) or not block.get("enable"):
            continue
        equivalents = [f"{key}.{name} is {BLOCK}.{ours}" for name, ours in _EQUIVALENTS.items() if name in block]
        raise ConfigError(
            f"{key}.enable is True: verl's own skip would hide rollouts from this package. Set {key}.enable=False. "
            f"The equivalent settings: {', '.join(equivalents)}."
        )


def _parse_path(value: Any, key: str) -> str | None:
    if value is None:
        return None
    if not isinstance(value, str) or not value.strip():
        raise ConfigError(f"{key} is {value!r}; use an absolute path or a URL such as s3://bucket/folder.")
    if is_url(value) and not value.startswith("file://"):
        return value
    path = os.path.expanduser(value.removeprefix("file://"))
    if not os.path.isabs(path):
        raise ConfigError(
            f"{key} is the relative path {value!r}. Ray runs the trainer in a different working directory, so the path "
            f"would point somewhere else. Use an absolute path, e.g. {os.path.abspath(path)}"
        )
    return os.path.normpath(path)


def _check_folder(path: Path, writes: bool) -> None:
    key = f"{BLOCK}.dump_dir"
    if any(_RAY_SESSION.fullmatch(part) for part in (*path.parts, *path.resolve().parts)):
        raise ConfigError(
            f"{key} is {str(path)!r}, inside a Ray session folder, which Ray deletes. Choose another folder."
        )
    here = path
    while not here.exists() and here != here.parent:
        here = here.parent
    if not here.is_dir():
        raise ConfigError(f"{key} is {str(path)!r}, but {str(here)!r} is a file. Choose a folder.")
    if not writes:
        return
    read_only = bool(os.statvfs(here).f_flag & os.ST_RDONLY)
    if read_only or not os.access(here, os.W_OK | os.X_OK):
        reason = "its file system is mounted read-only" if read_only else "this user has no write permission"
        raise ConfigError(f"{key} is {str(path)!r}, but {str(here)!r} is not writable: {reason}.")


def _parse_bool(value: Any, key: str) -> bool:
    if not isinstance(value, bool):
        raise ConfigError(f"{key} is {value!r}; it must be true or false.")
    return value


def _parse_count(value: Any, key: str) -> int | None:
    if value is None:
        return None
    if isinstance(value, bool) or not isinstance(value, int) or value < 1:
        raise ConfigError(f"{key} is {value!r}; it must be an integer of 1 or more, or null for no limit.")
    return value


def _parse_seconds(value: Any, key: str) -> float | None:
    if value is None:
        return None
    if isinstance(value, bool) or not isinstance(value, int | float) or not 0 < value < math.inf:
        raise ConfigError(f"{key} is {value!r}; it must be a positive number of seconds, or null for never.")
    return float(value)


def _parse_ratio(value: Any, key: str) -> float | None:
    if value is None:
        return None
    if isinstance(value, bool) or not isinstance(value, int | float) or not 0 <= value <= 1:
        raise ConfigError(f"{key} is {value!r}; it must be a number from 0 to 1, or null for no limit.")
    return float(value)


def _parse_size(value: Any, key: str) -> int | None:
    if value is None:
        return None
    try:
        size = parse_size(value, key)
    except ValueError as error:
        raise ConfigError(str(error)) from None
    if size == 0:
        raise ConfigError(f"{key} is {value!r}, so nothing could be recorded. Set a size, or null for no limit.")
    return size
