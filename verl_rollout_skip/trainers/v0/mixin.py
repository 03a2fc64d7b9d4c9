"""``RolloutSkipMixin``: puts ``RolloutSkip`` into the rollout step of a verl trainer (V0) and overrides nothing else.

``class MyTrainer(RolloutSkipMixin, RayPPOTrainer): pass`` is all that a user writes. The loop stays verl's own: what
``fit`` asks for by ``generate_sequences`` is loaded or generated, and everything else happens as always.
"""

from __future__ import annotations

import copy
import time
from typing import TYPE_CHECKING, Any

from omegaconf import DictConfig, OmegaConf
from verl import DataProto

from verl_rollout_skip.config import SkipConfig, take_out_skip_keys
from verl_rollout_skip.errors import InertError
from verl_rollout_skip.key import RolloutKey
from verl_rollout_skip.modes import Mode, Reward
from verl_rollout_skip.steps import TrainingSteps, check_steps, find_checkpoint, first_step
from verl_rollout_skip.trainers.base import SkipMixin
from verl_rollout_skip.trainers.fit import warn_outside_fit
from verl_rollout_skip.trainers.v0 import compat
from verl_rollout_skip.trainers.v0.driver_batch import DriverBatch
from verl_rollout_skip.trainers.v0.reward import recompute_rewards
from verl_rollout_skip.trainers.weights import DeferredWeightSync


def _as_v0(config: DictConfig) -> DictConfig:
    """The configuration of a V0 trainer: an entry point that makes one need not look at verl's setting, which says V1
    by default, and what is recorded must not say so."""
    if OmegaConf.select(config, "trainer.use_v1"):
        config = copy.deepcopy(config)
        config.trainer.use_v1 = False
    return config


if TYPE_CHECKING:
    from verl_rollout_skip.trainers.v0.compat import HostTrainer
else:
    HostTrainer = object  # at run time the host is whatever trainer the user derives from


