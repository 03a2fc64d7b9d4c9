"""Identifies code by its source: the file that a setting names, and the modules of the same project that it imports.

Nothing is imported or run. Imports are found in the syntax tree and resolved next to the file, in its package, in other
project folders on ``sys.path``, and in editable installs. Installed packages and verl are not followed; the manifest
has their versions.
"""

from __future__ import annotations

import ast
import functools
import importlib.util
import inspect
import linecache
import os
import sys
import sysconfig
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import xxhash
import yaml

from verl_rollout_skip.identity import UNREADABLE, file_identity, name_identity

Found = tuple[Path | None, bool]

_INSTALLED = {"site-packages", "dist-packages"}
_NAMED, _FOLLOWED = 20, 1000
# Users edit these while they debug a replay. verl's version is in the manifest.
_NOT_FOLLOWED = {"verl", "verl_rollout_skip"}
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
    file = _module_file(name)
    return name_identity(name) if file is None else f"{name}, {file_identity(str(file))}{_imports_identity(file)}"


def class_name_identity(name: str) -> str:
    """The source of the class with a dotted name, and the project's own modules that it imports."""
    module = name.rpartition(".")[0]
    return f"{name} in {module_identity(module)}" if module else name


def classes_identity(path: str) -> str:
    """A configuration file, and the classes and files that it names."""
    return "; ".join(_parts_of_config(Path(path).expanduser(), set()))


def _parts_of_config(file: Path, seen: set[Path]) -> list[str]:
    """A configuration file and what it names, recursively."""
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
    """All strings in a configuration, each with whether it names a class."""
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
            base.__module__.split(".")[0] in (*_NOT_FOLLOWED, *sys.builtin_module_names)
            or vars(base).keys() <= _IMPLICIT
        ):
            continue
        file = _class_file(base)
        if file is None or not _is_installed(Path(file)):
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


def _module_file(name: str) -> Path | None:
    """The source file of a module, found without importing it or its packages."""
    top, *inner = name.split(".")
    try:
        spec = importlib.util.find_spec(top)
    except (ImportError, ValueError):
        return None
    if spec is None:
        return None
    if not inner:
        return None if spec.origin is None else Path(spec.origin)
    found = (_look(Path(folder, *inner))[0] for folder in spec.submodule_search_locations or ())
    return next((file for file in found if file is not None), None)


def _imports_identity(file: Path) -> str:
    """The modules that a file imports, directly or indirectly; empty if it imports none of its own project."""
    home = file.parent.resolve()
    file = home / file.name
    modules = sorted((_relative(module, home), _digest(module)) for module in _imported(file))
    if not modules:
        return ""
    if len(modules) <= _NAMED:
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


def _imported(file: Path) -> set[Path]:
    found: set[Path] = set()
    waiting = [file]
    look = functools.cache(_look)  # modules share imports, and a network file system is slow
    while waiting and len(found) < _FOLLOWED:
        for module in sorted(_imports_of(waiting.pop(), look)):  # sorted, so that the limit always cuts off the same
            if module not in found and module != file:
                found.add(module)
                waiting.append(module)
    return found


def _imports_of(file: Path, look: Callable[[Path], Found]) -> set[Path]:
    if _INSTALLED & set(file.parts):
        return set()
    try:
        tree = ast.parse(file.read_bytes())
    except (OSError, SyntaxError, ValueError, RecursionError):
        return set()  # the file itself is still digested; Python could not import it either
    return {module for folder, parts in _names(tree, file) for module in _modules(folder, parts, look)}


def _names(tree: ast.AST, file: Path) -> Iterator[tuple[Path, list[str]]]:
    """The imports of a file, each as a folder to search and the parts of a dotted name."""
    root = _package_root(file)
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            for alias in node.names:
                yield from _starts(file, root, alias.name.split("."))
        elif isinstance(node, ast.ImportFrom):
            parts = node.module.split(".") if node.module else []
            folders = [file.parents[node.level - 1]] if 0 < node.level <= len(file.parents) else []
            for folder, inner in [(folder, parts) for folder in folders] if node.level else _starts(file, root, parts):
                yield folder, inner
                for alias in node.names:
                    yield folder, [*inner, alias.name]


