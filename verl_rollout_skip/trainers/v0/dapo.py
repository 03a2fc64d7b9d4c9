"""DAPO's dynamic sampling around the loop of verl's ``RayPPOTrainer``, which stays as it is.

The train dataloader is replaced by one that generates, drops the prompts whose responses are all rewarded alike,
collects until a training batch is full, and only then gives ``fit`` the prompts that were kept. When ``fit`` asks for
their responses it gets those that were generated already.
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
from verl_rollout_skip.prompts import UID
from verl_rollout_skip.trainers.v0.compat import check_dynamic_sampling

if TYPE_CHECKING:
    from verl_rollout_skip.trainers.v0.compat import DynamicSamplingHost
else:
    DynamicSamplingHost = object

logger = logging.getLogger(__name__)

# What the generation adds to the rows for its own use, or echoes of its input; fit makes its own.
_OF_THE_GENERATION = (UID, "priority", "__do_sample__")


@dataclass
class PendingStep:
    """What was generated for one training step so far: the prompts that were kept, and their rows."""

    prompts: list[dict[str, Any]] = field(default_factory=list)
    rows: list[DataProto] = field(default_factory=list)
    timings: list[dict[str, float]] = field(default_factory=list)
    kept: int = 0
    seconds: float = 0.0

    @property
    def gen_batches(self) -> int:
        return len(self.timings)


class DynamicSampling(DynamicSamplingHost):
    """To be named before a trainer: adds ``algorithm.filter_groups`` to it."""

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
                f"algorithm.filter_groups is not set, and {type(self).__name__} filters by it. Set "
                "algorithm.filter_groups.{enable,metric,max_num_gen_batches}, as recipes/dapo does."
            )
        if groups.enable:
            check_dynamic_sampling(type(self))
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
        """The only ways from here into the metrics of a step are the outputs of its updates."""
        if isinstance(self.async_rollout_manager, PregeneratedRollouts):
            output.meta_info["metrics"]["train/num_gen_batches"] = [self.async_rollout_manager.gen_batches]
        return output


class PregeneratedRollouts:
    """Stands before the generating manager and gives ``fit`` the rows that were generated for its prompts."""

    def __init__(self, trainer: DynamicSamplingHost, manager: Any) -> None:
        self.manager = manager
        self.gen_batches = 0
        self._trainer = trainer
        self._samples = trainer.config.actor_rollout_ref.rollout.n
        self._waiting: tuple[dict[str, Any], DataProto] | None = None

    def __getattr__(self, name: str) -> Any:
        return getattr(self.manager, name)

    def keep(self, prompts: dict[str, Any], rows: DataProto, gen_batches: int) -> None:
        """For the next request, which is to be for these prompts."""
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
        # REMAX asks for a greedy response to each prompt as well.
        timing = rows.meta_info.pop("timing")
        baseline = with_rewards(self._trainer, self.manager.generate_sequences(prompts.slice(len(rows), None)))
        baseline.pop(non_tensor_batch_keys=[key for key in _OF_THE_GENERATION if key in baseline.non_tensor_batch])
        baseline.meta_info = dict(rows.meta_info)
        rows = DataProto.concat([rows, baseline])
        rows.meta_info["timing"] = timing
        return rows

    def _check_same(self, kept: dict[str, Any], prompts: DataProto) -> None:
        """The prompts went through ``fit`` as objects, so that they can be told apart even if they are equal."""
        for key, values in kept.items():
            asked = prompts.non_tensor_batch.get(key)
            if key == UID or asked is None or values.dtype != object:
                continue  # fit makes uids of its own
            rows = asked[: len(values) * self._samples : self._samples]
            if len(rows) != len(values) or any(one is not other for one, other in zip(rows, values, strict=True)):
                raise RolloutSkipError(
                    f"The trainer asks for responses to other prompts than those that were kept for it (column "
                    f"{key!r}): it changes its batch between the dataloader and the rollout step, which dynamic "
                    "sampling cannot follow."
                )


class DynamicSamplingLoader:
    """Gives ``fit`` one batch for each training step, of prompts whose responses are there already.

    ``fit`` numbers the passes over its dataloader as epochs. A pass here is a pass over the data, and a step that is
    not full at the end of one goes on in the next.
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
        # fit divides its steps by this to find the epoch in which a resumed training is, and whether it is at the end
        # of one. Steps have no fixed share of an epoch here: this makes fit begin with 0 and load our own state.
        return sys.maxsize

    @property
    def sampler(self) -> Any:
        """verl 0.7.1 looks whether it is a curriculum."""
        return self._loader.sampler

    def state_dict(self) -> dict[str, Any]:
        return {"loader": self._loader.state_dict(), "epoch": self._epoch}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        if "loader" not in state:
            raise ConfigError(
                "The checkpoint was written without algorithm.filter_groups.enable=True: its dataloader counts "
                "training batches. Resume with the setting that it was written with."
            )
        self._loader.load_state_dict(state["loader"])
        self._epoch = state["epoch"]

    def __iter__(self) -> Iterator[dict[str, Any]]:
        number, self._pass = self._pass, self._pass + 1
        if number >= self._epoch:  # otherwise a resumed training was further already
            for raw in self._loader:
                self._generate(raw)
                if self._pending.kept >= self._config.data.train_batch_size:
                    yield self._finish_step()
                else:
                    self._check_limit()
            self._epoch += 1
        # fit stops to ask for batches after its last step, so it has not come to that.
        if self._pass >= self._config.trainer.total_epochs:
            logger.warning(
                "the data of %d epochs is used up: the training ends after step %d of %d, without the validation and "
                "checkpoint of a last step. %d prompts that were kept are too few for a step of %d and are left out",
                *(self._epoch, self._trainer.global_steps - 1, self._trainer.total_training_steps),
                *(self._pending.kept, self._config.data.train_batch_size),
            )

    def _generate(self, raw: dict[str, Any]) -> None:
        started = time.perf_counter()
        trainer, samples = self._trainer, self._config.actor_rollout_ref.rollout.n
        batch = DataProto.from_single_dict(dict(raw))
        batch.meta_info["temperature"] = self._config.actor_rollout_ref.rollout.temperature
        batch.non_tensor_batch[UID] = np.array([str(uuid.uuid4()) for _ in range(len(batch))], dtype=object)
        prompts = trainer._get_gen_batch(batch)
        prompts.meta_info["global_steps"] = trainer.global_steps
        prompts = prompts.repeat(repeat_times=samples, interleave=True)
        rows = trainer.async_rollout_manager.manager.generate_sequences(prompts)
        rows = with_rewards(trainer, rows)
        self._pending.timings.append(rows.meta_info.pop("timing", {}))
        kept = self._metric.with_variance(rows, samples)
        rows.pop(non_tensor_batch_keys=[key for key in _OF_THE_GENERATION if key in rows.non_tensor_batch])
        # A recorded batch may have taken the place of what the dataloader gave.
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
    """``algorithm.filter_groups.metric``: what the responses to a prompt must differ in for it to be kept."""

    def __init__(self, trainer: DynamicSamplingHost) -> None:
        self._trainer = trainer
        self._config = trainer.config.algorithm
        self._name = self._config.filter_groups.get("metric")

    def with_variance(self, rows: DataProto, samples: int) -> np.ndarray:
        """The numbers of the prompts that are kept."""
        values = self._values(rows).reshape(-1, samples)
        # Not the standard deviation: of equal values it may be a little more than zero.
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
            f"algorithm.filter_groups.metric is {self._name!r}. Valid are seq_reward, seq_final_reward, and numbers "
            f"that the reward function returns: {', '.join(numbers) or 'none'}."
        )

    def _final_rewards(self, rows: DataProto) -> np.ndarray:
        """The rewards with the KL penalty, if there is one in the reward; the controller is left to ``fit``."""
        scores = rows.batch["rm_scores"]
        if self._config.use_kl_in_reward:
            trainer = self._trainer
            rows.meta_info["temperature"] = trainer.config.actor_rollout_ref.rollout.temperature
            old_log_probs = trainer._compute_old_log_prob(rows)[0].batch["old_log_probs"]
            ref_log_prob = trainer._compute_ref_log_prob(rows).batch["ref_log_prob"]
            penalty = kl_penalty(old_log_probs, ref_log_prob, kl_penalty=self._config.kl_penalty)
            scores = scores - trainer.kl_ctrl_in_reward.value * penalty * rows.batch["response_mask"]
        return scores.sum(dim=-1).numpy()


