"""The parts of verl's ``RayPPOTrainer`` that the V0 mixins use, and how versions of verl differ.

Older versions lack some of the settings that a replay without an engine uses, and their workers reject unknown ones.
``known_settings`` finds out which of them the installed verl has.
"""

from __future__ import annotations

import dataclasses
import inspect
from typing import Any, Protocol

from omegaconf import DictConfig, ListConfig, open_dict
from verl import DataProto

from verl_rollout_skip.errors import ConfigError, UnsupportedTrainerError
from verl_rollout_skip.replay.ledger.updates import ACTOR, CRITIC
from verl_rollout_skip.trainers import compat
from verl_rollout_skip.trainers.compat import Need

TESTED = ("0.9.1", "0.9.0", "0.8.0", "0.7.1", "0.6.1")
_SUPPORTED = (
    f"RayPPOTrainer of verl {', '.join(TESTED)} and trainers derived from it that generate step by step, such as "
    "RayDAPOTrainer of verl-recipe; for verl's V1 trainers use verl_rollout_skip.v1"
)


class HostTrainer(Protocol):
    """What ``RolloutSkipMixin`` expects of its host, the trainer that follows it in the list of bases."""

    config: DictConfig
    tokenizer: Any
    train_dataloader: Any
    global_steps: int
    total_training_steps: int
    actor_rollout_wg: Any
    checkpoint_manager: Any

    def init_workers(self) -> None: ...

    def fit(self) -> Any: ...

    def _load_checkpoint(self) -> Any: ...

    def _save_checkpoint(self) -> None: ...

    def _get_gen_batch(self, batch: DataProto) -> DataProto: ...


class DynamicSamplingHost(HostTrainer, Protocol):
    """What ``DynamicSampling`` expects in addition. Available since verl 0.7.1."""

    async_rollout_manager: Any
    kl_ctrl_in_reward: Any
    use_rm: bool

    def _create_dataloader(self, *args: Any, **kwargs: Any) -> None: ...

    def _update_actor(self, batch: DataProto) -> DataProto: ...

    def _update_critic(self, batch: DataProto) -> DataProto: ...

    def _compute_old_log_prob(self, batch: DataProto) -> tuple[DataProto, Any]: ...

    def _compute_ref_log_prob(self, batch: DataProto) -> DataProto: ...

    def _compute_reward_colocate(self, batch: DataProto) -> Any: ...


NEEDS = (
    Need("init_workers", "to replace the object that generates"),
    Need("fit", "to detect the end of the training", positional=None),
    Need("_load_checkpoint", "to know the step at which a training starts"),
    Need("_get_gen_batch", "to record the ground truths", ("batch",)),
)
_SAMPLING = "DynamicSampling"
DYNAMIC_SAMPLING_NEEDS = (
    Need("_create_dataloader", "to generate before fit gets a batch", positional=None, user=_SAMPLING),
    Need("_update_actor", "to report the number of generation batches", ("batch",), user=_SAMPLING),
    Need("_update_critic", "to report the number of generation batches", ("batch",), user=_SAMPLING),
    Need("_compute_old_log_prob", "to filter by rewards with a KL penalty", ("batch",), user=_SAMPLING),
    Need("_compute_ref_log_prob", "to filter by rewards with a KL penalty", ("batch",), user=_SAMPLING),
    Need("_compute_reward_colocate", "to filter by scores of a reward model", ("batch",), user=_SAMPLING),
)
_GENERATE = Need("generate_sequences", "to record or replace a rollout", ("prompts",))
_UPDATE = Need("update_actor", "to stop a step that has no rollout step", positional=None)


def check_trainer(trainer: type) -> None:
    """Raise if a trainer lacks something that the mixin needs; warn if verl is not a tested version."""
    compat.check_trainer(trainer, NEEDS, _SUPPORTED)
    compat.warn_if_untested(TESTED, "the V0 trainers")


def check_dynamic_sampling(trainer: type) -> None:
    """Raise if a trainer lacks something that ``DynamicSampling`` needs."""
    supported = (
        "RayPPOTrainer from verl 0.7.1 on, where rollouts come with rewards; with an earlier version, use "
        "RolloutSkipMixin with the RayDAPOTrainer of its recipe/dapo"
    )
    compat.check_trainer(trainer, DYNAMIC_SAMPLING_NEEDS, supported, impossible="sample dynamically")


def prompts_of(trainer: HostTrainer, batch: DataProto) -> DataProto:
    """The part of a batch from the dataloader that a trainer sends to the engine. It is removed from the batch."""
    return trainer._get_gen_batch(batch)


def log_probs(trainer: DynamicSamplingHost, rows: DataProto) -> tuple[Any, Any]:
    """The log-probs of the actor and of the reference policy, two tensors."""
    old = trainer._compute_old_log_prob(rows)[0]
    reference = trainer._compute_ref_log_prob(rows)
    return old.batch["old_log_probs"], reference.batch["ref_log_prob"]


def scores_of_reward_model(trainer: DynamicSamplingHost, rows: DataProto) -> DataProto:
    """What a reward model that shares the engine's devices returns."""
    scores: DataProto = trainer._compute_reward_colocate(rows)
    return scores


def check_batches(trainer: Any) -> None:
    """Raise if the batches of a trainer are not verl's ``DataProto``, as on verl's ``neo`` branch."""
    kind = getattr(trainer, "data_proto_cls", DataProto)
    if not issubclass(kind, DataProto):
        raise UnsupportedTrainerError(
            f"{type(trainer).__name__} cannot be recorded or replayed: its batches are {kind.__name__}, but only "
            "DataProto can be stored. Use trainer.data_plane=classic."
        )


