"""``RolloutSkip``: the decision for one rollout step. Knows modes and keys, not verl's trainers.

Given a key, the input batch and a function that generates, it returns the batch to train on: loaded, or generated and
dumped. It never pairs a recorded rollout with other prompts without being told to, and it says what it did.
"""

from __future__ import annotations

import atexit
import contextlib
import logging
import shlex
import time
import weakref
from collections.abc import Callable, Mapping
from types import TracebackType
from typing import Any

from omegaconf import DictConfig

from verl_rollout_skip.config import BLOCK
from verl_rollout_skip.errors import (
    EntryExistsError,
    EntryNotFoundError,
    MismatchError,
    RolloutSkipError,
    StoreError,
    UnreadableEntryError,
    UnsafePathError,
    UnsupportedBatchError,
)
from verl_rollout_skip.history import HISTORY, IDENTITY, UNKNOWN, History, extend, identity_or_unknown
from verl_rollout_skip.key import RolloutKey
from verl_rollout_skip.manifest import CONFIG_HASH, explain_foreign
from verl_rollout_skip.missing import explain_key, explain_taken, places
from verl_rollout_skip.modes import Mode, Prompts
from verl_rollout_skip.outcome import LOAD_S, SAVED_S, Rollout, Statistics
from verl_rollout_skip.prompts import (
    SAMPLING,
    OtherInput,
    adopt_uids,
    meta_of,
    sampling_of,
    why_no_replacement,
    why_not_same,
)
from verl_rollout_skip.recorder import Recorder
from verl_rollout_skip.store.loaded import LoadedEntry
from verl_rollout_skip.store.store import RolloutStore
from verl_rollout_skip.store.threads import in_thread
from verl_rollout_skip.variants import Run, Source, open_run, own_source, resolve_prompts

logger = logging.getLogger(__name__)

Generate = Callable[[Any], Any]
LineUp = Callable[[LoadedEntry], Any]
"""The current input, row by row as an entry has it; raises ``OtherInput`` if the current one is another."""


