"""Driver-level trainings: the real ``fit`` of the installed verl, with everything that it does on the driver.

Dataset, tokenizer, dataloader, batches, advantages, metrics and checkpoint folders are real. Only the worker groups
and the engine are replaced (``stand_ins.py``), because they need GPUs; so a training takes a second.
"""

from __future__ import annotations

import copy
import functools
import logging
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from importlib import import_module
from pathlib import Path
from typing import Any

import hydra
import pandas
import pytest
import yaml
from omegaconf import DictConfig, OmegaConf
from verl import DataProto
from verl.trainer.ppo.ray_trainer import RayPPOTrainer, ResourcePoolManager
from verl.trainer.ppo.utils import Role

from recipes.cpu.assets import _tokenizer as byte_tokenizer
from recipes.cpu.assets import problems
from tests.trainers.v0.stand_ins import SYNCS_BY_ITSELF, VERL, Score, Workers
from tests.verl_configs import compose_ppo
from verl_rollout_skip import RolloutKey, RolloutSkipMixin, RolloutStore

ROLLOUT_MODES = ("sync", "async") if VERL < (0, 7) else ("async",)
"""The values of ``rollout.mode`` that the installed verl supports."""


def score_answer(response: str, answer: str) -> dict[str, float]:
    """1 for a correct answer, plus a bonus for a short one; ``acc`` says whether it is correct."""
    right = response.strip() == answer
    return {"score": float(right) + (len(response) < 3) / 8, "acc": float(right)}


class DriverOnly:
    """Replaces the worker groups, the engine and what connects them. Must precede verl's trainer."""

    config: DictConfig
    tokenizer: Any

    def __init__(self, *args: Any, score: Score = score_answer, **kwargs: Any) -> None:
        if VERL < (0, 7):  # the driver computes rewards itself
            kwargs["reward_fn"] = kwargs["val_reward_fn"] = _reward_manager(kwargs["tokenizer"], score)
        super().__init__(*args, **kwargs)
        self.workers = Workers(self.tokenizer, self.config, score)

    def init_workers(self) -> None:
        workers = self.workers
        self.actor_rollout_wg = self.ref_policy_wg = workers.actor
        self.critic_wg = workers.critic
        self.rm_wg = None
        self.async_rollout_mode = self.config.actor_rollout_ref.rollout.mode == "async"
        if self.async_rollout_mode:
            self.async_rollout_manager = workers.engine
        if not SYNCS_BY_ITSELF:
            model = OmegaConf.select(self.config, "reward.reward_model") or {}
            workers.engine.echoes = self.use_rm and not model.get("enable_resource_pool")  # type: ignore[attr-defined]
            self.reward_loop_manager = workers.reward_model
            self.checkpoint_manager = workers.checkpoint_manager
            chosen = self.config.actor_rollout_ref.rollout.get("checkpoint_manager_class")
            if chosen:
                self.checkpoint_manager = hydra.utils.get_class(chosen)(
                    config=None, actor_wg=workers.actor, replicas=[]
                )
            self.checkpoint_manager.sleep_replicas()


class PaddedBatches:
    """Do not unpad: verl 0.8.0 and 0.9.0 do it with flash_attn, which needs a GPU."""

    workers: Workers

    def _compute_old_log_prob(self, batch: DataProto) -> tuple[DataProto, float]:
        return self.workers.actor.compute_log_prob(batch), 0.5

    def _compute_ref_log_prob(self, batch: DataProto) -> DataProto:
        return self.workers.actor.compute_ref_log_prob(batch)

    def _compute_values(self, batch: DataProto) -> DataProto:
        return self.workers.critic.compute_values(batch)

    def _update_actor(self, batch: DataProto) -> DataProto:
        return self.workers.actor.update_actor(batch)

    def _update_critic(self, batch: DataProto) -> DataProto:
        return self.workers.critic.update_critic(batch)


class Listening:
    """Keeps the batches that the actor trains on. verl 0.6.1 passes them to the actor unchanged."""

    workers: Workers

    def _update_actor(self, batch: DataProto) -> DataProto:
        self.workers.trained.append(copy.deepcopy(batch))
        return super()._update_actor(batch)  # type: ignore[misc]


def on_stand_ins(trainer: type) -> type:
    """A trainer of the installed verl, or one derived from it, without the parts that need GPUs."""
    listening = () if VERL < (0, 7) else (Listening,)
    padded = (PaddedBatches,) if _needs_flash_attn() else ()
    return type(f"DriverOnly{trainer.__name__}", (DriverOnly, *listening, *padded, trainer), {})


