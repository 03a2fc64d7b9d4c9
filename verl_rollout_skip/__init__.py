"""Record rollouts of verl on disk and reuse them. Works without verl; names are imported when first used."""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

from verl_rollout_skip._version import __version__

if TYPE_CHECKING:
    from verl_rollout_skip.key import RolloutKey
    from verl_rollout_skip.store.store import RolloutStore

__all__ = ["RolloutKey", "RolloutStore", "__version__"]

_HOMES = {"RolloutKey": "verl_rollout_skip.key", "RolloutStore": "verl_rollout_skip.store.store"}


def __getattr__(name: str) -> Any:
    if name in _HOMES:
        return getattr(import_module(_HOMES[name]), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted([*globals(), *_HOMES])
