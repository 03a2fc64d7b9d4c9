"""``RolloutSkipMixin`` for verl's V1 trainers: loads what ``replay_buffer.sample`` returns, or lets it be generated.

Prompts are held back until the batch is sampled; then it is known whether they have to be generated at all. The loop,
the replay buffer and what comes after a sample stay verl's own.

Importing this module does not import verl, whose import loads plugins and modules of the user: those that want this
mixin would find half of it.
"""

from __future__ import annotations

import copy
import logging
import time
from typing import TYPE_CHECKING, Any

from omegaconf import DictConfig, open_dict
from tensordict import TensorDict
from transfer_queue import KVBatchMeta

from verl_rollout_skip.config import BLOCK, take_out_skip_keys
from verl_rollout_skip.errors import InertError, RolloutSkipError, UnsupportedTrainerError
from verl_rollout_skip.history import LEARNED_FROM
from verl_rollout_skip.key import RolloutKey
from verl_rollout_skip.modes import Mode, Reward
from verl_rollout_skip.outcome import Rollout
from verl_rollout_skip.prompts import UID, OtherInput, row_difference
from verl_rollout_skip.steps import TrainingSteps, check_steps, find_checkpoint, first_step
from verl_rollout_skip.store.loaded import LoadedEntry
from verl_rollout_skip.trainers.base import SkipMixin
from verl_rollout_skip.trainers.compat import import_engine
from verl_rollout_skip.trainers.fit import warn_outside_fit
from verl_rollout_skip.trainers.v1 import asynchronous, compat, reward, sampled
from verl_rollout_skip.trainers.v1.compat import PARTITION, SYNC
from verl_rollout_skip.trainers.v1.dataloader import PushBack
from verl_rollout_skip.trainers.v1.in_flight import InFlight
from verl_rollout_skip.trainers.v1.metrics import of_step
from verl_rollout_skip.trainers.weights import DeferredWeightSync

logger = logging.getLogger(__name__)


if TYPE_CHECKING:
    from verl_rollout_skip.trainers.v1.compat import HostTrainer
else:
    HostTrainer = object  # at run time the host is whatever trainer the user derives from


