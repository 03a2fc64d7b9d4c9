"""``TrainingColumns``: dumps the tensors that the updates of a training received, beside the rollouts.

An update has its rows in another order than the rollout, or only some of them: verl balances a batch, and DAPO filters
it. So each row is dumped with the generation batch and the row of its trajectory in the recorded rollout.
"""

from __future__ import annotations

import logging
import threading
from collections import Counter, defaultdict, deque
from collections.abc import Callable, Hashable, Mapping, Sequence
from concurrent.futures import Future
from typing import Any

import torch
import xxhash
from tensordict import TensorDict

from verl_rollout_skip.config.modes import Mode
from verl_rollout_skip.config.modes import TrainingColumns as Level
from verl_rollout_skip.config.skip_config import SkipConfig
from verl_rollout_skip.errors import DumpError, RolloutSkipError, UnsupportedBatchError
from verl_rollout_skip.key import RolloutKey
from verl_rollout_skip.replay.disk_usage import variant_usage
from verl_rollout_skip.replay.ledger.training import TrainingLedger
from verl_rollout_skip.replay.ledger.updates import UpdateSlice
from verl_rollout_skip.replay.recorder import Recorder
from verl_rollout_skip.runs.columns import (
    ACTOR,
    GEN_BATCH,
    LEVEL,
    ROLE,
    ROW,
    TRAINING,
    columns_folder,
)
from verl_rollout_skip.runs.variants import Run
from verl_rollout_skip.store.disk_usage import DiskUsage
from verl_rollout_skip.store.sizes import format_size
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
    """The columns of one training: ``add_rollout`` for each recorded rollout, then ``begin_update`` for each update.

    The rows of an update may be added on another thread. A failed dump is logged and counted in ``failures``. If
    ``on_dump_error`` says so, ``report_failures`` and ``close`` raise it. ``prepare`` makes the variant folder before
    anything is written to it.
    """

    def __init__(
        self,
        variant: str | None,
        training: str,
        settings: SkipConfig,
        usage: DiskUsage | None = None,
        prepare: Callable[[], None] = lambda: None,
    ) -> None:
        self.failures = 0
        self._settings = settings
        self._level = Level.OFF if variant is None else settings.training_columns
        self._training = training
        self._prepare = prepare
        self._store: RolloutStore | None = None
        if variant is not None and self.is_on:
            folder = columns_folder(variant, training)
            self._store = RolloutStore(folder, background=settings.background, usage=usage)
        self._rollouts: dict[RolloutKey, Future[Rows]] = {}
        self._updates: Counter[int] = Counter()
        self._failed: RolloutSkipError | OSError | None = None
        self._counting = threading.Lock()

    @property
    def is_on(self) -> bool:
        return self._level is not Level.OFF

    @property
    def written_bytes(self) -> int:
        """The size of the columns that are written so far."""
        return 0 if self._store is None else self._store.written_bytes

    @property
    def dumped(self) -> int:
        """The number of updates whose columns are written or waiting to be written."""
        return self._updates.total() - self.failures

    @property
    def notes(self) -> list[str]:
        """What the summary of the training says."""
        return [f"training columns of {self.dumped} updates ({format_size(self.written_bytes)})"] if self.is_on else []

    def wants(self, role: str) -> bool:
        """Whether to dump the updates of the actor or the critic. Only the actor's have log-probs."""
        return self._level is Level.ALL or (self._level is Level.LOG_PROBS and role == ACTOR)

    def add_rollout(self, key: RolloutKey, rows: Callable[[], Rows]) -> None:
        """Note the rows of a rollout, in recorded order. ``rows`` is called on another thread."""
        if not self.is_on:
            return
        with self._counting:
            old = [other for other in self._rollouts if other.step <= key.step - _STEPS_KEPT]
            for other in old:
                del self._rollouts[other]
            self._rollouts[key] = in_thread(rows)

    def begin_update(self, step: int, role: str) -> PendingUpdate | None:
        """An update of the actor or the critic begins. Its rows are dumped when they have been added; None if the
        settings do not select them."""
        if not self.wants(role) or step not in self._settings.steps:
            return None
        with self._counting:
            key = RolloutKey(step, self._updates[step])
            self._updates[step] += 1
        return PendingUpdate(self, key, role, None if self._level is Level.ALL else LOG_PROBS)

    def dump(self, key: RolloutKey, role: str, tensors: Mapping[str, list[torch.Tensor]], rows: Rows) -> None:
        """Dump an update, in the background if the settings say so. Each tensor is a list of slices."""
        assert self._store is not None
        try:
            batch = self._batch_of(key.step, tensors, rows)
            self._prepare()
            self._store.put(key, batch, info={ROLE: role, LEVEL: self._level.value, TRAINING: self._training})
        except (RolloutSkipError, OSError) as error:
            self.count_failure(error)
        except Exception as error:  # on another thread, nobody else would see it
            self.count_failure(DumpError(f"The columns of step {key.step} were not dumped: {error!r}"))

    def report_failures(self) -> None:
        """Count the dumps that have failed in the background, and raise the first failure if the settings say so."""
        if self._store is None:
            return
        try:
            self._store.raise_failures()
        except (RolloutSkipError, OSError) as error:
            self.count_failure(error)
        self._raise_failure()

    def close(self) -> None:
        """Wait until everything is written."""
        if self._store is None:
            return
        try:
            self._store.close()
        except (RolloutSkipError, OSError) as error:
            self.count_failure(error)
        self._raise_failure()

    def count_failure(self, error: RolloutSkipError | OSError) -> None:
        """Count and log a failed dump."""
        with self._counting:
            self.failures += (len(error.failures) if isinstance(error, DumpError) else 0) or 1
            if self._settings.fails_on_dump_error:
                self._failed = self._failed or error
                return
        logger.error("training columns were not dumped; the training continues: %s", error)

    def _batch_of(self, step: int, tensors: Mapping[str, list[torch.Tensor]], rows: Rows) -> TensorDict:
        taken = sorted({GEN_BATCH, ROW} & tensors.keys())
        if taken:
            raise UnsupportedBatchError(
                f"The columns of step {step} were not dumped: the update has a tensor {taken[0]!r}, but this name is "
                "reserved for recordings. Rename the tensor."
            )
        gen_batches, numbers = self._find_rows(step, rows)
        columns = {name: _joined(slices) for name, slices in tensors.items()}
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

    def _raise_failure(self) -> None:
        with self._counting:
            failed, self._failed = self._failed, None
        if failed is not None:
            raise failed


