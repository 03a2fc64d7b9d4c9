"""The lineage of a training: one digest of all rollouts it has learned from, which tells whether a hit is on-policy.

A rollout is generated with weights that depend on all rollouts before it, so each entry records their digest. If the
training has learned from other rollouts (a step was generated again or loaded twice), the recorded tokens still belong
to the entry's prompts, but another policy generated them. The hit then counts as off-policy and is reported.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping
from typing import Any

import numpy as np
import torch
import xxhash
from tensordict import NonTensorStack

from verl_rollout_skip.errors import RolloutSkipError
from verl_rollout_skip.key import RolloutKey

logger = logging.getLogger(__name__)

IDENTITY, HISTORY = "identity", "history"
"""Their keys in an entry's info."""

UNKNOWN = "unknown"
"""The identity of a rollout that could not be read, and the lineage of every training that learned from it. It equals
no other identity, not even itself."""

_START = "start"
# The columns that a training learns from; everything else follows from these and the prompts.
LEARNED_FROM = ("responses", "rm_scores")


def identity_of(batch: Any) -> str:
    """A digest of the responses and rewards of a batch, in order. Takes a batch or a mapping of its columns."""
    tensors = getattr(batch, "batch", batch)
    digest = xxhash.xxh3_128()
    for name in LEARNED_FROM if tensors is not None else ():
        column = tensors.get(name, None)
        if column is None:
            continue
        for part in _parts(column):
            digest.update(f"{name} {part.dtype} {tuple(part.shape)}".encode())
            digest.update(part.detach().cpu().contiguous().view(torch.uint8).numpy())
    return digest.hexdigest()


def proof_of(identity: str) -> Callable[[Mapping[str, Any]], str | None]:
    """A check that a batch's columns still have this identity: None if so, otherwise the names of the columns."""
    return lambda columns: None if identity_of(columns) == identity else " or ".join(LEARNED_FROM)


def identity_or_unknown(key: RolloutKey, batch: Any, failure: RolloutSkipError | None) -> str:
    """The identity of a rollout. If it could not be read and there is no batch, log the consequences."""
    if batch is not None:
        return identity_of(batch)
    logger.warning(
        "the rollout of %s could not be read, so it is unknown what later steps learn from: rollouts that they load, "
        "or that they record and other trainings load, count as off-policy. %s",
        key,
        failure,
    )
    return UNKNOWN


def _parts(column: Any) -> list[Any]:
    """The tensors that make up a column."""
    if isinstance(column, NonTensorStack | np.ndarray):
        # In V1, agent loops may score some rows and leave the others to a reward model.
        cells = column.tolist()
        rows = [row for row, cell in enumerate(cells) if cell is not None]
        return [torch.tensor(rows), *(cells[row] for row in rows)]
    return [column.values(), column.offsets()] if column.is_nested else [column]


class History:
    """Tracks the lineage of a training. Weights do not change within a step, so only earlier steps count."""

    def __init__(self) -> None:
        self._step: int | None = None
        self._before: str | None = None
        self._identities: list[str | None] = []

    @property
    def is_empty(self) -> bool:
        return self._step is None

    def before(self, step: int) -> str | None:
        """The lineage before a step; None if unknown, as after resuming from a checkpoint."""
        if self._step is None:
            return _START if step == 1 else None
        return self._before if step == self._step else extend(self._before, self._identities)

    def add(self, key: RolloutKey, identity: str | None, before: str | None = None) -> None:
        """Add a rollout that the training now learns from. ``before`` is used if the lineage is unknown."""
        if key.step != self._step:
            self._before = self.before(key.step) or before
            self._step, self._identities = key.step, []
        self._identities.append(identity)


def extend(before: str | None, identities: list[str | None]) -> str | None:
    """The lineage after a step with these rollouts; None if any part is unknown."""
    if UNKNOWN in (before, *identities):
        return UNKNOWN
    if before is None or None in identities:
        return None
    return xxhash.xxh3_128("\n".join([before, *map(str, identities)]).encode()).hexdigest()
