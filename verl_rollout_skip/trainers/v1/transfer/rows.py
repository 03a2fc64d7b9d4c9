"""Fetches a sampled batch from TransferQueue, and puts a recorded batch back.

A batch is recorded as a TensorDict with one row per trajectory: its fields in TransferQueue, the parts of its key, and
its tag. The rows keep their order, because it determines how verl splits them into mini-batches and micro-batches.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any, Protocol, runtime_checkable

import torch
import transfer_queue as tq
from tensordict import NonTensorData, NonTensorStack, TensorDict
from transfer_queue import KVBatchMeta

from verl_rollout_skip.errors import QueueError, UnsupportedBatchError
from verl_rollout_skip.replay.prompts import UID, InputMismatch
from verl_rollout_skip.store.codec import cells
from verl_rollout_skip.store.codec.batch import BatchKind
from verl_rollout_skip.store.loaded import Entry, LoadedEntry
from verl_rollout_skip.trainers.v1.compat import PARTITION, field_names, rows_by_unit

# The key of a trajectory is "{uid}_{session}_{index}". A recording has the position of the prompt (see InFlight)
# instead of the uid. The names are part of the format.
POSITION, SESSION, INDEX, TAG, SAMPLE = "tq_place", "tq_session", "tq_index", "tq_tag", "tq_sample"
_PARTS = {"keys", "tags", "partition_id", "fields", "extra_info"}
_OWN = (POSITION, SESSION, INDEX, TAG, SAMPLE)
# With fewer rows, requests cost more than splitting columns into cells.
_SPLIT_FROM = 256


@dataclass(frozen=True)
class Sample:
    """Data that belongs to a sampled batch as a whole.

    ``drawn`` are the digests of the prompts that were drawn since the previous sample, refills included; ``gone`` are
    the positions of the prompts in flight that this sample took or dropped. ``metrics`` come from the replay buffer.
    ``partial`` lists the rows that have a field, for fields that only some rows have. ``extra_info`` and ``fields``
    come from the sampler's ``KVBatchMeta``; ``pack`` adds them.
    """

    drawn: list[str]
    gone: list[int]
    metrics: dict[str, Any]
    partial: dict[str, list[int]] = field(default_factory=dict)
    extra_info: dict[str, Any] | None = field(default_factory=dict)
    fields: list[str] | None = None


@dataclass(frozen=True)
class PutBatch:
    """A recorded batch whose rows are in TransferQueue already."""

    meta: KVBatchMeta
    sample: Sample


@dataclass(frozen=True)
class Trajectory:
    """The parts of a trajectory's key."""

    uid: str
    session: int
    index: int

    @classmethod
    def parse(cls, key: str) -> Trajectory:
        uid, session, index = key.rsplit("_", 2)
        return cls(uid, int(session), int(index))

    def __str__(self) -> str:
        return f"{self.uid}_{self.session}_{self.index}"


def stack(values: list[Any]) -> NonTensorStack:
    """A column of Python objects. Rows often share theirs, and tensordict takes longer to wrap one than to read it."""
    wrapped = {id(value): NonTensorData(value) for value in values}
    return NonTensorStack.from_list([wrapped[id(value)] for value in values])


@dataclass(frozen=True)
class Fields:
    """The fields of a batch: those that all rows have, and for the others the rows that have them."""

    common: list[str]
    partial: dict[str, list[int]]

    def of_rows(self, rows: range) -> Fields:
        """The fields of a slice of the rows, numbered from its first row."""
        partial = {name: [row - rows.start for row in having if row in rows] for name, having in self.partial.items()}
        return Fields(self.common, partial)


def fetch(batch: KVBatchMeta, wanted: Collection[str] | None = None) -> tuple[TensorDict, dict[str, list[int]]]:
    """The fields of a batch, and for fields that only some rows have, the rows that have them.

    ``wanted`` names the fields to fetch if they exist; None means all.
    """
    fields = find_fields(batch, wanted)
    return fetch_rows(batch.keys, fields, partition=batch.partition_id), fields.partial


def fetch_rows(
    keys: list[str], fields: Fields, as_objects: Collection[str] = (), partition: str = PARTITION
) -> TensorDict:
    """The rows with these keys. Fields that only some rows have are objects, None elsewhere.

    TransferQueue returns the fields that all requested rows have, so the others are requested one by one.
    ``as_objects`` names fields that are objects although all of these rows have tensors, because other rows do not.
    """
    with _reading():
        columns: dict[str, Any] = {}
        if fields.common:
            found = tq.kv_batch_get(keys=keys, partition_id=partition, select_fields=fields.common)
            columns = {name: _storable(found.get(name), name in as_objects) for name in fields.common}
        for name, rows in fields.partial.items():
            values: list[Any] = [None] * len(keys)
            if rows:
                having = [keys[row] for row in rows]
                some = tq.kv_batch_get(keys=having, partition_id=partition, select_fields=[name])
                for row, value in zip(rows, _values(some.get(name)), strict=True):
                    values[row] = value
            columns[name] = stack(values)
    return TensorDict(columns, batch_size=[len(keys)])