class RolloutSkipMixin(SkipMixin, HostTrainer):
    """To be named before the trainer: ``class MyTrainer(RolloutSkipMixin, RayPPOTrainer)``."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        config: DictConfig = kwargs["config"] if "config" in kwargs else args[0]
        if SkipConfig.from_config(config).mode is not Mode.OFF:
            config = _as_v0(config)
        self._open_rollout_skip(config, compat.check_trainer)
        self._driver_batch: DriverBatch | None = None
        self._gen_batches = 0
        self._loading = False
        self._has_begun = False
        if self.rollout_skip.settings.mode.reads:
            self.rollout_skip.prefetch_first(first_step(config.trainer))
        config = self._configure(config)
        if "config" in kwargs:
            kwargs["config"] = config
        else:
            args = (config, *args[1:])
        super().__init__(*args, **kwargs)
        if self._is_on:
            compat.check_batches(self)
            self._check_recorded_steps()

    # The rollout step

    def init_workers(self) -> None:
        super().init_workers()
        settings = self.rollout_skip.settings
        if not self._is_on:
            return
        manager = compat.find_generator(self)
        self._generate = manager.generate_sequences
        manager.generate_sequences = self._rollout_step
        self._watch_updates()
        if not settings.starts_engine:
            compat.stop_weight_syncs(self)
        elif settings.mode.reads and getattr(self, "checkpoint_manager", None) is not None:
            self._weight_sync = DeferredWeightSync(self.checkpoint_manager)

    def _get_gen_batch(self, batch: DataProto) -> DataProto:
        gen_batch: DataProto = super()._get_gen_batch(batch)
        samples = self.config.actor_rollout_ref.rollout.n
        self._driver_batch = DriverBatch(batch, gen_batch, samples)
        return gen_batch

    def _rollout_step(self, prompts: DataProto) -> DataProto:
        if prompts.meta_info.get("validate", False):
            self._driver_batch = None  # it was the one of this validation
            return self._generate_now(prompts)
        warn_outside_fit(self)
        started = time.perf_counter()
        key = RolloutKey(self.global_steps, self._gen_batches)
        self._gen_batches += 1
        inputs = prompts if self._driver_batch is None else self._driver_batch.complete(prompts)
        rollout = self.rollout_skip.step(key, inputs, lambda _: self._generate_now(prompts))
        if rollout.inputs is not inputs:
            DriverBatch.put_back(self._driver_batch, rollout.inputs, prompts)
        if rollout.hit and self.rollout_skip.settings.reward is Reward.RECOMPUTE:
            recompute_rewards(rollout.batch, rollout.inputs, self)
        if rollout.hit:
            self.rollout_skip.count_wait(rollout, time.perf_counter() - started)
        if key.gen_batch == 0:
            self._samples.log(key.step, rollout.batch, self.tokenizer)
        return rollout.batch

    def _generate_now(self, prompts: DataProto) -> DataProto:
        if self._weight_sync is not None:
            self._weight_sync.catch_up()
        return self._generate(prompts)

    # The course of a training

    @property
    def global_steps(self) -> int:
        """verl's step counter. Keys count within a step, and a step without a rollout step is noticed here."""
        try:
            return self.__dict__["_global_steps"]
        except KeyError:
            raise AttributeError("global_steps is set by fit") from None

    @global_steps.setter
    def global_steps(self, step: int) -> None:
        moved_on = step == self.__dict__.get("_global_steps", step) + 1 and not self._loading
        self._check_not_inert(moved_on and self._has_begun and not self._gen_batches)
        self._has_begun = moved_on
        self._gen_batches = 0
        self.__dict__["_global_steps"] = step

    def _load_checkpoint(self) -> Any:
        self._loading = True
        try:
            return super()._load_checkpoint()
        finally:
            self._loading = False

    # Before and after

    def _configure(self, config: DictConfig) -> DictConfig:
        """What the trainer and its workers get to see."""
        config = copy.deepcopy(config)
        take_out_skip_keys(config)
        settings = self.rollout_skip.settings
        if not settings.starts_engine:
            config = compat.without_engine(config, settings.loads_rewards)
        return config

    def _check_recorded_steps(self) -> None:
        """A training that cannot come to its end is not begun."""
        mode = self.rollout_skip.settings.mode
        trainer = self.config.trainer
        steps_in_data = len(self.train_dataloader) * trainer.total_epochs
        last = min(self.total_training_steps, steps_in_data)
        filters = OmegaConf.select(self.config, "algorithm.filter_groups.enable")
        if filters and mode is Mode.REPLAY:
            # How many steps the data is enough for is not known before. The recorded training may have come to its end.
            last = min(last, max((key.step for key in self.rollout_skip.recorded_keys()), default=0))
        checkpoint = find_checkpoint(trainer)
        has_data = checkpoint is not None and checkpoint.step < steps_in_data
        check_steps(self.rollout_skip, TrainingSteps(last, checkpoint, does_one_more=has_data))

    def _watch_updates(self) -> None:
        """Notice a step that trains on something else before it does, whatever its loop looks like."""
        workers = self.actor_rollout_wg
        update = workers.update_actor

        def watched(*args: Any, **kwargs: Any) -> Any:
            self._check_not_inert(not self._gen_batches)
            return update(*args, **kwargs)

        workers.update_actor = watched

    def _check_not_inert(self, nothing_passed: bool) -> None:
        if not nothing_passed or self.rollout_skip.settings.mode is Mode.OFF:
            return
        raise InertError(
            f"Step {self.global_steps} has no rollout step that goes through {type(self).__name__}: its loop "
            f"generates in another way than by self.{compat.generator_name(self)}.generate_sequences, so nothing is "
            "recorded or replayed. Derive from a trainer whose loop does, or call RolloutSkip.step in your own loop "
            "(docs/configuration.md)."
        )
