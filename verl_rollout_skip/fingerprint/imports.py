"""Finds the modules of a user's own project that a Python file imports, directly or indirectly.

Nothing is imported or run. Imports are found in the syntax tree and resolved next to the file, in its package, in other
project folders on ``sys.path``, and in editable installs. Installed packages, verl and this package are not followed.
"""

from __future__ import annotations

import ast
import functools
import importlib.util
import os
import sys
import sysconfig
from collections.abc import Callable, Iterator
from pathlib import Path

Found = tuple[Path | None, bool]
"""The source file of a package or module, and whether its path is a folder."""

# Users edit these while they debug a replay. verl's version is in the manifest.
NOT_FOLLOWED = {"verl", "verl_rollout_skip"}
_INSTALLED = {"site-packages", "dist-packages"}
_MAX_MODULES = 1000


def imported_modules(file: Path) -> set[Path]:
    """The project's own modules that a file imports, directly or indirectly; at most 1000."""
    found: set[Path] = set()
    waiting = [file]
    find = functools.cache(_find_source)  # modules share imports, and network file systems are slow
    while waiting and len(found) < _MAX_MODULES:
        for module in sorted(_imports_of(waiting.pop(), find)):  # sorted: the limit always cuts off the same modules
            if module not in found and module != file:
                found.add(module)
                waiting.append(module)
    return found


def find_module(name: str) -> Path | None:
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
    found = (_find_source(Path(folder, *inner))[0] for folder in spec.submodule_search_locations or ())
    return next((file for file in found if file is not None), None)


def path_in_project(file: Path, home: Path) -> str:
    """The path of a file relative to its project, whose own folder may have a different name in each clone."""
    root = _package_root(file)
    if file.is_relative_to(home):
        root = home
    elif root == file.parent:  # not in a package, or in one without __init__.py
        folders = [folder for folder in _project_folders() if file.is_relative_to(folder)]
        root = max(folders, key=lambda folder: len(folder.parts), default=root)
    return file.relative_to(root).as_posix()


def _imports_of(file: Path, find: Callable[[Path], Found]) -> set[Path]:
    if _INSTALLED & set(file.parts):
        return set()
    try:
        tree = ast.parse(file.read_bytes())
    except (OSError, SyntaxError, ValueError, RecursionError):
        return set()  # the file itself is still digested; Python could not import it either
    return {module for folder, parts in _parse_imports(tree, file) for module in _modules(folder, parts, find)}


def _parse_imports(tree: ast.AST, file: Path) -> Iterator[tuple[Path, list[str]]]:
    """The imports of a file, each as a folder to search and the parts of a dotted name."""
    root = _package_root(file)
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            for alias in node.names:
                yield from _candidates(file, root, alias.name.split("."))
        elif isinstance(node, ast.ImportFrom):
            parts = node.module.split(".") if node.module else []
            folders = [file.parents[node.level - 1]] if 0 < node.level <= len(file.parents) else []
            for folder, inner in (
                [(folder, parts) for folder in folders] if node.level else _candidates(file, root, parts)
            ):
                yield folder, inner
                for alias in node.names:
                    yield folder, [*inner, alias.name]


def _candidates(file: Path, root: Path, parts: list[str]) -> list[tuple[Path, list[str]]]:
    """The places to search for an absolute import: next to the file, in its package's root, and on ``sys.path``."""
    is_own_package = root != file.parent and parts[0] == file.relative_to(root).parts[0]
    own = [root] if is_own_package else []
    if parts[0] in NOT_FOLLOWED:
        return [(folder, parts) for folder in dict.fromkeys([file.parent, *own])]
    folders = dict.fromkeys([file.parent, *own, *_project_folders()])
    return [*((folder, parts) for folder in folders), *_editable(parts)]


def _editable(parts: list[str]) -> list[tuple[Path, list[str]]]:
    """The location of a package that an editable install keeps outside ``sys.path``."""
    return [(path.parent, [path.name, *parts[1:]]) for path in _found_by_finders(parts[0], *sys.path)]


@functools.lru_cache(maxsize=1024)
def _found_by_finders(top: str, *search_path: str) -> tuple[Path, ...]:
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
    return tuple(path for path in map(Path.resolve, paths) if not is_installed(path))


def _project_folders() -> tuple[Path, ...]:
    """The folders on ``sys.path``, without the standard library and installed packages."""
    return _folders_on(os.getcwd(), *sys.path)


@functools.lru_cache(maxsize=8)
def _folders_on(working_directory: str, *entries: str) -> tuple[Path, ...]:
    folders = [Path(working_directory, entry).resolve() for entry in entries]
    return tuple(folder for folder in folders if os.path.isdir(folder) and not is_installed(folder))


def is_installed(path: Path) -> bool:
    """Whether a path is in the standard library or among installed packages."""
    system = [Path(sysconfig.get_paths()[name]).resolve() for name in ("stdlib", "platstdlib")]
    return bool(_INSTALLED & set(path.parts)) or any(path.resolve().is_relative_to(other) for other in system)


def _modules(folder: Path, parts: list[str], find: Callable[[Path], Found]) -> Iterator[Path]:
    """The module with a dotted name and its parent packages, which Python imports first."""
    path = folder
    for part in parts:
        path = path / part
        file, is_folder = find(path)
        if file is not None:
            yield file
        if not is_folder:
            return


def _find_source(path: Path) -> Found:
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
