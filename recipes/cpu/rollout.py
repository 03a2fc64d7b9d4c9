"""The rollout backend named "cpu": starts its servers and sends them the actor's weights."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import ray
import torch
import torch.distributed
from verl.workers.rollout.base import _ROLLOUT_REGISTRY, BaseRollout
from verl.workers.rollout.replica import RolloutReplica, RolloutReplicaRegistry

from recipes.cpu.server import CPUServer, ServerConfig, Version

NAME = "cpu"


def server_name(rank: int) -> str:
    """The name of a server's Ray actor: ``ray.get_actor(server_name(0))``."""
    return f"cpu_server_{rank}"


async def _ordinal_of_first_server(version: Version, request: str) -> int:
    """All replicas share one counter, so it does not matter which of them gets a request."""
    return await ray.get_actor(server_name(0)).ordinal.remote(version, request)


class CPUReplica(RolloutReplica):
    """One server per verl worker."""

    async def launch_servers(self) -> None:
        config, rank = self._server_config(), self.replica_rank
        actor: Any = ray.remote(CPUServer).options(
            name=server_name(rank), num_cpus=0, max_concurrency=self.max_concurrency
        )
        handle = actor.remote(config, rank, None if rank == 0 else _ordinal_of_first_server)
        self.servers = [handle]
        self._server_handle = handle
        self._server_address = f"cpu://{rank}"

    def _server_config(self) -> ServerConfig:
        config, model = self.config, self.model_config
        if self.is_reward_model or self.is_teacher_model:
            raise ValueError("the cpu rollout serves only the policy, not a reward model or a teacher")
        if self.world_size != 1:
            raise ValueError(
                f"the cpu rollout cannot split a model over {self.world_size} workers: set "
                "actor_rollout_ref.rollout.tensor_model_parallel_size=1 and data_parallel_size=1"
            )
        if config.logprobs_mode != "processed_logprobs":
            raise ValueError(f"the cpu rollout returns only processed_logprobs, not {config.logprobs_mode}")
        return ServerConfig(
            model=model.path,
            seed=config.seed,
            prompt_length=config.prompt_length,
            response_length=config.response_length,
            max_model_len=config.max_model_len or config.prompt_length + config.response_length,
            dtype=config.dtype,
            ignore_eos=config.ignore_eos,
            trust_remote_code=model.get("trust_remote_code", False),
        )


class CPUServerAdapter(BaseRollout):
    """Runs in a worker next to its actor and sends the actor's weights to the worker's server."""

    async def resume(self, tags: list[str]) -> None:
        pass

    async def release(self) -> None:
        pass

    async def update_weights(
        self,
        weights: Iterable[tuple[str, torch.Tensor]],
        wire_format: str = "named_tensors",
        global_steps: Version = None,
        **_: Any,
    ) -> None:
        if wire_format != "named_tensors":
            raise ValueError(f"the cpu rollout accepts only complete weights (named_tensors), not {wire_format}")
        # Gathering a sharded weight is a collective: every worker must iterate over all of them.
        state = {name: weight.detach().cpu() for name, weight in weights}
        server = ray.get_actor(server_name(torch.distributed.get_rank()))
        await server.load_weights.remote(state, global_steps)


RolloutReplicaRegistry.register(NAME, lambda: CPUReplica)
# verl has no function to register the adapter.
_ROLLOUT_REGISTRY[(NAME, "async")] = f"{__name__}.{CPUServerAdapter.__name__}"
