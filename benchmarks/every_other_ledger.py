"""The PPO recipe with a ledger in every other pair of steps, to measure its cost within one training.

The line of a step is written at the beginning of the next one, so only the second step of each pair counts. The metric
``rollout_skip/ledger_s`` is how long the training itself waited for the ledger.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import hydra
from omegaconf import DictConfig
from verl.trainer.ppo.ray_trainer import RayPPOTrainer
from verl.utils.device import auto_set_device

from benchmarks.trainings import LEDGER_WAITED, has_ledger
from verl_rollout_skip import RolloutSkipMixin
from verl_rollout_skip.runner import SkipTaskRunner, train

CONFIGS = Path(__file__).resolve().parents[1] / "recipes" / "ppo" / "config"
_CALLS = ("begin_step", "observe_rollout", "observe_update", "observe_metrics", "wait")


class Trainer(RolloutSkipMixin, RayPPOTrainer):  # type: ignore[misc]
    """Turns its ledger on and off."""

    def init_workers(self) -> None:
        super().init_workers()
        self._waited = 0.0
        ledger: Any = self.rollout_skip.ledger
        for name in _CALLS:
            setattr(ledger, name, self._timed(getattr(ledger, name)))
        observe = ledger.observe_metrics

        def observe_metrics(step: int, metrics: Any) -> dict[str, float]:
            more = observe(step, metrics)
            waited, self._waited = self._waited, 0.0
            return {**more, LEDGER_WAITED: waited}

        ledger.observe_metrics = observe_metrics

    def _timed(self, call: Callable[..., Any]) -> Callable[..., Any]:
        def timed(*args: Any, **kwargs: Any) -> Any:
            started = time.perf_counter()
            try:
                return call(*args, **kwargs)
            finally:
                self._waited += time.perf_counter() - started

        return timed

    def _get_gen_batch(self, batch: Any) -> Any:
        self.rollout_skip.ledger.begin_step(self.global_steps)
        self.rollout_skip.ledger.is_on = has_ledger(self.global_steps)
        return super()._get_gen_batch(batch)


class Runner(SkipTaskRunner):
    trainer_class = Trainer


@hydra.main(config_path=str(CONFIGS), config_name="ppo_cpu", version_base=None)
def main(config: DictConfig) -> None:
    auto_set_device(config)
    train(config, Runner)


if __name__ == "__main__":
    main()
