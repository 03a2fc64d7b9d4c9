"""``RolloutSkip``: the decision for one rollout step. Knows modes and keys, not verl's trainers.

The flow for a key: ``candidates`` yields recorded rollouts, and ``load`` returns the first whose input matches the
current one. If none matches, ``miss`` reports why, the trainer generates, and ``record`` dumps the result. ``step``
does all of this.
"""

from __future__ import annotations

import logging
import shlex
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from types import TracebackType
from typing import Any

from omegaconf import DictConfig

from verl_rollout_skip.config.modes import Mode, Prompts
from verl_rollout_skip.config.skip_config import BLOCK
from verl_rollout_skip.errors import (
    EntryExistsError,
    EntryNotFoundError,
    MismatchError,
    RolloutSkipError,
    UnsafePathError,
)
from verl_rollout_skip.key import RolloutKey
from verl_rollout_skip.replay.at_exit import close_at_exit
from verl_rollout_skip.replay.explain import explain_key, explain_taken, folders_of
from verl_rollout_skip.replay.ledger.live import Hit
from verl_rollout_skip.replay.ledger.training import TrainingLedger
from verl_rollout_skip.replay.lineage import LINEAGE, ROLLOUT_DIGEST, Lineage, digest_or_unknown
from verl_rollout_skip.replay.prompts import SAMPLING, meta_of, sampling_of
from verl_rollout_skip.replay.recorder import Recorder, SlicedRollout
from verl_rollout_skip.replay.results import Generated, Miss, Rollout, replace_timings
from verl_rollout_skip.replay.shadow import Shadow
from verl_rollout_skip.replay.sources import Candidate, Loader, Sources
from verl_rollout_skip.replay.statistics import Statistics
from verl_rollout_skip.runs.manifest import CONFIG_HASH, TRAINING_HASH
from verl_rollout_skip.runs.trainings import TRAINING, training_name
from verl_rollout_skip.runs.variants import Run, Source, open_run, resolve_prompts
from verl_rollout_skip.store.threads import in_thread

logger = logging.getLogger(__name__)

Generate = Callable[[Any], Any]

LOAD_S, SAVED_S = "rollout_skip/load_s", "rollout_skip/saved_s"


