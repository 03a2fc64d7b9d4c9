"""verl, Ray and TransferQueue are imported only in ``trainers``, and their private names only in ``compat``."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path

import verl_rollout_skip
from verl_rollout_skip.trainers.base import SkipMixin

ROOT = Path(verl_rollout_skip.__file__).parent
FOREIGN = ("verl", "ray", "transfer_queue")
# A DataProto is made when one was stored, so only where verl is installed anyway.
MAKES_BATCHES = "store/codec/batch.py"


def imports() -> Iterator[tuple[str, str, str]]:
    """Each import from verl, Ray or TransferQueue, as (module, imported module, name)."""
    for path in sorted(ROOT.rglob("*.py")):
        module = path.relative_to(ROOT).as_posix()
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if isinstance(node, ast.Import):
                found = [(alias.name, "") for alias in node.names]
            elif isinstance(node, ast.ImportFrom):
                found = [(node.module or "", alias.name) for alias in node.names]
            else:
                continue
            yield from ((module, source, name) for source, name in found if source.split(".")[0] in FOREIGN)


def test_only_trainers_import_verl_ray_and_transfer_queue() -> None:
    outside = {module for module, _, _ in imports() if not module.startswith("trainers/")}
    assert outside == {MAKES_BATCHES}


def private_attributes() -> Iterator[tuple[str, str]]:
    """Each private attribute of something other than ``self``, ``cls`` and ``super()`` in ``trainers``."""
    for path in sorted((ROOT / "trainers").rglob("*.py")):
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if not isinstance(node, ast.Attribute) or ast.unparse(node.value) in ("self", "cls", "super()"):
                continue
            if node.attr.startswith("_") and not node.attr.endswith("__"):
                yield path.relative_to(ROOT).as_posix(), node.attr


def test_only_compat_modules_use_private_attributes_of_other_objects() -> None:
    own = {name for name in dir(SkipMixin) if name.startswith("_")}
    foreign = {(module, name) for module, name in private_attributes() if name not in own}
    assert {module for module, _ in foreign} == {"trainers/v0/compat.py", "trainers/v1/compat.py"}, foreign


def test_only_compat_modules_import_private_names() -> None:
    private = {(module, name) for module, _, name in imports() if name.startswith("_")}
    assert private == {
        ("trainers/compat.py", "_ROLLOUT_REGISTRY"),
        ("trainers/v1/compat.py", "_accumulate_eviction_metrics"),
    }
