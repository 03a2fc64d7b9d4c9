"""``TrainingColumns``: dumps the tensors that the updates of a training received, beside the rollouts.

An update has its rows in another order than the rollout, or only some of them: verl balances a batch, and DAPO filters
it. So each row is dumped with the generation batch and the row of its trajectory in the recorded rollout.
"""

from __future__ import annotations

import logging
from collections import Counter, defaultdict, deque
from collections.abc import Callable, Hashable, Iterator, Mapping, Sequence
from contextlib import contextmanager

import torch
import xxhash
from tensordict import TensorDict

from verl_rollout_skip.config.modes import TrainingColumns as Level
from verl_rollout_skip.config.skip_config import SkipConfig
from verl_rollout_skip.errors import DumpError, RolloutSkipError, UnsupportedBatchError
from verl_rollout_skip.key import RolloutKey
from verl_rollout_skip.runs.columns import ACTOR, GEN_BATCH, LEVEL, ROLE, ROW, TRAINING, columns_folder
from verl_rollout_skip.store.disk_usage import DiskUsage
from verl_rollout_skip.store.store import RolloutStore

logger = logging.getLogger(__name__)

LOG_PROBS = ("old_log_probs", "ref_log_prob", "rollout_log_probs", "response_mask")
"""The tensors that ``log_probs`` dumps, as far as the update has them."""
IDENTIFYING = ("prompts", "responses", "rollout_log_probs")
"""The tensors that tell the rows of a batch apart where rows have no keys."""

Rows = Sequence[Hashable]
"""What identifies each row within a training step: its key in TransferQueue, or a digest of its tokens."""


class TrainingColumns:
    """The columns of one training. ``add_rollout`` for each rollout step, then ``add_update`` for each update.

    A failed dump is logged and counted in ``failures``; it is raised only if ``on_dump_error`` says so. ``prepare``
    makes the variant folder before anything is written to it.
    """

    def __init__(
        self,
        variant: str,
        training: str,
        settings: SkipConfig,
        usage: DiskUsage | None = None,
        prepare: Callable[[], None] = lambda: None,
    ) -> None:
        self.failures = 0
        self._prepare = prepare
        self._level = settings.training_columns
        self._fails = settings.fails_on_dump_error
        self._training = training
        self._store = RolloutStore(columns_folder(variant, training), background=settings.background, usage=usage)
        self._rollouts: dict[RolloutKey, Callable[[], Rows]] = {}
        self._updates: Counter[int] = Counter()

    @property
    def written_bytes(self) -> int:
        """The size of the columns that are written so far."""
        return self._store.written_bytes

    @property
    def updates(self) -> int:
        """The number of updates whose columns are written or waiting to be written."""
        return self._updates.total()

    def wants(self, role: str) -> bool:
        """Whether to dump the updates of the actor or the critic. Only the actor's have log-probs."""
        return self._level is Level.ALL or (self._level is Level.LOG_PROBS and role == ACTOR)

    def add_rollout(self, key: RolloutKey, rows: Callable[[], Rows]) -> None:
        """Note the rows of a rollout, in recorded order. ``rows`` is called when an update needs them."""
        self._rollouts = {other: found for other, found in self._rollouts.items() if other.step >= key.step}
        self._rollouts[key] = rows

    def add_update(self, step: int, role: str, tensors: Mapping[str, torch.Tensor], rows: Rows) -> None:
        """Dump the tensors of an update, in the background if the settings say so."""
        if not self.wants(role):
            return
        with self._handle_failures():
            chosen = {name: tensors[name] for name in tensors if self._level is Level.ALL or name in LOG_PROBS}
            taken = sorted({GEN_BATCH, ROW} & chosen.keys())
            if taken:
                raise UnsupportedBatchError(
                    f"The columns of step {step} were not dumped: the update has a tensor {taken[0]!r}, but this name "
                    "is reserved for recordings. Rename the tensor."
                )
            gen_batches, numbers = self._find_rows(step, rows)
            batch = TensorDict({**chosen, GEN_BATCH: gen_batches, ROW: numbers}, batch_size=[len(rows)])
            key = RolloutKey(step, self._updates[step])
            self._updates[step] += 1
            self._prepare()
            info = {ROLE: role, LEVEL: self._level.value, TRAINING: self._training}
            self._store.put(key, batch, info=info)

    def report_failures(self) -> None:
        """Handle the dumps that have failed in the background since the last call."""
        with self._handle_failures():
            self._store.raise_failures()

    def close(self) -> None:
        """Wait until everything is written."""
        self._rollouts.clear()
        with self._handle_failures():
            self._store.close()

    def _find_rows(self, step: int, rows: Rows) -> tuple[torch.Tensor, torch.Tensor]:
        """The generation batch and the row of each trajectory, -1 if it is not in a rollout of the step. Rows with
        equal tokens and log-probs are interchangeable; they are taken in order."""
        places: dict[Hashable, deque[tuple[int, int]]] = defaultdict(deque)
        for key, recorded in sorted(self._rollouts.items()):
            if key.step == step:
                for number, row in enumerate(recorded()):
                    places[row].append((key.gen_batch, number))
        found = [places[row].popleft() if places[row] else (-1, -1) for row in rows]
        gen_batches, numbers = zip(*found, strict=True) if found else ((), ())
        return torch.tensor(gen_batches, dtype=torch.int32), torch.tensor(numbers, dtype=torch.int32)

    @contextmanager
    def _handle_failures(self) -> Iterator[None]:
        try:
            yield
        except (RolloutSkipError, OSError) as error:
            failures = len(error.failures) if isinstance(error, DumpError) else 0
            self.failures += failures or 1
            if self._fails:
                raise
            logger.error("training columns were not dumped; the training continues: %s", error)


def rows_of(tensors: Mapping[str, torch.Tensor], names: Sequence[str] = IDENTIFYING) -> list[bytes]:
    """A digest of each row of a batch, over those of the named tensors that it has."""
    columns = [tensors[name] for name in names if name in tensors]
    if not columns:
        raise UnsupportedBatchError(f"The rows of a batch cannot be told apart: it has none of {', '.join(names)}.")
    digests = [xxhash.xxh3_128() for _ in range(len(columns[0]))]
    for column in columns:
        cells = column.detach().unbind() if column.is_nested else column.detach().contiguous()
        for digest, cell in zip(digests, cells, strict=True):
            digest.update(cell.reshape(-1).view(torch.uint8).numpy())
            digest.update(b";")
    return [digest.digest() for digest in digests]
