"""The package is a stack of layers: each imports only from the layers below it."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path

import pytest

import verl_rollout_skip

PACKAGE = Path(verl_rollout_skip.__file__).parent
LAYERS = ["key", "errors", "store", "config", "fingerprint", "runs", "replay", "trainers", "tools", "report", "cli"]
# Import paths of earlier versions, which only re-export.
EARLIER_PATHS = {"mixin", "runner", "v1"}


def imports(file: Path) -> Iterator[str]:
    """The modules of this package that a file imports, including imports for type checkers only."""
    for node in ast.walk(ast.parse(file.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Import):
            found = [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            found = [f"{node.module}.{alias.name}" for alias in node.names]
        else:
            continue
        yield from (name for name in found if name.startswith("verl_rollout_skip."))


def test_every_module_belongs_to_a_layer() -> None:
    modules = {path.stem for path in PACKAGE.iterdir() if path.suffix == ".py" or (path / "__init__.py").exists()}
    assert modules == {*LAYERS, *EARLIER_PATHS, "__init__", "_version"}


@pytest.mark.parametrize("layer", LAYERS)
def test_a_layer_imports_only_from_those_below_it(layer: str) -> None:
    allowed = {*LAYERS[: LAYERS.index(layer) + 1], "_version", "__version__"}
    files = sorted((PACKAGE / layer).rglob("*.py")) or [PACKAGE / f"{layer}.py"]
    upward = {
        f"{file.relative_to(PACKAGE)} imports {name}"
        for file in files
        for name in imports(file)
        if name.split(".")[1] not in allowed
    }
    assert upward == set()
