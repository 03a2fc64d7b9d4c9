"""An engine that generates nothing, which verl starts in ``replay`` instead of vLLM or SGLang.

It uses only verl's registries and settings: a rollout backend that launches no server and accepts no weights, a manager
without agent-loop workers, and a weight sync that does nothing. verl imports this module in its workers through
``actor_rollout_ref.model.external_lib``.
"""

from __future__ import annotations

import copy
import inspect
import logging
from collections.abc import Generator
from typing import Any, cast

from omegaconf import DictConfig, OmegaConf, open_dict
from verl.experimental.agent_loop import AgentLoopManager
from verl.workers.rollout.base import BaseRollout
from verl.workers.rollout.replica import RolloutReplica

from verl_rollout_skip.errors import ConfigError, EntryNotFoundError
from verl_rollout_skip.trainers.compat import register_rollout

logger = logging.getLogger(__name__)

NAME = "rollout_skip_replay"
"""The value of ``rollout.name`` that selects this engine."""

# The settings for the number of devices per server. A replay starts no server, so it may have fewer workers than the
# recording.
_SERVER_SIZES = (
    "tensor_model_parallel_size",
    "data_parallel_size",
    "pipeline_model_parallel_size",
    "expert_parallel_size",
)


class ReplayReplica(RolloutReplica):
    """A replica without servers."""

    async def launch_servers(self) -> None:
        # The load balancer needs a unique address for each replica, but nothing connects to it.
        self._server_address = f"replay://{self.replica_rank}"
        self._server_handle = cast(Any, None)

    def get_ray_class_with_init_args(self) -> Any:
        """Abstract in verl 0.6.1, which calls it only for replicas with their own workers."""
        return None

    async def init_standalone(self) -> None:
        # verl would reserve GPUs and start a worker on each.
        await self.launch_servers()

    async def sleep(self) -> None:
        pass

    async def wake_up(self) -> None:
        pass


class ReplayRollout(BaseRollout):
    """The part of the engine that runs in the training workers."""

    async def resume(self, tags: list[str]) -> None:
        pass

    async def release(self) -> None:
        pass

    async def update_weights(
        self, weights: Generator[Any, None, None], wire_format: str = "named_tensors", **kwargs: Any
    ) -> None:
        # Gathering the weights is expensive. Closing the generator before its first item gathers nothing.
        if inspect.isgenerator(weights):
            weights.close()


class NoAgentLoops(AgentLoopManager):
    """A manager without workers: all rollouts come from disk."""

    async def _init_agent_loop_workers(self) -> None:
        self.agent_loop_workers: list[Any] = []

    def generate_sequences(self, prompts: Any) -> Any:
        raise EntryNotFoundError(
            "The training tries to generate, but no inference engine was started, because the mode only loads. Set "
            "rollout_skip.engine=on if this training generates something besides its rollout steps."
        )


class NoWeightSync:
    """A checkpoint manager that sends no weights."""

    def __init__(self, config: Any, actor_wg: Any, replicas: list[Any]) -> None:
        self.replicas = replicas

    def update_weights(self, global_steps: int | None = None) -> dict[str, Any]:
        return {}

    def sleep_replicas(self) -> None:
        pass

    def wake_up_replicas(self) -> None:
        pass


def without_engine(config: DictConfig, loads_rewards: bool) -> DictConfig:
    """A copy of a training's configuration that starts no inference engine and does not validate.

    ``loads_rewards``: recorded rewards are used, so the reward model that computed them is not started either.
    """
    changed = without_reward_model(config) if loads_rewards else copy.deepcopy(config)
    if changed.trainer.get("val_only", False):
        raise ConfigError(
            "trainer.val_only is True: validation generates, but this mode starts no engine. Use "
            "rollout_skip.engine=on."
        )
    rollout, model, trainer = changed.actor_rollout_ref.rollout, changed.actor_rollout_ref.model, changed.trainer
    with open_dict(changed):
        rollout.name = NAME
        rollout.checkpoint_manager_class = _name(NoWeightSync)
        if rollout.get("agent") is None:
            rollout.agent = {}
        rollout.agent.agent_loop_manager_class = _name(NoAgentLoops)
        for size in _SERVER_SIZES:
            if rollout.get(size) is not None:
                rollout[size] = 1
        if OmegaConf.select(rollout, "disaggregation.enabled"):
            rollout.disaggregation.enabled = False  # only affects servers
        if OmegaConf.select(rollout, "prometheus.enable"):
            rollout.prometheus.enable = False  # there is no server to collect metrics from
        libraries = model.get("external_lib")
        model.external_lib = [*_listed(libraries), __name__]
        if trainer.get("val_before_train", True) or trainer.get("test_freq", -1) > 0:
            logger.warning(
                "validation is skipped: it generates, but no inference engine is started "
                "(rollout_skip.engine=on starts it)"
            )
        trainer.val_before_train = False
        trainer.test_freq = -1
    return changed


def without_reward_model(config: DictConfig) -> DictConfig:
    """A copy of a configuration without a reward model on its own devices, because rollouts contain its scores.

    A reward model that shares the actor's devices scores after the rollout, so it is still needed.
    """
    changed = copy.deepcopy(config)
    model = OmegaConf.select(changed, "reward.reward_model")
    if model is not None and model.get("enable") and model.get("enable_resource_pool"):
        logger.info(
            "the reward model is not started: its scores are recorded (rollout_skip.reward=recompute starts it)"
        )
        with open_dict(changed):
            model.enable = model.enable_resource_pool = False
    return changed


def _name(kind: type) -> str:
    return f"{kind.__module__}.{kind.__qualname__}"


def _listed(libraries: Any) -> list[str]:
    if libraries is None:
        return []
    return [libraries] if isinstance(libraries, str) else list(libraries)


register_rollout(NAME, _name(ReplayRollout), ReplayReplica)
