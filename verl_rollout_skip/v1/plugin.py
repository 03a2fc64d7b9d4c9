"""What verl loads by the entry point ``verl.plugins`` in each of its processes, so it imports next to nothing.

When verl imports its V1 trainers, ours are registered beside them. And when verl makes a trainer that knows nothing of
recorded rollouts although the configuration asks for them, that is an error instead of a run that skips nothing.
"""

from __future__ import annotations

import functools
import importlib.abc
import importlib.machinery
import importlib.util
import sys
from collections.abc import Callable, Sequence
from types import ModuleType
from typing import Any

MODES = {
    "skip_sync": "SkipPPOTrainerSync",
    "skip_colocate_async": "SkipPPOTrainerColocateAsync",
    "skip_separate_async": "SkipPPOTrainerSeparateAsync",
}


def register_trainers(module: ModuleType) -> None:
    """``verl.trainer.ppo.v1`` was imported: register our trainers, or something that says why it cannot be done."""
    guard_trainer(module.PPOTrainer)
    try:
        importlib.import_module("verl_rollout_skip.v1.trainers")
    except Exception as error:  # verl hides what a plugin raises; whoever asks for one of the modes is to see it
        for mode in MODES:
            module.register_trainer(mode)(_broken(module.PPOTrainer, mode, error))


def guard_trainer(trainer: Any) -> None:
    """Let a trainer of verl refuse a configuration that asks for recorded rollouts, which it knows nothing of."""
    make = trainer.__init__

    @functools.wraps(make)
    def make_or_refuse(self: Any, *args: Any, **kwargs: Any) -> None:
        config = kwargs["config"] if "config" in kwargs else args[0]
        if not hasattr(self, "rollout_skip"):
            _refuse_skip(type(self).__name__, config, _advice(config))
        make(self, *args, **kwargs)

    trainer.__init__ = make_or_refuse


def guard_fully_async(module: Any) -> None:
    """The same for ``verl.experimental.fully_async_policy``, whose trainer is made in another process."""
    run = module.run_ppo

    @functools.wraps(run)
    def run_or_refuse(config: Any, *args: Any, **kwargs: Any) -> Any:
        if config.get("async_training") is not None:
            _refuse_skip("fully_async_policy", config, "Use trainer.v1.trainer_mode=skip_separate_async instead.")
        return run(config, *args, **kwargs)

    module.run_ppo = run_or_refuse


def _refuse_skip(who: str, config: Any, advice: str) -> None:
    from verl_rollout_skip.config import BLOCK, SkipConfig
    from verl_rollout_skip.errors import InertError
    from verl_rollout_skip.modes import Mode

    mode = SkipConfig.from_config(config).mode
    if mode is not Mode.OFF:
        raise InertError(
            f"{BLOCK}.mode is {mode.value!r}, and {who} knows nothing of recorded rollouts: nothing would be recorded "
            f"or replayed. {advice}"
        )


def _advice(config: Any) -> str:
    if not config.trainer.get("use_v1"):
        return "Use recipes/ppo or recipes/dapo, or a class of your own with RolloutSkipMixin (README.md)."
    mode = f"skip_{config.trainer.v1.trainer_mode}"
    return f"Set trainer.v1.trainer_mode={mode if mode in MODES else ' or '.join(MODES)}."


def _broken(trainer: Any, mode: str, error: Exception) -> type:
    # Before __init__: verl's trainer is abstract, and Python would complain of that instead.
    def __new__(cls: type, *args: Any, **kwargs: Any) -> Any:
        raise ImportError(
            f"trainer.v1.trainer_mode={mode} cannot be used, because verl_rollout_skip.v1 cannot be imported: "
            f"{type(error).__name__}: {error}"
        ) from error

    return type(MODES[mode], (trainer,), {"__new__": __new__})


class _AfterImport(importlib.abc.MetaPathFinder):
    """Calls a function with a module as soon as that is imported, whoever imports it."""

    def __init__(self, name: str, call: Callable[[ModuleType], None]) -> None:
        self._name = name
        self._call = call
        self._is_looking = False

    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> importlib.machinery.ModuleSpec | None:
        if fullname != self._name or self._is_looking:
            return None
        self._is_looking = True
        try:
            spec = importlib.util.find_spec(fullname)
        finally:
            self._is_looking = False
        if spec is not None and spec.loader is not None:
            spec.loader = _Loader(spec.loader, self._imported)
        return spec

    def _imported(self, module: ModuleType) -> None:
        sys.meta_path.remove(self)
        self._call(module)


class _Loader(importlib.abc.Loader):
    """Python's own loader, which tells when it is done. ``python -m`` and tools ask it for more than to load."""

    def __init__(self, loader: Any, imported: Callable[[ModuleType], None]) -> None:
        self._loader = loader
        self._imported = imported

    def __getattr__(self, name: str) -> Any:
        return getattr(self._loader, name)

    def create_module(self, spec: importlib.machinery.ModuleSpec) -> ModuleType | None:
        return self._loader.create_module(spec)

    def exec_module(self, module: ModuleType) -> None:
        self._loader.exec_module(module)
        self._imported(module)


def call_after_import(name: str, call: Callable[[ModuleType], None]) -> None:
    """Call a function with a module, now or when it is imported."""
    if name in sys.modules:
        call(sys.modules[name])
    else:
        sys.meta_path.insert(0, _AfterImport(name, call))


call_after_import("verl.trainer.ppo.v1", register_trainers)
call_after_import("verl.trainer.ppo.ray_trainer", lambda module: guard_trainer(module.RayPPOTrainer))
call_after_import("verl.trainer.main_ppo", guard_fully_async)
