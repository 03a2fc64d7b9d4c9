"""Observes the rows that the updates of actor and critic receive, for the training's ledger.

The rows are in TransferQueue, and the driver only has their keys. It reads them while the workers update, which is when
it would wait otherwise, and in slices, so that a large batch never has to fit into its memory.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import torch
from transfer_queue import KVBatchMeta

from verl_rollout_skip.replay.ledger.updates import ACTOR, CRITIC, UpdateSlice
from verl_rollout_skip.replay.rollout import RolloutSkip
from verl_rollout_skip.trainers.v1 import compat

if TYPE_CHECKING:
    from verl_rollout_skip.trainers.v1.compat import UpdatingHost
else:
    UpdatingHost = object

_SLICE = 256
"""Rows per request."""


class ObservesUpdates(UpdatingHost):
    """Adds to a V1 trainer that its ledger observes the updates. Must precede the trainer in the list of bases."""

    rollout_skip: RolloutSkip

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
        ledger.observe_update(role, slices_of(batch))
        try:
            yield
        finally:
            ledger.wait()  # the rows are removed after the update


def slices_of(batch: KVBatchMeta) -> Callable[[], Iterator[UpdateSlice]]:
    """Reads the rows of a batch from TransferQueue."""
    keys, partition = list(batch.keys), batch.partition_id

    def read() -> Iterator[UpdateSlice]:
        names: list[str] | None = None
        for start in range(0, len(keys), _SLICE):
            chosen = keys[start : start + _SLICE]
            found = compat.columns(chosen, partition, compat.UPDATE_TENSORS if names is None else names)
            tensors = {name: value for name, value in found.items() if isinstance(value, torch.Tensor)}
            names = list(tensors)  # a field that some rows lack is in none of the slices
            yield UpdateSlice(start, tensors, chosen)

    return read
