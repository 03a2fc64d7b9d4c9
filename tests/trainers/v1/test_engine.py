"""The configuration of a V1 training without an inference engine."""

from __future__ import annotations

import pytest
from omegaconf import OmegaConf

from tests.verl_configs import compose_ppo
from verl_rollout_skip.trainers.v1.engine import remove_engine


def test_no_transport_is_set_up_for_servers_that_are_not_started() -> None:
    config = compose_ppo("actor_rollout_ref.rollout.prometheus.enable=True")
    remove_engine(config, loads_rewards=True)
    assert OmegaConf.select(config, "actor_rollout_ref.rollout.prometheus.enable") is False


@pytest.mark.parametrize("loads_rewards", [True, False])
def test_a_reward_model_on_its_own_devices_is_started_only_if_it_is_needed(loads_rewards: bool) -> None:
    config = compose_ppo("reward.reward_model.enable=True", "reward.reward_model.enable_resource_pool=True")
    remove_engine(config, loads_rewards)
    assert config.reward.reward_model.enable is not loads_rewards
    assert config.reward.reward_model.enable_resource_pool is not loads_rewards
