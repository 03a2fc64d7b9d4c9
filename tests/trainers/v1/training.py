"""V1 trainings without models: verl's own ``fit``, replay buffer, dataloader and TransferQueue, on a real Ray.

What needs a GPU is left out: no worker computes or updates anything, and an engine that responds immediately replaces
agent loops and servers, with groups of unequal size, several outputs per session, failed sessions and an order that
varies from run to run. A training keeps the data that each update saw.
"""

from __future__ import annotations

import contextlib
import random
import shutil
from collections.abc import Iterator
from dataclasses import dataclass, field
from enum import Enum
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pandas
import torch
import transfer_queue as tq
from omegaconf import DictConfig, OmegaConf
from tensordict import NonTensorData, TensorDict
from transfer_queue import KVBatchMeta
from verl.experimental.agent_loop.agent_loop import AgentLoopMetrics, AgentLoopOutput
from verl.trainer.ppo.v1 import PPOTrainerColocateAsync, PPOTrainerSeparateAsync, PPOTrainerSync
from verl.trainer.ppo.v1.trainer_separate_async import HybridEngineMode
from verl.utils.tensordict_utils import list_of_dict_to_tensordict

from tests.verl_configs import compose_ppo
from verl_rollout_skip.trainers.v1.compat import base_mode
from verl_rollout_skip.trainers.v1.mixin import RolloutSkipMixin

PROMPTS, SAMPLES, ROWS = 4, 3, 40
PARTITION = "train"


class Rewards(Enum):
    """Where the rewards come from."""

    BY_FUNCTION = "a reward worker scores the session, as in verl"
    BY_LOOP = "the agent loop returns the reward itself"
    LATER = "a colocated reward model scores after the sample"


@dataclass
class Engine:
    """Responds immediately. A response depends only on the prompt, the sample and the version of the weights."""

    rewards: Rewards = Rewards.BY_FUNCTION
    version: int = 0
    prompts: list[int] = field(default_factory=list)
    versions: list[int] = field(default_factory=list)

    def asked(self, version: int) -> list[int]:
        """The prompts that it responded to with these weights."""
        return [prompt for prompt, found in zip(self.prompts, self.versions, strict=True) if found == version]

    def generate_sequences(self, batch: TensorDict) -> None:
        batch.pop("validate", None)
        trajectories, failed = [], {}
        for prompt in _rows(batch):
            self.prompts.append(prompt["index"])
            self.versions.append(self.version)
            failed[prompt["uid"]] = prompt["index"] % 7 == 0
            for session in range(SAMPLES - failed[prompt["uid"]]):
                trajectories.append(self._session(prompt, session))
        random.SystemRandom().shuffle(trajectories)
        for outputs in trajectories:
            put_session(outputs)
        for uid, has_failed in failed.items():
            tag = {"status": "failure" if has_failed else "finished"}
            tq.kv_batch_put(keys=[uid], partition_id=PARTITION, tags=[tag])

    def _session(self, prompt: dict[str, Any], session: int) -> list[dict[str, Any]]:
        rng = random.Random(f"{prompt['index']} {session} {self.version}")
        reward = self._reward(rng, session)
        outputs = []
        scored = self.rewards is not Rewards.LATER
        for _ in range(1 + (prompt["index"] + session) % 2):
            length = rng.randint(1, 6)
            output = AgentLoopOutput(
                prompt_ids=[rng.randint(1, 200) for _ in range(4)],
                response_ids=[rng.randint(1, 200) for _ in range(length)],
                response_mask=[1] * length,
                response_logprobs=[-rng.random() for _ in range(length)],
                reward_score=reward if scored else None,
                num_turns=2,
                metrics=AgentLoopMetrics(generate_sequences=rng.random()),
                extra_fields={
                    **({"reward_extra_info": {"acc": reward}} if scored else {}),
                    "min_global_steps": self.version,
                    "max_global_steps": self.version,
                },
            )
            outputs.append(output)
        if self.rewards is Rewards.BY_FUNCTION:
            outputs[-1].metrics.compute_score = 0.01
        return [trajectory(output, prompt, session) for output in outputs]

    def _reward(self, rng: random.Random, session: int) -> float:
        return float(rng.random() < 0.4)


def trajectory(output: AgentLoopOutput, prompt: dict[str, Any], session: int) -> dict[str, Any]:
    """One output with everything that verl's agent-loop worker puts into TransferQueue for it."""
    fields = output.as_dict()
    fields.update({**prompt, "session_id": session})
    fields["loss_mask"] = fields["response_mask"]
    fields["input_ids"] = torch.cat([fields["prompts"], fields["responses"]])
    fields["position_ids"] = torch.arange(len(fields["input_ids"]))
    fields["multi_modal_inputs"] = {}
    return fields