class RolloutSkip:
    """Decides for each rollout step whether to load or to generate, and keeps the records.

    ``way_on`` is what the advice to use ``rollout-skip resume`` says beside the command; None if that cannot help.
    """

    way_on: str | None = ""

    def __init__(self, run: Run) -> None:
        self.run = run
        self.settings = run.settings
        self.statistics = Statistics()
        mode = self.settings.mode
        self._prompts = Prompts.RECORDED
        if mode in (Mode.CACHE, Mode.REPLAY):
            self._prompts = resolve_prompts(run.config, self.settings.prompts)
        self._recorder = None
        if run.writes is not None and mode.writes:
            self._recorder = Recorder(run, run.writes, self.statistics)
        self._sources: list[tuple[Source, RolloutStore]] = []
        if mode.reads:
            self._sources = [(source, self._store_of(source)) for source in run.sources]
        self._history = History()
        self._repeated: list[RolloutKey] = []
        self._other_history_told = False
        self._closed = self._closes_at_exit = False
        self._check_recorded()

    @classmethod
    def open(cls, config: DictConfig | Mapping[str, Any], trainer: type | None = None) -> RolloutSkip:
        """Everything from a training's configuration: settings, fingerprint, and the rollouts that fit.

        ``trainer`` is the class that trains: its code is compared, and ``rollout-skip resume`` finds it again.
        """
        return cls(open_run(config, trainer))

    def step(self, key: RolloutKey, inputs: Any, generate: Generate) -> Rollout:
        """The batch of one rollout step. ``generate`` is called with ``inputs`` if it must be generated."""
        if meta_of(inputs).get("validate"):
            return Rollout(generate(inputs), inputs, hit=False, metrics={})
        if not self.covers(key):
            batch = generate(inputs)
            self.pass_by(key, batch)
            return Rollout(batch, inputs, hit=False, metrics={})
        loaded = self.load(key, lambda _: inputs)
        if loaded is not None:
            return loaded
        dump = self.will_dump(key)
        given = self._recorder.snapshot(inputs) if self._recorder is not None and dump else inputs
        started = time.perf_counter()
        batch = generate(inputs)
        metrics = self.record(key, batch, given, time.perf_counter() - started, dump)
        return Rollout(batch, inputs, False, metrics)

    def prefetch_first(self, step: int = 1) -> None:
        """Start to load the first rollout of a training that begins with this step, while its workers start."""
        first = self.settings.steps.first_from(step)
        if first is not None:
            self._prefetch([RolloutKey(first)])

    def covers(self, key: RolloutKey) -> bool:
        """Whether this rollout step is one to load or to record."""
        return self.settings.mode is not Mode.OFF and key.step in self.settings.steps

    def load(self, key: RolloutKey, line_up: LineUp) -> Rollout | None:
        """The recorded rollout step; None if it is to be generated, which ``record`` is then to be told.

        For loops whose input is known only together with the rollout; others call ``step``.
        """
        if self._recorder is not None:
            self._recorder.raise_failures()
            if self.settings.mode is Mode.RECORD and self._is_taken(key, self._recorder.store):
                raise EntryExistsError(explain_taken(f"{key} is", self._recorder.folder))
        loaded = self._load(key, line_up)
        if loaded is None and not self.settings.mode.generates:
            raise EntryNotFoundError(explain_key(key, self.recorded_keys(), self.settings.mode, self.sources))
        self._prefetch_after(key)
        return loaded

    def will_dump(self, key: RolloutKey) -> bool:
        """Whether the rollout that is generated for a key is to be dumped, which ``record`` is then to be told.

        Asked once, because a key that another rollout has is reported and counted.
        """
        return self._recorder is not None and self._recorder.accepts(key)

    def pass_by(self, key: RolloutKey, batch: Any, failure: RolloutSkipError | None = None) -> None:
        """Take note of a rollout step that is neither loaded nor recorded: later ones depend on it.

        ``batch`` is None if it could not be read, and ``failure`` says why.
        """
        if self.settings.mode is not Mode.OFF:
            self.statistics.left_out += 1
            self._history.add(key, identity_or_unknown(key, batch, failure), self._recorded_history(key.step))

    def record(
        self,
        key: RolloutKey,
        batch: Any,
        inputs: Any,
        seconds: float,
        dump: bool,
        failure: RolloutSkipError | None = None,
    ) -> dict[str, float]:
        """Count what was generated in so many seconds, and dump it if it is to be; returns the metrics of the step.

        ``failure`` says why it cannot be dumped; ``batch`` is None if that is because it could not be read.
        """
        self.statistics.misses += 1
        self.statistics.generate_s += seconds
        # While the digest is taken, which reads all responses, the rest of the batch is.
        digest = in_thread(lambda: identity_or_unknown(key, batch, failure))
        taken = batch
        if self._recorder is not None and dump and failure is None:
            taken = self._recorder.snapshot_output(batch)
        identity = digest.result()
        self._history.add(key, identity, self._recorded_history(key.step))
        if self._recorder is not None and dump:
            if failure is not None:
                self._recorder.count_failure(key, failure)
            else:
                info = {
                    "generate_s": round(seconds, 6),
                    CONFIG_HASH: self.run.fingerprint.config_hash,
                    "training_hash": self.run.fingerprint.training_hash,
                    IDENTITY: identity,
                    HISTORY: self._history.before(key.step),
                    SAMPLING: sampling_of(inputs),
                }
                self._recorder.dump(key, taken, inputs, info)
                self._close_at_exit()
        metrics = {
            "rollout_skip/hit": 0.0,
            "rollout_skip/dump_bytes": float(self._stored_bytes()),
            "rollout_skip/dump_failures": float(self.statistics.dump_failures),
        }
        meta = getattr(batch, "meta_info", None)
        if meta is not None:
            meta["timing"] = {**(meta.get("timing") or {}), **metrics}
        return metrics

    def count_wait(self, rollout: Rollout, seconds: float) -> dict[str, float]:
        """The training has a loaded rollout, so many seconds after it asked for it; returns the metrics of the step.

        For trainers that have to do more with a rollout than to load it.
        """
        metrics = self.statistics.count_wait(rollout, seconds)
        _replace_timings(rollout.batch, metrics)
        return metrics

    @property
    def replaces_prompts(self) -> bool:
        """Whether a recorded batch replaces the current one whole instead of having to belong to it."""
        return self._prompts is Prompts.RECORDED

    def recorded_keys(self) -> list[RolloutKey]:
        """The keys that can be loaded."""
        return sorted({key for _, store in self._sources for key in store})

    def written_keys(self) -> list[RolloutKey]:
        """The keys that are recorded where new rollouts go."""
        return [] if self._recorder is None else self._recorder.store.keys()

    @property
    def sources(self) -> list[Source]:
        """What is read."""
        return [source for source, _ in self._sources]

    def summary(self) -> str:
        """What was loaded, generated, saved and lost."""
        return self.statistics.summary(self._stored_bytes())

    def close(self) -> None:
        """Wait for the dumps, complete the manifest, and log the summary. A failed dump is raised if it is to be."""
        if self._closed:
            return
        self._closed = True
        try:
            for _, store in self._sources:
                if self._recorder is None or store is not self._recorder.store:
                    store.close()
            if self._recorder is not None:
                self._recorder.close()
        finally:
            if self.statistics.is_any:
                logger.info("%s", self.summary())
            if self._recorder is not None and self.statistics.dumped and self.way_on is not None:
                folder = self._recorder.folder
                if all(source.folder == folder for source in self.sources):
                    path = shlex.quote(f"{folder}/manifest.json")
                    logger.info("to go on from here: rollout-skip resume %s%s", path, self.way_on)

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
            logger.error("while %s was on its way: %s", type(error).__name__, failed)

    def _close_at_exit(self) -> None:
        """Called after a dump: exit handlers run last first, and the writer must not stop before it is waited for."""
        if not self._closes_at_exit:
            self._closes_at_exit = True
            atexit.register(_close_forgotten, weakref.ref(self))

    # Loading

    def _load(self, key: RolloutKey, line_up: LineUp) -> Rollout | None:
        started = time.perf_counter()
        wanted = self._wanted_key(key)
        reasons = []
        for source, store in self._sources_now():
            entry = self._find_entry(wanted, source, store)
            if entry is None:
                continue
            recorded = entry.inputs() if self.replaces_prompts else None
            try:
                inputs = line_up(entry)
                if self.replaces_prompts:
                    reason = why_no_replacement(entry, recorded, inputs)
                else:
                    reason = why_not_same(entry, inputs)
            except (OtherInput, UnsupportedBatchError) as other:  # what cannot be stored was not recorded
                reason = str(other)
            if reason is not None:
                reasons.append(reason)
                continue
            batch = entry.batch()
            adopt_uids(batch, inputs)
            if recorded is not None:
                adopt_uids(recorded, inputs, add=True)
            metrics = self._count_hit(key, source, entry, time.perf_counter() - started)
            _replace_timings(batch, metrics)
            return Rollout(batch, inputs if recorded is None else recorded, True, metrics)
        if reasons:
            self._explain_misfit(wanted, reasons[0])
        return None

    def _wanted_key(self, key: RolloutKey) -> RolloutKey:
        """The key whose entry is loaded for this one: itself if it is recorded, what the mode says otherwise."""
        mode = self.settings.mode
        if mode.generates or any(key in store for _, store in self._sources):
            return key
        if mode is Mode.REPLAY:
            raise EntryNotFoundError(explain_key(key, self.recorded_keys(), self.settings.mode, self.sources))
        if self._repeated:  # listed once, since nothing is recorded in these modes; again if something is gone
            found = _repeated_key(self._repeated, key, mode)
            if any(found in store for _, store in self._sources):
                return found
        self._repeated = self.recorded_keys()
        if not self._repeated:
            raise EntryNotFoundError(explain_key(key, [], mode, self.sources))
        return _repeated_key(self._repeated, key, mode)

    def _sources_now(self) -> list[tuple[Source, RolloutStore]]:
        """What can be read. Today's own variant joins when it begins, here or in another process."""
        recorder = self._recorder
        if recorder is not None and self.settings.mode.reads and all(s is not recorder.store for _, s in self._sources):
            own = own_source(recorder.folder, self.run.fingerprint)
            if own is not None:
                self._sources.append((own, recorder.store))
        return self._sources

    def _find_entry(self, key: RolloutKey, source: Source, store: RolloutStore) -> LoadedEntry | None:
        """The entry if there is one. A folder that does not answer counts as a failed dump does."""
        try:
            entry = self._open_entry(key, store) if key in store else None
        except (OSError, UnsafePathError) as error:
            if not self.settings.mode.generates or self.settings.fails_on_dump_error:
                raise
            logger.error("%s is generated, because %s cannot be read: %s", key, source.folder, error)
            self.statistics.notes.append(f"{key} could not be looked for")
            return None
        foreign = None if entry is None else explain_foreign(entry.record.info, source.manifest)
        if foreign is None:
            return entry
        if not self.settings.mode.generates:
            raise MismatchError(f"{key} {foreign}")
        logger.warning("a miss: %s %s", key, foreign)
        return None

    def _open_entry(self, key: RolloutKey, store: RolloutStore) -> LoadedEntry | None:
        """The entry, decoded; None if it is to be generated again because it cannot be read."""
        try:
            entry = store.load(key)
            entry.decode()
            return entry
        except EntryNotFoundError:
            if not self.settings.mode.generates:
                raise
            return None  # removed or set aside by another process since we saw it
        except UnreadableEntryError as error:
            if not self.settings.mode.generates:
                raise
            return self._set_aside(key, store, error)

    def _set_aside(self, key: RolloutKey, store: RolloutStore, error: UnreadableEntryError) -> LoadedEntry | None:
        note = f"{key} was unreadable"
        if self._recorder is not None and store is self._recorder.store:
            try:
                note += f" and is kept as {store.set_aside(key)}"
            except EntryNotFoundError:
                pass  # another process has set it aside
            except StoreError:
                return store.load(key)  # another process has recorded it anew
        logger.warning("%s is generated again, because its dump cannot be used. %s (%s)", key, error, note)
        self.statistics.notes.append(note)
        return None

    def _explain_misfit(self, key: RolloutKey, reason: str) -> None:
        """An entry is there and belongs to something else: a miss, or an error where nothing is generated."""
        if self.replaces_prompts:
            text = f"The recorded batch of {key} cannot replace the current one: {reason}"
            advice = "Record anew (mode refresh), or use the data settings of the recording."
        else:
            text = f"{key} is recorded with another input: {reason}"
            advice = (
                f"Use the data and seed of the recording, or {BLOCK}.prompts=recorded to train on the recorded batch "
                "whole."
            )
        if not self.settings.mode.generates:
            raise MismatchError(f"{text}\n{advice}")
        logger.warning("a miss: %s", text)

    def _count_hit(self, key: RolloutKey, source: Source, entry: LoadedEntry, seconds: float) -> dict[str, float]:
        saved = max(float(entry.record.info.get("generate_s") or 0.0) - seconds, 0.0)
        off_policy = source.informational or self._is_off_policy(key, source, entry)
        self._history.add(key, entry.record.info.get(IDENTITY), entry.record.info.get(HISTORY))
        self.statistics.hits += 1
        self.statistics.load_s += seconds
        self.statistics.saved_s += saved
        self.statistics.off_policy += off_policy
        return {
            "rollout_skip/hit": 1.0,
            LOAD_S: seconds,
            SAVED_S: saved,
            "rollout_skip/dump_failures": float(self.statistics.dump_failures),
            "rollout_skip/off_policy": float(off_policy),
        }

    def _is_off_policy(self, key: RolloutKey, source: Source, entry: LoadedEntry) -> bool:
        """Whether other weights than today's generated an entry. The first step has those that all began with."""
        # Several trainings may have recorded into one variant, so the entry knows better than the manifest.
        recorded = entry.record.info.get("training_hash", source.manifest.training_hash)
        is_other_training = source.other_reward or recorded != self.run.fingerprint.training_hash
        return (key.step > 1 and is_other_training) or self._has_other_history(key, entry)

    def _has_other_history(self, key: RolloutKey, entry: LoadedEntry) -> bool:
        recorded, current = entry.record.info.get(HISTORY), self._history.before(key.step)
        if recorded is None or current is None or (recorded == current and current != UNKNOWN):
            return False
        if not self._other_history_told:
            self._other_history_told = True
            fact = "was recorded after other rollouts than this training has learned from"
            reason = "some were generated again, or are loaded more than once"
            if UNKNOWN in (recorded, current):
                which = "this" if current == UNKNOWN else "the recorded"
                fact = "may have been recorded after other rollouts than this training has learned from"
                reason = f"one of {which} training could not be read when it was generated"
            logger.warning(
                "%s %s, because %s. From here on loaded rollouts may be off-policy (rollout_skip/off_policy)",
                key,
                fact,
                reason,
            )
        return True

    def _recorded_history(self, step: int) -> str | None:
        """For a training that begins with a checkpoint: the history of its first step, if the recorded one saved it."""
        if not self._history.is_empty or step == 1:
            return None
        stores = [store for _, store in self._sources_now()]
        if self._recorder is not None and self._recorder.store not in stores:
            stores.append(self._recorder.store)
        for store in stores:
            try:
                records = [store.record(key).info for key in store if key.step == step - 1]
            except (EntryNotFoundError, UnreadableEntryError):
                continue  # it is told when the entry itself is asked for
            if records:
                return extend(records[0].get(HISTORY), [info.get(IDENTITY) for info in records])
        return None

    def _prefetch_after(self, key: RolloutKey) -> None:
        step = self.settings.steps.first_from(key.step + 1)
        self._prefetch([RolloutKey(key.step, key.gen_batch + 1), *([] if step is None else [RolloutKey(step)])])

    def _prefetch(self, candidates: list[RolloutKey]) -> None:
        """Start to load the first of these that is recorded; let go of whatever else was loaded ahead."""
        found: tuple[RolloutKey, RolloutStore] | None = None
        # What is wrong with a source is said when the rollout itself is asked for.
        with contextlib.suppress(OSError, RolloutSkipError):
            found = self._first_recorded(candidates)
        for _, store in self._sources:
            if found is None or store is not found[1]:
                store.drop_prefetched()
        if found is not None:
            found[1].prefetch(found[0], inputs=self.replaces_prompts)

    def _first_recorded(self, keys: list[RolloutKey]) -> tuple[RolloutKey, RolloutStore] | None:
        for key in keys:
            if key.gen_batch == 0 and self.settings.mode in (Mode.REPEAT, Mode.REPEAT_LAST):
                key = self._wanted_key(key)
            for _, store in self._sources:
                if key in store:
                    return key, store
        return None

    # What is known

    def _store_of(self, source: Source) -> RolloutStore:
        if self._recorder is not None and source.folder == self._recorder.folder:
            return self._recorder.store
        return RolloutStore(source.folder)

    def _check_recorded(self) -> None:
        """Settle before the training starts what can be settled: a mode that only loads needs something to load."""
        if not self.settings.mode.generates and not self.recorded_keys():
            raise EntryNotFoundError(
                f"Mode {self.settings.mode.value!r} loads recorded rollouts, and {places(self.sources)} holds none. "
                f"Record first ({BLOCK}.mode=cache)."
            )

    def _is_taken(self, key: RolloutKey, store: RolloutStore) -> bool:
        try:
            return key in store
        except (OSError, UnsafePathError):
            if self.settings.fails_on_dump_error:
                raise
            return False  # the dump fails as well, and says why

    def _stored_bytes(self) -> int:
        return 0 if self._recorder is None else self._recorder.store.written_bytes