def whole_of(batch: KVBatchMeta, sample: Sample) -> dict[str, Any]:
    """``sample`` with what the ``KVBatchMeta`` says about the batch as a whole. Raises if it cannot be restored."""
    _check_restorable(batch)
    uids = {Trajectory.parse(key).uid for key in batch.keys}
    return {**vars(sample), "extra_info": _copied_extra_info(batch, uids), "fields": batch.fields}


def pack(found: TensorDict, batch: KVBatchMeta, positions: list[int], sample: Sample) -> None:
    """Add the other recorded data to the fields of a sampled batch."""
    pack_rows(found, batch.keys, batch.tags, positions, whole_of(batch, sample))


def pack_rows(
    found: TensorDict, keys: list[str], tags: list[dict[str, Any]], positions: list[int], whole: dict[str, Any]
) -> None:
    """Add the other recorded data to fetched rows: the parts of their keys, their tags, and ``whole``."""
    for name in _OWN:
        if name in found.keys():  # noqa: SIM118 - iterating over a TensorDict yields its rows
            raise UnsupportedBatchError(
                f"The rollout has a field {name!r}, but this name is reserved for recordings. Rename the field."
            )
    trajectories = [Trajectory.parse(key) for key in keys]
    found.set(POSITION, torch.tensor(positions))
    found.set(SESSION, torch.tensor([trajectory.session for trajectory in trajectories]))
    found.set(INDEX, torch.tensor([trajectory.index for trajectory in trajectories]))
    found.set(TAG, stack([dict(tag) for tag in tags]))
    found.set(SAMPLE, NonTensorData(whole))


def _check_restorable(batch: KVBatchMeta) -> None:
    """Raise if a replay could not rebuild this ``KVBatchMeta`` from the recorded parts."""
    others = sorted(name for name in vars(batch).keys() - _PARTS if not name.startswith("_"))
    if type(batch) is not KVBatchMeta or others:
        parts = f" with {', '.join(others)}" if others else ""
        raise UnsupportedBatchError(
            f"The sampler returned a {type(batch).__name__}{parts}. Only {', '.join(sorted(_PARTS))} of a KVBatchMeta "
            "are recorded. Put other data into extra_info."
        )
    if batch.partition_id != PARTITION:
        raise UnsupportedBatchError(
            f"The sampler returned a batch of partition {batch.partition_id!r}, but it was asked to sample from "
            f"{PARTITION!r}, and a replay puts the batch there."
        )


def _copied_extra_info(batch: KVBatchMeta, uids: Collection[str]) -> dict[str, Any] | None:
    """A copy, because verl adds to it while it trains. Raises if it cannot be stored or names prompts by uid."""
    stored = cells.encode_inline(batch.extra_info, "extra_info of the sampled KVBatchMeta")
    named = next((uid for uid in uids if f'"{uid}' in stored["json"]), None)
    if named is not None:
        raise UnsupportedBatchError(
            f"extra_info of the sampled KVBatchMeta names the prompt {named}, but uids are new in every run. Refer to "
            "prompts by their rows in the batch."
        )
    copied: dict[str, Any] | None = cells.decode_inline(stored)
    return copied


@runtime_checkable
class SampledEntry(Entry, Protocol):
    """An entry that knows its sample without being decoded."""

    positions: list[int]
    sample: Sample


def sample_of(entry: Entry) -> tuple[list[int], Sample]:
    """The position of each row's prompt, and the data of the batch as a whole."""
    if isinstance(entry, SampledEntry):
        return entry.positions, entry.sample
    assert isinstance(entry, LoadedEntry)
    recorded = entry.decode()
    if recorded.kind is not BatchKind.TENSORDICT or (SAMPLE,) not in recorded.meta:
        raise InputMismatch(
            "it was not recorded by one of verl's V1 trainers, whose rollouts have a different format than those of "
            "the V0 trainers. Set trainer.use_v1=False, or record again."
        )
    return recorded.tensors[(POSITION,)].tolist(), Sample(**recorded.meta[(SAMPLE,)])


def put(recorded: TensorDict, uids: list[str]) -> KVBatchMeta:
    """Put a recorded batch into TransferQueue under the current uids, and return its metadata."""
    sample = Sample(**recorded.get(SAMPLE).data)
    keys, tags = put_rows(recorded, uids, sample.partial)
    return KVBatchMeta(partition_id=PARTITION, keys=keys, tags=tags, fields=sample.fields, extra_info=sample.extra_info)


