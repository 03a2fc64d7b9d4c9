"""``Sources``: the recorded rollouts that a training may load, found by key and prefetched."""

from __future__ import annotations

import contextlib
import logging
import time
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property
from typing import Any

from verl_rollout_skip.config.modes import Mode
from verl_rollout_skip.config.skip_config import BLOCK
from verl_rollout_skip.errors import (
    EntryNotFoundError,
    MismatchError,
    RolloutSkipError,
    StoreError,
    UnreadableEntryError,
    UnsafePathError,
    UnsupportedBatchError,
)
from verl_rollout_skip.key import RolloutKey
from verl_rollout_skip.replay.explain import explain_key
from verl_rollout_skip.replay.lineage import LINEAGE, ROLLOUT_DIGEST, extend
from verl_rollout_skip.replay.prompts import adopt_uids, explain_mismatch, explain_unfit_replacement
from verl_rollout_skip.runs.manifest import explain_foreign
from verl_rollout_skip.runs.variants import Run, Source, own_source
from verl_rollout_skip.store.loaded import Entry
from verl_rollout_skip.store.store import RolloutStore

logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class Candidate:
    """A recorded rollout that can be loaded if its input matches. ``started`` is the start time of the search."""

    key: RolloutKey
    source: Source
    entry: Entry
    replaces_prompts: bool
    started: float

    @cached_property
    def recorded_inputs(self) -> Any:
        """The recorded input if it replaces the current one, otherwise None."""
        return self.entry.inputs() if self.replaces_prompts else None

    def explain_mismatch(self, inputs: Any) -> str | None:
        """Why the entry cannot be used with the current input; None if it can."""
        try:
            if self.replaces_prompts:
                return explain_unfit_replacement(self.entry, self.recorded_inputs, inputs)
            return explain_mismatch(self.entry, inputs)
        except UnsupportedBatchError as error:  # a value that cannot be stored was not recorded either
            return str(error)

    def batches(self, inputs: Any) -> tuple[Any, Any]:
        """The recorded batch and its input, with the uids of the current input."""
        batch = self.entry.batch()
        adopt_uids(batch, inputs)
        if self.recorded_inputs is None:
            return batch, inputs
        adopt_uids(self.recorded_inputs, inputs, add=True)
        return batch, self.recorded_inputs

    def describe_mismatch(self, reason: str) -> tuple[str, str]:
        """The message and the advice for an entry that cannot be used for this reason."""
        if self.replaces_prompts:
            return (
                f"The recorded batch of {self.key} cannot replace the current one: {reason}",
                "Record again (mode refresh), or use the data settings of the recording.",
            )
        return (
            f"{self.key} is recorded with a different input: {reason}",
            f"Use the data and seed of the recording, or set {BLOCK}.prompts=recorded to train on the recorded batch.",
        )


class Loader:
    """Loads entries. The V1 trainers have one that puts large entries directly into TransferQueue."""

    def load(self, store: RolloutStore, key: RolloutKey, inputs: bool) -> Entry:
        """The entry of a key, verified and decoded. ``inputs``: whether its input is needed too."""
        entry = store.load(key)
        entry.decode()
        return entry

    def prefetch(self, store: RolloutStore, key: RolloutKey, inputs: bool) -> None:
        """Start loading an entry, including its input if ``inputs``."""
        store.prefetch(key, inputs=inputs)

    def drop(self, store: RolloutStore) -> None:
        """Forget what was prefetched from a store."""
        store.drop_prefetched()


