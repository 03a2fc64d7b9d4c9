"""``TrainingColumns``: dumps the tensors that the updates of a training received, beside the rollouts.

An update has its rows in another order than the rollout, or only some of them: verl balances a batch, and DAPO filters
it. So each row is dumped with the generation batch and the row of its trajectory in the recorded rollout.
"""

from __future__ import annotations

import logging
import threading
from collections import Counter, defaultdict, deque
from collections.abc import Callable, Hashable, Iterable, Mapping, Sequence
from concurrent.futures import Future

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
from verl_rollout_skip.store.threads import in_thread

logger = logging.getLogger(__name__)

LOG_PROBS = ("old_log_probs", "ref_log_prob", "rollout_log_probs", "response_mask")
"""The tensors that ``log_probs`` dumps, as far as the update has them."""
IDENTIFYING = ("prompts", "responses", "rollout_log_probs")
"""The tensors that tell the rows of a batch apart where rows have no keys."""
_STEPS_KEPT = 4

Rows = Sequence[Hashable]
"""What identifies each row within a training step: its key in TransferQueue, or a digest of its tokens."""


class TrainingColumns:
    """The columns of one training: ``add_rollout`` for each rollout step, then ``add_update`` for each update.

    Updates may be added on another thread than rollouts. A failed dump is logged and counted in ``failures``. If
    ``on_dump_error`` says so, ``report_failures`` and ``close`` raise it. ``prepare`` makes the variant folder before
    anything is written to it.
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
        self._level = settings.training_columns
        self._fails = settings.fails_on_dump_error
        self._training = training
        self._prepare = prepare
        self._store = RolloutStore(columns_folder(variant, training), background=settings.background, usage=usage)
        self._rollouts: dict[RolloutKey, Future[Rows]] = {}
        self._updates: Counter[int] = Counter()
        self._failed: RolloutSkipError | OSError | None = None
        self._counting = threading.Lock()

    @property
    def written_bytes(self) -> int:
        """The size of the columns that are written so far."""
        return self._store.written_bytes

    @property
    def dumped(self) -> int:
        """The number of updates whose columns are written or waiting to be written."""
        return self._updates.total() - self.failures

    def wants(self, role: str) -> bool:
        """Whether to dump the updates of the actor or the critic. Only the actor's have log-probs."""
        return self._level is Level.ALL or (self._level is Level.LOG_PROBS and role == ACTOR)

    def add_rollout(self, key: RolloutKey, rows: Callable[[], Rows]) -> None:
        """Note the rows of a rollout, in recorded order. ``rows`` is called on another thread."""
        with self._counting:
            old = [other for other in self._rollouts if other.step <= key.step - _STEPS_KEPT]
            for other in old:
                del self._rollouts[other]
            self._rollouts[key] = in_thread(rows)

    def add_update(self, step: int, role: str, slices: Iterable[tuple[Mapping[str, torch.Tensor], Rows]]) -> None:
        """Dump an update: slices of its rows, each with its tensors and what identifies its rows."""
        if not self.wants(role):
            return
        with self._counting:
            key = RolloutKey(step, self._updates[step])
            self._updates[step] += 1
        try:
            batch = self._batch_of(step, slices)
            self._prepare()
            self._store.put(key, batch, info={ROLE: role, LEVEL: self._level.value, TRAINING: self._training})
        except (RolloutSkipError, OSError) as error:
            self._count_failure(error)
        except Exception as error:  # this may be a thread of its own, where nobody else would see it
            self._count_failure(DumpError(f"The columns of step {step} were not dumped: {error!r}"))

    def report_failures(self) -> None:
        """Count the dumps that have failed in the background, and raise the first failure if the settings say so."""
        try:
            self._store.raise_failures()
        except (RolloutSkipError, OSError) as error:
            self._count_failure(error)
        self._raise_failure()

    def close(self) -> None:
        """Wait until everything is written."""
        try:
            self._store.close()
        except (RolloutSkipError, OSError) as error:
            self._count_failure(error)
        self._raise_failure()

    def _batch_of(self, step: int, slices: Iterable[tuple[Mapping[str, torch.Tensor], Rows]]) -> TensorDict:
        pieces: dict[str, list[torch.Tensor]] = defaultdict(list)
        rows: list[Hashable] = []
        for tensors, identities in slices:
            rows += identities
            for name, tensor in tensors.items():
                if self._level is Level.ALL or name in LOG_PROBS:
                    pieces[name].append(tensor)
        taken = sorted({GEN_BATCH, ROW} & pieces.keys())
        if taken:
            raise UnsupportedBatchError(
                f"The columns of step {step} were not dumped: the update has a tensor {taken[0]!r}, but this name is "
                "reserved for recordings. Rename the tensor."
            )
        gen_batches, numbers = self._find_rows(step, rows)
        columns = {name: _joined(tensors) for name, tensors in pieces.items()}
        return TensorDict({**columns, GEN_BATCH: gen_batches, ROW: numbers}, batch_size=[len(rows)])

    def _find_rows(self, step: int, rows: Rows) -> tuple[torch.Tensor, torch.Tensor]:
        """The generation batch and the row of each trajectory, -1 if it is not in a rollout of the step. Rows with
        equal tokens and log-probs are interchangeable; they are taken in order."""
        with self._counting:
            recorded = {key: found for key, found in self._rollouts.items() if key.step == step}
        places: dict[Hashable, deque[tuple[int, int]]] = defaultdict(deque)
        for key in sorted(recorded):
            for number, row in enumerate(recorded[key].result()):
                places[row].append((key.gen_batch, number))
        found = [places[row].popleft() if places[row] else (-1, -1) for row in rows]
        gen_batches, numbers = zip(*found, strict=True) if found else ((), ())
        return torch.tensor(gen_batches, dtype=torch.int32), torch.tensor(numbers, dtype=torch.int32)

    def _count_failure(self, error: RolloutSkipError | OSError) -> None:
        with self._counting:
            self.failures += (len(error.failures) if isinstance(error, DumpError) else 0) or 1
            if self._fails:
                self._failed = self._failed or error
                return
        logger.error("training columns were not dumped; the training continues: %s", error)

    def _raise_failure(self) -> None:
        with self._counting:
            failed, self._failed = self._failed, None
        if failed is not None:
            raise failed


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


def _joined(pieces: list[torch.Tensor]) -> torch.Tensor:
    if len(pieces) == 1:
        return pieces[0]
    if pieces[0].is_nested:
        cells = [cell for piece in pieces for cell in piece.unbind()]
        return torch.nested.as_nested_tensor(cells, layout=torch.jagged)
    return torch.cat(pieces)