def put_rows(
    recorded: TensorDict, uids: Sequence[str | None], partial: dict[str, list[int]]
) -> tuple[list[str], list[dict[str, Any]]]:
    """Put recorded rows into TransferQueue, except those without a uid, and return their keys and tags.

    ``partial`` are the fields that only some rows have, with these rows. The rows of each storage unit are put
    separately: otherwise TransferQueue would split every column once per unit.
    """
    rows = [row for row, uid in enumerate(uids) if uid is not None]
    if not rows:
        return [], []
    sessions, indexes, tags = recorded[SESSION].tolist(), recorded[INDEX].tolist(), recorded.get(TAG).tolist()
    key_of = {row: str(Trajectory(str(uids[row]), sessions[row], indexes[row])) for row in rows}
    keys, chosen_tags = list(key_of.values()), [tags[row] for row in rows]
    tq.kv_batch_put(keys=keys, partition_id=PARTITION, tags=chosen_tags)
    units = rows_by_unit(keys, PARTITION) if len(keys) >= _SPLIT_FROM else [list(range(len(keys)))]
    columns = recorded.exclude(*_OWN)
    columns.set(UID, stack(list(uids)))
    cells = {name: _Cells(columns.get(name)) for name in columns.keys()}  # noqa: SIM118 - it would yield rows
    for unit in units:
        members = [rows[number] for number in unit]
        fields = {name: column.select(members) for name, column in cells.items() if name not in partial}
        _put_fields([key_of[row] for row in members], fields)
    for name, having in partial.items():
        members = [row for row in having if row in key_of]
        if members:
            _put_fields([key_of[row] for row in members], {name: stack(cells[name].values(members))})
    return keys, chosen_tags


def _put_fields(keys: list[str], fields: dict[str, Any]) -> None:
    tq.kv_batch_put(keys=keys, partition_id=PARTITION, fields=TensorDict(fields, batch_size=[len(keys)]))


class _Cells:
    """A column that is split into its cells at most once."""

    def __init__(self, column: Any) -> None:
        self._column = column
        self._cells: list[Any] | None = None

    def values(self, rows: list[int]) -> list[Any]:
        if self._cells is None:
            self._cells = _values(self._column)
        return [self._cells[row] for row in rows]

    def select(self, rows: list[int]) -> Any:
        """A column with these rows."""
        column = self._column
        if rows == list(range(len(column))):
            return column
        if not isinstance(column, torch.Tensor):
            return stack(self.values(rows))
        if not column.is_nested:
            return column[rows]
        try:
            return torch.nested.as_nested_tensor(self.values(rows), layout=torch.jagged)
        except RuntimeError:  # more than one ragged dimension, such as the positions of images
            return stack(self.values(rows))


def waiting_prompts() -> dict[str, dict[str, Any]]:
    """The prompts in TransferQueue and their tags, in the order in which they were added."""
    with _reading():
        listed = (tq.kv_list(PARTITION) or {}).get(PARTITION, {})
    return {key: tag for key, tag in listed.items() if tag.get("is_prompt", False)}


@contextmanager
def _reading() -> Iterator[None]:
    try:
        yield
    except Exception as error:  # TransferQueue, ZeroMQ, Ray and storage backends all raise their own
        raise QueueError(f"TransferQueue cannot be read: {type(error).__name__}: {error}") from error


def find_fields(batch: KVBatchMeta, wanted: Collection[str] | None = None) -> Fields:
    """The fields of a batch, or those of them that are ``wanted``.

    Agent loops write while a batch is recorded. The thread of TransferQueue that answers these requests also serves the
    writers, so an answer is consistent. A snapshot of its controller is copied by another thread, so it might not be.
    """
    with _reading():
        client, partition = tq.get_client(), batch.partition_id
        asked = client.kv_retrieve_meta(keys=batch.keys, partition_id=partition, create=False)
        common, partial = [name for name in asked.field_names if wanted is None or name in wanted], {}
        for name in field_names(partition):
            if name in asked.field_names or (wanted is not None and name not in wanted):
                continue
            indexes, filled = client.get_production_status(data_fields=[name], partition_id=partition)
            having = set(indexes[filled[:, 0] == 1].tolist())
            rows = [row for row, index in enumerate(asked.global_indexes) if index in having]
            if rows:
                partial[name] = rows
        return Fields(common, partial)


def _storable(column: Any, as_objects: bool = False) -> Any:
    """A column that can be stored: tensors and objects as they are, nested tensors in torch's old layout as objects."""
    is_old = isinstance(column, torch.Tensor) and column.is_nested and column.layout is not torch.jagged
    if isinstance(column, torch.Tensor | NonTensorStack) and not is_old and not as_objects:
        return column
    return stack(_values(column))


def _values(column: Any) -> list[Any]:
    if isinstance(column, torch.Tensor):
        return list(column.unbind())
    return column.tolist() if isinstance(column, NonTensorStack) else list(column)