class RolloutSkipMixin(SkipMixin, HostTrainer):
    """To be named before the trainer: ``class MyTrainer(RolloutSkipMixin, PPOTrainerSync)``."""

    def __init__(self, config: DictConfig) -> None:
        mode = compat.base_mode(type(self))
        self._open_rollout_skip(copy.deepcopy(config), compat.check_trainer)
        if not self._is_on:
            reason = f"{BLOCK}.mode is off" if BLOCK in config else f"the configuration has no block {BLOCK}"
            logger.info(
                "%s records and replays nothing, because %s. To record, set %s.mode=cache and %s.dump_dir (with + "
                "before them if there is no such block).",
                type(self).__name__,
                reason,
                BLOCK,
                BLOCK,
            )
        reward.check_settings(self.rollout_skip.settings, config)
        asynchronous.check_sources(self.rollout_skip, mode)
        if mode != SYNC:
            asynchronous.check_settings(self.rollout_skip.settings)
            self.rollout_skip.way_on = asynchronous.way_on(config)
        self._in_flight = InFlight()
        self._push_back = PushBack()
        self._held: list[TensorDict] = []
        self._prepared: dict[str, Any] = {}
        self._generating = False
        self._never_sent = 0
        self._last_key = RolloutKey(0)
        self._step_metrics: list[dict[str, float]] = []
        # In place, because verl makes the agent loops from the object that it gave us; and it picks settings by the
        # name of its own trainer.
        take_out_skip_keys(config)
        with open_dict(config):
            config.trainer.v1.trainer_mode = mode
        if not self.rollout_skip.settings.starts_engine:
            import_engine()
            from verl_rollout_skip.trainers.v1.engine import remove_engine

            remove_engine(config, self.rollout_skip.settings.loads_rewards)
        if self.rollout_skip.settings.mode is Mode.REPLAY:
            asynchronous.keep_roles(config)
        if self.rollout_skip.settings.mode.reads:
            self.rollout_skip.prefetch_first(first_step(config.trainer))
        super().__init__(config)

    @property
    def _is_sync(self) -> bool:
        return bool(self.trainer_mode == SYNC)

    @property
    def _holds_back(self) -> bool:
        """Whether prompts wait for the decision. Asynchronous trainings generate ahead, or replay everything."""
        return self._is_sync or self.rollout_skip.settings.mode is Mode.REPLAY

    # Drawing and submitting prompts

    def _fetch_one_gen_batch(self) -> TensorDict:
        chunk = self._push_back.next()
        return super()._fetch_one_gen_batch() if chunk is None else chunk

    def _submit_batch_to_rollout(self, batch: TensorDict) -> int:
        if not self._is_on:
            return super()._submit_batch_to_rollout(batch)
        self._in_flight.add(batch)
        if self._generating or not self._holds_back:
            return super()._submit_batch_to_rollout(batch)
        if self._is_sync:
            self._held.append(batch)
        else:
            asynchronous.register(batch, self.global_steps)
        return len(batch)

    def prepare_step(self) -> dict[str, Any]:
        self._prepared = super().prepare_step()
        return self._prepared

    def _reissue_inflight_prompts(self, partition_id: str = PARTITION) -> int:
        """A checkpoint of an asynchronous training brought its prompts in flight with it."""
        if self._is_on and not self._is_sync:
            self._in_flight.restore(asynchronous.restored_prompts(forget_trajectories=self._holds_back))
        return 0 if self._holds_back else super()._reissue_inflight_prompts(partition_id)

    # Sampling

    def _build_replay_buffer(self) -> Any:
        buffer = super()._build_replay_buffer()
        if self._is_on:
            compat.check_replay_buffer(buffer)
            self._sample = buffer.sample
            buffer.sample = self._rollout_step
        return buffer

    def _rollout_step(
        self, global_steps: int, partition_id: str, batch_size: int
    ) -> tuple[KVBatchMeta, dict[str, Any]]:
        if partition_id != PARTITION:
            return self._sample(global_steps=global_steps, partition_id=partition_id, batch_size=batch_size)
        warn_outside_fit(self)
        started = time.perf_counter()
        key = self._next_key()
        rollout = None
        if self.rollout_skip.covers(key) and (self._holds_back or self.rollout_skip.settings.mode is not Mode.CACHE):
            try:
                rollout = self.rollout_skip.load(key, self._line_up)
            finally:
                if rollout is None:
                    self._undraw()
        return self._generate(key, batch_size) if rollout is None else self._put(rollout, started)

    def _next_key(self) -> RolloutKey:
        step, last = self.global_steps, self._last_key
        self._last_key = RolloutKey(step, last.gen_batch + 1 if step == last.step else 0)
        return self._last_key

    def _line_up(self, entry: LoadedEntry) -> TensorDict:
        """The prompts of the current step, row by row as an entry has them; refills are drawn as they were then."""
        self._undraw()
        places, sample = sampled.sample_of(entry)
        self._draw(entry, places, sample.drawn)
        if max(places) >= len(self._in_flight):
            raise OtherInput("it was sampled from prompts of earlier steps that the current training did not draw.")
        return self._in_flight.rows(places)

    def _draw(self, entry: LoadedEntry, places: list[int], recorded: list[str]) -> None:
        """Draw what the step drew then. Prompts that are to be the recorded ones are compared before more are drawn:
        what is drawn ahead in vain has to be put back."""
        compared = 0
        while True:
            drawn = self._in_flight.drawn
            if not self.rollout_skip.replaces_prompts:
                self._compare(entry, places, recorded, compared)
            if len(drawn) >= len(recorded):
                break
            compared = len(drawn)
            dataloader = self.train_dataloader
            fetch = super()._fetch_one_gen_batch
            self._in_flight.add(self._push_back.draw(fetch, dataloader.state_dict))
        if len(drawn) != len(recorded):
            raise OtherInput(
                f"its step drew {len(recorded)} prompts from the data, and the current one draws {len(drawn)}."
            )

    def _undraw(self) -> None:
        self._in_flight.take_back(self._push_back.put_back())

    def _compare(self, entry: LoadedEntry, places: list[int], recorded: list[str], start: int) -> None:
        """Raise if a prompt of those drawn from ``start`` on is another one than then, and no row of the entry will
        say so: it was not trained on, or more would have to be drawn first."""
        drawn = self._in_flight.drawn
        pairs = list(zip(drawn, recorded, strict=False))[start:]
        others = [number for number, (prompt, digest) in enumerate(pairs, start) if prompt.digest != digest]
        first = len(self._in_flight) - len(drawn)
        trained = [number for number in others if first + number in places]
        if not others or (trained and len(drawn) >= len(recorded)):
            return
        text = f"prompt {(trained or others)[0]} of the {len(recorded)} that its step drew from the data"
        if not trained:
            raise OtherInput(f"{text}, one that it did not train on, is another one now.")
        place = first + trained[0]
        difference = row_difference(entry, places.index(place), self._in_flight.rows([place]), 0)
        raise OtherInput(f"{text} is another one now:\n{difference}")

    def _put(self, rollout: Rollout, started: float) -> tuple[KVBatchMeta, dict[str, Any]]:
        """A hit: what was recorded is in TransferQueue when this returns, as if it had been generated."""
        if self.rollout_skip.settings.reward is Reward.RECOMPUTE:
            reward.recompute_rewards(rollout.batch, rollout.inputs, self)
        batch = sampled.put(rollout.batch, rollout.inputs.get(UID).tolist())
        sample = sampled.Sample(**rollout.batch.get(sampled.SAMPLE).data)
        ahead = self._push_back.keep()
        if not self._is_sync:
            for chunk in ahead:
                asynchronous.register(chunk, self.global_steps)
            asynchronous.clear(self._in_flight.uids(sample.gone))
        self._held.clear()
        self._in_flight.settle(sample.gone)
        self._never_sent = len(self._in_flight)
        self._step_metrics.append(self.rollout_skip.count_wait(rollout, time.perf_counter() - started))
        self._log_samples(rollout.batch)
        return batch, dict(sample.metrics)

    def _generate(self, key: RolloutKey, batch_size: int) -> tuple[KVBatchMeta, dict[str, Any]]:
        if self._never_sent:
            raise UnsupportedTrainerError(
                f"{key} is to be generated, and {self._never_sent} prompts are left over from the loaded steps before: "
                f"{type(self.replay_buffer).__name__} keeps prompts from step to step, "
                "so loaded and generated steps cannot follow each other exactly. Use mode replay or refresh."
            )
        if self._weight_sync is not None:
            self._weight_sync.catch_up()
        started = time.perf_counter()
        self._generating = True
        try:
            for held in self._held:
                super()._submit_batch_to_rollout(held)
            self._held.clear()
            batch, metrics = self._sample(
                global_steps=self.global_steps,
                partition_id=PARTITION,
                batch_size=batch_size,
            )
        finally:
            self._generating = False
        self._record(key, batch, metrics, time.perf_counter() - started)
        return batch, metrics

    def _record(self, key: RolloutKey, batch: KVBatchMeta, metrics: dict[str, Any], seconds: float) -> None:
        uids = [sampled.Trajectory.parse(key).uid for key in batch.keys]
        places = self._in_flight.places(uids)
        covered = self.rollout_skip.covers(key)
        dump = covered and self.rollout_skip.will_dump(key)
        gone = sorted(set(places))
        fields: TensorDict | None = None
        inputs: TensorDict | None = None
        failure: RolloutSkipError | None = None
        try:
            gone = self._in_flight.gone(uids, sampled.waiting_prompts())
            fields, partial = sampled.fetch(batch, None if dump else self._needed_fields(covered))
            if dump:
                drawn = [prompt.digest for prompt in self._in_flight.drawn]
                reported = asynchronous.joined(self._prepared, metrics)
                sampled.pack(fields, batch, places, sampled.Sample(drawn, gone, reported, partial))
                inputs = self._in_flight.rows(places)
        except RolloutSkipError as error:
            failure = error
        if covered:
            self._step_metrics.append(self.rollout_skip.record(key, fields, inputs, seconds, dump, failure))
        else:
            self.rollout_skip.pass_by(key, fields, failure)
        if covered and fields is not None:
            self._log_samples(fields)
        self._in_flight.settle(gone)
        self._prepared = {}

    def _needed_fields(self, covered: bool) -> tuple[str, ...]:
        """What is looked at in a rollout that is not dumped."""
        shows_samples = covered and self._samples.is_on and self._last_key.gen_batch == 0
        return (*LEARNED_FROM, "prompts") if shows_samples else LEARNED_FROM

    def _log_samples(self, batch: TensorDict) -> None:
        if self._last_key.gen_batch == 0:
            self._samples.log(self._last_key.step, batch, self.tokenizer)

    # The course of a training

    def _init_dataloader(self) -> None:
        super()._init_dataloader()
        if self._is_on:
            trainer = self.config.trainer
            in_data = self.steps_per_epoch * trainer.total_epochs
            last = min(self.total_training_steps, in_data)
            steps = TrainingSteps(last, find_checkpoint(trainer))
            check_steps(self.rollout_skip, steps, self.parameter_sync_step)
            if not self._is_sync:
                asynchronous.check_steps(self.rollout_skip, steps.range)

    def _setup(self) -> None:
        settings = self.rollout_skip.settings
        if settings.starts_engine:
            super()._setup()
            if settings.mode.reads and self._is_sync:
                self._weight_sync = DeferredWeightSync(self.checkpoint_manager)
        else:
            from verl_rollout_skip.trainers.v1.engine import NoReplicas, remove_transport

            remove_transport(self.config)
            super()._setup()
            for manager in ("checkpoint_manager", "standalone_checkpoint_manager"):
                if hasattr(self, manager):
                    setattr(self, manager, NoReplicas())

    def _validate(self) -> dict[str, float]:
        if self._weight_sync is None:
            return super()._validate()
        with self._weight_sync.suspended():
            return super()._validate()

    def _save_checkpoint(self) -> None:
        with self._push_back.undrawn(self.train_dataloader):
            super()._save_checkpoint()

    def step(self, metrics: dict[str, Any], timing_raw: dict[str, Any]) -> KVBatchMeta:
        self._step_metrics = []
        batch: KVBatchMeta = super().step(metrics, timing_raw)
        if self._is_on and self._last_key.step != self.global_steps:
            raise InertError(
                f"Step {self.global_steps} went by without a sample of "
                f"{type(self.replay_buffer).__name__} through {type(self).__name__}, so "
                "nothing is recorded or replayed: its loop samples in another way than by self.replay_buffer.sample."
            )
        metrics.update(of_step(self._step_metrics))
        return batch
