"""A V1 training without an inference engine: the changed settings, and managers without receivers."""

from __future__ import annotations

from omegaconf import DictConfig, open_dict

from verl_rollout_skip.trainers.engine import NoWeightSync, without_engine


class NoReplicas(NoWeightSync):
    """In the place of verl's ``CheckpointEngineManager``, which the V1 trainers make themselves."""

    def __init__(self) -> None:
        super().__init__(None, None, [])

    def abort_replicas(self, reject_request: bool = False) -> None:
        pass

    def resume_generation_replicas(self) -> None:
        pass


def remove_engine(config: DictConfig, loads_rewards: bool) -> None:
    """Change a configuration in place so that no server and no agent loop is started and nothing is validated."""
    changed = without_engine(config, loads_rewards)
    with open_dict(config):
        for block in changed:
            config[block] = changed[block]


def remove_transport(config: DictConfig) -> None:
    """Let nothing be set up for sending weights to servers of their own. Only after the trainer has checked its
    settings: verl's ``separate_async`` insists on such a transport."""
    with open_dict(config):
        config.actor_rollout_ref.rollout.checkpoint_engine.backend = "naive"
