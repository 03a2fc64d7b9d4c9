"""What is different in asynchronous trainings, which generate ahead and keep prompts in flight from step to step.

A sample depends on what was in flight, and on the weights that each part of it was generated with. So a recording is
replayed from its first step to its last or not at all: steps cannot be loaded and generated in turn.
"""

from __future__ import annotations

from typing import Any

import transfer_queue as tq
from omegaconf import DictConfig, OmegaConf, open_dict
from tensordict import NonTensorData, TensorDict

from verl_rollout_skip.config import BLOCK, SkipConfig, describe_steps
from verl_rollout_skip.errors import ConfigError, EntryExistsError, MismatchError
from verl_rollout_skip.missing import places
from verl_rollout_skip.modes import Mode
from verl_rollout_skip.rollout import RolloutSkip
from verl_rollout_skip.trainers.plugin import MODES
from verl_rollout_skip.trainers.v1.compat import PARTITION, SKIP, SYNC, add_eviction_metrics
from verl_rollout_skip.trainers.v1.sampled import waiting_prompts

_MODE = "trainer.v1.trainer_mode"
_SWITCH = "trainer.v1.separate_async.hybrid_rollout.enable_switch"
_REASON = (
    "an asynchronous training generates ahead: what a step trains on depends on the prompts in flight and on the "
    "weights of the steps before"
)


def check_settings(settings: SkipConfig) -> None:
    """Refuse what cannot be exact, before any worker starts."""
    if settings.mode in (Mode.REPEAT, Mode.REPEAT_LAST):
        raise ConfigError(
            f"{BLOCK}.mode is {settings.mode.value!r}, and {_REASON}, so a recorded step cannot stand for another one. "
            "Use trainer.v1.trainer_mode=skip_sync, or mode replay."
        )
    if settings.mode is Mode.REPLAY and settings.steps.ranges is not None:
        raise ConfigError(
            f"{BLOCK}.steps is {settings.steps} and mode is 'replay', but {_REASON}: steps cannot be loaded and "
            f"generated in turn. Replay all steps ({BLOCK}.steps=all)."
        )


def check_sources(rollout_skip: RolloutSkip, mode: str) -> None:
    """Refuse recordings of the other kind, which ``on_mismatch: reuse`` lets through. A name of somebody's own trainer
    does not say of which kind it is."""
    for source in rollout_skip.sources:
        recorded = source.manifest.fingerprint.get(_MODE)
        current = rollout_skip.run.fingerprint.rollout.get(_MODE)
        if f"{SKIP}{recorded}" in MODES and recorded != current and (recorded == SYNC) != (mode == SYNC):
            raise MismatchError(
                f"{source.folder} was recorded with {_MODE}={recorded}, and this training is one of {mode}. Not even "
                f"{BLOCK}.on_mismatch=reuse can give its rollouts to this training, because {_REASON}. Set "
                f"{_MODE}=skip_{recorded}, or record again."
            )


def check_steps(rollout_skip: RolloutSkip, wanted: range) -> None:
    """Refuse to continue a recording in the middle."""
    if rollout_skip.settings.mode is not Mode.CACHE:
        return
    recorded = {key.step for key in rollout_skip.recorded_keys()} & set(wanted)
    if recorded:
        raise EntryExistsError(
            f"Steps {describe_steps(recorded)} of this training are recorded in {places(rollout_skip.sources)}, and "
            f"mode is 'cache'. They cannot be loaded and others generated, because {_REASON}. Use mode replay to train "
            "on what is recorded, or mode refresh to record these steps anew."
        )


def way_on(config: DictConfig) -> str | None:
    """What ``rollout-skip resume`` does after a recording ends here; None if it has no checkpoint to do it from."""
    if config.trainer.get("save_freq", -1) <= 0:
        return None
    return " (from its last checkpoint; the steps after it are recorded anew)"


def keep_roles(config: DictConfig) -> None:
    """Do not lend the training's GPUs to generation: nothing is generated that would have to be waited for."""
    if OmegaConf.select(config, _SWITCH):
        with open_dict(config):
            OmegaConf.update(config, _SWITCH, False)


def register(batch: TensorDict, step: int) -> None:
    """Put prompts into TransferQueue as verl does before it has them generated, so that checkpoints contain them."""
    names = [name for name in batch.keys() if not isinstance(batch.get(name), NonTensorData)]  # noqa: SIM118
    tags = [{"is_prompt": True, "status": "pending", "global_steps": step} for _ in range(len(batch))]
    tq.kv_batch_put(keys=list(batch["uid"]), partition_id=PARTITION, tags=tags, fields=batch.select(*names))


def clear(uids: list[str]) -> None:
    """Prompts that are not in flight any more."""
    tq.kv_clear(keys=uids, partition_id=PARTITION)


def restored_prompts(forget_trajectories: bool) -> TensorDict | None:
    """The prompts that came with a checkpoint, in the order in which they were drawn; what was generated for them may
    be in the way of what is recorded."""
    prompts = list(waiting_prompts())
    if not prompts:
        return None
    if forget_trajectories:
        listed = tq.kv_list(PARTITION)[PARTITION]
        old = [key for key, tag in listed.items() if not tag.get("is_prompt", False)]
        if old:
            tq.kv_clear(keys=old, partition_id=PARTITION)
        # Whoever resumes from the next checkpoint and generates must generate for them again.
        tq.kv_batch_put(keys=prompts, partition_id=PARTITION, tags=[{"status": "pending"}] * len(prompts))
    return tq.kv_batch_get(keys=prompts, partition_id=PARTITION)


def joined(prepared: dict[str, Any], sampled: dict[str, Any]) -> dict[str, Any]:
    """The metrics of a sample together with those of prompts that were evicted before, while the step was prepared."""
    if not prepared:
        return dict(sampled)
    metrics = dict(prepared)
    count = next((value for name, value in sampled.items() if name.endswith("/off_policy/evicted_samples")), 0)
    add_eviction_metrics(metrics, sampled, count)
    return metrics
