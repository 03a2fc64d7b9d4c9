"""``TaskLoader``: loads recorded samples, large ones by tasks that put their rows directly into TransferQueue.

The rows of the next hit are put during the current step, under temporary uids, because its prompts are not drawn yet.
"""

from __future__ import annotations

import contextlib
import logging
import uuid
from concurrent.futures import Future, wait
from itertools import accumulate
from typing import Any

import transfer_queue as tq
from transfer_queue import KVBatchMeta

from verl_rollout_skip.config.modes import Mode, Reward
from verl_rollout_skip.config.skip_config import BLOCK, SkipConfig
from verl_rollout_skip.errors import EntryNotFoundError, RolloutSkipError
from verl_rollout_skip.key import RolloutKey
from verl_rollout_skip.replay.sources import Loader
from verl_rollout_skip.store.codec.batch import BatchKind
from verl_rollout_skip.store.loaded import Entry
from verl_rollout_skip.store.record import EntryRecord
from verl_rollout_skip.store.store import RolloutStore
from verl_rollout_skip.store.threads import start_thread
from verl_rollout_skip.trainers.v1.compat import PARTITION
from verl_rollout_skip.trainers.v1.transfer.pool import TaskPool
from verl_rollout_skip.trainers.v1.transfer.rows import PutBatch, Sample
from verl_rollout_skip.trainers.v1.transfer.slices import BYTES_PER_TOKEN
from verl_rollout_skip.trainers.v1.transfer.tasks import PutSlice

logger = logging.getLogger(__name__)


class PutEntry:
    """A recorded sample whose rows are already in TransferQueue, under temporary uids."""

    def __init__(self, store: RolloutStore, record: EntryRecord, token: str, slices: list[PutSlice]) -> None:
        self.record, self.token = record, token
        self._store, self._slices = store, slices
        self.positions = [position for each in slices for position in each.positions]
        self.sample = Sample(**slices[0].whole)

    @property
    def input_kind(self) -> BatchKind | None:
        return self._slices[0].input_kind

    def prompt_digests(self) -> list[str] | None:
        digests: list[str] = []
        for each in self._slices:
            if each.prompt_digests is None:
                return None
            digests += each.prompt_digests
        return digests

    def batch(self, kind: BatchKind | str | None = None) -> PutBatch:
        keys = [key for each in self._slices for key in each.keys]
        tags = [tag for each in self._slices for tag in each.tags]
        sample = self.sample
        meta = KVBatchMeta(
            partition_id=PARTITION, keys=keys, tags=tags, fields=sample.fields, extra_info=sample.extra_info
        )
        return PutBatch(meta, sample)

    def inputs(self, kind: BatchKind | str | None = None) -> Any:
        """The recorded input, to explain a mismatch. This loads the whole entry on the driver."""
        return self._store.load(self.record.key).inputs(kind)


class TaskLoader(Loader):
    """Puts large entries into TransferQueue by tasks, if ``is_on``; other entries are loaded into the driver.

    ``ahead`` allows this before the trainer asks for the entry.
    """

    def __init__(self, pool: TaskPool, is_on: bool, ahead: bool) -> None:
        self._pool, self._is_on, self.ahead = pool, is_on, ahead
        self._started: tuple[RolloutStore, RolloutKey, Future[PutEntry]] | None = None
        self._dropped: list[Future[PutEntry]] = []
        self._unused: list[PutEntry] = []

    def load(self, store: RolloutStore, key: RolloutKey, inputs: bool) -> Entry:
        started, self._started = self._started, None
        if started is not None and started[:2] != (store, key):
            self._dropped.append(started[2])
            started = None
        if started is None and not self._is_put(store, key, inputs):
            return super().load(store, key, inputs)
        try:
            entry = self._put(store, key) if started is None else started[2].result()
        except EntryNotFoundError:
            raise
        except Exception as error:  # from Ray, TransferQueue, the file system of a node …
            logger.warning("%s is loaded by the driver, because tasks could not load it: %s", key, error)
            return super().load(store, key, inputs)
        self._unused.append(entry)
        # It may have been replaced since it was put ahead of time.
        return entry if store.record(key) == entry.record else super().load(store, key, inputs)

    def prefetch(self, store: RolloutStore, key: RolloutKey, inputs: bool) -> None:
        if self._started is not None:
            if self._started[:2] == (store, key):
                return
            self._dropped.append(self._started[2])
            self._started = None
        if not self._is_put(store, key, inputs):
            super().prefetch(store, key, inputs)
        elif self.ahead:
            self._started = store, key, start_thread(lambda: self._put(store, key), "rollout-skip-put")

    def drop(self, store: RolloutStore) -> None:
        super().drop(store)
        if self._started is not None and self._started[0] is store:
            self._dropped.append(self._started[2])
            self._started = None

    def accept(self, entry: Entry) -> None:
        """The training uses this entry: verl removes its rows. Remove those of all others that were loaded."""
        self._unused = [unused for unused in self._unused if unused is not entry]
        self.clear_unused()

    def clear_unused(self) -> None:
        """Remove the rows of entries that were loaded and not used."""
        unused, self._unused = self._unused, []
        for entry in unused:
            clear(entry.token)

    def clear_all(self) -> None:
        """Also wait for rows that are being put ahead of time, and remove them, before others are generated."""
        self.clear_unused()
        if self._started is not None:
            self._dropped.append(self._started[2])
            self._started = None
        dropped, self._dropped = self._dropped, []
        wait(dropped)
        for future in dropped:
            if future.exception() is None:
                clear(future.result().token)

    def _is_put(self, store: RolloutStore, key: RolloutKey, inputs: bool) -> bool:
        """Whether tasks put the rows of an entry. The driver also needs it if its input replaces the current one."""
        if inputs or not self._is_on:
            return False
        try:
            record = store.record(key)
        except (OSError, RolloutSkipError):
            return False  # reported when the entry is loaded
        tokens = (record.prompt_tokens or 0) + (record.response_tokens or 0)
        return self._pool.takes(max(tokens * BYTES_PER_TOKEN, record.bytes), f"{key} is loaded")

    def _put(self, store: RolloutStore, key: RolloutKey) -> PutEntry:
        record, token = store.record(key), uuid.uuid4().hex
        try:
            starts = accumulate((part.rows for part in record.parts), initial=0)
            parts = list(zip(record.parts, starts, strict=False))
            slices = self._pool.put(store.path, key, parts, token, store.load_limit)
        except BaseException:
            with contextlib.suppress(Exception):  # the error that is raised is more important
                clear(token)
            raise
        return PutEntry(store, record, token, slices)


def report_driver_loads(settings: SkipConfig, replaces_prompts: bool) -> None:
    """Log why tasks do not load rollouts although they are on, if there is a reason."""
    reasons = {
        "mode 'shadow' compares them": settings.mode is Mode.SHADOW,
        "reward is 'recompute'": settings.reward is Reward.RECOMPUTE,
        "recorded batches replace the current ones": replaces_prompts,
    }
    why = next((reason for reason, holds in reasons.items() if holds), None)
    if why is not None:
        logger.info("the driver loads rollouts although %s.tasks is 'on', because %s", BLOCK, why)


def clear(prefix: str | tuple[str, ...]) -> None:
    """Remove the rows from TransferQueue whose keys have this prefix, or one of these."""
    listed = (tq.kv_list(PARTITION) or {}).get(PARTITION, {})
    keys = [key for key in listed if key.startswith(prefix)]
    if keys:
        tq.kv_clear(keys=keys, partition_id=PARTITION)
