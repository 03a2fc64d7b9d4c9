"""The parts of verl's ``PPOTrainer``, its replay buffer and TransferQueue that the V1 mixin uses, including private
ones."""

from __future__ import annotations

from collections.abc import Collection
from typing import Any, Protocol

import ray
import torch
import transfer_queue as tq
from omegaconf import DictConfig
from tensordict import TensorDict
from transfer_queue import KVBatchMeta

from verl_rollout_skip.errors import UnsupportedTrainerError
from verl_rollout_skip.trainers import compat
from verl_rollout_skip.trainers.compat import Need
from verl_rollout_skip.trainers.plugin import MODES

SYNC = "sync"
SKIP = "skip_"
PARTITION = "train"
"""TransferQueue's partition for the prompts and trajectories of a training."""

TESTED = ("0.9.1", "0.9.0")
_SUPPORTED = f"the V1 trainers of verl {', '.join(TESTED)} and trainers derived from them"


class HostTrainer(Protocol):
    """What ``RolloutSkipMixin`` expects of its host, the trainer that follows it in the list of bases."""

    config: DictConfig
    tokenizer: Any
    trainer_mode: str
    global_steps: int
    steps_per_epoch: int
    total_training_steps: int
    parameter_sync_step: int
    replay_buffer: Any
    train_dataloader: Any
    checkpoint_manager: Any

    def __init__(self, config: DictConfig) -> None: ...

    def fit(self, agent_loop_manager: Any) -> Any: ...

    def step(self, metrics: dict[str, Any], timing_raw: dict[str, Any]) -> KVBatchMeta: ...

    def prepare_step(self) -> dict[str, Any]: ...

    def get_reward_handles(self) -> Any: ...

    def _compute_reward_colocate(self, batch: KVBatchMeta, metrics: dict[str, Any] | None = None) -> KVBatchMeta: ...

    def _compute_advantage(self, batch: KVBatchMeta, metrics: dict[str, Any]) -> KVBatchMeta: ...

    def _fetch_one_gen_batch(self) -> TensorDict: ...

    def _submit_batch_to_rollout(self, batch: TensorDict) -> int: ...

    def _reissue_inflight_prompts(self, partition_id: str = PARTITION) -> int: ...

    def _build_replay_buffer(self) -> Any: ...

    def _init_dataloader(self) -> None: ...

    def _setup(self) -> None: ...

    def _validate(self) -> dict[str, float]: ...

    def _save_checkpoint(self) -> None: ...


class UpdatingHost(Protocol):
    """What ``ObservesUpdates`` expects in addition."""

    def _update_actor(self, batch: KVBatchMeta, metrics: dict[str, Any]) -> KVBatchMeta: ...

    def _update_critic(self, batch: KVBatchMeta, metrics: dict[str, Any]) -> KVBatchMeta: ...


UPDATE_TENSORS = [
    *("prompts", "responses", "response_mask", "rollout_log_probs", "rm_scores", "old_log_probs", "entropy"),
    *("ref_log_prob", "values", "token_level_rewards", "rollout_is_weights", "advantages", "returns"),
]
"""The fields that an update reads or that were computed for it, except those that follow from others."""

NEEDS = (
    Need("fit", "to detect the end of the training", positional=None),
    Need("step", "to detect a step that does not sample from the replay buffer", ("metrics", "timing_raw")),
    Need("_build_replay_buffer", "to replace what is sampled"),
    Need("_fetch_one_gen_batch", "to draw the prompts that a recorded step drew"),
    Need("_submit_batch_to_rollout", "to hold back prompts until it is known whether they are generated", ("batch",)),
    Need("_reissue_inflight_prompts", "to track prompts restored from a checkpoint", ("partition_id",)),
    Need("_init_dataloader", "to compare the steps of the training with the recorded ones"),
    Need("_setup", "to avoid starting an inference engine, or to defer its weight syncs"),
    Need("_validate", "to send weights before a validation"),
    Need("_save_checkpoint", "to save the state of the dataloader without the prompts drawn ahead"),
)
# prepare_step is overridden too, but is optional: verl 0.9.0 does not have it.

_SAMPLE = Need("sample", "to record or replace a rollout", keywords=("global_steps", "partition_id", "batch_size"))

_QUEUE = (
    Need("kv_batch_put", "to put a recorded batch back", keywords=("keys", "partition_id", "fields", "tags")),
    Need("kv_batch_get", "to record a batch", keywords=("keys", "partition_id", "select_fields")),
    Need("kv_list", "to list waiting prompts", ("partition",)),
    Need("kv_clear", "to remove prompts that are no longer in flight", keywords=("keys", "partition_id")),
    Need("get_client", "to find the rows that have a field"),
)
_CLIENT = (
    Need("kv_retrieve_meta", "to record a batch", ("self",), ("keys", "partition_id", "create")),
    Need("get_production_status", "to find the rows that have a field", ("self",), ("data_fields", "partition_id")),
    Need("_get_partition_meta", "to list the fields", ("self", "partition")),
    Need("_run_coroutine", "to list the fields", ("self", "coroutine")),
)


