"""Special cases of asynchronous trainers, which generate ahead and keep prompts in flight across steps.

A sample depends on the prompts in flight, and on the weights that generated each part of it. So a recording is replayed
from its first step to its last: loaded and generated steps cannot be mixed.
"""

from __future__ import annotations

from typing import Any

import transfer_queue as tq
from omegaconf import DictConfig, OmegaConf, open_dict
from tensordict import NonTensorData, TensorDict

from verl_rollout_skip.config.modes import Mode
from verl_rollout_skip.config.skip_config import BLOCK, SkipConfig, describe_steps
from verl_rollout_skip.errors import ConfigError, EntryExistsError, MismatchError
from verl_rollout_skip.replay.explain import folders_of
from verl_rollout_skip.replay.rollout import RolloutSkip
from verl_rollout_skip.trainers.plugin import MODES
from verl_rollout_skip.trainers.v1.compat import PARTITION, SKIP, SYNC, add_eviction_metrics
from verl_rollout_skip.trainers.v1.transfer.rows import waiting_prompts

_MODE = "trainer.v1.trainer_mode"
_SWITCH = "trainer.v1.separate_async.hybrid_rollout.enable_switch"
_REASON = (
    "an asynchronous training generates ahead: what a step trains on depends on the prompts in flight and on the "
    "weights of the steps before"
)


def check_settings(settings: SkipConfig) -> None:
    """Reject settings with which a replay cannot be exact, before any worker starts."""
    if settings.mode is Mode.SHADOW:
        raise ConfigError(
            f"{BLOCK}.mode is 'shadow', but {_REASON}. What the engine generates in a step does not have to be what a "
            "recorded training generated in it, even if both are correct, so it cannot be compared. Use "
            "trainer.v1.trainer_mode=skip_sync to test the engine, or mode replay."
        )
    if settings.mode in (Mode.REPEAT, Mode.REPEAT_LAST):
        raise ConfigError(
            f"{BLOCK}.mode is {settings.mode.value!r}, but {_REASON}, so a recorded step cannot replace another one. "
            "Use trainer.v1.trainer_mode=skip_sync, or mode replay."
        )
    if settings.mode is Mode.REPLAY and settings.steps.ranges is not None:
        raise ConfigError(
            f"{BLOCK}.steps is {settings.steps} and mode is 'replay', but {_REASON}, so loaded and generated steps "
            f"cannot be mixed. Replay all steps ({BLOCK}.steps=all)."
        )


def check_sources(rollout_skip: RolloutSkip, mode: str) -> None:
    """Reject synchronous recordings in asynchronous trainings and vice versa, even with ``on_mismatch: reuse``. A
    user-defined trainer mode is accepted, because it is unknown whether it is synchronous."""
    for source in rollout_skip.sources:
        recorded = source.manifest.fingerprint.get(_MODE)
        current = rollout_skip.run.fingerprint.rollout.get(_MODE)
        if f"{SKIP}{recorded}" in MODES and recorded != current and (recorded == SYNC) != (mode == SYNC):
            raise MismatchError(
                f"{source.folder} was recorded with {_MODE}={recorded}, but this training uses {mode}. Not even "
                f"{BLOCK}.on_mismatch=reuse allows this, because {_REASON}. Set {_MODE}=skip_{recorded}, or record "
                "again."
            )


def check_steps(rollout_skip: RolloutSkip, wanted: range) -> None:
    """Reject a recording that would be continued in the middle."""
    if rollout_skip.settings.mode is not Mode.CACHE:
        return
    recorded = {key.step for key in rollout_skip.recorded_keys()} & set(wanted)
    if recorded:
        raise EntryExistsError(
            f"Steps {describe_steps(recorded)} of this training are already recorded in "
            f"{folders_of(rollout_skip.sources)}. Mode 'cache' cannot load them and generate others, because {_REASON}"
            ". Use mode replay to train on the recorded steps, or mode refresh to record them again."
        )


def resume_hint(config: DictConfig) -> str | None:
    """How ``rollout-skip resume`` continues this training; None if there is no checkpoint to continue from."""
    if config.trainer.get("save_freq", -1) <= 0:
        return None
    return " (from its last checkpoint; the steps after it are recorded again)"


def disable_role_switch(config: DictConfig) -> None:
    """Keep verl from lending the training's GPUs to generation, because nothing is generated."""
    if OmegaConf.select(config, _SWITCH):
        with open_dict(config):
            OmegaConf.update(config, _SWITCH, False)


def register(batch: TensorDict, step: int) -> None:
    """Put prompts into TransferQueue as verl does before generating, so that checkpoints contain them."""
    names = [name for name in batch.keys() if not isinstance(batch.get(name), NonTensorData)]  # noqa: SIM118
    tags = [{"is_prompt": True, "status": "pending", "global_steps": step} for _ in range(len(batch))]
    tq.kv_batch_put(keys=list(batch["uid"]), partition_id=PARTITION, tags=tags, fields=batch.select(*names))


def clear(uids: list[str]) -> None:
    """Remove prompts that are no longer in flight."""
    tq.kv_clear(keys=uids, partition_id=PARTITION)


def restored_prompts(forget_trajectories: bool) -> TensorDict | None:
    """The prompts that a checkpoint restored, in the order in which they were drawn.

    ``forget_trajectories`` removes their generated trajectories, which recorded ones will replace.
    """
    prompts = list(waiting_prompts())
    if not prompts:
        return None
    if forget_trajectories:
        listed = tq.kv_list(PARTITION)[PARTITION]
        old = [key for key, tag in listed.items() if not tag.get("is_prompt", False)]
        if old:
            tq.kv_clear(keys=old, partition_id=PARTITION)
        # A training that resumes from the next checkpoint and generates must generate for them again.
        tq.kv_batch_put(keys=prompts, partition_id=PARTITION, tags=[{"status": "pending"}] * len(prompts))
    return tq.kv_batch_get(keys=prompts, partition_id=PARTITION)


def combine_metrics(prepared: dict[str, Any], sampled: dict[str, Any]) -> dict[str, Any]:
    """The metrics of a sample, including those of prompts that were evicted while the step was prepared."""
    if not prepared:
        return dict(sampled)
    metrics = dict(prepared)
    count = next((value for name, value in sampled.items() if name.endswith("/off_policy/evicted_samples")), 0)
    add_eviction_metrics(metrics, sampled, count)
    return metrics