def put_session(outputs: list[dict[str, Any]]) -> None:
    tags = []
    for fields in outputs:
        lengths = {"prompt_len": len(fields["prompts"]), "response_len": len(fields["responses"])}
        versions = {name: fields["extra_fields"][name] for name in ("min_global_steps", "max_global_steps")}
        tags.append(
            {
                "status": "success",
                **lengths,
                "seq_len": sum(lengths.values()),
                "global_steps": fields["global_steps"],
                **versions,
            }
        )
    keys = [f"{fields['uid']}_{fields['session_id']}_{index}" for index, fields in enumerate(outputs)]
    tq.kv_batch_put(keys=keys, partition_id=PARTITION, fields=list_of_dict_to_tensordict(outputs), tags=tags)


class Weights:
    """Replaces the checkpoint manager: keeps the versions that were sent to the engine."""

    def __init__(self) -> None:
        self.engine: Engine | None = None
        self.sent: list[int] = []

    def update_weights(self, global_steps: int) -> None:
        self.sent.append(global_steps)
        if self.engine is not None:
            self.engine.version = global_steps

    def nothing(self, **_: Any) -> None:
        pass

    sleep_replicas = abort_replicas = resume_generation_replicas = nothing


class WithoutWorkers:
    """Removes from a V1 trainer everything that needs models."""

    def _setup(self) -> None:
        self._init_tokenizer()  # type: ignore[attr-defined]
        self._init_dataloader()  # type: ignore[attr-defined]
        self._init_dump_executor()  # type: ignore[attr-defined]
        self.reward_loop_manager = SimpleNamespace(reward_loop_worker_handles=[])
        self.actor_rollout_wg = SimpleNamespace(save_checkpoint=_ignore, load_checkpoint=_ignore)
        self.checkpoint_manager = self.standalone_checkpoint_manager = self.weights = Weights()
        self.trained: list[dict[str, Any]] = []
        self.logged: dict[int, dict[str, Any]] = {}
        self._load_checkpoint()  # type: ignore[attr-defined]

    def fit(self, engine: Any) -> None:
        self.weights.engine = engine
        engine.version = self.global_steps  # type: ignore[attr-defined]
        super().fit(engine)  # type: ignore[misc]

    def _balance_batch(self, batch: KVBatchMeta, metrics: dict[str, Any]) -> KVBatchMeta:
        self.trained.append(seen(batch))
        return batch

    def _compute_old_log_prob(self, batch: KVBatchMeta, metrics: dict[str, Any]) -> KVBatchMeta:
        values = TensorDict({"old_log_probs": torch.zeros(len(batch.keys))}, batch_size=len(batch.keys))
        tq.kv_batch_put(keys=batch.keys, partition_id=batch.partition_id, fields=values)
        return batch

    def _compute_advantage(self, batch: KVBatchMeta, metrics: dict[str, Any]) -> KVBatchMeta:
        return batch

    _update_actor = _compute_advantage

    def _compute_metrics(self, batch: KVBatchMeta, metrics: dict[str, Any], *_: Any, **__: Any) -> None:
        self.logged[self.global_steps] = dict(metrics)  # type: ignore[attr-defined]


class SyncTrainer(RolloutSkipMixin, WithoutWorkers, PPOTrainerSync):
    """The synchronous trainer."""


class ColocateTrainer(RolloutSkipMixin, WithoutWorkers, PPOTrainerColocateAsync):
    """An asynchronous trainer: one batch of prompts is in flight while it trains on another."""


class SeparateTrainer(RolloutSkipMixin, WithoutWorkers, PPOTrainerSeparateAsync):
    """The asynchronous trainer that updates several times between two weight syncs."""

    def _setup(self) -> None:
        super()._setup()
        self.current_mode = HybridEngineMode.TRAINER


class PlainTrainer(WithoutWorkers, PPOTrainerSync):
    """verl's own trainer, for comparison."""


def seen(batch: KVBatchMeta) -> dict[str, Any]:
    """Everything that an update could read from TransferQueue, with the uids numbered in order of appearance."""
    fields = tq.kv_batch_get(keys=batch.keys, partition_id=batch.partition_id)
    numbers: dict[str, int] = {}
    keys = [key.rsplit("_", 2) for key in batch.keys]
    found: dict[str, Any] = {
        "keys": [(numbers.setdefault(uid, len(numbers)), session, index) for uid, session, index in keys],
        "tags": [dict(tag) for tag in batch.tags],
    }
    for name in sorted(fields.keys()):
        column = fields.get(name)
        if isinstance(column, torch.Tensor):
            found[name] = [(str(row.dtype), row.tolist()) for row in column.unbind()]
        else:
            found[name] = [numbers[cell] if name == "uid" else repr(cell) for cell in column.tolist()]
    return found


