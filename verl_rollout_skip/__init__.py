"""Record rollouts of verl on disk and reuse them. Works without verl; names are imported when first used."""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

from verl_rollout_skip._version import __version__

if TYPE_CHECKING:
    from verl_rollout_skip.config import SkipConfig
    from verl_rollout_skip.key import RolloutKey
    from verl_rollout_skip.manifest import Manifest
    from verl_rollout_skip.modes import Mode
    from verl_rollout_skip.rollout import RolloutSkip
    from verl_rollout_skip.store.store import RolloutStore
    from verl_rollout_skip.trainers.v0.mixin import RolloutSkipMixin
    from verl_rollout_skip.trainers.v0.trainers import SkipDAPOTrainer, SkipPPOTrainer

__all__ = [
    "Manifest",
    "Mode",
    "RolloutKey",
    "RolloutSkip",
    "RolloutSkipMixin",
    "RolloutStore",
    "SkipConfig",
    "SkipDAPOTrainer",
    "SkipPPOTrainer",
    "__version__",
]

_HOMES = {
    "Manifest": "verl_rollout_skip.manifest",
    "Mode": "verl_rollout_skip.modes",
    "RolloutKey": "verl_rollout_skip.key",
    "RolloutSkip": "verl_rollout_skip.rollout",
    "RolloutSkipMixin": "verl_rollout_skip.trainers.v0.mixin",
    "RolloutStore": "verl_rollout_skip.store.store",
    "SkipConfig": "verl_rollout_skip.config",
    "SkipDAPOTrainer": "verl_rollout_skip.trainers.v0.trainers",
    "SkipPPOTrainer": "verl_rollout_skip.trainers.v0.trainers",
}

_NEED_VERL = ("RolloutSkipMixin", "SkipDAPOTrainer", "SkipPPOTrainer")


def __getattr__(name: str) -> Any:
    if name in _NEED_VERL:
        import_module("verl")  # first: it imports modules of the user, which may want these names as well
    if name in _HOMES:
        return getattr(import_module(_HOMES[name]), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted([*globals(), *_HOMES])
