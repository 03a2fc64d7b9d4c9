"""``RolloutSkip``: the decision for one rollout step. Knows modes and keys, not verl's trainers.

Given a key, the input batch and a function that generates, it returns the batch to train on: loaded, or generated and
dumped. It never pairs a recorded rollout with other prompts without being told to, and it says what it did.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from types import TracebackType
from typing import Any

from omegaconf import DictConfig

from verl_rollout_skip.config import BLOCK
from verl_rollout_skip.errors import (
    DumpError,
    EntryExistsError,
    EntryNotFoundError,
    MismatchError,
    RolloutSkipError,
    UnreadableEntryError,
)
from verl_rollout_skip.key import RolloutKey
from verl_rollout_skip.layout import gpu_layout
from verl_rollout_skip.manifest import Manifest, Recording, write_manifest
from verl_rollout_skip.modes import Mode, Prompts
from verl_rollout_skip.prompts import adopt_uids, compare_prompts
from verl_rollout_skip.sizes import format_size
from verl_rollout_skip.store.locations import open_storage
from verl_rollout_skip.store.store import LoadedEntry, RolloutStore
from verl_rollout_skip.variants import Run, open_run, resolve_prompts

logger = logging.getLogger(__name__)

Generate = Callable[[Any], Any]


@dataclass(frozen=True)
class Rollout:
    """The outcome of one rollout step: the batch to train on and the input that belongs to it.

    ``inputs`` is the current input, or the recorded one where the recorded batch replaces the current one.
    ``metrics`` are for the step's log.
    """

    batch: Any
    inputs: Any
    hit: bool
    metrics: dict[str, float]


@dataclass
class Statistics:
    """What happened so far."""

    hits: int = 0
    misses: int = 0
    dumped: int = 0
    not_dumped: int = 0
    dump_failures: int = 0
    load_s: float = 0.0
    saved_s: float = 0.0
    generate_s: float = 0.0
    notes: list[str] = field(default_factory=list)

    def summary(self, stored_bytes: int) -> str:
        """One line for the end of a training."""
        text = (
            f"{self.hits + self.misses} rollout steps: {self.hits} loaded in {self.load_s:.1f} s, {self.misses} "
            f"generated in {self.generate_s:.1f} s; about {self.saved_s:.0f} s saved; {self.dumped} dumped "
            f"({format_size(stored_bytes)}), {self.dump_failures} dumps failed"
        )
        if self.not_dumped:
            text += f", {self.not_dumped} not dumped because another rollout has their key (mode refresh replaces it)"
        return "; ".join([text, *self.notes])


class RolloutSkip:
    """Decides for each rollout step whether to load or to generate, and keeps the records."""

    def __init__(self, run: Run) -> None:
        self.run = run
        self.settings = run.settings
        self.statistics = Statistics()
        self._prompts = resolve_prompts(run.config, self.settings.prompts)
        if self.settings.mode in (Mode.REPEAT, Mode.REPEAT_LAST):
            self._prompts = Prompts.RECORDED
        self._writes = None
        if run.writes is not None and self.settings.mode.writes:
            self._writes = RolloutStore(
                run.writes, background=self.settings.background, max_disk=self.settings.max_disk
            )
        self._reads = None
        if run.reads is not None and self.settings.mode.reads:
            self._reads = self._writes if run.reads == run.writes and self._writes else RolloutStore(run.reads)
        self._recording: Recording | None = None
        self._dumped_steps: set[int] | None = None
        self._new_steps: list[int] = []
        self._check_recorded()

    @classmethod
    def open(cls, config: DictConfig | Mapping[str, Any]) -> RolloutSkip:
        """Everything from a training's configuration: settings, fingerprint, and the rollouts that fit."""
        return cls(open_run(config))

    def step(self, key: RolloutKey, inputs: Any, generate: Generate) -> Rollout:
        """The batch of one rollout step. ``generate`` is called with ``inputs`` if it must be generated."""
        mode = self.settings.mode
        if mode is Mode.OFF or key.step not in self.settings.steps or _is_validation(inputs):
            return Rollout(generate(inputs), inputs, hit=False, metrics={})
        if mode is Mode.RECORD and self._writes is not None and key in self._writes:
            raise EntryExistsError(
                f"{key} is already recorded in {self.run.writes}, and mode 'record' never overwrites. Mode 'cache' "
                "continues a recording, mode 'refresh' replaces it."
            )
        return self._load(key, inputs) or self._generate(key, inputs, generate)

    def recorded_keys(self) -> list[RolloutKey]:
        """The keys that can be loaded."""
        return [] if self._reads is None else self._reads.keys()

    def summary(self) -> str:
        """What was loaded, generated, saved and lost."""
        return self.statistics.summary(self._stored_bytes())

    def close(self) -> None:
        """Wait for the dumps, complete the manifest, and log the summary. A failed dump is raised if it is to be."""
        try:
            if self._writes is not None:
                self._surface(self._writes.close)
        finally:
            if self._recording is not None:
                self._recording.save(self._new_steps)
            if self.settings.mode is not Mode.OFF:
                logger.info("%s", self.summary())

    def __enter__(self) -> RolloutSkip:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        try:
            self.close()
        except RolloutSkipError as failed:
            if error is None:
                raise
            logger.error("while %s was on its way: %s", type(error).__name__, failed)

    # Loading

    def _load(self, key: RolloutKey, inputs: Any) -> Rollout | None:
        if self._reads is None:
            return None
        started = time.perf_counter()
        source = self._source_key(key)
        if source is None:
            return None
        try:
            entry = self._reads.load(source)
            batch = entry.batch()
        except UnreadableEntryError as error:
            self._handle_unreadable(source, error)
            return None
        replacement = self._fit(key, entry, inputs)
        if replacement is None:
            return None
        seconds = time.perf_counter() - started
        adopt_uids(batch, inputs)
        adopt_uids(replacement, inputs)
        self._prefetch_after(source)
        return Rollout(batch, replacement, True, self._count_hit(key, entry, batch, seconds))

    def _source_key(self, key: RolloutKey) -> RolloutKey | None:
        """The key whose entry is loaded for this one: itself if it is recorded, what the mode says otherwise."""
        assert self._reads is not None
        mode = self.settings.mode
        if key in self._reads:
            return key
        if mode in (Mode.REPEAT, Mode.REPEAT_LAST):
            return self._repeated_key(key)
        if mode is Mode.REPLAY:
            raise EntryNotFoundError(self._not_recorded(key))
        return None

    def _repeated_key(self, key: RolloutKey) -> RolloutKey:
        keys = self.recorded_keys()
        steps = sorted({other.step for other in keys})
        step = steps[-1] if self.settings.mode is Mode.REPEAT_LAST else steps[(key.step - 1) % len(steps)]
        batches = [other for other in keys if other.step == step]
        return batches[key.gen_batch % len(batches)]

    def _fit(self, key: RolloutKey, entry: LoadedEntry, inputs: Any) -> Any | None:
        """The input that the entry belongs to: the current one, the recorded one, or None if it must not be used."""
        if self._prompts is Prompts.RECORDED:
            recorded = entry.inputs()
            if recorded is None or len(recorded) != len(inputs):
                found = "no input" if recorded is None else f"{len(recorded)} rows"
                raise MismatchError(
                    f"The recorded batch for {key} cannot replace the current one: it has {found}, and the current one "
                    f"{len(inputs)} rows. Use the batch sizes of the recording."
                )
            return recorded
        mismatch = compare_prompts(entry, inputs)
        if mismatch is None:
            return inputs
        if not self.settings.mode.generates:
            raise MismatchError(
                f"{key} is recorded with other prompts: {mismatch}\nUse the data and seed of the recording, or "
                f"{BLOCK}.prompts=recorded to train on the recorded batch whole."
            )
        logger.warning("%s: a miss, because it is recorded with other prompts: %s", key, mismatch)
        return None

    def _handle_unreadable(self, key: RolloutKey, error: UnreadableEntryError) -> None:
        if not self.settings.mode.generates or self._reads is None or self._reads is not self._writes:
            raise error
        aside = self._reads.set_aside(key)
        logger.warning("%s is generated again, because its dump cannot be used. %s It is kept as %s", key, error, aside)
        self.statistics.notes.append(f"{key} was unreadable and is kept as {aside}")

    def _count_hit(self, key: RolloutKey, entry: LoadedEntry, batch: Any, seconds: float) -> dict[str, float]:
        saved = max(float(entry.record.info.get("generate_s") or 0.0) - seconds, 0.0)
        self.statistics.hits += 1
        self.statistics.load_s += seconds
        self.statistics.saved_s += saved
        metrics = {
            "rollout_skip/hit": 1.0,
            "rollout_skip/load_s": seconds,
            "rollout_skip/saved_s": saved,
            "rollout_skip/dump_failures": float(self.statistics.dump_failures),
            "rollout_skip/off_policy": float(self._is_off_policy(key)),
        }
        _replace_timings(batch, metrics)
        return metrics

    def _is_off_policy(self, key: RolloutKey) -> bool:
        return self.run.informational or (bool(self.run.training_difference) and key.step > 1)

    def _prefetch_after(self, key: RolloutKey) -> None:
        assert self._reads is not None
        for following in (RolloutKey(key.step, key.gen_batch + 1), RolloutKey(key.step + 1)):
            if following in self._reads:
                self._reads.prefetch(following)
                return

    # Generating

    def _generate(self, key: RolloutKey, inputs: Any, generate: Generate) -> Rollout:
        if not self.settings.mode.generates:
            raise EntryNotFoundError(self._not_recorded(key))
        started = time.perf_counter()
        batch = generate(inputs)
        seconds = time.perf_counter() - started
        self.statistics.misses += 1
        self.statistics.generate_s += seconds
        self._dump(key, batch, inputs, seconds)
        metrics = {
            "rollout_skip/hit": 0.0,
            "rollout_skip/dump_bytes": float(self._stored_bytes()),
            "rollout_skip/dump_failures": float(self.statistics.dump_failures),
        }
        meta = getattr(batch, "meta_info", None)
        if meta is not None:
            meta.setdefault("timing", {}).update(metrics)
        return Rollout(batch, inputs, False, metrics)

    def _dump(self, key: RolloutKey, batch: Any, inputs: Any, seconds: float) -> None:
        store = self._writes
        if store is None or not self._may_dump(key):
            return
        replace = self.settings.mode is Mode.REFRESH
        if not replace and key in store:
            self.statistics.not_dumped += 1
            logger.warning("%s was generated, not dumped: another rollout has its key; mode refresh replaces it", key)
            return
        info = {"generate_s": round(seconds, 6), "training_hash": self.run.fingerprint.training_hash}
        self._surface(lambda: self._begin_recording(key))
        self._surface(lambda: store.put(key, batch, inputs=inputs, info=info, replace=replace))
        self.statistics.dumped += 1
        self._new_steps.append(key.step)

    def _may_dump(self, key: RolloutKey) -> bool:
        limit = self.settings.max_dump_steps
        if limit is None or self._writes is None:
            return True
        if self._dumped_steps is None:
            self._dumped_steps = {other.step for other in self._writes}
        if key.step not in self._dumped_steps and len(self._dumped_steps) >= limit:
            return False
        self._dumped_steps.add(key.step)
        return True

    def _begin_recording(self, key: RolloutKey) -> None:
        if self._recording is not None or self.run.writes is None:
            return
        storage = open_storage(self.run.writes)
        own = Manifest.make(self.run.name, self.run.config, self.run.fingerprint)
        found = write_manifest(storage, own)
        if found.fingerprint != own.fingerprint:
            raise MismatchError(
                f"{found.path} belongs to other settings with the same short hash. Use another dump_dir."
            )
        self._recording = Recording(storage, gpu_layout(self.run.config))
        self._recording.save([key.step])

    def _surface(self, action: Callable[[], None]) -> None:
        """Do something that may report a failed dump, and let that stop the training only if it is to."""
        try:
            action()
        except (RolloutSkipError, OSError) as error:
            failed = len(error.failures) if isinstance(error, DumpError) and error.failures else 1
            self.statistics.dump_failures += failed
            if self.settings.fails_on_dump_error:
                raise
            logger.error("a dump failed, the training goes on: %s", error)

    # What is known

    def _check_recorded(self) -> None:
        """Settle before the training starts what can be settled: a mode that only loads needs something to load."""
        if not self.settings.mode.generates and not self.recorded_keys():
            raise EntryNotFoundError(
                f"Mode {self.settings.mode.value!r} loads recorded rollouts, and {self.run.reads} holds none. Record "
                f"first ({BLOCK}.mode=cache)."
            )

    def _not_recorded(self, key: RolloutKey) -> str:
        steps = sorted({other.step for other in self.recorded_keys()})
        held = f"steps {steps[0]} to {steps[-1]} ({len(steps)} of them)" if steps else "nothing"
        return (
            f"{key} is not recorded in {self.run.reads}, which holds {held}. In mode {self.settings.mode.value!r} "
            "nothing is generated. Train fewer steps, record more (mode cache), or use mode repeat."
        )

    def _stored_bytes(self) -> int:
        return 0 if self._writes is None else self._writes.written_bytes


def _is_validation(inputs: Any) -> bool:
    return bool((getattr(inputs, "meta_info", None) or {}).get("validate", False))


def _replace_timings(batch: Any, metrics: dict[str, float]) -> None:
    """The timings of the recorded run are not today's; what verl logs from there is what we measured now."""
    meta = getattr(batch, "meta_info", None)
    if meta is not None:
        meta["timing"] = dict(metrics)
