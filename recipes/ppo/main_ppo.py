"""verl's PPO entry point with recorded rollouts: ``python -m recipes.ppo.main_ppo`` and verl's usual overrides."""

from __future__ import annotations

import hydra
from omegaconf import DictConfig
from verl.utils.device import auto_set_device

from verl_rollout_skip.runner import train


@hydra.main(config_path="config", config_name="ppo", version_base=None)
def main(config: DictConfig) -> None:
    auto_set_device(config)
    train(config)


if __name__ == "__main__":
    main()
