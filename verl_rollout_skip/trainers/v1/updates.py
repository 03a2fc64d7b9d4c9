"""Observes the rows that the updates of actor and critic receive, for the training's ledger.

The rows are in TransferQueue, and the driver only has their keys. While the workers update, tasks read a large batch.
The driver reads a small one, or one whose columns are dumped, slice by slice.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

from transfer_queue import KVBatchMeta

from verl_rollout_skip.replay.ledger.updates import ACTOR, CRITIC, UpdateSlice
from verl_rollout_skip.replay.rollout import RolloutSkip
from verl_rollout_skip.trainers.v1 import compat
from verl_rollout_skip.trainers.v1.transfer.pool import TaskPool
from verl_rollout_skip.trainers.v1.transfer.slices import row_ranges, size_of

if TYPE_CHECKING:
    from verl_rollout_skip.trainers.v1.compat import UpdatingHost
else:
    UpdatingHost = object


class ObservesUpdates(UpdatingHost):
    """Adds to a V1 trainer that its ledger observes the updates. Must precede the trainer in the list of bases."""

    rollout_skip: RolloutSkip
    _pool: TaskPool

    def _update_actor(self, batch: KVBatchMeta, metrics: dict[str, Any]) -> KVBatchMeta:
        with self._observed(ACTOR, batch):
            return super()._update_actor(batch, metrics=metrics)

    def _update_critic(self, batch: KVBatchMeta, metrics: dict[str, Any]) -> KVBatchMeta:
        with self._observed(CRITIC, batch):
            return super()._update_critic(batch, metrics=metrics)

    @contextmanager
    def _observed(self, role: str, batch: KVBatchMeta) -> Iterator[None]:
        ledger = self.rollout_skip.ledger
        if not ledger.is_observing:
            yield
            return
        part_bytes = self.rollout_skip.settings.part_bytes
        ledger.observe_update(role, slices_of(batch, part_bytes, None if ledger.consumers else self._pool))
        try:
            yield
        finally:
            ledger.wait()  # the rows are removed after the update


def slices_of(batch: KVBatchMeta, part_bytes: int, pool: TaskPool | None) -> Callable[[], Iterator[UpdateSlice]]:
    """Reads the rows of a batch from TransferQueue. Without a pool, the driver reads them, because it needs them."""
    keys, tags, partition = list(batch.keys), list(batch.tags), batch.partition_id
    ranges = row_ranges(tags, part_bytes)
    slices = [keys[rows.start : rows.stop] for rows in ranges]

    def read() -> Iterator[UpdateSlice]:
        if pool is not None and pool.takes(size_of(tags), "an update is read"):
            for rows, chosen, figures in zip(ranges, slices, pool.figures(slices, partition), strict=True):
                yield UpdateSlice(rows.start, {}, chosen, figures)
            return
        names: Collection[str] = compat.UPDATE_TENSORS
        for rows, chosen in zip(ranges, slices, strict=True):
            tensors = compat.update_tensors(chosen, partition, names)
            names = list(tensors)  # a field that some rows lack is in none of the slices
            yield UpdateSlice(rows.start, tensors, chosen)

    return read