def _close_forgotten(reference: weakref.ref[RolloutSkip]) -> None:
    """The process ends, and nobody has closed a recording."""
    skip = reference()
    if skip is None or skip._closed:
        return
    logger.warning(
        "the process ends and RolloutSkip.close was not called: waiting for the dumps. Call it at the end of your "
        "loop, or use RolloutSkip as a context manager: Ray ends a process without waiting"
    )
    try:
        skip.close()
    except Exception as error:
        logger.error("while the dumps were completed: %s", error)


def _replace_timings(batch: Any, metrics: dict[str, float]) -> None:
    """The timings of the recorded run are not today's; what verl logs from there is what we measured now."""
    meta = getattr(batch, "meta_info", None)
    if meta is not None:
        meta["timing"] = dict(metrics)


def _repeated_key(keys: list[RolloutKey], key: RolloutKey, mode: Mode) -> RolloutKey:
    """Which of the recorded rollouts stands for one that is not recorded."""
    steps = sorted({other.step for other in keys})
    if mode is Mode.REPEAT_LAST:
        batches = [other for other in keys if other.step == steps[-1]]
        return batches[key.gen_batch % len(batches)]
    # A step that needs more generation batches than were recorded goes on with those of the following steps.
    step = steps[(key.step - steps[0]) % len(steps)]
    first = next(place for place, other in enumerate(keys) if other.step == step)
    return keys[(first + key.gen_batch) % len(keys)]