def with_rewards(trainer: DynamicSamplingHost, rows: DataProto) -> DataProto:
    """A reward model that shares its devices with the engine is asked after the generation, as fit does it."""
    if not trainer.use_rm or "rm_scores" in rows.batch:
        return rows
    trainer.checkpoint_manager.sleep_replicas()
    rows = rows.union(trainer._compute_reward_colocate(rows))
    trainer.checkpoint_manager.update_weights(trainer.global_steps - 1)
    return rows


def _column(key: str, batch: DataProto, prompts: DataProto, samples: int) -> Any:
    """A column of the dataloader's batch, of which some were kept and some were sent to be generated."""
    for part, step in ((batch, 1), (prompts, samples)):
        if key in part.non_tensor_batch:
            return part.non_tensor_batch[key][::step]
        if part.batch is not None and key in part.batch.keys():  # noqa: SIM118 - a TensorDict is no dict
            return part.batch[key][::step]
    raise RolloutSkipError(f"_get_gen_batch of this trainer drops {key!r}, which dynamic sampling needs for fit.")


def _are_numbers(values: np.ndarray) -> bool:
    return all(isinstance(value, int | float | np.number | np.bool_) for value in values.tolist())


def _joined(parts: list[Any]) -> Any:
    return torch.cat(parts) if isinstance(parts[0], torch.Tensor) else np.concatenate(parts)


def _summed(pending: PendingStep) -> dict[str, float]:
    """The timings of a step: those of its generation batches, and what fit could not measure itself."""
    summed = {key: value for timing in pending.timings for key, value in timing.items()}
    for key in summed:
        values = [timing[key] for timing in pending.timings if key in timing]
        if key in ("rollout_skip/hit", "rollout_skip/off_policy"):
            summed[key] = sum(values) / len(values)
        elif key in ("rollout_skip/load_s", "rollout_skip/saved_s"):
            summed[key] = sum(values)
    return {**summed, "gen": pending.seconds, "step": pending.seconds}
