"""Which rollouts a training has learned from, as one digest: what tells a hit that continues it from one that does not.

A rollout is generated with the weights that the rollouts before it have led to. An entry therefore says which those
were. If a training has learned from others (a step was generated again, or is loaded a second time), the tokens are
still those of the entry's prompts, but another policy wrote them, and the user is told.
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
"""What an entry's info calls them."""

UNKNOWN = "unknown"
"""The identity of a rollout that could not be read, and the history of every training that has learned from one. It is
equal to none, not even to itself."""

_START = "start"
# What a rollout gives a training to learn from; everything else follows from these and from the prompts.
LEARNED_FROM = ("responses", "rm_scores")


def identity_of(batch: Any) -> str:
    """The same for the same responses and rewards, in the same order. A batch, or its columns by name."""
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
    """Tells of the columns of a batch that had this identity whether they still have it, and names them if not."""
    return lambda columns: None if identity_of(columns) == identity else " or ".join(LEARNED_FROM)


def identity_or_unknown(key: RolloutKey, batch: Any, failure: RolloutSkipError | None) -> str:
    """The identity of a rollout; if it could not be read, so that there is no batch, the log says what that means."""
    if batch is not None:
        return identity_of(batch)
    logger.warning(
        "what was generated for %s is not known, so neither is what later steps have learned from: rollouts that are "
        "loaded in them, or recorded and loaded by others, count as off-policy. %s",
        key,
        failure,
    )
    return UNKNOWN


def _parts(column: Any) -> list[Any]:
    """The tensors that a column consists of."""
    if isinstance(column, NonTensorStack | np.ndarray):
        # On V1 agent loops may reward some rows and leave the others to a reward model.
        cells = column.tolist()
        rows = [row for row, cell in enumerate(cells) if cell is not None]
        return [torch.tensor(rows), *(cells[row] for row in rows)]
    return [column.values(), column.offsets()] if column.is_nested else [column]


class History:
    """Follows a training step by step. Within a step the weights stay the same, so only earlier steps count."""

    def __init__(self) -> None:
        self._step: int | None = None
        self._before: str | None = None
        self._identities: list[str | None] = []

    @property
    def is_empty(self) -> bool:
        return self._step is None

    def before(self, step: int) -> str | None:
        """Everything before a step; None if it is not known, as in a training that resumed from a checkpoint."""
        if self._step is None:
            return _START if step == 1 else None
        return self._before if step == self._step else extend(self._before, self._identities)

    def add(self, key: RolloutKey, identity: str | None, before: str | None = None) -> None:
        """The training learns from a rollout now. ``before`` is taken where the history is not known."""
        if key.step != self._step:
            self._before = self.before(key.step) or before
            self._step, self._identities = key.step, []
        self._identities.append(identity)


def extend(before: str | None, identities: list[str | None]) -> str | None:
    """The history after a step of these rollouts; None if anything of it is not known."""
    if UNKNOWN in (before, *identities):
        return UNKNOWN
    if before is None or None in identities:
        return None
    return xxhash.xxh3_128("\n".join([before, *map(str, identities)]).encode()).hexdigest()
