"""What a V1 training without an inference engine is told."""

from __future__ import annotations

from omegaconf import OmegaConf

from tests.verl_configs import compose_ppo
from verl_rollout_skip.v1.engine import remove_engine


def test_nothing_is_set_up_for_servers_that_are_not_started() -> None:
    config = compose_ppo("actor_rollout_ref.rollout.prometheus.enable=True")
    remove_engine(config)
    assert OmegaConf.select(config, "actor_rollout_ref.rollout.prometheus.enable") is False