class PendingUpdate:
    """Collects the rows of one update. ``names`` are the tensors to keep, None for all."""

    def __init__(self, columns: TrainingColumns, key: RolloutKey, role: str, names: tuple[str, ...] | None) -> None:
        self._columns, self._key, self._role, self._names = columns, key, role, names
        self._tensors: dict[str, list[torch.Tensor]] | None = None
        self._rows: list[Hashable] = []
        self._has_failed = False

    def add(self, part: UpdateSlice) -> None:
        """Add the next rows."""
        if self._has_failed:
            return
        found = {name: tensor for name, tensor in part.tensors.items() if self._names is None or name in self._names}
        if self._tensors is None:
            self._tensors = {name: [] for name in found}
        self._tensors = {name: slices for name, slices in self._tensors.items() if name in found}  # that all rows have
        for name, slices in self._tensors.items():
            slices.append(found[name])
        try:
            self._rows += part.rows if isinstance(part.rows, list) else rows_of(part.tensors)
        except UnsupportedBatchError as error:
            self.fail(error)

    def finish(self) -> None:
        """Dump the rows."""
        if self._tensors is not None and not self._has_failed:
            self._columns.dump(self._key, self._role, self._tensors, self._rows)

    def fail(self, error: Exception) -> None:
        """The rows cannot be read."""
        self._has_failed = True
        self._columns.count_failure(DumpError(f"The columns of step {self._key.step} were not dumped: {error}"))


def open_columns(run: Run, training: str, recorder: Recorder | None, ledger: TrainingLedger) -> TrainingColumns:
    """The columns of a training, beside the rollouts that it records or reads, filled with what its ledger observes."""
    settings, folder, prepare = run.settings, None, lambda: None
    if settings.mode is not Mode.OFF and settings.training_columns is not Level.OFF:
        folder = recorder.folder if recorder is not None else next((source.folder for source in run.sources), None)
    usage = None
    if recorder is not None:
        usage, prepare = recorder.usage, recorder.prepare_folder
    elif folder is not None:
        usage = variant_usage(folder, settings.max_disk)
    columns = TrainingColumns(folder, training, settings, usage, prepare)
    if columns.is_on:
        ledger.consumers.append(columns.begin_update)
    return columns


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


def rows_of_batch(batch: Any) -> list[bytes]:
    """A digest of each row of a DataProto or a TensorDict."""
    columns = batch if isinstance(batch, TensorDict) else batch.batch
    return rows_of({} if columns is None else {name: columns.get(name) for name in columns.keys()})  # noqa: SIM118