def _needs_flash_attn() -> bool:
    return VERL >= (0, 8) and not hasattr(import_module("verl.utils.attention_utils"), "_fallback_unpad_input")


VerlTrainer = on_stand_ins(RayPPOTrainer)


class SkipTrainer(RolloutSkipMixin, VerlTrainer):  # type: ignore[misc, valid-type]
    """The class that a user writes, with stand-ins."""


@dataclass(frozen=True)
class Finished:
    """What a training did."""

    trainer: Any
    metrics: dict[int, dict[str, float]]
    messages: list[str]
    dumps: Path
    error: BaseException | None = None

    @property
    def events(self) -> list[str]:
        """The calls that the stand-ins received, in order: ``sync STEP``, ``generate``, ``sleep``, ``update`` …"""
        return self.trainer.workers.events

    @property
    def generated(self) -> int:
        """How many rollouts were generated, without validation."""
        return len(self.trainer.workers.engine.training_calls)

    @property
    def trained(self) -> list[DataProto]:
        """The batches that the actor trained on."""
        return self.trainer.workers.trained

    @property
    def hits(self) -> list[float]:
        return [metrics["timing_s/rollout_skip/hit"] for _, metrics in sorted(self.metrics.items())]

    def said(self, text: str) -> bool:
        return any(text in message for message in self.messages)


class Trainings:
    """Trainings on the same small data, each in its own folder, with the same dump_dir."""

    def __init__(self, folder: Path, rollout_mode: str, monkeypatch: pytest.MonkeyPatch) -> None:
        self.folder = folder
        self.dumps = folder / "dumps"
        self.rollout_mode = rollout_mode
        self._monkeypatch = monkeypatch
        monkeypatch.setattr("datasets.config.HF_DATASETS_CACHE", folder / "datasets")
        self._runs = 0
        self.tokenizer = byte_tokenizer()
        self.tokenizer.save_pretrained(folder / "model")
        (folder / "model" / "config.json").write_text('{"model_type": "qwen2", "architectures": ["Qwen2ForCausalLM"]}')
        self.write_data("train", 16)
        self.write_data("val", 3)

    def write_data(self, name: str, rows: int, first: int = 0) -> Path:
        path = self.folder / f"{name}.parquet"
        chosen = [problems()[(first + row) % len(problems())] for row in range(rows)]
        pandas.DataFrame([_row(index, *problem) for index, problem in enumerate(chosen)]).to_parquet(path)
        return path

    def config(self, mode: str | None, *overrides: str) -> DictConfig:
        """The configuration that verl's entry point composes, with ``rollout_skip.mode`` unless it is None."""
        config = copy.deepcopy(_composed(self.rollout_mode))
        skip = [] if mode is None else [f"rollout_skip.mode={mode}", f"rollout_skip.dump_dir={self.dumps}"]
        places = [
            f"data.train_files={self.folder}/train.parquet",
            f"data.val_files={self.folder}/val.parquet",
            f"actor_rollout_ref.model.path={self.folder}/model",
            f"trainer.default_local_dir={self.folder}/run-{self._runs}/checkpoints",
        ]
        for override in (*places, *skip, *overrides):
            key, _, value = override.partition("=")
            OmegaConf.update(config, key, yaml.safe_load(value), force_add=True)
        return config

    def make(self, mode: str | None, *overrides: str, trainer: type | None = None, **arguments: Any) -> Any:
        """A trainer that is ready to ``fit``."""
        kind = trainer or (VerlTrainer if mode is None else SkipTrainer)
        made = kind(
            config=self.config(mode, *overrides),
            tokenizer=self.tokenizer,
            role_worker_mapping={Role.ActorRollout: None, **arguments.pop("roles", {})},
            resource_pool_manager=ResourcePoolManager({"global_pool": [1]}, {}),
            **arguments,
        )
        made.init_workers()
        return made

    def run(self, mode: str | None, *overrides: str, fails: bool = False, **arguments: Any) -> Finished:
        """Train to the end. ``fails``: the training must end with an error."""
        self._runs += 1
        self._monkeypatch.setenv("VERL_FILE_LOGGER_PATH", str(self.folder / "metrics.jsonl"))
        metrics: dict[int, dict[str, float]] = {}
        # verl 0.6.1 has tensors among its metrics and cannot write them into a file.
        self._monkeypatch.setattr(
            "verl.utils.tracking.FileLogger.log", lambda _, data, step: metrics.update({step: data})
        )
        error: BaseException | None = None
        with captured_messages() as messages:
            trainer = self.make(mode, *overrides, **arguments)
            try:
                trainer.fit()
            except Exception as raised:
                if not fails:
                    raise
                error = raised
        assert fails is (error is not None), "the training ended without an error"
        return Finished(trainer, metrics, messages, self.dumps, error)

    @property
    def store(self) -> RolloutStore:
        """The store of the only variant."""
        (manifest,) = self.dumps.glob("*/*/manifest.json")
        return RolloutStore(str(manifest.parent))

    @property
    def recorded_keys(self) -> list[tuple[int, int]]:
        return [(key.step, key.gen_batch) for key in sorted(self.store.keys())]

    def forget(self, *keys: tuple[int, int]) -> None:
        """Remove entries, as if the recording had ended before them."""
        store = self.store
        for key in keys:
            store.delete(RolloutKey(*key))


