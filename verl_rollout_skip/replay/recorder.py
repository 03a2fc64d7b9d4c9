"""``Recorder``: dumps the rollouts of one training, writes their manifest, and handles dumps that fail."""

from __future__ import annotations

import logging
import threading
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

from verl_rollout_skip.config.modes import Mode
from verl_rollout_skip.errors import DumpError, EntryExistsError, MismatchError, RolloutSkipError
from verl_rollout_skip.fingerprint.layout import gpu_layout
from verl_rollout_skip.key import RolloutKey
from verl_rollout_skip.replay.disk_usage import variant_usage
from verl_rollout_skip.replay.lineage import ROLLOUT_DIGEST, proof_of
from verl_rollout_skip.replay.prompts import shallow_copy
from verl_rollout_skip.runs.manifest import Manifest, write_manifest
from verl_rollout_skip.runs.paths import MANIFEST, TRAININGS
from verl_rollout_skip.runs.tokenizer import copy_tokenizer
from verl_rollout_skip.runs.trainings import TrainingFile
from verl_rollout_skip.runs.variants import Run
from verl_rollout_skip.store.codec import Summary
from verl_rollout_skip.store.record import RecordedPart
from verl_rollout_skip.store.storage import HERE
from verl_rollout_skip.store.storage.locations import open_storage
from verl_rollout_skip.store.store import RolloutStore

logger = logging.getLogger(__name__)


class SlicedRollout(ABC):
    """A generated rollout whose rows other processes read and write, slice by slice.

    ``size`` is the memory that the slices take until they are written.
    """

    size: int

    @abstractmethod
    def write(self, folder: str, key: RolloutKey) -> tuple[Summary, list[RecordedPart]]:
        """Wait until the slices are written as parts of an entry, and return its key figures and its parts."""


