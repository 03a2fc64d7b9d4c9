"""Identifies code by its source: the file that a setting names, and the modules of the same project that it imports.

Nothing is imported or run. ``imports.py`` finds the imported modules. The manifest contains the versions of verl and of
installed packages.
"""

from __future__ import annotations

import inspect
import linecache
import os
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import xxhash
import yaml

from verl_rollout_skip.fingerprint.identity import UNREADABLE, file_identity, name_identity
from verl_rollout_skip.fingerprint.imports import (
    NOT_FOLLOWED,
    find_module,
    imported_modules,
    is_installed,
    path_in_project,
)

# An identity lists up to this many imported modules by name.
_MAX_NAMED = 20
# Attributes that Python adds to every class.
_IMPLICIT = {
    *("__module__", "__doc__", "__qualname__", "__dict__", "__weakref__", "__annotations__", "__static_attributes__"),
    *("__firstlineno__", "__abstractmethods__", "_abc_impl", "__orig_bases__", "__parameters__"),
}
# The keys that name a class in the YAML files of tools, interactions and agent loops.
_CLASS_KEYS = ("class_name", "_target_")
_CONFIG_FILES = {".yaml", ".yml", ".json"}
# A larger file is data, e.g. the index of a search tool.
_MAX_CONFIG_BYTES = 1 << 20


def code_identity(path: str) -> str:
    """A source file (a path or pkg://package.module) and the project's own modules that it imports."""
    if path.startswith("pkg://"):
        return module_identity(path.removeprefix("pkg://").replace("/", "."))
    file = Path(path.removeprefix("file://")).expanduser()
    return file_identity(str(file)) + _imports_identity(file)


def module_identity(name: str) -> str:
    """The source of an importable module, and the project's own modules that it imports."""
    file = find_module(name)
    return name_identity(name) if file is None else f"{name}, {file_identity(str(file))}{_imports_identity(file)}"


def class_name_identity(name: str) -> str:
    """The source of the class with a dotted name, and the project's own modules that it imports."""
    module = name.rpartition(".")[0]
    return f"{name} in {module_identity(module)}" if module else name


def classes_identity(path: str) -> str:
    """A configuration file, and the classes and files that it names."""
    return "; ".join(_parts_of_config(Path(path).expanduser(), set()))


def _parts_of_config(file: Path, seen: set[Path]) -> list[str]:
    """A configuration file and the classes and files that it names, recursively."""
    seen.add(file.resolve())
    try:
        tree = yaml.safe_load(file.read_text())  # reads JSON too
    except (OSError, ValueError, yaml.YAMLError, RecursionError):
        return [file_identity(str(file))]
    texts = sorted(set(_texts(tree)))
    modules = sorted({name.rpartition(".")[0] for is_class, name in texts if is_class} - {""})
    parts = [file_identity(str(file)), *map(module_identity, modules)]
    paths = [os.path.expanduser(text) for is_class, text in texts if not is_class]
    for named in [Path(path) for path in paths if os.path.isfile(path)]:
        if named.resolve() in seen:
            continue
        if named.suffix in _CONFIG_FILES and named.stat().st_size <= _MAX_CONFIG_BYTES:
            parts += [f"{named.name}, {part}" for part in _parts_of_config(named, seen)]
        else:
            seen.add(named.resolve())
            identify = code_identity if named.suffix == ".py" else file_identity
            parts.append(f"{named.name}, {identify(str(named))}")
    return parts


def _texts(tree: Any, key: Any = None) -> Iterator[tuple[bool, str]]:
    """All strings in a configuration, each with a flag for class names."""
    if isinstance(tree, str):
        yield key in _CLASS_KEYS, tree
    elif isinstance(tree, dict):
        for name, value in tree.items():
            yield from _texts(value, name)
    elif isinstance(tree, list):
        for item in tree:
            yield from _texts(item)


def class_identity(kind: type) -> str:
    """The source of a class and its bases, except those that are empty, installed or verl's; "" if none is left."""
    names: dict[str, list[str]] = {}
    for base in kind.__mro__:
        if (
            base.__module__.split(".")[0] in (*NOT_FOLLOWED, *sys.builtin_module_names)
            or vars(base).keys() <= _IMPLICIT
        ):
            continue
        file = _class_file(base)
        if file is None or not is_installed(Path(file)):
            names.setdefault(_text_identity(file), []).append(base.__qualname__)
    return "; ".join(", ".join(found) + identity for identity, found in names.items())


def _class_file(kind: type) -> str | None:
    module = sys.modules.get(kind.__module__)
    # In a Ray worker, __main__ is not the script that defines the class.
    is_defined_here = kind.__module__ != "__main__" or getattr(module, kind.__name__, None) is kind
    if is_defined_here and getattr(module, "__file__", None):
        return module.__file__  # type: ignore[union-attr]
    for value in vars(kind).values():
        function = inspect.unwrap(getattr(value, "__func__", None) or getattr(value, "fget", None) or value)
        if inspect.isfunction(function) and function.__module__ == kind.__module__:
            return function.__code__.co_filename
    return None


def _text_identity(file: str | None) -> str:
    if file is not None and os.path.isfile(file):
        return f": {code_identity(file)}"
    text = "".join(linecache.getlines(file or ""))  # a notebook cell
    return f": a cell, digest {xxhash.xxh3_128(text.encode()).hexdigest()}" if text else f" ({UNREADABLE})"


def _imports_identity(file: Path) -> str:
    """The project's own modules that a file imports, directly or indirectly; empty if there are none."""
    home = file.parent.resolve()
    file = home / file.name
    modules = sorted((path_in_project(module, home), _digest(module)) for module in imported_modules(file))
    if not modules:
        return ""
    if len(modules) <= _MAX_NAMED:
        return ", with " + ", ".join(f"{name} {digest[:8] if digest else UNREADABLE}" for name, digest in modules)
    whole = xxhash.xxh3_128("\n".join(f"{name} {digest}" for name, digest in modules).encode()).hexdigest()
    unreadable = [name for name, digest in modules if not digest]
    lost = f" ({', '.join(unreadable)}: {UNREADABLE})" if unreadable else ""
    return f", with {len(modules)} modules that it imports, digest {whole}{lost}"


def _digest(module: Path) -> str:
    """The digest of a module; empty if it cannot be read."""
    try:
        return xxhash.xxh3_128(module.read_bytes()).hexdigest()
    except OSError:
        return ""