class Sources:
    """The variants that a training reads. ``own`` is the store it writes to and, once it has a manifest, also reads.

    ``notes`` lists the entries that could not be read, for the summary.
    """

    def __init__(self, run: Run, own: RolloutStore | None, replaces_prompts: bool, loader: Loader) -> None:
        self._run = run
        self._mode = run.settings.mode
        self._own = own
        self._replaces_prompts = replaces_prompts
        self._loader = loader
        self.notes: list[str] = []
        self._repeated: list[RolloutKey] = []
        self._opened: list[tuple[Source, RolloutStore]] = []
        if self._mode.reads:
            self._opened = [(source, self._store_of(source)) for source in run.sources]

    @property
    def sources(self) -> list[Source]:
        return [source for source, _ in self._opened]

    def keys(self) -> list[RolloutKey]:
        """The keys that can be loaded."""
        return sorted({key for _, store in self._opened for key in store})

    def candidates(self, key: RolloutKey) -> Iterator[Candidate]:
        """The readable entries for a key, one per source. Entries that cannot be read are reported and skipped."""
        started = time.perf_counter()
        wanted = self._wanted_key(key)
        for source, store in self._opened_with_own(wanted):
            entry = self._find(wanted, source, store)
            if entry is not None:
                yield Candidate(wanted, source, entry, self._replaces_prompts, started)

    def lineage_before(self, step: int) -> str | None:
        """The recorded lineage before a step, for a training that starts from a checkpoint; None if it is unknown.

        A folder that cannot be read is handled like a failed dump.
        """
        stores = [store for _, store in self._opened]
        if self._own is not None and self._own not in stores:
            stores.append(self._own)
        for store in stores:
            try:
                records = [store.record(key).info for key in store if key.step == step - 1]
            except (EntryNotFoundError, UnreadableEntryError):
                continue  # reported when the entry itself is loaded
            except (OSError, UnsafePathError) as error:
                if self._needs_sources:
                    raise
                logger.warning(
                    "it is unknown what this training learned from before step %d, because %s cannot be read, so "
                    "rollout_skip/off_policy may be 0 for rollouts that are off-policy: %s",
                    step,
                    store.path,
                    error,
                )
                return None
            if records:
                return extend(records[0].get(LINEAGE), [info.get(ROLLOUT_DIGEST) for info in records])
        return None

    def prefetch(self, keys: list[RolloutKey]) -> None:
        """Start loading the first of these keys that is recorded, and drop everything else that was prefetched."""
        found: tuple[RolloutKey, RolloutStore] | None = None
        # A source that cannot be read is reported when the rollout itself is loaded.
        with contextlib.suppress(OSError, RolloutSkipError):
            found = self._first_recorded(keys)
        for _, store in self._opened:
            if found is None or store is not found[1]:
                self._loader.drop(store)
        if found is not None:
            self._loader.prefetch(found[1], found[0], self._replaces_prompts)

    def close(self) -> None:
        """Close the stores, except the one that the training writes to."""
        for _, store in self._opened:
            if store is not self._own:
                store.close()

    def _store_of(self, source: Source) -> RolloutStore:
        if self._own is not None and source.folder == self._own.path:
            return self._own
        return RolloutStore(source.folder)

    @property
    def _needs_sources(self) -> bool:
        """Whether a folder that cannot be read stops the training."""
        return not self._mode.generates or self._run.settings.fails_on_dump_error

    def _opened_with_own(self, key: RolloutKey) -> Iterator[tuple[Source, RolloutStore]]:
        """The sources to search for a key. The training's own variant is the last one if it has no manifest at the
        start: it is opened once any process has written one, and only if the key is in none of the others."""
        yield from self._opened
        own = self._own
        if own is None or not self._mode.reads or any(store is own for _, store in self._opened):
            return
        try:
            source = own_source(own.path, self._run.fingerprint)
        except (OSError, UnsafePathError) as error:
            self._handle_unreadable(key, own.path, error)
            return
        if source is not None:
            self._opened.append((source, own))
            yield source, own

    def _handle_unreadable(self, key: RolloutKey, folder: str, error: Exception) -> None:
        """Handle a folder that cannot be read like a failed dump: raise the error, or log that the key is generated."""
        if self._needs_sources:
            raise error
        logger.error("%s is generated, because %s cannot be read: %s", key, folder, error)
        self.notes.append(f"{key} could not be looked up")

    def _wanted_key(self, key: RolloutKey) -> RolloutKey:
        """The key of the entry to load: the key itself if it is recorded, otherwise the one that the mode selects."""
        if self._mode.generates or any(key in store for _, store in self._opened):
            return key
        if self._mode.loads_own_steps:
            raise EntryNotFoundError(explain_key(key, self.keys(), self._mode, self.sources))
        if self._repeated:  # these modes record nothing, so keys are listed once, and again only if an entry is gone
            found = _repeated_key(self._repeated, key, self._mode)
            if any(found in store for _, store in self._opened):
                return found
        self._repeated = self.keys()
        if not self._repeated:
            raise EntryNotFoundError(explain_key(key, [], self._mode, self.sources))
        return _repeated_key(self._repeated, key, self._mode)

    def _first_recorded(self, keys: list[RolloutKey]) -> tuple[RolloutKey, RolloutStore] | None:
        for key in keys:
            if key.gen_batch == 0 and self._mode in (Mode.REPEAT, Mode.REPEAT_LAST):
                key = self._wanted_key(key)
            for _, store in self._opened:
                if key in store:
                    return key, store
        return None

    def _find(self, key: RolloutKey, source: Source, store: RolloutStore) -> Entry | None:
        """The entry if there is one."""
        try:
            entry = self._open(key, store) if key in store else None
        except (OSError, UnsafePathError) as error:
            self._handle_unreadable(key, source.folder, error)
            return None
        foreign = None if entry is None else explain_foreign(entry.record.info, source.manifest)
        if foreign is None:
            return entry
        if not self._mode.generates:
            raise MismatchError(f"{key} {foreign}")
        logger.warning("a miss: %s %s", key, foreign)
        return None

    def _open(self, key: RolloutKey, store: RolloutStore) -> Entry | None:
        """The entry, decoded; None if it cannot be read and has to be generated again."""
        try:
            return self._loader.load(store, key, self._replaces_prompts)
        except EntryNotFoundError:
            if not self._mode.generates:
                raise
            return None  # another process has removed it or set it aside
        except UnreadableEntryError as error:
            if not self._mode.generates:
                raise
            return self._set_aside(key, store, error)

    def _set_aside(self, key: RolloutKey, store: RolloutStore, error: UnreadableEntryError) -> Entry | None:
        note = f"{key} was unreadable"
        if store is self._own:
            try:
                note += f" and is kept as {store.set_aside(key)}"
            except EntryNotFoundError:
                pass  # another process has set it aside
            except StoreError:
                return store.load(key)  # another process has recorded it again
        logger.warning("%s is generated again, because its dump cannot be used. %s (%s)", key, error, note)
        self.notes.append(note)
        return None


def _repeated_key(keys: list[RolloutKey], key: RolloutKey, mode: Mode) -> RolloutKey:
    """The key of the recorded rollout to load for a key that is not recorded."""
    steps = sorted({other.step for other in keys})
    if mode is Mode.REPEAT_LAST:
        batches = [other for other in keys if other.step == steps[-1]]
        return batches[key.gen_batch % len(batches)]
    # A step that needs more generation batches than were recorded continues with those of the following steps.
    step = steps[(key.step - steps[0]) % len(steps)]
    first = next(index for index, other in enumerate(keys) if other.step == step)
    return keys[(first + key.gen_batch) % len(keys)]
