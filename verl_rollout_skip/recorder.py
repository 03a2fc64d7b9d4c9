"""``Recorder``: the dumps of one training, their manifest, and what becomes of a dump that fails."""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import Any

from verl_rollout_skip.errors import DumpError, EntryExistsError, MismatchError, RolloutSkipError
from verl_rollout_skip.history import IDENTITY, proof_of
from verl_rollout_skip.key import RolloutKey
from verl_rollout_skip.layout import gpu_layout
from verl_rollout_skip.manifest import NAME as MANIFEST
from verl_rollout_skip.manifest import TRAININGS, Manifest, TrainingFile, write_manifest
from verl_rollout_skip.modes import Mode
from verl_rollout_skip.outcome import Statistics
from verl_rollout_skip.prompts import shallow_copy
from verl_rollout_skip.store.storage import HERE
from verl_rollout_skip.store.storage.locations import open_storage
from verl_rollout_skip.store.store import RolloutStore
from verl_rollout_skip.tokenizer import copy_tokenizer
from verl_rollout_skip.variants import Run

logger = logging.getLogger(__name__)


class Recorder:
    """Writes generated rollouts into today's own variant."""

    def __init__(self, run: Run, folder: str, statistics: Statistics) -> None:
        self.run = run
        self.folder = folder
        self.store = RolloutStore(folder, background=run.settings.background, max_disk=run.settings.max_disk)
        self._statistics = statistics
        self._training: TrainingFile | None = None
        self._accepted: set[RolloutKey] = set()
        self._steps_on_disk: set[int] | None = None

    def accepts(self, key: RolloutKey) -> bool:
        """Whether a rollout is to be dumped: nobody has its key, and not enough steps are recorded yet."""
        replace = self.run.settings.mode is Mode.REFRESH
        accepts: list[bool] = []
        return self._surface(lambda: accepts.append(self._accepts(key, replace))) and accepts[0]

    def dump(self, key: RolloutKey, batch: Any, inputs: Any, info: dict[str, Any]) -> None:
        """Record a rollout that was accepted."""
        if self._surface(lambda: self._begin(key)):
            self._accepted.add(key)
            if not self._surface(lambda: self._put(key, batch, inputs, info)):
                self._accepted.discard(key)
            self._count()

    def snapshot(self, inputs: Any) -> Any:
        """An input as it is now, because generating may change it; to be given to ``dump``."""
        try:
            return self.store.snapshot(inputs)
        except RolloutSkipError:
            return shallow_copy(inputs)  # which the dump then fails with

    def snapshot_output(self, batch: Any) -> Any:
        """What was generated, as it is now; to be given to ``dump``."""
        try:
            return self.store.snapshot_output(batch)
        except RolloutSkipError:
            return batch  # which the dump then fails with

    def count_failure(self, key: RolloutKey, failure: RolloutSkipError) -> None:
        """A rollout that was accepted cannot be dumped: raise the reason, if it is to stop the training."""

        def fail() -> None:
            raise type(failure)(f"{key}: {failure}") from failure

        self._surface(fail)

    def _accepts(self, key: RolloutKey, replace: bool) -> bool:
        if not replace and key in self.store:
            self._count_taken(key)
            return False
        return self._within_limit(key)

    def raise_failures(self) -> None:
        """Let what has failed in the background since the last time stop the training, if it is to."""
        self._surface(self.store.raise_failures)
        self._count()

    def close(self) -> None:
        """Wait for the dumps and complete the manifest; raise what failed, if it is to stop the training."""
        try:
            self._surface(self.store.close)
        finally:
            self._count()
            if self._training is not None:
                self._write_down(self._training, [key.step for key in self._accepted])

    def _put(self, key: RolloutKey, batch: Any, inputs: Any, info: dict[str, Any]) -> None:
        replace = self.run.settings.mode is Mode.REFRESH
        try:
            proof = proof_of(info[IDENTITY])
            self.store.put(key, batch, inputs=inputs, info=info, replace=replace, proof=proof)
        except EntryExistsError as error:  # without a background thread; with one it comes among the failures
            raise DumpError.of([(key, error)]) from error

    def _begin(self, key: RolloutKey) -> None:
        storage = open_storage(self.folder)
        if self._training is not None and storage.info(HERE, MANIFEST) is not None:
            return  # somebody may have pruned the variant meanwhile
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
            logger.warning("the tokenizer was not copied beside the dumps: %s", error)
        if self._training is None:
            self._training = TrainingFile(storage, gpu_layout(self.run.config))
        self._write_down(self._training, [key.step])

    def _write_down(self, training: TrainingFile, steps: list[int]) -> None:
        try:
            training.save(steps)
        except OSError as error:
            logger.warning(
                "the steps that this training recorded could not be written down in %s/%s: %s. The rollouts do not "
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

    def _surface(self, action: Callable[[], None]) -> bool:
        """Do something that may report failed dumps, and let those stop the training only if they are to.

        Returns whether the action itself was done: a failure that it reports may be one of an earlier dump.
        """
        try:
            action()
        except MismatchError:
            raise
        except (RolloutSkipError, OSError) as error:
            failures = error.failures if isinstance(error, DumpError) else ()
            self._accepted -= {key for key, _ in failures}
            serious = [(key, failure) for key, failure in failures if not self._is_taken(key, failure)]
            if failures and not serious:
                return True
            self._statistics.dump_failures += len(serious) or 1
            if self.run.settings.fails_on_dump_error:
                raise
            logger.error("a dump failed, the training goes on: %s", error)
            return bool(failures)
        return True

    def _is_taken(self, key: RolloutKey, failure: BaseException) -> bool:
        """Another process was first with another rollout. That is no failure, except where all must be recorded."""
        if self.run.settings.mode is Mode.RECORD or not isinstance(failure, EntryExistsError):
            return False
        self._count_taken(key)
        return True

    def _count_taken(self, key: RolloutKey) -> None:
        self._statistics.not_dumped += 1
        logger.warning("%s is generated and not dumped: another rollout has its key; mode refresh replaces it", key)

    def _count(self) -> None:
        self._statistics.dumped = len(self._accepted)
