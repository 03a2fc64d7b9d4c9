"""DAPO's dynamic sampling around the unmodified loop of verl's ``RayPPOTrainer``.

The train dataloader is replaced by one that generates, drops the prompts whose responses all get the same reward, and
repeats until a training batch is full. Only then does it yield the kept prompts to ``fit``. When ``fit`` requests their
responses, it gets the ones that were already generated.
"""

from __future__ import annotations

import logging
import sys
import time
import uuid
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from verl import DataProto
from verl.trainer.ppo.core_algos import kl_penalty

from verl_rollout_skip.errors import ConfigError, RolloutSkipError
from verl_rollout_skip.replay.prompts import UID
from verl_rollout_skip.trainers.v0 import compat

if TYPE_CHECKING:
    from verl_rollout_skip.trainers.v0.compat import DynamicSamplingHost
else:
    DynamicSamplingHost = object

logger = logging.getLogger(__name__)

# Columns that generation adds for its own use or copies from its input. fit creates its own.
_GENERATION_COLUMNS = (UID, "priority", "__do_sample__")


@dataclass
class PendingStep:
    """The rollouts generated so far for one training step: the kept prompts and their rows."""

    prompts: list[dict[str, Any]] = field(default_factory=list)
    rows: list[DataProto] = field(default_factory=list)
    timings: list[dict[str, float]] = field(default_factory=list)
    kept: int = 0
    seconds: float = 0.0

    @property
    def gen_batches(self) -> int:
        return len(self.timings)


class DynamicSampling(DynamicSamplingHost):
    """Adds ``algorithm.filter_groups`` to a trainer. Must precede the trainer in the list of bases."""

    train_dataloader: Any
    async_rollout_manager: Any

    def _create_dataloader(self, *args: Any, **kwargs: Any) -> None:
        super()._create_dataloader(*args, **kwargs)
        if self._filters_groups():
            self.train_dataloader = DynamicSamplingLoader(self, self.train_dataloader)

    def _filters_groups(self) -> bool:
        groups = self.config.algorithm.get("filter_groups")
        if groups is None:
            raise ConfigError(
                f"algorithm.filter_groups is not set, but {type(self).__name__} needs it. Set "
                "algorithm.filter_groups.{enable,metric,max_num_gen_batches}, as recipes/dapo does."
            )
        if groups.enable:
            compat.check_dynamic_sampling(type(self))
        return bool(groups.enable)

    def init_workers(self) -> None:
        super().init_workers()
        if self._filters_groups():
            self.async_rollout_manager = PregeneratedRollouts(self, self.async_rollout_manager)

    def _update_actor(self, batch: DataProto) -> DataProto:
        return self._with_gen_batches(super()._update_actor(batch))

    def _update_critic(self, batch: DataProto) -> DataProto:
        return self._with_gen_batches(super()._update_critic(batch))

    def _with_gen_batches(self, output: DataProto) -> DataProto:
        """Add the number of generation batches to the output of an update, the only way into the metrics of a step."""
        if isinstance(self.async_rollout_manager, PregeneratedRollouts):
            output.meta_info["metrics"]["train/num_gen_batches"] = [self.async_rollout_manager.gen_batches]
        return output


class PregeneratedRollouts:
    """Wraps the rollout manager. When ``fit`` generates, it gets the rows that were already generated."""

    def __init__(self, trainer: DynamicSamplingHost, manager: Any) -> None:
        self.manager = manager
        self.gen_batches = 0
        self._trainer = trainer
        self._samples = trainer.config.actor_rollout_ref.rollout.n
        self._waiting: tuple[dict[str, Any], DataProto] | None = None

    def __getattr__(self, name: str) -> Any:
        return getattr(self.manager, name)

    def keep(self, prompts: dict[str, Any], rows: DataProto, gen_batches: int) -> None:
        """Keep the rows for the next request, which must be for these prompts."""
        self._waiting = (prompts, rows)
        self.gen_batches = gen_batches

    def generate_sequences(self, prompts: DataProto) -> DataProto:
        if prompts.meta_info.get("validate", False) or self._waiting is None:
            return self.manager.generate_sequences(prompts)
        kept, rows = self._waiting
        self._waiting = None
        self._check_same(kept, prompts)
        if len(prompts) == len(rows):
            return rows
        # REMAX also requests a greedy response to each prompt.
        timing = rows.meta_info.pop("timing")
        baseline = with_rewards(self._trainer, self.manager.generate_sequences(prompts.slice(len(rows), None)))
        baseline.pop(non_tensor_batch_keys=[key for key in _GENERATION_COLUMNS if key in baseline.non_tensor_batch])
        baseline.meta_info = dict(rows.meta_info)
        rows = DataProto.concat([rows, baseline])
        rows.meta_info["timing"] = timing
        return rows

    def _check_same(self, kept: dict[str, Any], prompts: DataProto) -> None:
        """Raise if ``fit`` requests different prompts. They are compared by identity, because prompts may be equal."""
        for key, values in kept.items():
            asked = prompts.non_tensor_batch.get(key)
            if key == UID or asked is None or values.dtype != object:
                continue  # fit creates its own uids
            rows = asked[: len(values) * self._samples : self._samples]
            if len(rows) != len(values) or any(one is not other for one, other in zip(rows, values, strict=True)):
                raise RolloutSkipError(
                    f"The trainer requests responses to prompts that the dataloader did not return (column {key!r}): "
                    "it changes its batch between the dataloader and the rollout step, which dynamic sampling does not "
                    "support."
                )


