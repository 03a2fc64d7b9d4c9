"""Record rollouts of verl on disk and reuse them. Works without verl; names are imported when first used."""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

from verl_rollout_skip._version import __version__

if TYPE_CHECKING:
    from verl_rollout_skip.config.modes import Mode
    from verl_rollout_skip.config.skip_config import SkipConfig
    from verl_rollout_skip.key import RolloutKey
    from verl_rollout_skip.replay.rollout import RolloutSkip
    from verl_rollout_skip.runs.manifest import Manifest
    from verl_rollout_skip.store.store import RolloutStore
    from verl_rollout_skip.trainers.v0.mixin import RolloutSkipMixin
    from verl_rollout_skip.trainers.v0.trainers import SkipDAPOTrainer, SkipPPOTrainer
    from verl_rollout_skip.trainers.v1.mixin import RolloutSkipMixin as RolloutSkipMixinV1

__all__ = [
    "Manifest",
    "Mode",
    "RolloutKey",
    "RolloutSkip",
    "RolloutSkipMixin",
    "RolloutSkipMixinV1",
    "RolloutStore",
    "SkipConfig",
    "SkipDAPOTrainer",
    "SkipPPOTrainer",
    "__version__",
]

_MODULES = {
    "Manifest": "runs.manifest",
    "Mode": "config.modes",
    "RolloutKey": "key",
    "RolloutSkip": "replay.rollout",
    "RolloutSkipMixin": "trainers.v0.mixin",
    "RolloutSkipMixinV1": "trainers.v1.mixin",
    "RolloutStore": "store.store",
    "SkipConfig": "config.skip_config",
    "SkipDAPOTrainer": "trainers.v0.trainers",
    "SkipPPOTrainer": "trainers.v0.trainers",
}
# Both trainer families call their mixin RolloutSkipMixin.
_NAMES_THERE = {"RolloutSkipMixinV1": "RolloutSkipMixin"}
_NEED_VERL = ("RolloutSkipMixin", "SkipDAPOTrainer", "SkipPPOTrainer")


def __getattr__(name: str) -> Any:
    if name not in _MODULES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    if name in _NEED_VERL:
        import_module("verl")  # first: it imports the user's modules, which may import these names too
    return getattr(import_module(f"{__name__}.{_MODULES[name]}"), _NAMES_THERE.get(name, name))


def __dir__() -> list[str]:
    return sorted([*globals(), *_MODULES])