def _starts(file: Path, root: Path, parts: list[str]) -> list[tuple[Path, list[str]]]:
    """The folders to search for an absolute import: the file's own, its package's root, and ``sys.path``."""
    is_own_package = root != file.parent and parts[0] == file.relative_to(root).parts[0]
    own = [root] if is_own_package else []
    if parts[0] in _NOT_FOLLOWED:
        return [(folder, parts) for folder in dict.fromkeys([file.parent, *own])]
    anywhere = _search_path(os.getcwd(), *sys.path)
    folders = dict.fromkeys([file.parent, *own, *anywhere])
    return [*((folder, parts) for folder in folders), *_editable(parts)]


def _editable(parts: list[str]) -> list[tuple[Path, list[str]]]:
    """Where an editable install keeps a package that is not on ``sys.path``."""
    return [(path.parent, [path.name, *parts[1:]]) for path in _found_by_finders(parts[0], *sys.path)]


@functools.lru_cache(maxsize=1024)
def _found_by_finders(top: str, *_search_path: str) -> tuple[Path, ...]:
    """The path, without suffix, of a package or module that a project's import hook finds; nothing is imported."""
    try:
        spec = importlib.util.find_spec(top)
    except (ImportError, ValueError, AttributeError):
        return ()
    if spec is None:
        return ()
    paths = [Path(folder) for folder in spec.submodule_search_locations or ()]
    if not paths and spec.origin is not None and spec.origin.endswith(".py"):
        paths = [Path(spec.origin).with_suffix("")]
    return tuple(path for path in map(Path.resolve, paths) if not _is_installed(path))


@functools.lru_cache(maxsize=8)
def _search_path(here: str, *entries: str) -> tuple[Path, ...]:
    """The project folders on ``sys.path``, without the standard library and installed packages."""
    folders = [Path(here, entry).resolve() for entry in entries]
    return tuple(folder for folder in folders if os.path.isdir(folder) and not _is_installed(folder))


def _is_installed(path: Path) -> bool:
    system = [Path(sysconfig.get_paths()[name]).resolve() for name in ("stdlib", "platstdlib")]
    return bool(_INSTALLED & set(path.parts)) or any(path.resolve().is_relative_to(other) for other in system)


def _modules(folder: Path, parts: list[str], look: Callable[[Path], Found]) -> Iterator[Path]:
    """The module with a dotted name and its parent packages, which Python imports first."""
    path = folder
    for part in parts:
        path = path / part
        file, is_folder = look(path)
        if file is not None:
            yield file
        if not is_folder:
            return


def _look(path: Path) -> Found:
    """The source file of the package or module at a path without suffix, and whether the path is a folder."""
    is_folder = os.path.isdir(path)
    candidates = [path / "__init__.py"] if is_folder else []
    candidates.append(path.with_name(f"{path.name}.py"))
    return next((file for file in candidates if os.path.isfile(file)), None), is_folder


def _package_root(file: Path) -> Path:
    """The folder that contains a module's outermost package."""
    root = file.parent
    while os.path.isfile(root / "__init__.py") and root != root.parent:
        root = root.parent
    return root


def _relative(file: Path, home: Path) -> str:
    """The path of a file relative to its project, whose own folder may have a different name in each clone."""
    root = _package_root(file)
    if file.is_relative_to(home):
        root = home
    elif root == file.parent:  # not in a package, or in one without __init__.py
        folders = [folder for folder in _search_path(os.getcwd(), *sys.path) if file.is_relative_to(folder)]
        root = max(folders, key=lambda folder: len(folder.parts), default=root)
    return file.relative_to(root).as_posix()
