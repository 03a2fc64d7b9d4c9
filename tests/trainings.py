"""A small training for ``RolloutSkip``: a configuration with real files, and an engine that counts its calls."""

from __future__ import annotations

import copy
import json
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from omegaconf import DictConfig, OmegaConf
from verl import DataProto

from tests.batches import rollout_input, rollout_output
from verl_rollout_skip.key import RolloutKey
from verl_rollout_skip.replay.results import Rollout
from verl_rollout_skip.replay.rollout import RolloutSkip

ROWS = 8
RUN_NAME = "exp_proj_TrainGBS4__InferGBS4__N2"


class Training:
    """The files and settings of a training in a folder. ``open`` starts it with changed settings."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.dumps = folder / "dumps"
        files = {"model/config.json": "{}", "model/tokenizer.json": "{}", "train.parquet": "rows", "reward.py": "v1"}
        for name, content in files.items():
            path = folder / "inputs" / name
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(content)

    def config(self, mode: str, skip: dict[str, Any] | None = None, **changes: Any) -> DictConfig:
        """The whole configuration. ``changes`` are keys with ``__`` instead of dots."""
        inputs = self.folder / "inputs"
        config = OmegaConf.create(
            {
                "data": {
                    "train_files": str(inputs / "train.parquet"),
                    "train_batch_size": ROWS // 2,
                    "gen_batch_size": None,
                    "seed": None,
                    "shuffle": True,
                    "sampler": {"class_path": None, "class_name": None},
                },
                "actor_rollout_ref": {
                    "model": {"path": str(inputs / "model")},
                    "rollout": {"n": 2, "temperature": 1.0, "tensor_model_parallel_size": 1},
                    "actor": {"optim": {"lr": 1e-6}},
                },
                "algorithm": {"adv_estimator": "grpo"},
                "reward": {"custom_reward_function": {"path": str(inputs / "reward.py"), "name": "score"}},
                "trainer": {"experiment_name": "exp", "project_name": "proj", "nnodes": 1, "n_gpus_per_node": 8},
                "rollout_skip": {"mode": mode, "dump_dir": str(self.dumps), **(skip or {})},
            }
        )
        for key, value in changes.items():
            OmegaConf.update(config, key.replace("__", "."), value)
        return config

    def open(self, mode: str, skip: dict[str, Any] | None = None, **changes: Any) -> RolloutSkip:
        return RolloutSkip.open(self.config(mode, skip, **changes))

    def record(self, *keys: RolloutKey, skip: dict[str, Any] | None = None, **changes: Any) -> None:
        """Record rollouts for these keys, each with the inputs from ``inputs_of``."""
        with self.open("record", skip, **changes) as training:
            for key in keys:
                training.step(key, inputs_of(key), Engine())

    def variants(self) -> list[Path]:
        return sorted((self.dumps / RUN_NAME).iterdir())


class Engine:
    """Generates a different output in each call, and counts the calls."""

    def __init__(self, seed: int = 100) -> None:
        self.calls = 0
        self.seed = seed
        self.last: DataProto | None = None

    def __call__(self, inputs: DataProto) -> DataProto:
        self.calls += 1
        self.last = rollout_output(len(inputs), seed=self.seed + self.calls)
        return self.last


def inputs_of(key: RolloutKey, uids: str = "today", rows: int = ROWS) -> DataProto:
    """The prompts of a step: the same in every run, with new uids."""
    inputs = rollout_input(rows, seed=1000 * key.step + key.gen_batch)
    for row, index in enumerate(inputs.non_tensor_batch["index"]):
        inputs.non_tensor_batch["uid"][row] = f"{uids}-{key.step}-{index}"
    inputs.meta_info = {"global_steps": key.step}
    return inputs


def recorded_output(key: RolloutKey, training: Training) -> Rollout:
    """The output of one replayed step."""
    with training.open("replay", {"prompts": "recorded"}) as replay:
        return replay.step(key, inputs_of(key), never)


def never(inputs: Any) -> Any:
    """An engine that must not be called."""
    raise AssertionError("generated although it should have been loaded")


def contents(folder: Path) -> dict[str, bytes]:
    """The bytes of every file below a folder."""
    return {str(path.relative_to(folder)): path.read_bytes() for path in sorted(folder.rglob("*")) if path.is_file()}


@contextmanager
def unreachable(folder: Path) -> Iterator[None]:
    """A folder that can be neither read nor written, as when an automount fails: a link to itself takes its place."""
    moved = folder.with_name(f"{folder.name}.moved")
    if folder.exists():
        folder.rename(moved)
    folder.parent.mkdir(parents=True, exist_ok=True)
    folder.symlink_to(folder)
    try:
        yield
    finally:
        folder.unlink()
        if moved.exists():
            moved.rename(folder)


def without_timings(batch: DataProto) -> DataProto:
    """A copy without timings, to compare the rollouts of two runs."""
    kept = copy.copy(batch)
    kept.meta_info = {key: value for key, value in batch.meta_info.items() if key != "timing"}
    return kept


def manifest_of(variant: Path) -> dict[str, Any]:
    return json.loads((variant / "manifest.json").read_text())
