"""``RolloutSkipMixin`` for verl's V1 trainers: loads the batch that ``replay_buffer.sample`` returns, or generates it.

Prompts are held back until the trainer samples, because only then is it known whether they have to be generated. The
loop, the replay buffer and everything after the sample are verl's own.

This module does not import verl, because ``import verl`` loads plugins and user modules that may import this mixin.
"""

from __future__ import annotations

import copy
import logging
import time
from typing import TYPE_CHECKING, Any

from omegaconf import DictConfig, open_dict
from tensordict import TensorDict
from transfer_queue import KVBatchMeta

from verl_rollout_skip.config.modes import Mode, Reward, Tasks
from verl_rollout_skip.config.skip_config import SkipConfig, remove_skip_keys
from verl_rollout_skip.errors import QueueError, UnsupportedBatchError, UnsupportedTrainerError
from verl_rollout_skip.key import RolloutKey
from verl_rollout_skip.replay.lineage import LEARNED_FROM
from verl_rollout_skip.replay.prompts import UID, InputMismatch
from verl_rollout_skip.replay.results import Miss, Rollout
from verl_rollout_skip.replay.steps import TrainingSteps, check_steps, find_checkpoint, first_step
from verl_rollout_skip.trainers.base import SkipMixin
from verl_rollout_skip.trainers.checkpoints import observe_checkpoint
from verl_rollout_skip.trainers.compat import import_engine
from verl_rollout_skip.trainers.v1 import asynchronous, compat, reward
from verl_rollout_skip.trainers.v1.alignment import Alignment
from verl_rollout_skip.trainers.v1.compat import PARTITION, SYNC
from verl_rollout_skip.trainers.v1.dataloader import PushBack
from verl_rollout_skip.trainers.v1.in_flight import InFlight
from verl_rollout_skip.trainers.v1.metrics import of_step
from verl_rollout_skip.trainers.v1.shadow import ShadowSteps
from verl_rollout_skip.trainers.v1.transfer import rows as queue
from verl_rollout_skip.trainers.v1.transfer.loading import PutEntry, TaskLoader, report_driver_loads
from verl_rollout_skip.trainers.v1.transfer.partial import PartialRollouts
from verl_rollout_skip.trainers.v1.transfer.pool import TaskPool
from verl_rollout_skip.trainers.v1.transfer.reading import SampleReader
from verl_rollout_skip.trainers.v1.transfer.rows import SAMPLE, PutBatch, Sample
from verl_rollout_skip.trainers.v1.updates import ObservesUpdates
from verl_rollout_skip.trainers.weights import DeferredWeightSync

logger = logging.getLogger(__name__)

if TYPE_CHECKING:
    from verl_rollout_skip.trainers.v1.compat import HostTrainer
else:
    HostTrainer = object  # at run time, the host is the trainer class that follows the mixin


