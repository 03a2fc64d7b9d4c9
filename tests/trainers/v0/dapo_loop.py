"""A training loop like those of DAPO trainers: generate, drop, ``continue`` until the batch is full.

verl-recipe's ``RayDAPOTrainer`` is such a loop, but it is not in any package. This short one behaves the same where it
matters: one request per batch of the dataloader, without the step; uids that are made after generating; a second
request for REMAX; a separate counter ``gen_steps``; weight syncs without a step.
"""

from __future__ import annotations

import uuid
from copy import deepcopy
from typing import Any

import numpy as np
import torch
from verl import DataProto
from verl.trainer.ppo.metric_utils import compute_data_metrics
from verl.trainer.ppo.ray_trainer import compute_advantage, compute_response_mask
from verl.utils.tracking import Tracking

from tests.trainers.v0.training import VerlTrainer


class DapoLoop(VerlTrainer):  # type: ignore[misc, valid-type]
    """Filters by the sum of the rewards, or by the column that ``algorithm.filter_groups.metric`` names."""

    def fit(self) -> None:
        settings = self.config.trainer
        logger = Tracking(settings.project_name, settings.experiment_name, settings.logger)
        self.global_steps = self.gen_steps = 0
        self._load_checkpoint()
        self._tell_engine("update_weights")
        self.global_steps += 1
        self.gen_steps += 1
        batch, gen_batches = None, 0
        for _ in range(settings.total_epochs):
            for raw in self.train_dataloader:
                gen_batches += 1
                varied, timing = self._varied(DataProto.from_single_dict(raw))
                batch = varied if batch is None else DataProto.concat([batch, varied])
                size = self.config.data.train_batch_size * self.config.actor_rollout_ref.rollout.n
                if len(batch) < size:
                    self._check_limit(gen_batches)
                    self.gen_steps += 1
                    continue
                metrics = {**self._train(batch[:size]), "train/num_gen_batches": gen_batches}
                logger.log(
                    {**metrics, **{f"timing_s/{key}": value for key, value in timing.items()}}, self.global_steps
                )
                if self.global_steps >= self.total_training_steps:
                    return
                batch, gen_batches = None, 0
                self.global_steps += 1
                self.gen_steps += 1

    def _varied(self, batch: DataProto) -> tuple[DataProto, dict[str, float]]:
        """The responses to the prompts of a batch whose rewards differ."""
        samples = self.config.actor_rollout_ref.rollout.n
        prompts = self._get_gen_batch(batch)
        output = self._generator.generate_sequences(prompts.repeat(repeat_times=samples, interleave=True))
        timing = output.meta_info.pop("timing")
        if self.config.algorithm.adv_estimator == "remax":
            greedy = deepcopy(prompts)
            greedy.meta_info["do_sample"] = False
            baseline = self._rewarded(deepcopy(batch).union(self._generator.generate_sequences(greedy)))
            batch.batch["reward_baselines"] = baseline.batch["token_level_scores"].sum(dim=-1)
        batch.non_tensor_batch["uid"] = np.array([str(uuid.uuid4()) for _ in range(len(batch))], dtype=object)
        batch = self._rewarded(batch.repeat(repeat_times=samples, interleave=True).union(output))
        metric = self.config.algorithm.filter_groups.metric
        values = batch.batch["token_level_scores"].sum(dim=-1).numpy()
        values = np.asarray(batch.non_tensor_batch.get(metric, values)).reshape(-1, samples)
        differ = np.repeat(values.max(axis=1) > values.min(axis=1), samples)
        return batch[np.flatnonzero(differ)], timing

    def _rewarded(self, batch: DataProto) -> DataProto:
        if "rm_scores" in batch.batch.keys():  # noqa: SIM118 - a TensorDict is not a dict
            scores = batch.batch["rm_scores"]
        else:
            scores = self.reward_fn(batch)
        batch.batch["token_level_scores"] = batch.batch["token_level_rewards"] = scores
        return batch

    def _train(self, batch: DataProto) -> dict[str, Any]:
        self._tell_engine("sleep_replicas")
        batch.batch["response_mask"] = compute_response_mask(batch)
        batch.meta_info["global_token_num"] = torch.sum(batch.batch["attention_mask"], dim=-1).tolist()
        batch.meta_info["temperature"] = self.config.actor_rollout_ref.rollout.temperature
        if hasattr(self, "_compute_old_log_prob"):
            log_probs = self._compute_old_log_prob(batch)[0]
        else:
            log_probs = self.actor_rollout_wg.compute_log_prob(batch)
        log_probs.batch.pop("entropys")
        batch = batch.union(log_probs)
        algorithm = self.config.algorithm
        batch = compute_advantage(batch, algorithm.adv_estimator, num_repeat=2, config=algorithm)
        update = getattr(self, "_update_actor", self.actor_rollout_wg.update_actor)
        update(batch)
        if self.config.trainer.save_freq > 0:
            self._save_checkpoint()
        self._tell_engine("update_weights")
        return compute_data_metrics(batch, use_critic=False)

    @property
    def _generator(self) -> Any:
        return self.async_rollout_manager if self.async_rollout_mode else self.actor_rollout_wg

    def _tell_engine(self, what: str) -> None:
        manager = getattr(self, "checkpoint_manager", None)
        if manager is not None:
            getattr(manager, what)()

    def _check_limit(self, gen_batches: int) -> None:
        limit = self.config.algorithm.filter_groups.max_num_gen_batches
        if 0 < limit <= gen_batches:
            raise ValueError(f"{gen_batches=} >= max_num_gen_batches={limit}. Generated too many.")