def check_trainer(trainer: type) -> None:
    """Raise if a trainer or TransferQueue lacks something the mixin needs; warn if verl is not a tested version."""
    compat.check_trainer(trainer, NEEDS, _SUPPORTED)
    advice = f"Supported trainers: {_SUPPORTED}, with the TransferQueue that they require."
    compat.check_functions(tq, "TransferQueue", _QUEUE, advice)
    compat.check_functions(tq.TransferQueueClient, "TransferQueueClient", _CLIENT, advice)
    compat.warn_if_untested(TESTED, "the V1 trainers")


def check_replay_buffer(buffer: Any) -> None:
    """Raise if a replay buffer has no ``sample``, or one with different parameters."""
    compat.check_functions(buffer, type(buffer).__name__, [_SAMPLE], f"Supported trainers: {_SUPPORTED}.")


# The methods that verl calls between a sample and the update. Only the last two change columns of sampled rows.
_AFTER_SAMPLE = (
    "step",
    "_step_once",
    "on_sample_end",
    "_balance_batch",
    "_compute_old_log_prob",
    "_compute_ref_log_prob",
    "_compute_values",
    "_compute_reward_colocate",
    "_compute_advantage",
)


def keeps_rows(trainer: type) -> bool:
    """Whether a trainer is known not to change sampled rows before the last two of these methods."""
    return compat.verl_version() in TESTED and all(_is_of_verl(trainer, name) for name in _AFTER_SAMPLE)


def _is_of_verl(trainer: type, name: str) -> bool:
    owners = [kind.__module__ for kind in trainer.__mro__ if name in vars(kind)]
    return next((owner.startswith("verl.") for owner in owners if not owner.startswith("verl_rollout_skip.")), False)


def base_mode(trainer: type) -> str:
    """The trainer mode of the verl trainer that a class extends."""
    from verl.trainer.ppo.v1.trainer_base import TRAINER_REGISTRY

    from verl_rollout_skip.trainers.v1.mixin import RolloutSkipMixin

    names = {kind: name for name, kind in TRAINER_REGISTRY.items()}
    for kind in trainer.__mro__:
        if kind in names and not issubclass(kind, RolloutSkipMixin):
            return names[kind]
    raise UnsupportedTrainerError(
        f"{trainer.__name__} has none of verl's V1 trainers as a base ({', '.join(sorted(TRAINER_REGISTRY))}). "
        f"Write class {trainer.__name__}(RolloutSkipMixin, PPOTrainerSync), or register your own trainer first."
    )


def use_skip_trainer(config: DictConfig) -> None:
    """Replace one of verl's own trainer modes with the corresponding ``skip_`` mode; leave a user's own mode alone."""
    mode = f"{SKIP}{config.trainer.v1.trainer_mode}"
    if mode in MODES:
        config.trainer.v1.trainer_mode = mode


def connect_queue() -> None:
    """Connect this process to the TransferQueue of the training; ``tq.init`` would create one if there were none."""
    ray.get_actor("TransferQueueController", namespace="transfer_queue")
    tq.init()


def field_names(partition: str) -> list[str]:
    """The fields that at least one row of a TransferQueue partition has."""
    client = tq.get_client()
    return list(client._run_coroutine(client._get_partition_meta(partition)).field_names)


def update_tensors(keys: list[str], partition: str, names: Collection[str] = UPDATE_TENSORS) -> dict[str, torch.Tensor]:
    """Those of the fields for an update that are tensors in all of these rows."""
    found = tq.kv_batch_get(keys=keys, partition_id=partition, select_fields=list(names))
    columns = {name: found.get(name) for name in names if name in found.keys()}  # noqa: SIM118 - a TensorDict
    return {name: column for name, column in columns.items() if isinstance(column, torch.Tensor)}


def rows_by_unit(keys: list[str], partition: str) -> list[list[int]]:
    """The rows of each storage unit, for keys that are in TransferQueue. One group if there are no such units."""
    client = tq.get_client()
    group = getattr(client.storage_manager, "_group_by_hash", None)
    if group is None:  # other storage backends
        return [list(range(len(keys)))]
    found = client.kv_retrieve_meta(keys=keys, partition_id=partition, create=False)
    return [list(unit.batch_positions) for unit in group(found.global_indexes).values()]


def add_eviction_metrics(metrics: dict[str, Any], more: dict[str, Any], count: int) -> None:
    """Combine metrics of evicted prompts as the replay buffer does."""
    from verl.trainer.ppo.v1.replay_buffer import _accumulate_eviction_metrics

    _accumulate_eviction_metrics(metrics, more, count)
