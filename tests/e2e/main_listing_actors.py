"""The PPO recipe with a trainer that writes down, in its second step, which actors Ray has: ACTORS_FILE says where."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import hydra
import ray
from omegaconf import DictConfig
from ray.util.state import list_actors
from verl.trainer.main_ppo import run_ppo

from verl_rollout_skip import SkipPPOTrainer
from verl_rollout_skip.runner import SkipTaskRunner

CONFIGS = Path(__file__).resolve().parents[2] / "recipes" / "ppo" / "config"


class ListingTrainer(SkipPPOTrainer):
    def _update_actor(self, batch: Any) -> Any:
        if self.global_steps == 2:
            cluster = ray.get_runtime_context().gcs_address
            found = list_actors(address=cluster, limit=1000, filters=[("state", "=", "ALIVE")])
            actors = [actor.class_name for actor in found]
            Path(os.environ["ACTORS_FILE"]).write_text(json.dumps(actors))
        return super()._update_actor(batch)


class Runner(SkipTaskRunner):
    trainer_class = ListingTrainer


@hydra.main(config_path=str(CONFIGS), config_name="ppo_cpu", version_base=None)
def main(config: DictConfig) -> None:
    run_ppo(config, task_runner_class=ray.remote(Runner))


if __name__ == "__main__":
    main()