class RolloutSkip:
    """Decides for each rollout step whether to load or to generate, and records generated rollouts.

    ``resume_hint`` is appended to the suggested ``rollout-skip resume`` command; None if resuming would not help.
    """

    def __init__(self, run: Run, resume_hint: str | None = "", loader: Loader | None = None) -> None:
        self.run = run
        self.settings = run.settings
        self._resume_hint = resume_hint
        mode = self.settings.mode
        prompts = Prompts.RECORDED
        if mode.loads_own_steps:
            prompts = resolve_prompts(run.config, self.settings.prompts)
        self.replaces_prompts = prompts is Prompts.RECORDED
        """Whether a recorded batch replaces the current one instead of having to match it."""
        training, writes = training_name(), run.write_folder is not None and mode.writes
        self._recorder = Recorder(run, str(run.write_folder), training) if writes else None
        self.ledger = TrainingLedger(run, training, self._prepare_ledger)
        own = None if self._recorder is None else self._recorder.store
        self._sources = Sources(run, own, self.replaces_prompts, loader or Loader())
        self.shadow = Shadow(run) if mode is Mode.SHADOW else None
        """Compares generated rollouts with loaded ones, in mode shadow."""
        self._lineage = Lineage()
        self._counts = Statistics()
        self.is_closed = self._closes_at_exit = False
        self._check_recorded()

    @classmethod
    def open(
        cls,
        config: DictConfig | Mapping[str, Any],
        trainer: type | None = None,
        resume_hint: str | None = "",
        loader: Loader | None = None,
    ) -> RolloutSkip:
        """Read the settings from a training's configuration, compute the fingerprint, and find matching rollouts.

        ``trainer`` is the trainer class: its code is compared, and ``rollout-skip resume`` uses it again. ``loader``
        overrides how entries are loaded.
        """
        return cls(open_run(config, trainer), resume_hint, loader)

    def step(self, key: RolloutKey, inputs: Any, generate: Generate) -> Rollout:
        """Load the rollout of one step, or call ``generate`` with ``inputs`` and record the result."""
        if meta_of(inputs).get("validate"):
            return Rollout(generate(inputs), inputs, hit=False, metrics={})
        rejected = []
        for candidate in self.candidates(key):
            mismatch = candidate.explain_mismatch(inputs)
            if mismatch is None:
                rollout = self.load(key, candidate, inputs)
                return rollout if self.shadow is None else self.shadow.follow(key, rollout, generate)
            rejected.append((candidate, mismatch))
        miss = self.miss(key, rejected)
        given = self._recorder.snapshot(inputs) if self._recorder is not None and miss.dumps else inputs
        started = time.perf_counter()
        batch = generate(inputs)
        generated = Generated(batch, given, time.perf_counter() - started)
        return Rollout(batch, inputs, hit=False, metrics=self.record(miss, generated))

    def prefetch_first(self, step: int = 1) -> None:
        """Start loading the first rollout of a training that begins at ``step``, while its workers start."""
        self._prefetch_step(step)

    def prefetch_after(self, key: RolloutKey) -> None:
        """Start loading the rollout that follows a key, if it is recorded."""
        next_batch = RolloutKey(key.step, key.gen_batch + 1)
        next_step = RolloutKey(key.step + 1)
        self._sources.prefetch([next_batch, *([next_step] if self.covers(next_step) else [])])

    def covers(self, key: RolloutKey) -> bool:
        """Whether the settings select this rollout step to be loaded or recorded."""
        return self.settings.mode is not Mode.OFF and key.step in self.settings.steps

    def candidates(self, key: RolloutKey) -> Iterator[Candidate]:
        """The recorded rollouts that may be loaded for a key, best first. ``load`` one of them, or call ``miss``."""
        self.ledger.begin_step(key.step)
        if not self.covers(key):
            return iter(())
        if self._recorder is not None:
            self._recorder.report_failures()
            if self.settings.mode is Mode.RECORD and self._is_taken(key, self._recorder):
                raise EntryExistsError(explain_taken(f"{key} is", self._recorder.folder))
        return self._sources.candidates(key)

    def load(self, key: RolloutKey, candidate: Candidate, inputs: Any) -> Rollout:
        """A hit: the recorded rollout of a candidate whose input matches."""
        batch, inputs = candidate.batches(inputs)
        metrics = self._count_hit(key, candidate, time.perf_counter() - candidate.started)
        replace_timings(batch, metrics)
        self.prefetch_after(key)
        return Rollout(batch, inputs, True, metrics)

    def miss(self, key: RolloutKey, rejected: Sequence[tuple[Candidate, str]] = ()) -> Miss:
        """Nothing recorded can be used. Report why not, or raise if the mode never generates.

        ``rejected`` lists each candidate with the reason why it cannot be used.
        """
        if not self.covers(key):
            return Miss(key, is_covered=False, dumps=False)
        if rejected:
            candidate, reason = rejected[0]
            text, advice = candidate.describe_mismatch(reason)
            if not self.settings.mode.generates:
                raise MismatchError(f"{text}\n{advice}")
            logger.warning("a miss: %s", text)
        if not self.settings.mode.generates:
            raise EntryNotFoundError(explain_key(key, self.recorded_keys(), self.settings.mode, self.sources))
        self.prefetch_after(key)
        return Miss(key, is_covered=True, dumps=self._recorder is not None and self._recorder.accepts(key))

    def record(self, miss: Miss, generated: Generated) -> dict[str, float]:
        """Dump a generated rollout if ``miss.dumps``, and return metrics for the step's log.

        Call this for every generated rollout, because the lineage of later rollouts includes it.
        """
        key, batch = miss.key, generated.batch
        if self.settings.mode is Mode.OFF:
            return {}
        recorder = self._recorder if miss.dumps else None
        output, digest = None, generated.digest
        if digest is None:
            output, digest = self._snapshot(recorder, key, generated)
        self._add_to_lineage(key, digest)
        self.ledger.observe_rollout(key, digest, hit=None)
        if not miss.is_covered:
            self._counts.left_out += 1
            self._prefetch_step(key.step + 1)
            return {}
        self._counts.misses += 1
        self._counts.generate_s += generated.seconds
        if recorder is not None and generated.failure is not None:
            recorder.report_failure(key, generated.failure)
        elif recorder is not None:
            info = self._info(key, digest, generated)
            if isinstance(batch, SlicedRollout):
                recorder.dump_slices(key, batch, info)
            else:
                recorder.dump(key, output, generated.inputs, info)
            self._close_at_exit()
        metrics = {
            "rollout_skip/hit": 0.0,
            "rollout_skip/dump_bytes": float(self._stored_bytes()),
            "rollout_skip/dump_failures": float(self._dump_failures()),
        }
        meta = getattr(batch, "meta_info", None)
        if meta is not None:
            meta["timing"] = {**(meta.get("timing") or {}), **metrics}
        return metrics

    def count_wait(self, rollout: Rollout, seconds: float) -> dict[str, float]:
        """Replace the load time of a hit with the total time that the training waited; return the updated metrics.

        For trainers that do more with a rollout than load it.
        """
        seconds -= rollout.generate_s
        loaded, saved = rollout.metrics[LOAD_S], rollout.metrics[SAVED_S]
        metrics = {**rollout.metrics, LOAD_S: seconds, SAVED_S: max(saved + loaded - seconds, 0.0)}
        self._counts.load_s += seconds - loaded
        self._counts.saved_s += metrics[SAVED_S] - saved
        timings = (getattr(rollout.batch, "meta_info", None) or {}).get("timing", {})
        replace_timings(rollout.batch, {**timings, **metrics})
        return metrics

    def policy_of(self, step: int) -> dict[str, Any]:
        """What decides which weights generate a step: the rollouts that the training has learned from, and its
        settings. The lineage is None if it is unknown."""
        lineage = self._lineage.before(step)
        if lineage is None and self._lineage.is_empty:
            lineage = self._sources.lineage_before(step)
        return {LINEAGE: lineage, TRAINING_HASH: self.run.fingerprint.training_hash}

    def prepare_folder(self) -> None:
        """Write the manifest of the training's own variant before anything else is written there."""
        if self._recorder is not None:
            self._recorder.prepare_folder()

    def recorded_keys(self) -> list[RolloutKey]:
        """The keys that can be loaded."""
        return self._sources.keys()

    def written_keys(self) -> list[RolloutKey]:
        """The keys that are recorded in the training's own variant."""
        return [] if self._recorder is None else self._recorder.store.keys()

    @property
    def sources(self) -> list[Source]:
        """The variants that are read."""
        return self._sources.sources

    @property
    def statistics(self) -> Statistics:
        """The statistics so far. A snapshot: later steps do not change it."""
        counts, recorder = self._counts, self._recorder
        compared = [] if self.shadow is None else self.shadow.notes
        notes = [*compared, *self._sources.notes, *self._counts.notes]
        if recorder is None:
            return replace(counts, notes=notes)
        return replace(
            counts,
            dumped=recorder.dumped,
            not_dumped=recorder.not_dumped,
            dump_failures=recorder.failures,
            notes=notes,
        )

    def summary(self) -> str:
        """The statistics in one line."""
        return self.statistics.summary(self._stored_bytes())

    def close(self, note: str | None = None) -> None:
        """Wait for the dumps, save the list of recorded steps, and log the summary. ``note`` is added to the summary.

        Raises for a failed dump if ``on_dump_error`` says so.
        """
        if self.is_closed:
            return
        self.is_closed = True
        if note is not None:
            self._counts.notes.append(note)
        try:
            self._sources.close()
            if self._recorder is not None:
                self._recorder.close()
        finally:
            self._counts.notes += self.ledger.close()
            statistics = self.statistics
            if statistics.has_activity:
                logger.info("%s", self.summary())
            if self._recorder is not None and statistics.dumped and self._resume_hint is not None:
                folder = self._recorder.folder
                if all(source.folder == folder for source in self.sources):
                    path = shlex.quote(f"{folder}/manifest.json")
                    logger.info("to continue from here: rollout-skip resume %s%s", path, self._resume_hint)

    def __enter__(self) -> RolloutSkip:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        try:
            self.close()
        except (RolloutSkipError, OSError) as failed:
            if error is None:
                raise
            logger.error("while handling %s: %s", type(error).__name__, failed)

    def _close_at_exit(self) -> None:
        if not self._closes_at_exit:
            self._closes_at_exit = True
            close_at_exit(self)

    def _count_hit(self, key: RolloutKey, candidate: Candidate, seconds: float) -> dict[str, float]:
        info, source = candidate.entry.record.info, candidate.source
        saved = max(float(info.get("generate_s") or 0.0) - seconds, 0.0) if self.shadow is None else 0.0
        other_lineage = self._lineage.differs(key, info.get(LINEAGE))
        off_policy = source.informational or other_lineage or self._learned_otherwise(key, candidate)
        recorder = info.get(TRAINING) if isinstance(info.get(TRAINING), str) else None
        reasons = (source.informational, source.other_reward, other_lineage)
        hit = Hit(source.folder, candidate.key.step, recorder, *reasons)
        self.ledger.observe_rollout(key, info.get(ROLLOUT_DIGEST), hit, off_policy)
        self._lineage.add(key, info.get(ROLLOUT_DIGEST), info.get(LINEAGE))
        self._counts.hits += 1
        self._counts.load_s += seconds
        self._counts.saved_s += saved
        self._counts.off_policy += off_policy
        return {
            "rollout_skip/hit": 1.0,
            LOAD_S: seconds,
            SAVED_S: saved,
            "rollout_skip/dump_failures": float(self._dump_failures()),
            "rollout_skip/off_policy": float(off_policy),
        }

    def _learned_otherwise(self, key: RolloutKey, candidate: Candidate) -> bool:
        """Whether an entry was recorded with other weights due to settings. All trainings start with the same ones."""
        info, source = candidate.entry.record.info, candidate.source
        # Several trainings may have recorded into one variant, so the entry's own hash takes precedence.
        recorded = info.get(TRAINING_HASH, source.manifest.training_hash)
        is_other_training = source.other_reward or recorded != self.run.fingerprint.training_hash
        return key.step > 1 and is_other_training

    def _add_to_lineage(self, key: RolloutKey, digest: str) -> None:
        """Add a generated rollout. The lineage before a checkpoint is known only if those steps were recorded."""
        starts_late = self._lineage.is_empty and key.step > 1
        self._lineage.add(key, digest, self._sources.lineage_before(key.step) if starts_late else None)

    def _snapshot(self, recorder: Recorder | None, key: RolloutKey, generated: Generated) -> tuple[Any, str]:
        """A snapshot of a generated rollout, if it is dumped, and its digest."""
        # The digest reads all responses. Take the snapshot at the same time.
        digesting = in_thread(lambda: digest_or_unknown(key, generated.batch, generated.failure))
        output = None
        if recorder is not None and generated.failure is None:
            output = recorder.snapshot_output(generated.batch)
        return output, digesting.result()

    def _info(self, key: RolloutKey, digest: str, generated: Generated) -> dict[str, Any]:
        """The metadata of an entry."""
        return {
            "generate_s": round(generated.seconds, 6),
            CONFIG_HASH: self.run.fingerprint.config_hash,
            TRAINING_HASH: self.run.fingerprint.training_hash,
            ROLLOUT_DIGEST: digest,
            LINEAGE: self._lineage.before(key.step),
            SAMPLING: sampling_of(generated.inputs),
            TRAINING: self.ledger.training,
        }

    def _prepare_ledger(self) -> None:
        if self._recorder is not None:
            self._recorder.prepare_ledger()

    def _prefetch_step(self, step: int) -> None:
        """Prefetch a step if it is selected. If step 100 is the first one, it is prefetched during step 99: keeping
        it from the start would occupy memory for 98 steps."""
        if self.covers(RolloutKey(step)):
            self._sources.prefetch([RolloutKey(step)])

    def _check_recorded(self) -> None:
        """Fail before the training starts if the mode only loads and nothing is recorded."""
        if not self.settings.mode.generates and not self.recorded_keys():
            raise EntryNotFoundError(
                f"Mode {self.settings.mode.value!r} loads recorded rollouts, but {folders_of(self.sources)} has "
                f"none. Record first ({BLOCK}.mode=cache)."
            )

    def _is_taken(self, key: RolloutKey, recorder: Recorder) -> bool:
        try:
            return key in recorder.store
        except (OSError, UnsafePathError):
            if self.settings.fails_on_dump_error:
                raise
            return False  # the dump will fail too, and report why

    def _dump_failures(self) -> int:
        return 0 if self._recorder is None else self._recorder.failures

    def _stored_bytes(self) -> int:
        return 0 if self._recorder is None else self._recorder.store.written_bytes
