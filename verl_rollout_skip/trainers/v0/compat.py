"""Where verl's trainers generate, version by version. A trainer or version without a known place is refused.

A seam also knows how its version can be made to start no inference engine: by settings alone, which differ, and with
those only that the version knows, because its workers refuse others.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from omegaconf import DictConfig, ListConfig, open_dict

from verl_rollout_skip.errors import ConfigError, UnsupportedTrainerError
from verl_rollout_skip.trainers.fit import explain_unfollowable

_METHODS = ("init_workers", "fit", "_load_checkpoint", "_get_gen_batch")


@dataclass(frozen=True)
class Seam:
    """The object whose ``generate_sequences`` a trainer calls for its rollout step, since verl 0.7.1."""

    attribute: str = "async_rollout_manager"
    takes_weight_sync: bool = True
    """Whether a class that sends no weights can be named in ``rollout.checkpoint_manager_class``."""
    takes_libraries: bool = True
    """Whether several modules can be named in ``model.external_lib``."""

    @property
    def description(self) -> str:
        return f"self.{self.attribute}.generate_sequences"

    def generator(self, trainer: Any) -> Any:
        found = getattr(trainer, self.attribute, None)
        if found is None or not hasattr(found, "generate_sequences"):
            raise UnsupportedTrainerError(
                f"{type(trainer).__name__} has no {self.description} after init_workers, so its rollout step cannot be "
                "recorded or replayed."
            )
        return found

    def without_engine(self, config: DictConfig, loads_rewards: bool) -> DictConfig:
        """A copy of a training's configuration that starts no inference engine."""
        from verl_rollout_skip.trainers.engine import without_engine

        changed = without_engine(config, loads_rewards)
        rollout, model = changed.actor_rollout_ref.rollout, changed.actor_rollout_ref.model
        with open_dict(changed):
            if not self.takes_weight_sync:
                rollout.pop("checkpoint_manager_class")
            if not self.takes_libraries:
                model.external_lib = _only(model.external_lib)
        return changed

    def stop_weight_syncs(self, trainer: Any) -> None:
        """For a trainer that was made with the configuration of ``without_engine``, after ``init_workers``."""
        from verl_rollout_skip.trainers.engine import NoWeightSync

        if not self.takes_weight_sync:
            trainer.checkpoint_manager = NoWeightSync(config=None, actor_wg=None, replicas=[])


@dataclass(frozen=True)
class OldSeam(Seam):
    """verl 0.6.1, where the workers generate (``rollout.mode`` sync) or agent loops do, and both fetch the weights."""

    takes_weight_sync: bool = False
    takes_libraries: bool = False

    @property
    def description(self) -> str:
        return "self.actor_rollout_wg.generate_sequences or self.async_rollout_manager.generate_sequences"

    def generator(self, trainer: Any) -> Any:
        uses_agent_loops = getattr(trainer, "async_rollout_mode", False)
        return Seam("async_rollout_manager" if uses_agent_loops else "actor_rollout_wg").generator(trainer)

    def without_engine(self, config: DictConfig, loads_rewards: bool) -> DictConfig:
        changed = super().without_engine(config, loads_rewards)
        rollout = changed.actor_rollout_ref.rollout
        with open_dict(changed):
            # This version names the manager of its agent loops in the code, but it can manage none of them.
            rollout.mode = "async"
            rollout.agent.num_workers = 0
            rollout.agent.pop("agent_loop_manager_class")
        return changed

    def stop_weight_syncs(self, trainer: Any) -> None:
        pass  # nobody generates, so nobody fetches them


SEAMS = {
    "0.9.1": Seam(),
    # Their weight sync is made with arguments of other names, and the settings of their models want one module.
    "0.8.0": Seam(takes_weight_sync=False, takes_libraries=False),
    "0.7.1": Seam(takes_weight_sync=False, takes_libraries=False),
    "0.6.1": OldSeam(),
}


def find_seam(trainer: type) -> Seam:
    """Where this trainer generates, or an error that names what is supported."""
    import verl

    if verl.__version__ not in SEAMS:
        raise UnsupportedTrainerError(
            f"verl {verl.__version__} is installed, and where its trainers generate is known here for "
            f"{', '.join(SEAMS)} only. Install one of these, or a later version of verl-rollout-skip."
        )
    for method in _METHODS:
        own = [vars(kind)[method] for kind in trainer.__mro__ if method in vars(kind) and _is_of_a_trainer(kind)]
        if not own:
            _refuse(trainer, f"it has no {method}")
        reason = explain_unfollowable(own[0])
        if reason is not None:
            _refuse(trainer, f"its {method} {reason}")
    return SEAMS[verl.__version__]


def _is_of_a_trainer(kind: type) -> bool:
    return not kind.__module__.startswith("verl_rollout_skip.trainers.")


def _refuse(trainer: type, reason: str) -> None:
    raise UnsupportedTrainerError(
        f"{trainer.__name__} cannot be recorded or replayed: {reason}. Supported are RayPPOTrainer of verl "
        f"{', '.join(SEAMS)} and trainers derived from it that generate step by step, such as RayDAPOTrainer of "
        "verl-recipe; for verl's V1 trainers use verl_rollout_skip.v1."
    )


def _only(libraries: Any) -> str:
    """The one module that a version which imports only one is to import."""
    names = list(libraries) if isinstance(libraries, ListConfig) else [libraries]
    if len(names) > 1:
        raise ConfigError(
            f"actor_rollout_ref.model.external_lib is {names[0]!r}, and this version of verl imports only one module: "
            "that place is needed to replay without an inference engine. Use rollout_skip.engine=on."
        )
    return str(names[0])
