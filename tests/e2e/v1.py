"""V1 trainings by verl's own entry point: nothing but settings makes them record and replay."""

from __future__ import annotations

from pathlib import Path

from tests.e2e.training import ROOT, Trainings

MODULES = "recipes.cpu.plugin,tests.e2e.v1_trainer_modes"
OWN_BUFFER = "trainer.v1.sampler.custom_sampler.path=null"
"""verl's replay buffer instead of the one of recipes/cpu: rows come as they finish, and it looks every two seconds."""


class V1Trainings(Trainings):
    """``python -m verl.trainer.main_ppo`` with the CPU configuration."""

    def __init__(self, folder: Path, assets: Path) -> None:
        configs = f"--config-dir={ROOT / 'recipes' / 'cpu' / 'config'}"
        super().__init__(folder, assets, module="verl.trainer.main_ppo", config="cpu_trainer", options=(configs,))

    def start(self, name: str, *overrides: str, env: dict[str, str] | None = None):  # type: ignore[no-untyped-def]
        variables = {"VERL_USE_EXTERNAL_MODULES": MODULES, **(env or {})}
        return super().start(name, "trainer.use_v1=True", *overrides, env=variables)


def skip(mode: str, dumps: Path, trainer: str = "skip_sync") -> tuple[str, ...]:
    """The settings that a user gives to record or to replay."""
    return (f"trainer.v1.trainer_mode={trainer}", f"+rollout_skip.mode={mode}", f"+rollout_skip.dump_dir={dumps}")