def assert_same_training(one: Finished, other: Finished, steps: list[int] | None = None) -> None:
    """Both trained on the same batches, and every metric but timings is equal to the last bit."""
    assert len(one.metrics) > 0
    for step in steps or sorted({*one.metrics, *other.metrics}):
        left, right = (_results(training.metrics[step]) for training in (one, other))
        assert len(left) > (20 if step else 2), "metrics are missing"
        assert left == right, f"step {step}"
    if steps is None:
        assert_same_batches(one.trained, other.trained)


def assert_same_batches(ones: list[DataProto], others: list[DataProto]) -> None:
    assert len(ones) == len(others)
    for one, other in zip(ones, others, strict=True):
        assert _contents(one) == _contents(other)


def _results(metrics: dict[str, float]) -> dict[str, str]:
    return {
        key: float(value).hex()
        for key, value in metrics.items()
        if not key.startswith(("timing", "perf/", "rollout_skip/"))
    }


def _contents(batch: DataProto) -> dict[str, Any]:
    """Everything in a batch in a form that can be compared. Uids are new in each run, so only groups count."""
    uids = batch.non_tensor_batch["uid"].tolist()
    found: dict[str, Any] = {"groups": [uids.index(uid) for uid in uids]}
    for key, tensor in batch.batch.items():
        found[key] = (tensor.dtype, tensor.tolist())
    for key, column in batch.non_tensor_batch.items():
        if key != "uid":
            found[key] = (column.dtype, repr(column.tolist()))
    return found


@functools.cache
def _composed(rollout_mode: str) -> DictConfig:
    """verl's configuration of a small training, resolved once, because that takes longer than such a training."""
    older = ["data.return_raw_chat=True", "reward_model.enable=False"] if VERL < (0, 7) else []
    config = compose_ppo(
        "data.train_batch_size=4",
        "data.max_prompt_length=48",
        "data.max_response_length=8",
        "data.dataloader_num_workers=0",
        f"actor_rollout_ref.rollout.mode={rollout_mode}",
        "actor_rollout_ref.rollout.n=2",
        "actor_rollout_ref.rollout.calculate_log_probs=True",
        "actor_rollout_ref.rollout.agent.num_workers=1",
        "algorithm.adv_estimator=grpo",
        "trainer.project_name=proj",
        "trainer.experiment_name=exp",
        "trainer.logger=[file]",
        "trainer.total_epochs=1",
        "trainer.total_training_steps=3",
        "trainer.n_gpus_per_node=1",
        "trainer.val_before_train=False",
        "trainer.test_freq=-1",
        "trainer.save_freq=-1",
        *older,
    )
    OmegaConf.resolve(config)
    return config


@contextmanager
def captured_messages() -> Iterator[list[str]]:
    """The messages that this package logs inside this context."""
    messages: list[str] = []
    handler = logging.Handler()
    handler.emit = lambda record: messages.append(f"{record.levelname}: {record.getMessage()}")  # type: ignore[method-assign]
    logger = logging.getLogger("verl_rollout_skip")
    logger.addHandler(handler)
    try:
        yield messages
    finally:
        logger.removeHandler(handler)


def _row(index: int, question: str, answer: str) -> dict[str, Any]:
    return {
        "data_source": "addition",
        "prompt": [{"role": "user", "content": question}],
        "ability": "math",
        "reward_model": {"style": "rule", "ground_truth": answer},
        "extra_info": {"index": index},
    }


def _reward_manager(tokenizer: Any, score: Score) -> Any:
    from verl.workers.reward_manager import NaiveRewardManager

    def compute_score(data_source: str, solution_str: str, ground_truth: str, extra_info: Any) -> Any:
        result = score(solution_str, ground_truth)
        return result if len(result) > 1 else result["score"]

    return NaiveRewardManager(tokenizer, num_examine=0, compute_score=compute_score)
