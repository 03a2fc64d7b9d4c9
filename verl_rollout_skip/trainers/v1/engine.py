"""A V1 training without an inference engine: the changed settings, and checkpoint managers that send nothing."""

from __future__ import annotations

from omegaconf import DictConfig, open_dict

from verl_rollout_skip.trainers.engine import NoWeightSync, without_engine


class NoReplicas(NoWeightSync):
    """Replaces verl's ``CheckpointEngineManager``, which the V1 trainers create themselves."""

    def __init__(self) -> None:
        super().__init__(None, None, [])

    def abort_replicas(self, reject_request: bool = False) -> None:
        pass

    def resume_generation_replicas(self) -> None:
        pass


def remove_engine(config: DictConfig, loads_rewards: bool) -> None:
    """Change a configuration in place so that no servers or agent loops start, and validation is off."""
    changed = without_engine(config, loads_rewards)
    with open_dict(config):
        for block in changed:
            config[block] = changed[block]


def remove_transport(config: DictConfig) -> None:
    """Do not set up the transfer of weights to standalone servers. Call this after the trainer has checked its
    settings, because verl's ``separate_async`` requires such a transfer."""
    with open_dict(config):
        config.actor_rollout_ref.rollout.checkpoint_engine.backend = "naive"
