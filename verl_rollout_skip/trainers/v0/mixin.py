"""``RolloutSkipMixin`` for verl's V0 trainers: loads what ``generate_sequences`` would return, or generates it.

A user writes ``class MyTrainer(RolloutSkipMixin, RayPPOTrainer): pass``. The loop stays verl's own; only the method
that generates is replaced.
"""

from __future__ import annotations

import copy
import time
from typing import TYPE_CHECKING, Any

from omegaconf import DictConfig, OmegaConf
from verl import DataProto

from verl_rollout_skip.config.modes import Mode, Reward, Tasks
from verl_rollout_skip.config.skip_config import BLOCK, SkipConfig, remove_skip_keys
from verl_rollout_skip.errors import ConfigError, MismatchError
from verl_rollout_skip.replay.steps import TrainingSteps, check_steps, find_checkpoint, first_step
from verl_rollout_skip.trainers.base import KeyCounter, SkipMixin
from verl_rollout_skip.trainers.checkpoints import observe_checkpoint
from verl_rollout_skip.trainers.v0 import compat
from verl_rollout_skip.trainers.v0.driver_batch import DriverBatch
from verl_rollout_skip.trainers.v0.reward import recompute_rewards
from verl_rollout_skip.trainers.v0.updates import observe_updates
from verl_rollout_skip.trainers.weights import DeferredWeightSync

if TYPE_CHECKING:
    from verl_rollout_skip.trainers.v0.compat import HostTrainer
else:
    HostTrainer = object  # at run time, the host is the trainer class that follows the mixin


