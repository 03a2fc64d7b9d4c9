"""Import paths of earlier versions keep working: in code of users, in manifests, and in what verl was told to load."""

from __future__ import annotations

from importlib import import_module

import pytest

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
def test_an_earlier_path_gives_the_same_object(path: str) -> None:
    module, _, name = path.rpartition(".")
    assert getattr(import_module(module), name) is getattr(import_module(EARLIER[path]), name)
