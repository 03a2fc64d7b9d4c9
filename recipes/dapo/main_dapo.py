"""DAPO with recorded rollouts: ``python -m recipes.dapo.main_dapo`` and verl's usual overrides."""

from __future__ import annotations

import hydra
from omegaconf import DictConfig
from verl.utils.device import auto_set_device

from verl_rollout_skip import SkipDAPOTrainer
from verl_rollout_skip.runner import SkipTaskRunner, train


class DAPOTaskRunner(SkipTaskRunner):
    trainer_class = SkipDAPOTrainer


@hydra.main(config_path="config", config_name="dapo", version_base=None)
def main(config: DictConfig) -> None:
    auto_set_device(config)
    train(config, DAPOTaskRunner)


if __name__ == "__main__":
    main()
