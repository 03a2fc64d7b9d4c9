"""Entry points: ``train``, and ``SkipTaskRunner``, a task runner for verl's ``run_ppo`` with any trainer class.

verl's task runner hard-codes ``RayPPOTrainer``. Here the class is an attribute; everything else is the same.
"""

from __future__ import annotations

from typing import Any

import ray
from omegaconf import DictConfig, OmegaConf
from verl.trainer.main_ppo import TaskRunnerV1, run_ppo
from verl.trainer.main_ppo_v0 import BaseTaskRunner
from verl.trainer.ppo.utils import create_rl_dataset, create_rl_sampler, need_critic, need_reference_policy
from verl.utils.config import omega_conf_to_dataclass, validate_config
from verl.utils.dataset.rl_dataset import collate_fn

from verl_rollout_skip.config.skip_config import SkipConfig
from verl_rollout_skip.trainers.engine import without_reward_model
from verl_rollout_skip.trainers.v0.trainers import SkipPPOTrainer
from verl_rollout_skip.trainers.v1.compat import use_skip_trainer


class SkipTaskRunner(BaseTaskRunner):
    """Creates the trainer, its workers and data, and trains: ``run_ppo(config, ray.remote(SkipTaskRunner))``."""

    trainer_class: type = SkipPPOTrainer

    def run(self, config: DictConfig) -> None:
        OmegaConf.resolve(config)
        _, ray_worker_group_cls = self.add_actor_rollout_worker(config)
        self.add_critic_worker(config)
        resources = _resources(config)
        self.add_reward_model_resource_pool(resources)
        self.add_teacher_model_resource_pool(config)
        _validate(config)
        model = omega_conf_to_dataclass(config.actor_rollout_ref.model)
        train_dataset, val_dataset = (_dataset(config, model, is_train) for is_train in (True, False))
        trainer = self.trainer_class(
            config=config,
            tokenizer=model.tokenizer,
            processor=model.processor,
            role_worker_mapping=self.role_worker_mapping,
            resource_pool_manager=self.init_resource_pool_mgr(resources),
            ray_worker_group_cls=ray_worker_group_cls,
            train_dataset=train_dataset,
            val_dataset=val_dataset,
            collate_fn=collate_fn,
            train_sampler=self.make_sampler(config, train_dataset),
        )
        trainer.init_workers()
        trainer.fit()

    def make_sampler(self, config: DictConfig, dataset: Any) -> Any:
        """The sampler of the training data. Override this to use your own."""
        return create_rl_sampler(config.data, dataset)


def train(config: DictConfig, task_runner: type = SkipTaskRunner) -> None:
    """Train with recorded rollouts. Otherwise the same as verl's entry point: V1 or V0, depending on ``use_v1``."""
    if config.trainer.use_v1:
        _validate(config)
        use_skip_trainer(config)
        run_ppo(config, task_runner_class=TaskRunnerV1)
    else:
        run_ppo(config, task_runner_class=ray.remote(task_runner))


def _resources(config: DictConfig) -> DictConfig:
    """The configuration for the resource pools: no devices for a reward model that a replay does not start."""
    settings = SkipConfig.from_config(config)
    if settings.loads_rewards and not settings.starts_engine:
        return without_reward_model(config)
    return config


def _validate(config: DictConfig) -> None:
    """Run verl's check of its settings, which its entry points call but its trainers do not."""
    validate_config(config, use_reference_policy=need_reference_policy(config), use_critic=need_critic(config))


def _dataset(config: DictConfig, model: Any, is_train: bool) -> Any:
    data = config.data
    if is_train:
        files, limit = data.train_files, data.get("train_max_samples", -1)
    else:
        files, limit = data.val_files, data.get("val_max_samples", -1)
    return create_rl_dataset(files, data, model.tokenizer, model.processor, is_train=is_train, max_samples=limit)