def generator_name(trainer: Any) -> str:
    """The name of the attribute that generates. In verl 0.6.1 this can be the workers (``rollout.mode=sync``)."""
    return "async_rollout_manager" if getattr(trainer, "async_rollout_mode", True) else "actor_rollout_wg"


def find_generator(trainer: Any) -> Any:
    """The object whose ``generate_sequences`` a trainer calls in its rollout step. Exists after ``init_workers``."""
    name = generator_name(trainer)
    found = getattr(trainer, name, None)
    reason = _GENERATE.explain_mismatch(getattr(found, _GENERATE.name, None))
    if reason is not None:
        raise UnsupportedTrainerError(
            f"{type(trainer).__name__} cannot be recorded or replayed: self.{name} cannot be used, because after "
            f"init_workers {reason}. The installed version of verl is {compat.verl_version()}. Supported trainers: "
            f"{_SUPPORTED}."
        )
    return found


def find_actor(trainer: Any) -> Any:
    """The object whose ``update_actor`` a trainer calls. Exists after ``init_workers``."""
    found = getattr(trainer, "actor_rollout_wg", None)
    compat.check_functions(found, "self.actor_rollout_wg", [_UPDATE], f"Supported trainers: {_SUPPORTED}.")
    return found


def updates_of(trainer: Any) -> list[tuple[str, Any, str]]:
    """The calls that update weights: role, workers, and name of the method. They exist after ``init_workers``."""
    critic = getattr(trainer, "critic_wg", None)
    # The critic's was called update_critic up to verl 0.7.1.
    methods = [name for name in ("train_mini_batch", "update_critic") if callable(getattr(critic, name, None))]
    return [(ACTOR, find_actor(trainer), _UPDATE.name), *((CRITIC, critic, name) for name in methods)]


@dataclasses.dataclass(frozen=True)
class Settings:
    """Which of the settings for a replay without an engine the installed verl has."""

    weight_sync: bool
    """``rollout.checkpoint_manager_class`` with our constructor; since verl 0.9.0."""
    agent_loop_manager: bool
    """``rollout.agent.agent_loop_manager_class``; since verl 0.7.1."""
    several_libraries: bool
    """More than one module in ``model.external_lib``; since verl 0.9.0."""


def known_settings() -> Settings:
    from verl.workers import config

    return Settings(
        weight_sync="checkpoint_manager_class" in _field_types(config, "RolloutConfig") and _takes_our_weight_sync(),
        agent_loop_manager="agent_loop_manager_class" in _field_types(config, "AgentLoopConfig"),
        several_libraries=_takes_lists(_field_types(config, "HFModelConfig").get("external_lib")),
    )


def without_engine(config: DictConfig, loads_rewards: bool) -> DictConfig:
    """A copy of a training's configuration that keeps the installed verl from starting an inference engine."""
    known = known_settings()
    changed = compat.import_engine().without_engine(config, loads_rewards)
    rollout, model = changed.actor_rollout_ref.rollout, changed.actor_rollout_ref.model
    with open_dict(changed):
        if not known.weight_sync:
            rollout.pop("checkpoint_manager_class")
        if not known.several_libraries:
            model.external_lib = _single_library(model.external_lib)
        if not known.agent_loop_manager:
            # verl's own manager cannot be replaced, but it can have zero workers.
            rollout.mode = "async"
            rollout.agent.num_workers = 0
            rollout.agent.pop("agent_loop_manager_class")
    return changed


def stop_weight_syncs(trainer: Any) -> None:
    """Stop weight syncs if the installed verl has no setting for that. Call this after ``init_workers``."""
    # verl 0.6.1 has no such manager: the engine itself fetches the weights.
    if getattr(trainer, "checkpoint_manager", None) is not None and not known_settings().weight_sync:
        trainer.checkpoint_manager = compat.import_engine().NoWeightSync(config=None, actor_wg=None, replicas=[])


def _takes_our_weight_sync() -> bool:
    from verl.checkpoint_engine import CheckpointEngineManager

    kinds = (CheckpointEngineManager, compat.import_engine().NoWeightSync)
    wanted, own = (inspect.signature(kind).parameters for kind in kinds)
    return list(wanted) == list(own)


def _field_types(module: Any, name: str) -> dict[str, Any]:
    """The fields of a configuration class of verl, with their types."""
    kind = getattr(module, name, None)
    if not dataclasses.is_dataclass(kind):
        raise UnsupportedTrainerError(
            f"verl {compat.verl_version()} has no {name} in {module.__name__}, which is needed to replay without an "
            "inference engine. Use rollout_skip.engine=on."
        )
    return {field.name: field.type for field in dataclasses.fields(kind)}


def _takes_lists(hint: Any) -> bool:
    return any(word in str(hint) for word in ("Any", "list", "List", "Sequence"))


def _single_library(libraries: Any) -> str:
    """The module to import, for a verl that imports only one."""
    names = list(libraries) if isinstance(libraries, ListConfig) else [libraries]
    if len(names) > 1:
        raise ConfigError(
            f"actor_rollout_ref.model.external_lib is {names[0]!r}, but this version of verl imports only one module, "
            "and a replay without an inference engine needs its own. Use rollout_skip.engine=on."
        )
    return str(names[0])