class DynamicSamplingLoader:
    """Yields one batch per training step, of prompts whose responses are already generated.

    ``fit`` counts the passes over its dataloader as epochs. A pass here is a pass over the data; a step that is not
    full at the end of a pass continues in the next one.
    """

    def __init__(self, trainer: DynamicSamplingHost, loader: Any) -> None:
        self._trainer = trainer
        self._loader = loader
        self._config = trainer.config
        self._epoch = 0
        self._pass = 0
        self._pending = PendingStep()
        self._metric = GroupMetric(trainer)

    def __len__(self) -> int:
        # fit divides the step by this number to find the epoch in which a resumed training starts and the end of an
        # epoch. Here a step is not a fixed share of an epoch. With this number, fit starts at epoch 0 and loads our
        # state.
        return sys.maxsize

    @property
    def sampler(self) -> Any:
        """verl 0.7.1 checks whether the sampler is a curriculum."""
        return self._loader.sampler

    def state_dict(self) -> dict[str, Any]:
        return {"loader": self._loader.state_dict(), "epoch": self._epoch}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        if "loader" not in state:
            raise ConfigError(
                "The checkpoint was written without algorithm.filter_groups.enable=True, so its dataloader counts "
                "training batches. Resume with the setting that it was saved with."
            )
        self._loader.load_state_dict(state["loader"])
        self._epoch = state["epoch"]

    def __iter__(self) -> Iterator[dict[str, Any]]:
        number, self._pass = self._pass, self._pass + 1
        if number >= self._epoch:  # otherwise the checkpoint is past this epoch
            for raw in self._loader:
                self._generate(raw)
                if self._pending.kept >= self._config.data.train_batch_size:
                    yield self._finish_step()
                else:
                    self._check_limit()
            self._epoch += 1
        # fit requests no batch after its last step, so at this point the training is not complete.
        if self._pass >= self._config.trainer.total_epochs:
            logger.warning(
                "the data of %d epochs is used up: the training ends after step %d of %d, without the validation and "
                "checkpoint of a last step. %d kept prompts are too few for a step of %d and are not trained on",
                *(self._epoch, self._trainer.global_steps - 1, self._trainer.total_training_steps),
                *(self._pending.kept, self._config.data.train_batch_size),
            )

    def _generate(self, raw: dict[str, Any]) -> None:
        started = time.perf_counter()
        trainer, samples = self._trainer, self._config.actor_rollout_ref.rollout.n
        batch = DataProto.from_single_dict(dict(raw))
        batch.meta_info["temperature"] = self._config.actor_rollout_ref.rollout.temperature
        batch.non_tensor_batch[UID] = np.array([str(uuid.uuid4()) for _ in range(len(batch))], dtype=object)
        prompts = compat.prompts_of(trainer, batch)
        prompts.meta_info["global_steps"] = trainer.global_steps
        prompts = prompts.repeat(repeat_times=samples, interleave=True)
        rows = trainer.async_rollout_manager.manager.generate_sequences(prompts)
        rows = with_rewards(trainer, rows)
        self._pending.timings.append(rows.meta_info.pop("timing", {}))
        kept = self._metric.with_variance(rows, samples)
        rows.pop(non_tensor_batch_keys=[key for key in _GENERATION_COLUMNS if key in rows.non_tensor_batch])
        # A recorded batch may have replaced the one from the dataloader.
        self._pending.prompts.append({key: _column(key, batch, prompts, samples)[kept] for key in raw})
        self._pending.rows.append(
            rows.select_idxs(np.repeat(kept, samples) * samples + np.tile(range(samples), len(kept)))
        )
        self._pending.kept += len(kept)
        self._pending.seconds += time.perf_counter() - started

    def _finish_step(self) -> dict[str, Any]:
        pending, self._pending = self._pending, PendingStep()
        size, samples = self._config.data.train_batch_size, self._config.actor_rollout_ref.rollout.n
        prompts = {key: _joined([part[key] for part in pending.prompts])[:size] for key in pending.prompts[0]}
        meta = dict(pending.rows[0].meta_info)
        for part in pending.rows:
            part.meta_info = {}
        rows = DataProto.concat(pending.rows).slice(0, size * samples)
        rows.meta_info = {**meta, "timing": _summed(pending)}
        self._trainer.async_rollout_manager.keep(prompts, rows, pending.gen_batches)
        return prompts

    def _check_limit(self) -> None:
        limit, done = self._config.algorithm.filter_groups.get("max_num_gen_batches") or 0, self._pending.gen_batches
        if limit <= 0 or done < limit:
            logger.info(
                "step %d: %d of %d prompts after %d generation batches, more are needed",
                *(self._trainer.global_steps, self._pending.kept, self._config.data.train_batch_size, done),
            )
            return
        raise ValueError(
            f"num_gen_batches={done} >= max_num_gen_batches={limit}. Generated too many. Please check if your data are "
            f"too difficult. You could also try set max_num_gen_batches=0 to enable endless trials. (Step "
            f"{self._trainer.global_steps}: {self._pending.kept} of {self._config.data.train_batch_size} prompts have "
            f"responses that differ in {self._config.algorithm.filter_groups.metric!r}.)"
        )


