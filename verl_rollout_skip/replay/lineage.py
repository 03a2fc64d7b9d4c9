"""The lineage of a training: one digest of all rollouts it has learned from, which tells whether a hit is on-policy.

A rollout is generated with weights that depend on all rollouts before it, so each entry records their digest. If the
training has learned from different rollouts (a step was generated again or loaded twice), the recorded tokens still
belong to the entry's prompts, but a different policy generated them. The hit then counts as off-policy and is reported.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import torch
import xxhash

from verl_rollout_skip.errors import RolloutSkipError
from verl_rollout_skip.key import RolloutKey

logger = logging.getLogger(__name__)

ROLLOUT_DIGEST, LINEAGE = "identity", "history"
"""The keys for a rollout's digest and its lineage in an entry's ``info``. They are part of the file format."""

UNKNOWN = "unknown"
"""The digest of a rollout that could not be read, and the lineage of every training that learned from it. It never
counts as equal, not even to itself."""

_START = "start"
# The columns that a training learns from; everything else follows from these and the prompts.
LEARNED_FROM = ("responses", "rm_scores")


def rollout_digest(batch: Any) -> str:
    """A digest of the responses and rewards of a batch, in order. Takes a batch or a mapping of its columns."""
    tensors = getattr(batch, "batch", batch)
    columns = {} if tensors is None else {name: tensors.get(name, None) for name in LEARNED_FROM}
    columns = {name: column for name, column in columns.items() if column is not None}
    if any(not isinstance(column, torch.Tensor) or column.is_nested for column in columns.values()):
        return join_row_digests([row_digests(columns)])
    digest = xxhash.xxh3_128()
    for name, column in columns.items():
        _add(digest, name, column)
    return digest.hexdigest()


def row_digests(columns: Any) -> bytes:
    """The digests of the rows of a V1 batch, 16 bytes each. Several processes can compute those of one batch."""
    present = {name: columns.get(name, None) for name in LEARNED_FROM}
    found = {name: _rows(column) for name, column in present.items() if column is not None}
    digests = [xxhash.xxh3_128() for _ in next(iter(found.values()), ())]
    for name, rows in found.items():
        for digest, row in zip(digests, rows, strict=True):
            if row is not None:
                _add(digest, name, row)
    return b"".join(digest.digest() for digest in digests)


def join_row_digests(pieces: Iterable[bytes]) -> str:
    """The digest of a batch whose rows have these digests, in order."""
    return xxhash.xxh3_128_hexdigest(b"".join(pieces))


def proof_of(digest: str) -> Callable[[Mapping[str, Any]], str | None]:
    """A function that checks whether columns still have this digest: it returns None, or the names of the columns."""
    return lambda columns: None if rollout_digest(columns) == digest else " or ".join(LEARNED_FROM)


def digest_or_unknown(key: RolloutKey, batch: Any, failure: RolloutSkipError | None) -> str:
    """The digest of a rollout; ``UNKNOWN``, with a warning, if there is no batch because it could not be read."""
    if batch is not None:
        return rollout_digest(batch)
    logger.warning(
        "the rollout of %s could not be read, so it is unknown what later steps learn from: rollouts that they load, "
        "or that they record and other trainings load, count as off-policy. %s",
        key,
        failure,
    )
    return UNKNOWN


def _add(digest: Any, name: str, tensor: torch.Tensor) -> None:
    digest.update(f"{name} {tensor.dtype} {tuple(tensor.shape)}".encode())
    digest.update(tensor.detach().cpu().contiguous().reshape(-1).view(torch.uint8).numpy())


def _rows(column: Any) -> Sequence[Any]:
    """The rows of a column. In V1, agent loops may score some rows and leave the others, None, to a reward model."""
    if not isinstance(column, torch.Tensor):
        return list(column.tolist())
    return column.unbind()


class Lineage:
    """Tracks the lineage of a training. Weights do not change within a step, so only earlier steps count."""

    def __init__(self) -> None:
        self._step: int | None = None
        self._before: str | None = None
        self._digests: list[str | None] = []
        self._has_reported = False

    @property
    def is_empty(self) -> bool:
        return self._step is None

    def before(self, step: int) -> str | None:
        """The lineage before a step; None if unknown, as after resuming from a checkpoint."""
        if self._step is None:
            return _START if step == 1 else None
        return self._before if step == self._step else extend(self._before, self._digests)

    def add(self, key: RolloutKey, digest: str | None, before: str | None = None) -> None:
        """Add a rollout that the training now learns from. ``before`` is used if the lineage is unknown."""
        if key.step != self._step:
            self._before = self.before(key.step) or before
            self._step, self._digests = key.step, []
        self._digests.append(digest)

    def differs(self, key: RolloutKey, recorded: str | None) -> bool:
        """Whether an entry was recorded after different rollouts. Logs a warning the first time."""
        current = self.before(key.step)
        if recorded is None or current is None or (recorded == current and current != UNKNOWN):
            return False
        if not self._has_reported:
            self._has_reported = True
            fact = "was recorded after different rollouts than this training has learned from"
            reason = "some were generated again, or are loaded more than once"
            if UNKNOWN in (recorded, current):
                whose = "this training's" if current == UNKNOWN else "the recorded training's"
                fact = "may have been recorded after different rollouts than this training has learned from"
                reason = f"one of {whose} rollouts could not be read when it was generated"
            logger.warning(
                "%s %s, because %s. From here on, loaded rollouts may be off-policy (rollout_skip/off_policy)",
                key,
                fact,
                reason,
            )
        return True


def extend(before: str | None, digests: list[str | None]) -> str | None:
    """The lineage after a step with these rollouts; None if any part is unknown."""
    if UNKNOWN in (before, *digests):
        return UNKNOWN
    if before is None or None in digests:
        return None
    return xxhash.xxh3_128("\n".join([before, *map(str, digests)]).encode()).hexdigest()
