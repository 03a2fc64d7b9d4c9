"""``call_after_import``: calls a function as soon as a module is imported.

verl's plugin mechanism imports plugins in ``import verl``, before its trainers, and does not call them again. Importing
the trainers in the plugin instead would add seconds to the start of every verl process.
"""

from __future__ import annotations

import copy
import functools
import sys
from collections.abc import Callable, Sequence
from importlib.machinery import ModuleSpec
from types import ModuleType
from typing import Any


class _Watcher:
    """A finder that delegates to the finders after it, and calls functions with a module once it is loaded."""

    def __init__(self) -> None:
        self.calls: dict[str, list[Callable[[Any], None]]] = {}

    def find_spec(
        self, name: str, path: Sequence[str] | None = None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        if name not in self.calls or self not in sys.meta_path:
            return None
        for finder in sys.meta_path[sys.meta_path.index(self) + 1 :]:
            spec = finder.find_spec(name, path, target) if hasattr(finder, "find_spec") else None
            if spec is not None:
                return _watched(spec)
        return None


def _watched(spec: ModuleSpec) -> ModuleSpec:
    if hasattr(spec.loader, "exec_module") and not isinstance(spec.loader, type):
        loader: Any = copy.copy(spec.loader)  # other modules may share the original
        loader.exec_module = functools.partial(_exec_module, loader)
        spec.loader = loader
    return spec


def _exec_module(loader: Any, module: ModuleType) -> None:
    del loader.exec_module  # restores the original method
    loader.exec_module(module)
    for call in _watcher.calls.pop(module.__name__, []):
        call(module)


_watcher = _Watcher()


def call_after_import(name: str, call: Callable[[Any], None]) -> None:
    """Call a function with a module, now or when it is imported."""
    if name in sys.modules:
        call(sys.modules[name])
        return
    if _watcher not in sys.meta_path:
        sys.meta_path.insert(0, _watcher)
    _watcher.calls.setdefault(name, []).append(call)
