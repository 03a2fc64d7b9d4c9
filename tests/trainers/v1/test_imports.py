"""verl finds the trainers of this package and of users in any order of imports.

Each order needs a process that has not imported verl. These processes are forked from one that has imported the
libraries that verl needs, because those take most of the time.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from typing import Any

import pytest

from tests.documents import ROOT, blocks_of

PROGRAM = """
import importlib, json, os, sys, traceback

for name in ("torch", "transformers", "peft", "ray", "tensordict", "transfer_queue", "datasets", "fastapi", "aiohttp"):
    importlib.import_module(name)
assert not any(name.partition(".")[0] in ("verl", "verl_rollout_skip") for name in sys.modules)


def found(names, external):
    os.environ["VERL_USE_EXTERNAL_MODULES"] = external
    for name in names:
        module, _, attribute = name.partition(":")
        imported = importlib.import_module(module)
        assert not attribute or getattr(imported, attribute)
    from omegaconf import OmegaConf
    from verl.trainer.ppo import v1
    from verl.trainer.ppo.v1 import trainer_base

    modes = ["skip_sync", "skip_colocate_async", "skip_separate_async"] + (["my_mode"] if "my_m" in external else [])
    classes = {mode: v1.get_trainer_cls(mode) for mode in modes}
    assert classes == {mode: trainer_base.get_trainer_cls(mode) for mode in modes}
    asking = OmegaConf.create({"rollout_skip": {"mode": "cache", "dump_dir": "/tmp"}, "trainer": {}})
    try:
        v1.PPOTrainerSync(asking)
    except Exception as error:
        refused = type(error).__name__
    named = {mode: [kind.__name__ for kind in (made, *made.__bases__)] for mode, made in classes.items()}
    return {"refused": refused, **named}


for number, order in enumerate(json.loads(sys.argv[1])):
    if os.fork() == 0:
        try:
            with open(f"{number}.json", "w") as file:
                json.dump(found(*order), file)
        except BaseException:
            traceback.print_exc()
        finally:
            os._exit(0)
    os.wait()
"""
ORDERS = {
    "verl first": (["verl"], ""),
    "its trainers first": (["verl.trainer.ppo.v1"], ""),
    "this package first": (["verl_rollout_skip.trainers.v1.mixin"], ""),
    "its trainers, then": (["verl_rollout_skip.trainers.v1.trainers"], ""),
    "verl, with the example": (["verl"], "my_module"),
    "this package, with the example": (["verl_rollout_skip.trainers.v1.mixin"], "my_module"),
    "the trainers of this package, with the example": (["verl_rollout_skip.trainers.v1.trainers"], "my_module"),
    "the plugin, with the example": (["verl_rollout_skip.trainers.plugin", "my_module"], "my_module"),
    "a class, with one derived from it": (["verl_rollout_skip.v1:SkipPPOTrainerSync"], "my_subclass"),
    "a V0 class, with one derived from it": (["verl_rollout_skip:SkipPPOTrainer"], "my_v0_subclass"),
    "the V0 mixin, with a class that has it": (["verl_rollout_skip:RolloutSkipMixin"], "my_v0_subclass"),
}
SUBCLASS = """
from verl_rollout_skip.v1 import SkipPPOTrainerSync
class Mine(SkipPPOTrainerSync): ...
"""
V0_SUBCLASS = """
from verl_rollout_skip import RolloutSkipMixin, SkipPPOTrainer
class Mine(SkipPPOTrainer): ...
"""


@pytest.fixture(scope="module")
def outcomes(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """The result of each order of imports; the example in the docs is the module ``my_module``."""
    folder = tmp_path_factory.mktemp("imports")
    (example,) = (block for block in blocks_of(ROOT / "docs" / "v1.md") if "my_mode" in block.text)
    (folder / "my_module.py").write_text(example.text)
    (folder / "my_subclass.py").write_text(SUBCLASS)
    (folder / "my_v0_subclass.py").write_text(V0_SUBCLASS)
    (folder / "program.py").write_text(PROGRAM)
    command = [sys.executable, "program.py", json.dumps(list(ORDERS.values()))]
    env = {**os.environ, "PYTHONWARNINGS": "ignore"}
    done = subprocess.run(command, cwd=folder, env=env, capture_output=True, text=True, check=False)
    files = [folder / f"{number}.json" for number in range(len(ORDERS))]
    texts = [file.read_text() if file.exists() else "" for file in files]
    return {name: json.loads(text) if text else done.stderr for name, text in zip(ORDERS, texts, strict=True)}


@pytest.mark.slow
@pytest.mark.parametrize("order", ORDERS)
def test_all_modes_are_found_in_any_order_of_imports(outcomes: dict[str, Any], order: str) -> None:
    found = outcomes[order]
    assert isinstance(found, dict), found
    assert found.pop("refused") == "InertError"
    expected = {
        "skip_sync": ["SkipPPOTrainerSync", "RolloutSkipMixin", "PPOTrainerSync"],
        "skip_colocate_async": ["SkipPPOTrainerColocateAsync", "RolloutSkipMixin", "PPOTrainerColocateAsync"],
        "skip_separate_async": ["SkipPPOTrainerSeparateAsync", "RolloutSkipMixin", "PPOTrainerSeparateAsync"],
    }
    if "example" in order:
        expected["my_mode"] = ["MyTrainer", "RolloutSkipMixin", "PPOTrainerSync"]
    assert found == expected