class RolloutSkipMixin(ObservesUpdates, SkipMixin, HostTrainer):
    """The mixin must precede the trainer: ``class MyTrainer(RolloutSkipMixin, PPOTrainerSync)``.

    ``keeps_sampled_rows``: the trainer does not change a sampled row in TransferQueue before ``_compute_advantage``, so
    the rows of a large sample can be read while the training continues. By default, only verl's own trainers do.
    """

    keeps_sampled_rows: bool | None = None

    def __init__(self, config: DictConfig) -> None:
        mode = compat.base_mode(type(self))
        resume_hint = "" if mode == SYNC else asynchronous.resume_hint(config)
        settings = SkipConfig.from_config(config)
        by_tasks = settings.reward is Reward.RECORDED and settings.mode is not Mode.SHADOW
        self._pool = TaskPool(settings.tasks)
        self._loader = TaskLoader(self._pool, by_tasks, ahead=mode == SYNC)
        self._open_rollout_skip(copy.deepcopy(config), compat.check_trainer, resume_hint, self._loader)
        if not self._is_on:
            self._report_off(config)
        if settings.tasks is Tasks.ON and settings.mode.reads:
            report_driver_loads(settings, self.rollout_skip.replaces_prompts)
        if self._is_on and settings.tasks is not Tasks.OFF:
            self._find_nodes()
        reward.check_settings(self.rollout_skip.settings, config)
        asynchronous.check_sources(self.rollout_skip, mode)
        if mode != SYNC:
            asynchronous.check_settings(self.rollout_skip.settings)
        self._in_flight = InFlight()
        self._push_back = PushBack()
        self._alignment = Alignment(
            self._in_flight,
            self._push_back,
            fetch=self._fetch_from_dataloader,
            state=lambda: self.train_dataloader.state_dict(),
            compares=not self.rollout_skip.replaces_prompts,
        )
        self._reader = SampleReader(self.rollout_skip, self._pool, self._in_flight)
        self._partial = PartialRollouts(self.rollout_skip, self._pool, self._in_flight, is_on=mode == SYNC)
        self._shadow = ShadowSteps(self.rollout_skip.shadow, config, self._in_flight)
        self._held: list[TensorDict] = []
        self._prepared: dict[str, Any] = {}
        self._generating: RolloutKey | None = None
        self._last_key: RolloutKey | None = None
        self._never_submitted = 0
        self._step_metrics: list[dict[str, float]] = []
        # Change the configuration in place, because verl creates the agent loops from the same object. verl selects
        # settings by the name of its own trainer mode.
        remove_skip_keys(config)
        with open_dict(config):
            config.trainer.v1.trainer_mode = mode
        if not self.rollout_skip.settings.starts_engine:
            import_engine()
            from verl_rollout_skip.trainers.v1.engine import remove_engine

            remove_engine(config, self.rollout_skip.settings.loads_rewards)
        if self.rollout_skip.settings.mode is Mode.REPLAY:
            asynchronous.disable_role_switch(config)
        if self.rollout_skip.settings.mode.reads:
            self.rollout_skip.prefetch_first(first_step(config.trainer))
        super().__init__(config)

    def _find_nodes(self) -> None:
        """Start to find out which nodes reach the folders, before they are needed."""
        settings = self.rollout_skip.settings
        if settings.dump_dir is not None and settings.mode.writes:
            self._pool.find_nodes(settings.dump_dir, writes=True)
        for source in self.rollout_skip.sources:
            self._pool.find_nodes(source.folder, writes=False)

    @property
    def _keeps_sampled_rows(self) -> bool:
        kept = self.keeps_sampled_rows
        return compat.keeps_rows(type(self)) if kept is None else kept

    @property
    def _is_sync(self) -> bool:
        return bool(self.trainer_mode == SYNC)

    @property
    def _holds_back(self) -> bool:
        """Whether prompts are held back until the trainer samples. An asynchronous training generates ahead, unless it
        replays everything."""
        return self._is_sync or self.rollout_skip.settings.mode is Mode.REPLAY

    # Drawing and submitting prompts

    def _fetch_one_gen_batch(self) -> TensorDict:
        return self._alignment.next_chunk()

    def _fetch_from_dataloader(self) -> TensorDict:
        return super()._fetch_one_gen_batch()

    def _submit_batch_to_rollout(self, batch: TensorDict) -> int:
        if not self._is_on:
            return super()._submit_batch_to_rollout(batch)
        self._in_flight.add(batch)
        if self._generating is not None:
            return self._submit_unfinished(self._generating, batch)
        if not self._holds_back:
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
        """The checkpoint of an asynchronous training contains the prompts that were in flight."""
        if self._is_on and not self._is_sync:
            self._in_flight.restore(asynchronous.restored_prompts(forget_trajectories=self._holds_back))
            if self._holds_back:
                self._loader.ahead = True  # rows put earlier would be mistaken for trajectories of the checkpoint
                self.rollout_skip.prefetch_first(self.global_steps)
        return 0 if self._holds_back else super()._reissue_inflight_prompts(partition_id)

    # The rollout step

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
        """Called by verl's loop instead of ``replay_buffer.sample``."""
        if partition_id != PARTITION:
            return self._sample(global_steps=global_steps, partition_id=partition_id, batch_size=batch_size)
        self._finish_reading()  # of the previous sample, if a step has several
        started = time.perf_counter()
        key = self._last_key = self._next_key(self.global_steps)
        found = self._find(key)
        if isinstance(found, Miss):
            return self._generate(found, batch_size)
        if self.rollout_skip.shadow is not None:
            found = self._generate_to_compare(key, found, batch_size)
        return self._put(key, found, started)

    def _find(self, key: RolloutKey) -> Rollout | Miss:
        """The recorded rollout whose prompts match the current step, or a miss."""
        rejected = []
        reads = self._holds_back or self.rollout_skip.settings.mode is not Mode.CACHE
        for candidate in self.rollout_skip.candidates(key) if reads else ():
            try:
                inputs: Any = self._alignment.align(candidate.entry)
                if candidate.replaces_prompts or not isinstance(candidate.entry, PutEntry):
                    inputs = self._alignment.rows(candidate.entry)
                mismatch = candidate.explain_mismatch(inputs)
            except (InputMismatch, UnsupportedBatchError) as error:
                mismatch = str(error)
            if mismatch is None:
                self._loader.accept(candidate.entry)
                return self.rollout_skip.load(key, candidate, inputs)
            rejected.append((candidate, mismatch))
        self._alignment.undo()
        self._loader.clear_unused()
        return self.rollout_skip.miss(key, rejected)

    def _put(self, key: RolloutKey, rollout: Rollout, started: float) -> tuple[KVBatchMeta, dict[str, Any]]:
        """A hit: put the recorded rows into TransferQueue, as if they had been generated."""
        if isinstance(rollout.batch, PutBatch):  # tasks have put them
            batch, sample = rollout.batch.meta, rollout.batch.sample
        else:
            if self.rollout_skip.settings.reward is Reward.RECOMPUTE:
                reward.recompute_rewards(rollout.batch, rollout.inputs, self)
            batch = queue.put(rollout.batch, rollout.inputs.get(UID).tolist())
            sample = Sample(**rollout.batch.get(SAMPLE).data)
        refills = self._push_back.keep()
        if not self._is_sync:
            for chunk in refills:
                asynchronous.register(chunk, self.global_steps)
            asynchronous.clear(self._in_flight.uids(sample.gone))
        self._held.clear()
        self._in_flight.settle(sample.gone)
        self._never_submitted = len(self._in_flight)
        self._step_metrics.append(self.rollout_skip.count_wait(rollout, time.perf_counter() - started))
        self._log_samples(key, batch, None if isinstance(rollout.batch, PutBatch) else rollout.batch)
        return batch, dict(sample.metrics)

    def _generate(self, miss: Miss, batch_size: int) -> tuple[KVBatchMeta, dict[str, Any]]:
        self._prepare_to_generate(miss.key)
        started = time.perf_counter()
        self._partial.begin(miss)
        with self._partial.recording(miss):
            batch, metrics = self._submit_and_sample(miss.key, batch_size)
        self._record(miss, batch, metrics, time.perf_counter() - started)
        return batch, metrics

    def _generate_to_compare(self, key: RolloutKey, rollout: Rollout, batch_size: int) -> Rollout:
        """In mode shadow: generate a step that is recorded too, and compare. The generated rows are removed."""
        self._prepare_to_generate(key)
        with self._alignment.redrawn(), self._shadow.step(rollout):
            started = time.perf_counter()
            batch, _ = self._submit_and_sample(key, batch_size)
            return self._shadow.compare(key, rollout, batch, time.perf_counter() - started)

    def _prepare_to_generate(self, key: RolloutKey) -> None:
        if self._never_submitted:
            raise UnsupportedTrainerError(
                f"{key} has to be generated, but {self._never_submitted} prompts are left over from loaded steps: "
                f"{type(self.replay_buffer).__name__} keeps prompts across steps, so a generated step cannot follow "
                "loaded ones exactly. Use mode replay or refresh."
            )
        if self._weight_sync is not None:
            self._weight_sync.catch_up()
        self._loader.clear_all()

    def _submit_and_sample(self, key: RolloutKey, batch_size: int) -> tuple[KVBatchMeta, dict[str, Any]]:
        self._generating = key
        try:
            for held in self._held:
                self._submit_unfinished(key, held)
            self._held.clear()
            sampled: tuple[KVBatchMeta, dict[str, Any]] = self._sample(
                global_steps=self.global_steps, partition_id=PARTITION, batch_size=batch_size
            )
            return sampled
        finally:
            self._generating = None

    def _submit_unfinished(self, key: RolloutKey, batch: TensorDict) -> int:
        """Submit the prompts of a batch that no earlier training has finished."""
        others = self._partial.put_back(key, self._shadow.prompts(batch))
        if others is not None:
            super()._submit_batch_to_rollout(others)
        return len(batch)

    def _record(self, miss: Miss, batch: KVBatchMeta, metrics: dict[str, Any], seconds: float) -> None:
        """Read a sample: a large one while the training continues, unless the training might change its rows."""
        reported = asynchronous.combine_metrics(self._prepared, metrics)
        self._prepared = {}
        is_reading = self._reader.start(miss, batch, reported, seconds, self._needed_fields(miss))
        if not (is_reading and self._keeps_sampled_rows):
            self._finish_reading()

    def _finish_reading(self) -> None:
        """Wait until the sample is read, and record it. Call this before its rows change or are removed."""
        read = self._reader.finish()
        if read is None:
            return
        miss, batch, generated = read
        self._step_metrics.append(self.rollout_skip.record(miss, generated))
        if miss.is_covered and generated.failure is None:
            self._log_samples(miss.key, batch, generated.batch if isinstance(generated.batch, TensorDict) else None)

    def _compute_reward_colocate(self, batch: KVBatchMeta, metrics: dict[str, Any] | None = None) -> KVBatchMeta:
        self._finish_reading()  # this adds rewards to the rows
        return super()._compute_reward_colocate(batch, metrics)

    def _compute_advantage(self, batch: KVBatchMeta, metrics: dict[str, Any]) -> KVBatchMeta:
        self._finish_reading()  # rejection sampling changes the response mask
        return super()._compute_advantage(batch, metrics)

    def _needed_fields(self, miss: Miss) -> tuple[str, ...]:
        """The fields to fetch for a rollout that is not dumped."""
        shows_samples = miss.is_covered and self._samples.is_on and miss.key.gen_batch == 0
        return (*LEARNED_FROM, "prompts") if shows_samples else LEARNED_FROM

    def _log_samples(self, key: RolloutKey, batch: KVBatchMeta, rows: TensorDict | None) -> None:
        """Log some rows of a batch; ``rows`` are its rows, or None if they are only in TransferQueue."""
        if key.gen_batch != 0 or not self._samples.is_on:
            return
        if rows is None:
            shown = self._samples.shown_rows(len(batch.keys))
            keys, tags = [batch.keys[row] for row in shown], [batch.tags[row] for row in shown]
            meta = KVBatchMeta(partition_id=PARTITION, keys=keys, tags=tags)
            try:
                rows, _ = queue.fetch(meta, (*LEARNED_FROM, "prompts"))
            except QueueError as error:
                logger.warning("step %d: no sample rows are logged: %s", key.step, error)
                return
        self._samples.log(key.step, rows, self.tokenizer)

    # The rest of a training

    @property
    def _rollout_call(self) -> str:
        return "self.replay_buffer.sample"

    def _init_dataloader(self) -> None:
        super()._init_dataloader()
        if self._is_on:
            trainer = self.config.trainer
            steps_in_data = self.steps_per_epoch * trainer.total_epochs
            last = min(self.total_training_steps, steps_in_data)
            steps = TrainingSteps(last, find_checkpoint(trainer))
            check_steps(self.rollout_skip, steps, self.parameter_sync_step)
            if not self._is_sync:
                asynchronous.check_steps(self.rollout_skip, steps.range)

    def _setup(self) -> None:
        settings = self.rollout_skip.settings
        if settings.starts_engine:
            super()._setup()
            if self.rollout_skip.shadow is not None:
                self.rollout_skip.shadow.show_text(self.tokenizer.decode)
            if settings.defers_weight_syncs and self._is_sync:
                self._weight_sync = DeferredWeightSync(self.checkpoint_manager)
        else:
            from verl_rollout_skip.trainers.v1.engine import NoReplicas, remove_transport

            remove_transport(self.config)
            super()._setup()
            for manager in ("checkpoint_manager", "standalone_checkpoint_manager"):
                if hasattr(self, manager):
                    setattr(self, manager, NoReplicas())

    def _close_recording(self) -> None:
        try:
            self._finish_reading()
        finally:
            try:
                self._loader.clear_all()
            finally:
                super()._close_recording()
                self._partial.close()

    def _validate(self) -> dict[str, float]:
        if self._weight_sync is None:
            return super()._validate()
        with self._weight_sync.suspended():
            return super()._validate()

    def _save_checkpoint(self) -> None:
        if not self._is_sync:
            self._loader.clear_all()  # the checkpoint of an asynchronous training contains what is in TransferQueue
        with self._push_back.rewound(self.train_dataloader):
            super()._save_checkpoint()
        observe_checkpoint(self, self.rollout_skip.ledger)
        if not self._is_sync and self._last_key is not None:
            self.rollout_skip.prefetch_after(self._last_key)

    def step(self, metrics: dict[str, Any], timing_raw: dict[str, Any]) -> KVBatchMeta:
        self._step_metrics = []
        batch: KVBatchMeta = super().step(metrics, timing_raw)
        self._finish_reading()
        self._check_rollout_step(self.global_steps)
        metrics.update(of_step(self._step_metrics))
        return batch
