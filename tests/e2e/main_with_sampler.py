"""The PPO recipe with a custom sampler that returns the data in reverse order."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import hydra
import ray
from omegaconf import DictConfig
from torch.utils.data import Dataset, Sampler
from verl.trainer.main_ppo import run_ppo

from verl_rollout_skip.runner import SkipTaskRunner

CONFIGS = Path(__file__).resolve().parents[2] / "recipes" / "ppo" / "config"


class BackwardSampler(Sampler[int]):
    def __init__(self, dataset: Dataset[Any]) -> None:
        self._rows = range(len(dataset))  # type: ignore[arg-type]

    def __len__(self) -> int:
        return len(self._rows)

    def __iter__(self) -> Iterator[int]:
        return reversed(self._rows)


class Runner(SkipTaskRunner):
    def make_sampler(self, config: DictConfig, dataset: Any) -> Any:
        return BackwardSampler(dataset)


@hydra.main(config_path=str(CONFIGS), config_name="ppo_cpu", version_base=None)
def main(config: DictConfig) -> None:
    run_ppo(config, task_runner_class=ray.remote(Runner))


if __name__ == "__main__":
    main()
