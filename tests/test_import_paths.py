"""What users import: public names at the top level, and import paths of earlier versions."""

from __future__ import annotations

import subprocess
import sys
from importlib import import_module

import pytest

import verl_rollout_skip

EARLIER = {
    "verl_rollout_skip.mixin.RolloutSkipMixin": "verl_rollout_skip.trainers.v0.mixin",
    "verl_rollout_skip.runner.SkipTaskRunner": "verl_rollout_skip.trainers.runner",
    "verl_rollout_skip.runner.train": "verl_rollout_skip.trainers.runner",
    "verl_rollout_skip.trainers.SkipPPOTrainer": "verl_rollout_skip.trainers.v0.trainers",
    "verl_rollout_skip.trainers.SkipDAPOTrainer": "verl_rollout_skip.trainers.v0.trainers",
    "verl_rollout_skip.v1.RolloutSkipMixin": "verl_rollout_skip.trainers.v1.mixin",
    "verl_rollout_skip.v1.SkipPPOTrainerSync": "verl_rollout_skip.trainers.v1.trainers",
    "verl_rollout_skip.v1.mixin.RolloutSkipMixin": "verl_rollout_skip.trainers.v1.mixin",
    "verl_rollout_skip.v1.trainers.SkipPPOTrainerSync": "verl_rollout_skip.trainers.v1.trainers",
    "verl_rollout_skip.v1.trainers.SkipPPOTrainerColocateAsync": "verl_rollout_skip.trainers.v1.trainers",
    "verl_rollout_skip.v1.trainers.SkipPPOTrainerSeparateAsync": "verl_rollout_skip.trainers.v1.trainers",
}


@pytest.mark.parametrize("path", EARLIER)
def test_an_earlier_import_path_gives_the_same_object(path: str) -> None:
    module, _, name = path.rpartition(".")
    assert getattr(import_module(module), name) is getattr(import_module(EARLIER[path]), name)


@pytest.mark.parametrize("name", verl_rollout_skip.__all__)
def test_every_public_name_can_be_imported(name: str) -> None:
    assert getattr(verl_rollout_skip, name)
    assert name in dir(verl_rollout_skip)


def test_the_mixins_of_both_trainer_families_have_separate_names() -> None:
    from verl_rollout_skip.trainers.v0.mixin import RolloutSkipMixin as OfV0
    from verl_rollout_skip.trainers.v1.mixin import RolloutSkipMixin as OfV1

    assert verl_rollout_skip.RolloutSkipMixin is OfV0
    assert verl_rollout_skip.RolloutSkipMixinV1 is OfV1
    assert OfV0 is not OfV1


def test_an_unknown_name_is_an_attribute_error() -> None:
    with pytest.raises(AttributeError, match="has no attribute 'RolloutSkipMixinV2'"):
        verl_rollout_skip.RolloutSkipMixinV2  # noqa: B018


def test_importing_the_package_imports_neither_torch_nor_verl() -> None:
    code = (
        "import sys, verl_rollout_skip as package\n"
        "package.Mode, package.RolloutKey, package.SkipConfig, dir(package)\n"
        "print([name for name in ('torch', 'verl', 'ray', 'transfer_queue') if name in sys.modules])"
    )
    run = subprocess.run([sys.executable, "-c", code], check=True, capture_output=True, text=True)
    assert run.stdout.strip() == "[]"