class RolloutSkipMixin(SkipMixin, HostTrainer):
    """The mixin must precede the trainer: ``class MyTrainer(RolloutSkipMixin, RayPPOTrainer)``."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        config: DictConfig = kwargs["config"] if "config" in kwargs else args[0]
        settings = SkipConfig.from_config(config)
        if settings.mode is not Mode.OFF:
            if settings.tasks is Tasks.ON:
                raise ConfigError(
                    f"{BLOCK}.tasks is 'on', but only V1 trainers keep rollouts in TransferQueue, where tasks can read "
                    f"them. Set {BLOCK}.tasks=auto."
                )
            config = _as_v0(config)
        self._open_rollout_skip(config, compat.check_trainer)
        self._driver_batch: DriverBatch | None = None
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

    def init_workers(self) -> None:
        super().init_workers()
        if not self._is_on:
            return
        generator = compat.find_generator(self)
        self._generate = generator.generate_sequences
        generator.generate_sequences = self._rollout_step
        self._watch_updates()
        observe_updates(self, self.rollout_skip.ledger)
        if self.rollout_skip.shadow is not None:
            self.rollout_skip.shadow.show_text(self.tokenizer.decode)
        settings = self.rollout_skip.settings
        if not settings.starts_engine:
            compat.stop_weight_syncs(self)
        elif settings.defers_weight_syncs and getattr(self, "checkpoint_manager", None) is not None:
            self._weight_sync = DeferredWeightSync(self.checkpoint_manager)

    # The rollout step

    def _get_gen_batch(self, batch: DataProto) -> DataProto:
        gen_batch: DataProto = super()._get_gen_batch(batch)
        samples = self.config.actor_rollout_ref.rollout.n
        self._driver_batch = DriverBatch(batch, gen_batch, samples)
        return gen_batch

    def _rollout_step(self, prompts: DataProto) -> DataProto:
        """Called by verl's loop in place of ``generate_sequences``."""
        if prompts.meta_info.get("validate", False):
            self._driver_batch = None  # it belongs to this validation
            return self._generate_now(prompts)
        started = time.perf_counter()
        key = self._next_key(self.global_steps)
        inputs = prompts if self._driver_batch is None else self._driver_batch.complete(prompts)

        def generate(given: DataProto) -> DataProto:
            if given is not inputs:  # in mode shadow, the engine gets the recorded prompts too
                self._replace_batch(given, prompts)
            return self._generate_now(prompts)

        rollout = self.rollout_skip.step(key, inputs, generate)
        if rollout.inputs is not inputs and self.rollout_skip.shadow is None:
            self._replace_batch(rollout.inputs, prompts)
        if rollout.hit and self.rollout_skip.settings.reward is Reward.RECOMPUTE:
            recompute_rewards(rollout.batch, rollout.inputs, self)
        if rollout.hit:
            self.rollout_skip.count_wait(rollout, time.perf_counter() - started)
        if key.gen_batch == 0:
            self._samples.log(key.step, rollout.batch, self.tokenizer)
        return rollout.batch

    def _replace_batch(self, recorded: DataProto, prompts: DataProto) -> None:
        if self._driver_batch is None:
            raise MismatchError(
                "The recorded batch cannot replace the current one, because this trainer does not make its input with "
                "_get_gen_batch. Use rollout_skip.prompts=check."
            )
        self._driver_batch.replace_with(recorded, prompts)

    def _generate_now(self, prompts: DataProto) -> DataProto:
        if self._weight_sync is not None:
            self._weight_sync.catch_up()
        return self._generate(prompts)

    # Settings and steps, before any worker starts

    def _configure(self, config: DictConfig) -> DictConfig:
        """The configuration that verl's trainer and its workers see."""
        config = copy.deepcopy(config)
        remove_skip_keys(config)
        settings = self.rollout_skip.settings
        if not settings.starts_engine:
            config = compat.without_engine(config, settings.loads_rewards)
        return config

    def _check_recorded_steps(self) -> None:
        """Raise if the training cannot reach its last step."""
        mode = self.rollout_skip.settings.mode
        trainer = self.config.trainer
        steps_in_data = len(self.train_dataloader) * trainer.total_epochs
        last = min(self.total_training_steps, steps_in_data)
        filters = OmegaConf.select(self.config, "algorithm.filter_groups.enable")
        if filters and mode.needs_all_steps:
            # A filter may use up the data before the last step, as it may have done in the recorded training.
            last = min(last, max((key.step for key in self.rollout_skip.recorded_keys()), default=0))
        checkpoint = find_checkpoint(trainer)
        has_data = checkpoint is not None and checkpoint.step < steps_in_data
        check_steps(self.rollout_skip, TrainingSteps(last, checkpoint, runs_extra_step=has_data))

    # Steps without a rollout step

    @property
    def _rollout_call(self) -> str:
        return f"self.{compat.generator_name(self)}.generate_sequences"

    def _load_checkpoint(self) -> Any:
        loaded = super()._load_checkpoint()
        self._rollout_keys = KeyCounter(start=getattr(self, "global_steps", 0))
        return loaded

    def _save_checkpoint(self) -> None:
        super()._save_checkpoint()
        observe_checkpoint(self, self.rollout_skip.ledger)

    def _watch_updates(self) -> None:
        """Raise before a step that had no rollout step updates the actor, whatever its loop looks like."""
        workers = compat.find_actor(self)
        update = workers.update_actor

        def watched(*args: Any, **kwargs: Any) -> Any:
            self._check_rollout_step(self.global_steps)
            return update(*args, **kwargs)

        workers.update_actor = watched

    def _end_training(self) -> None:
        super()._end_training()
        # This also catches loops that update some other way. The last step may or may not have been completed.
        missing = self._rollout_keys.first_without_rollout(end=getattr(self, "global_steps", 0))
        if missing is not None:
            self._check_rollout_step(missing)


def _as_v0(config: DictConfig) -> DictConfig:
    """The configuration with ``trainer.use_v1=False``, so that the recording says that it was made by a V0 trainer.

    An entry point may create a V0 trainer regardless of this setting, which is True by default.
    """
    if OmegaConf.select(config, "trainer.use_v1"):
        config = copy.deepcopy(config)
        config.trainer.use_v1 = False
    return config
