"""The plugin for verl: ``import verl`` loads this module in every process, so it imports almost nothing.

It registers the V1 trainer modes of this package. It also makes verl's own trainers, which would ignore the settings of
this package, raise an error if a configuration has them. Other trainings are not affected.
"""

from __future__ import annotations

import functools
import importlib
import inspect
import sys
from collections.abc import Callable
from typing import Any

from verl_rollout_skip.trainers.import_hook import call_after_import

MODES = {
    "skip_sync": "SkipPPOTrainerSync",
    "skip_colocate_async": "SkipPPOTrainerColocateAsync",
    "skip_separate_async": "SkipPPOTrainerSeparateAsync",
}

# Repeated from config/, which is not imported for trainings that have neither key.
_KEYS = ("rollout_skip", "actor_rollout_ref.rollout.skip_rollout")

Advise = Callable[[str, Any], str]
"""Returns advice for the name of a trainer and its configuration."""


def offer_trainers(module: Any) -> None:
    """Called when ``verl.trainer.ppo.v1`` is imported: make our trainers available, and guard verl's own."""
    guard_trainer(getattr(module, "PPOTrainer", None), _advise_v1)
    find = getattr(module, "get_trainer_cls", None)
    if find is None:
        return

    @functools.wraps(find)
    def find_or_register(name: str) -> Any:
        if name in MODES:
            _register_trainers(name)
        return find(name)

    homes: list[Any] = [module, sys.modules.get(find.__module__)]
    for home in homes:
        if getattr(home, "get_trainer_cls", None) is find:
            home.get_trainer_cls = find_or_register


def _register_trainers(mode: str) -> None:
    try:
        importlib.import_module("verl_rollout_skip.trainers.v1.trainers")
    except Exception as error:
        raise ImportError(
            f"trainer.v1.trainer_mode={mode} cannot be used, because verl_rollout_skip.v1 cannot be imported: "
            f"{type(error).__name__}: {error}"
        ) from error


def guard_trainer(trainer: Any, advise: Advise) -> None:
    """Make one of verl's trainers raise if the configuration asks for recorded rollouts, which it would ignore."""
    if not inspect.isclass(trainer):
        return
    kind: Any = trainer
    init = kind.__init__

    @functools.wraps(init)
    def init_or_refuse(self: Any, *args: Any, **kwargs: Any) -> None:
        if not hasattr(self, "rollout_skip"):
            _refuse_skip(type(self).__name__, _config_of(args, kwargs), advise)
        init(self, *args, **kwargs)

    kind.__init__ = init_or_refuse


def guard_v0(module: Any) -> None:
    """Called when ``verl.trainer.ppo.ray_trainer`` is imported."""
    guard_trainer(getattr(module, "RayPPOTrainer", None), _advise_v0)


def guard_fully_async(module: Any) -> None:
    """Called when ``verl.trainer.main_ppo`` is imported: guard ``fully_async_policy``, whose trainer is created in
    another process."""
    run = getattr(module, "run_ppo", None)
    if run is None:
        return

    @functools.wraps(run)
    def run_or_refuse(*args: Any, **kwargs: Any) -> Any:
        config = _config_of(args, kwargs)
        if asks_for_skip(config) and config.get("async_training") is not None:
            _refuse_skip("fully_async_policy", config, _advise_fully_async)
        return run(*args, **kwargs)

    module.run_ppo = run_or_refuse


def asks_for_skip(config: Any) -> bool:
    """Whether a training's configuration mentions this package. Never raises."""
    from omegaconf import DictConfig, OmegaConf

    return isinstance(config, DictConfig) and any(
        OmegaConf.select(config, key, throw_on_resolution_failure=False) is not None for key in _KEYS
    )


def _refuse_skip(who: str, config: Any, advise: Advise) -> None:
    from omegaconf import DictConfig

    from verl_rollout_skip.config.modes import Mode
    from verl_rollout_skip.config.skip_config import BLOCK, SkipConfig, refuse_misspelled
    from verl_rollout_skip.errors import InertError

    if isinstance(config, DictConfig):
        refuse_misspelled(config)
    if not asks_for_skip(config):
        return
    mode = SkipConfig.from_config(config).mode
    if mode is not Mode.OFF:
        raise InertError(
            f"{BLOCK}.mode is {mode.value!r}, but {who} does not support recorded rollouts: nothing would be recorded "
            f"or replayed. {advise(who, config)}"
        )


def _config_of(args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    return kwargs["config"] if "config" in kwargs else next(iter(args), None)


def _advise_v0(who: str, config: Any) -> str:
    return (
        f"Use recipes/ppo or recipes/dapo, or write class MyTrainer(RolloutSkipMixin, {who}), with RolloutSkipMixin "
        "from verl_rollout_skip."
    )


def _advise_v1(who: str, config: Any) -> str:
    from omegaconf import OmegaConf

    mode = f"skip_{OmegaConf.select(config, 'trainer.v1.trainer_mode')}"
    if mode in MODES:
        return f"Set trainer.v1.trainer_mode={mode}."
    return (
        f"Set trainer.v1.trainer_mode={' or '.join(MODES)}, or write class MyTrainer(RolloutSkipMixin, {who}), with "
        "RolloutSkipMixin from verl_rollout_skip.v1."
    )


def _advise_fully_async(who: str, config: Any) -> str:
    return "Use trainer.v1.trainer_mode=skip_separate_async instead."


call_after_import("verl.trainer.ppo.v1", offer_trainers)
call_after_import("verl.trainer.ppo.ray_trainer", guard_v0)
call_after_import("verl.trainer.main_ppo", guard_fully_async)