class Trainings:
    """Trainings on the same model and data, with dumps and checkpoints in one folder."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.dumps = folder / "dumps"
        if not (folder / "inputs").exists():
            self._write_files(folder / "inputs")

    def copied(self, folder: Path) -> Trainings:
        """A copy in another folder."""
        shutil.copytree(self.folder, folder, dirs_exist_ok=True)
        return Trainings(folder)

    def variant(self) -> Path:
        """The folder of the only variant."""
        (manifest,) = self.dumps.glob("*/*/manifest.json")
        return manifest.parent

    def config(self, *overrides: str) -> DictConfig:
        inputs = self.folder / "inputs"
        config = compose_ppo(
            f"data.train_files={inputs}/train.parquet",
            f"data.val_files={inputs}/train.parquet",
            f"data.train_batch_size={PROMPTS}",
            "data.dataloader_num_workers=0",
            "data.filter_overlong_prompts=False",
            "data.seed=1",
            f"actor_rollout_ref.model.path={inputs}/model",
            f"actor_rollout_ref.rollout.n={SAMPLES}",
            "algorithm.adv_estimator=grpo",
            f"trainer.default_local_dir={self.folder}/checkpoints",
            "trainer.total_training_steps=3",
            "trainer.total_epochs=1000",
            "trainer.save_freq=-1",
            "trainer.test_freq=-1",
            "trainer.val_before_train=False",
            "trainer.resume_mode=disable",
            "trainer.logger=[]",
            "actor_rollout_ref.actor.use_kl_loss=False",
            *overrides,
        )
        OmegaConf.resolve(config)
        return config

    def train(self, mode: str | None, *overrides: str, kind: type = SyncTrainer, engine: Engine | None = None) -> Any:
        """Train to the end and clear TransferQueue. Returns the trainer with the data that it kept."""
        skip = [f"+rollout_skip.mode={mode}", f"+rollout_skip.dump_dir={self.dumps}"] if mode else []
        trainer = kind(config=self.config(*skip, f"trainer.v1.trainer_mode={base_mode(kind)}", *overrides))
        trainer.engine = engine or Engine()
        try:
            trainer.init()
            trainer.fit(trainer.engine)
            trainer.left_over = left_over()
        finally:
            clear_queue()
        return trainer

    @staticmethod
    def _write_files(folder: Path) -> None:
        from transformers import Qwen2Config

        from recipes.cpu.assets import _tokenizer

        _tokenizer().save_pretrained(folder / "model")
        model = Qwen2Config(hidden_size=8, num_hidden_layers=1, architectures=["Qwen2ForCausalLM"])
        model.save_pretrained(folder / "model")
        rows = [
            {
                "data_source": "addition",
                "prompt": [{"role": "user", "content": f"{row}+1="}],
                "reward_model": {"style": "rule", "ground_truth": str(row + 1)},
                "extra_info": {"index": row},
            }
            for row in range(ROWS)
        ]
        pandas.DataFrame(rows).to_parquet(folder / "train.parquet")


def hits(trainer: Any) -> list[int]:
    """The steps whose rollouts were loaded."""
    return [step for step, metrics in trainer.logged.items() if metrics.get("rollout_skip/hit")]


def results(trainer: Any) -> dict[int, dict[str, Any]]:
    """The metrics that must be the same in a replay."""
    return {
        step: {name: value for name, value in metrics.items() if not name.startswith("rollout_skip/")}
        for step, metrics in trainer.logged.items()
    }


def left_over() -> list[str]:
    """The keys in TransferQueue."""
    return [key for keys in (tq.kv_list() or {}).values() for key in keys]


def clear_queue() -> None:
    for partition, keys in (tq.kv_list() or {}).items():
        if keys:
            tq.kv_clear(keys=list(keys), partition_id=partition)


@contextlib.contextmanager
def transfer_queue() -> Iterator[None]:
    """Ray and a TransferQueue on it, for one module of tests."""
    import ray

    ray.init(num_cpus=8, num_gpus=0, include_dashboard=False, log_to_driver=False)
    try:
        tq.init(OmegaConf.create({"backend": {"SimpleStorage": {"num_data_storage_units": 1}}}))
        yield
    finally:
        tq.close()
        ray.shutdown()


def _rows(batch: TensorDict) -> list[dict[str, Any]]:
    columns = {name: batch.get(name) for name in batch.keys()}  # noqa: SIM118
    rows = []
    for number in range(len(batch)):
        row = {}
        for name, column in columns.items():
            if isinstance(column, NonTensorData):
                row[name] = column.data
            else:
                row[name] = column[number] if isinstance(column, torch.Tensor) else column.tolist()[number]
        rows.append(row)
    return rows


def _ignore(*_: Any, **__: Any) -> None:
    pass
