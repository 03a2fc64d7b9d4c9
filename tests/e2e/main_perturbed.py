"""The PPO recipe with a trainer that changes one value in step 2, if the variable PERTURB says which.

The variable is not a setting, so a training with it claims to be the same as one without it.
"""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import hydra
from omegaconf import DictConfig
from verl import DataProto
from verl.trainer.ppo.ray_trainer import RayPPOTrainer
from verl.utils.device import auto_set_device

from verl_rollout_skip import RolloutSkipMixin
from verl_rollout_skip.runner import SkipTaskRunner, train

CONFIGS = Path(__file__).resolve().parents[2] / "recipes" / "ppo" / "config"
VARIABLE = "PERTURB"
LOSS, REWARD, LOG_PROB = "loss", "reward", "log_prob"


class ScaledLoss:
    """Scales the policy loss of each update from step 2 on. The loss is proportional to the advantages.

    It follows the mixin in the list of bases, so that the workers do what the driver did not ask for.
    """

    actor_rollout_wg: Any
    global_steps: int

    def init_workers(self) -> None:
        super().init_workers()  # type: ignore[misc]
        update = self.actor_rollout_wg.update_actor

        def scaled(batch: Any) -> Any:
            if os.environ.get(VARIABLE) == LOSS and self.global_steps >= 2:
                batch = batch.clone(recurse=False)
                batch["advantages"] = batch["advantages"] * (1 + 1e-6)
            return update(batch)

        self.actor_rollout_wg.update_actor = scaled


class PerturbedTrainer(RolloutSkipMixin, ScaledLoss, RayPPOTrainer):  # type: ignore[misc]
    """Changes one reward or one log-prob of step 2."""

    def _balance_batch(self, batch: DataProto, *args: Any, **kwargs: Any) -> None:
        super()._balance_batch(batch, *args, **kwargs)
        self._change(REWARD, batch, "rm_scores")

    def _compute_old_log_prob(self, batch: DataProto) -> Any:
        found = super()._compute_old_log_prob(batch)
        self._change(LOG_PROB, found[0], "old_log_probs")
        return found

    def _change(self, what: str, batch: DataProto, name: str) -> None:
        if os.environ.get(VARIABLE) == what and self.global_steps == 2:
            values = batch.batch[name].clone()
            values[0, 0] += 0.25
            batch.batch[name] = values


class Runner(SkipTaskRunner):
    trainer_class = PerturbedTrainer


@hydra.main(config_path=str(CONFIGS), config_name="ppo_cpu", version_base=None)
def main(config: DictConfig) -> None:
    auto_set_device(config)
    train(config, Runner)


if __name__ == "__main__":
    main()