class Recorder:
    """Writes generated rollouts into the training's own variant.

    A failed dump is logged and counted; it is raised only if ``on_dump_error`` says so. ``not_dumped`` counts the
    rollouts that were not dumped because their key is already taken.
    """

    def __init__(self, run: Run, folder: str, training: str) -> None:
        self.run = run
        self.folder = folder
        self.usage = variant_usage(folder, run.settings.max_disk)
        self.store = RolloutStore(folder, background=run.settings.background, usage=self.usage)
        self.not_dumped = 0
        self.failures = 0
        self._replaces = run.settings.mode is Mode.REFRESH
        self._name = training
        self._training: TrainingFile | None = None
        self._accepted: set[RolloutKey] = set()
        self._steps_on_disk: set[int] | None = None
        self._preparing = threading.Lock()

    @property
    def dumped(self) -> int:
        """The number of rollouts that are written or waiting to be written."""
        return len(self._accepted)

    def accepts(self, key: RolloutKey) -> bool:
        """Whether to dump a rollout: its key is free or may be replaced, and ``max_dump_steps`` is not reached.

        Call this once per key, because a taken key is counted and reported.
        """
        accepted = False
        with self._handle_failures():
            if not self._replaces and key in self.store:
                self._count_taken(key)
            else:
                accepted = self._within_limit(key)
        return accepted

    def snapshot(self, inputs: Any) -> Any:
        """A snapshot of an input to pass to ``dump``, because generation may change it."""
        try:
            return self.store.snapshot(inputs)
        except RolloutSkipError:
            return shallow_copy(inputs)  # the dump will fail with this error

    def snapshot_output(self, batch: Any) -> Any:
        """A snapshot of a generated rollout to pass to ``dump``."""
        try:
            return self.store.snapshot_output(batch)
        except RolloutSkipError:
            return batch  # the dump will fail with this error

    def dump(self, key: RolloutKey, batch: Any, inputs: Any, info: dict[str, Any]) -> None:
        """Write an accepted rollout, in the background if the settings say so."""
        proof = proof_of(info[ROLLOUT_DIGEST])
        self._dump(
            key, lambda: self.store.put(key, batch, inputs=inputs, info=info, replace=self._replaces, proof=proof)
        )

    def dump_slices(self, key: RolloutKey, rollout: SlicedRollout, info: dict[str, Any]) -> None:
        """Commit an accepted rollout that other processes write."""
        self._dump(
            key,
            lambda: self.store.put_parts(
                key, lambda: rollout.write(self.folder, key), info=info, size=rollout.size, replace=self._replaces
            ),
        )

    def prepare_folder(self) -> None:
        """Write the manifest before the first dump, and again if the variant was pruned in the meantime."""
        with self._preparing:
            self._prepare_folder()

    def prepare_ledger(self) -> None:
        """Write the manifest before the ledger, if there is none yet."""
        if self._training is None and open_storage(self.folder).info(HERE, MANIFEST) is None:
            self.prepare_folder()

    def report_failure(self, key: RolloutKey, failure: RolloutSkipError) -> None:
        """Treat an accepted rollout that cannot be dumped as a failed dump."""
        with self._handle_failures():
            raise type(failure)(f"{key}: {failure}") from failure

    def report_failures(self) -> None:
        """Handle the dumps that have failed in the background since the last call."""
        with self._handle_failures():
            self.store.raise_failures()

    def close(self) -> None:
        """Wait for pending dumps and save the list of steps that this training recorded."""
        try:
            with self._handle_failures():
                self.store.close()
        finally:
            if self._training is not None:
                self._save(self._training, [key.step for key in self._accepted])

    def _dump(self, key: RolloutKey, put: Callable[[], None]) -> None:
        with self._handle_failures():
            self._accepted.add(key)
            try:
                self.prepare_folder()
                put()
            except EntryExistsError as error:  # a background thread adds it to its failures instead
                raise DumpError.of([(key, error)]) from error
            except (RolloutSkipError, OSError) as error:
                # An error that lists failures may be about earlier dumps; those are discarded where it is handled.
                if not (isinstance(error, DumpError) and error.failures):
                    self._accepted.discard(key)
                raise

    def _prepare_folder(self) -> None:
        storage = open_storage(self.folder)
        if self._training is not None and storage.info(HERE, MANIFEST) is not None:
            return
        own = Manifest.make(self.run.name, self.run.config, self.run.fingerprint, self.run.trainer)
        found = write_manifest(storage, own)
        if found.fingerprint != own.fingerprint:
            raise MismatchError(
                f"{found.path} belongs to other settings with the same short hash. Nothing was written. Use another "
                "dump_dir."
            )
        try:
            copy_tokenizer(self.run.config, storage)
        except OSError as error:
            logger.warning("the tokenizer was not copied into the variant folder: %s", error)
        if self._training is None:
            self._training = TrainingFile(storage, gpu_layout(self.run.config), self._name)
        self._save(self._training, [key.step for key in self._accepted])

    def _save(self, training: TrainingFile, steps: list[int]) -> None:
        try:
            training.save(steps)
        except OSError as error:
            logger.warning(
                "the list of steps that this training recorded could not be written to %s/%s: %s. The rollouts do not "
                "depend on it.",
                self.folder,
                TRAININGS,
                error,
            )

    def _within_limit(self, key: RolloutKey) -> bool:
        limit = self.run.settings.max_dump_steps
        if limit is None:
            return True
        if self._steps_on_disk is None:
            self._steps_on_disk = {other.step for other in self.store}
        steps = self._steps_on_disk | {other.step for other in self._accepted}
        return key.step in steps or len(steps) < limit

    @contextmanager
    def _handle_failures(self) -> Iterator[None]:
        """Count and log a failed dump; raise it only if ``on_dump_error`` says so."""
        try:
            yield
        except MismatchError:
            raise
        except (RolloutSkipError, OSError) as error:
            failures = error.failures if isinstance(error, DumpError) else ()
            self._accepted -= {key for key, _ in failures}
            serious = [(key, failure) for key, failure in failures if not self._is_taken(key, failure)]
            if failures and not serious:
                return
            self.failures += len(serious) or 1
            if self.run.settings.fails_on_dump_error:
                raise
            logger.error("a dump failed; the training continues: %s", error)

    def _is_taken(self, key: RolloutKey, failure: BaseException) -> bool:
        """Whether another process recorded a different rollout first. Only mode ``record`` counts this as a failure."""
        if self.run.settings.mode is Mode.RECORD or not isinstance(failure, EntryExistsError):
            return False
        self._count_taken(key)
        return True

    def _count_taken(self, key: RolloutKey) -> None:
        self.not_dumped += 1
        logger.warning(
            "%s was generated but not dumped, because its key is taken by another rollout; mode refresh replaces it",
            key,
        )