class GroupMetric:
    """``algorithm.filter_groups.metric``: a prompt is kept if its responses differ in it."""

    def __init__(self, trainer: DynamicSamplingHost) -> None:
        self._trainer = trainer
        self._config = trainer.config.algorithm
        self._name = self._config.filter_groups.get("metric")

    def with_variance(self, rows: DataProto, samples: int) -> np.ndarray:
        """The indexes of the prompts to keep."""
        values = self._values(rows).reshape(-1, samples)
        # Not the standard deviation, which can be slightly above zero for equal values.
        return np.flatnonzero((values.max(axis=1) > values.min(axis=1)) | (samples == 1))

    def _values(self, rows: DataProto) -> np.ndarray:
        if self._name == "seq_final_reward":
            return self._final_rewards(rows)
        if self._name in ("seq_reward", "reward"):
            return rows.batch["rm_scores"].sum(dim=-1).numpy()
        extras = {key: rows.non_tensor_batch[key] for key in rows.meta_info.get("reward_extra_keys", [])}
        numbers = [key for key, values in extras.items() if _are_numbers(values)]
        if self._name in numbers:
            return np.asarray(extras[self._name], dtype=float)
        raise ConfigError(
            f"algorithm.filter_groups.metric is {self._name!r}. Valid values are seq_reward, seq_final_reward, and "
            f"numbers that the reward function returns: {', '.join(numbers) or 'none'}."
        )

    def _final_rewards(self, rows: DataProto) -> np.ndarray:
        """The rewards including the KL penalty, if there is one. ``fit`` updates the KL controller."""
        scores = rows.batch["rm_scores"]
        if self._config.use_kl_in_reward:
            trainer = self._trainer
            rows.meta_info["temperature"] = trainer.config.actor_rollout_ref.rollout.temperature
            penalty = kl_penalty(*compat.log_probs(trainer, rows), kl_penalty=self._config.kl_penalty)
            scores = scores - trainer.kl_ctrl_in_reward.value * penalty * rows.batch["response_mask"]
        return scores.sum(dim=-1).numpy()


def with_rewards(trainer: DynamicSamplingHost, rows: DataProto) -> DataProto:
    """Let a reward model that shares the engine's devices score the rows after generation, as ``fit`` does."""
    if not trainer.use_rm or "rm_scores" in rows.batch:
        return rows
    trainer.checkpoint_manager.sleep_replicas()
    rows = rows.union(compat.scores_of_reward_model(trainer, rows))
    trainer.checkpoint_manager.update_weights(trainer.global_steps - 1)
    return rows


def _column(key: str, batch: DataProto, prompts: DataProto, samples: int) -> Any:
    """A column of the dataloader's batch, from the part that ``fit`` keeps or from the part that is sent."""
    for part, step in ((batch, 1), (prompts, samples)):
        if key in part.non_tensor_batch:
            return part.non_tensor_batch[key][::step]
        if part.batch is not None and key in part.batch.keys():  # noqa: SIM118 - a TensorDict is not a dict
            return part.batch[key][::step]
    raise RolloutSkipError(f"_get_gen_batch of this trainer drops {key!r}, which dynamic sampling must return to fit.")


def _are_numbers(values: np.ndarray) -> bool:
    return all(isinstance(value, int | float | np.number | np.bool_) for value in values.tolist())


def _joined(parts: list[Any]) -> Any:
    return torch.cat(parts) if isinstance(parts[0], torch.Tensor) else np.concatenate(parts)


def _summed(pending: PendingStep) -> dict[str, float]:
    """The timings of a step: those of its generation batches, plus the time before ``fit`` starts its timers."""
    summed = {key: value for timing in pending.timings for key, value in timing.items()}
    for key in summed:
        values = [timing[key] for timing in pending.timings if key in timing]
        if key in ("rollout_skip/hit", "rollout_skip/off_policy"):
            summed[key] = sum(values) / len(values)
        elif key in ("rollout_skip/load_s", "rollout_skip/saved_s"):
            summed[key] = sum(values)
    return {**summed, "gen": pending.seconds, "step": pending.seconds}
