"""Reads a generated sample from TransferQueue, to record it or to compute its digest.

Tasks read a large sample while the training continues; the driver reads a small one immediately.
"""

from __future__ import annotations

from collections.abc import Collection
from concurrent.futures import Future
from dataclasses import dataclass
from functools import partial
from typing import Any

from transfer_queue import KVBatchMeta

from verl_rollout_skip.errors import RolloutSkipError
from verl_rollout_skip.replay.results import Generated, Miss
from verl_rollout_skip.replay.rollout import RolloutSkip
from verl_rollout_skip.store.threads import start_thread
from verl_rollout_skip.trainers.v1.in_flight import InFlight, PromptRows
from verl_rollout_skip.trainers.v1.transfer import rows as queue
from verl_rollout_skip.trainers.v1.transfer.pool import TaskPool
from verl_rollout_skip.trainers.v1.transfer.rows import Fields, Sample, Trajectory
from verl_rollout_skip.trainers.v1.transfer.slices import SampledSlices, cut, size_of


@dataclass(frozen=True)
class Sampled:
    """A sample in TransferQueue: its rows, the fields to read, and the positions of its prompts.

    ``whole`` is recorded for the sample as a whole; None if the sample is not recorded and only its digest is needed.
    """

    batch: KVBatchMeta
    positions: list[int]
    fields: Fields
    prompts: PromptRows
    whole: dict[str, Any] | None
    seconds: float

    def read(self) -> Generated:
        """Read the rows into the driver."""
        keys = self.batch.keys
        try:
            found = queue.fetch_rows(keys, self.fields, partition=self.batch.partition_id)
            if self.whole is None:
                return Generated(found, None, self.seconds)
            queue.pack_rows(found, keys, self.batch.tags, self.positions, self.whole)
        except RolloutSkipError as failure:
            return Generated(None, None, self.seconds, failure)
        return Generated(found, self.prompts.rows(self.positions), self.seconds)

    def read_by_tasks(self, pool: TaskPool, part_bytes: int) -> Generated:
        """Let tasks read and encode the rows, or only compute their digest."""
        requests = cut(self.batch, self.positions, self.fields, part_bytes)
        try:
            if self.whole is None:
                return Generated(None, None, self.seconds, digest=pool.digest(requests))
            slices = SampledSlices(pool, requests, self.prompts, self.whole)
        except RolloutSkipError as failure:
            return Generated(None, None, self.seconds, failure)
        return Generated(slices, None, self.seconds, slices.failure, slices.digest)


class SampleReader:
    """Reads the samples of a training, one at a time."""

    def __init__(self, skip: RolloutSkip, pool: TaskPool, in_flight: InFlight) -> None:
        self._pool, self._in_flight, self._part_bytes = pool, in_flight, skip.settings.part_bytes
        self._columns = skip.columns
        self._read: tuple[Miss, KVBatchMeta, Generated | Future[Generated]] | None = None

    def start(
        self,
        miss: Miss,
        batch: KVBatchMeta,
        metrics: dict[str, Any],
        seconds: float,
        wanted: Collection[str] | None,
    ) -> bool:
        """Read a sample that took ``seconds`` to generate. Returns whether it is still being read.

        ``wanted`` names the fields to read if the sample is not recorded. ``metrics`` come from the replay buffer.
        """
        uids = [Trajectory.parse(key).uid for key in batch.keys]
        positions = self._in_flight.positions(uids)
        gone = sorted(set(positions))
        kept = KVBatchMeta(partition_id=batch.partition_id, keys=list(batch.keys), tags=list(batch.tags))
        if miss.dumps:
            self._columns.add_rollout(miss.key, kept.keys.copy)
        found: Generated | Future[Generated]
        try:
            gone = self._in_flight.gone(uids, queue.waiting_prompts())
            fields = queue.find_fields(batch, None if miss.dumps else wanted)
            whole = None
            if miss.dumps:
                drawn = [prompt.digest for prompt in self._in_flight.drawn]
                whole = queue.whole_of(batch, Sample(drawn, gone, metrics, fields.partial))
            sampled = Sampled(kept, positions, fields, self._in_flight.prompt_rows(positions), whole, seconds)
            if self._pool.takes(size_of(kept.tags), f"{miss.key} is read"):
                read = partial(sampled.read_by_tasks, self._pool, self._part_bytes)
                found = start_thread(read, "rollout-skip-read")
            else:
                found = sampled.read()
        except RolloutSkipError as failure:
            found = Generated(None, None, seconds, failure)
        self._in_flight.settle(gone)
        self._read = miss, kept, found
        return isinstance(found, Future)

    def finish(self) -> tuple[Miss, KVBatchMeta, Generated] | None:
        """Wait for the sample, and return it once; None if there is none."""
        read, self._read = self._read, None
        if read is None:
            return None
        miss, batch, found = read
        return miss, batch, found.result() if isinstance(found, Future) else found
