"""A sampled batch out of TransferQueue, and a recorded one back into it.

A batch is recorded as a TensorDict with one row a trajectory: the fields that the queue held, and beside them what made
up the trajectory's key and its tag. The rows keep their order, which decides the micro-batches of a training.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import torch
import transfer_queue as tq
from tensordict import NonTensorData, NonTensorStack, TensorDict
from transfer_queue import KVBatchMeta

from verl_rollout_skip.errors import UnsupportedBatchError
from verl_rollout_skip.prompts import UID, OtherInput
from verl_rollout_skip.store.batch import BatchKind
from verl_rollout_skip.store.store import LoadedEntry

PARTITION = "train"

# The key of a trajectory is "{uid}_{session}_{index}"; the uids of a recording are replaced by a place (see InFlight).
PLACE, SESSION, INDEX, TAG, SAMPLE = "tq_place", "tq_session", "tq_index", "tq_tag", "tq_sample"
_OWN = (PLACE, SESSION, INDEX, TAG, SAMPLE)


@dataclass(frozen=True)
class Sample:
    """What belongs to a sampled batch as a whole.

    ``drawn`` are the digests of the prompts that were taken from the dataloader since the sample before, refills
    included; ``gone`` the places of the prompts in flight that this sample took or dropped. ``metrics`` are those that
    the replay buffer reported, and ``partial`` says of fields that only some rows have which rows those are.
    """

    drawn: list[str]
    gone: list[int]
    metrics: dict[str, Any]
    partial: dict[str, list[int]] = field(default_factory=dict)


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


def stack(cells: list[Any]) -> NonTensorStack:
    """A column of Python objects."""
    return NonTensorStack.from_list([NonTensorData(cell) for cell in cells])


def fetch(batch: KVBatchMeta) -> tuple[TensorDict, dict[str, list[int]]]:
    """All fields of the rows of a batch, and for those that only some rows have, which rows.

    TransferQueue hands out the fields that all of the asked rows have, so the others are asked for by themselves.
    """
    common, partial = _fields(batch)
    found = tq.kv_batch_get(keys=batch.keys, partition_id=batch.partition_id, select_fields=common)
    columns = {name: _storable(found.get(name)) for name in common}
    for name, rows in partial.items():
        some = tq.kv_batch_get(
            keys=[batch.keys[row] for row in rows], partition_id=batch.partition_id, select_fields=[name]
        )
        cells: list[Any] = [None] * len(batch.keys)
        for row, cell in zip(rows, _cells(some.get(name)), strict=True):
            cells[row] = cell
        columns[name] = stack(cells)
    return TensorDict(columns, batch_size=[len(batch.keys)]), partial


def pack(fields: TensorDict, batch: KVBatchMeta, places: list[int], sample: Sample) -> None:
    """Add to the fields of a sampled batch what else is recorded of it."""
    for name in _OWN:
        if name in fields.keys():  # noqa: SIM118 - iterating a TensorDict walks its rows
            raise UnsupportedBatchError(f"The rollout has a field {name!r}, a name that recordings use for themselves.")
    trajectories = [Trajectory.parse(key) for key in batch.keys]
    fields.set(PLACE, torch.tensor(places))
    fields.set(SESSION, torch.tensor([trajectory.session for trajectory in trajectories]))
    fields.set(INDEX, torch.tensor([trajectory.index for trajectory in trajectories]))
    fields.set(TAG, stack([dict(tag) for tag in batch.tags]))
    fields.set(SAMPLE, NonTensorData(dict(vars(sample))))


def sample_of(entry: LoadedEntry) -> tuple[list[int], Sample]:
    """The place of each row's prompt, and what belongs to the batch as a whole."""
    recorded = entry.decode()
    if recorded.kind is not BatchKind.TENSORDICT or (SAMPLE,) not in recorded.meta:
        raise OtherInput(
            "it was not recorded by one of verl's V1 trainers, whose rollouts have another shape than those of the V0 "
            "trainers. Set trainer.use_v1=False, or record anew."
        )
    return recorded.tensors[(PLACE,)].tolist(), Sample(**recorded.meta[(SAMPLE,)])


def put(recorded: TensorDict, uids: list[str]) -> KVBatchMeta:
    """Put a recorded batch into TransferQueue under today's uids; what ``sample`` would have returned for it."""
    sessions, indexes = recorded[SESSION].tolist(), recorded[INDEX].tolist()
    keys = [str(Trajectory(*parts)) for parts in zip(uids, sessions, indexes, strict=True)]
    tags = recorded.get(TAG).tolist()
    sample = Sample(**recorded.get(SAMPLE).data)
    fields = recorded.exclude(*_OWN, *sample.partial)
    fields.set(UID, stack(uids))
    tq.kv_batch_put(keys=keys, partition_id=PARTITION, fields=fields, tags=tags)
    for name, rows in sample.partial.items():
        cells = recorded.get(name).tolist()
        some = TensorDict({name: stack([cells[row] for row in rows])}, batch_size=[len(rows)])
        tq.kv_batch_put(keys=[keys[row] for row in rows], partition_id=PARTITION, fields=some)
    return KVBatchMeta(partition_id=PARTITION, keys=keys, tags=tags)


def waiting_prompts() -> dict[str, dict[str, Any]]:
    """The prompts that TransferQueue holds, with their tags, in the order in which they came."""
    listed = (tq.kv_list(PARTITION) or {}).get(PARTITION, {})
    return {key: tag for key, tag in listed.items() if tag.get("is_prompt", False)}


def _fields(batch: KVBatchMeta) -> tuple[list[str], dict[str, list[int]]]:
    """The fields that all rows of a batch have, and for others that some have, which rows those are.

    Agent loops write while a batch is recorded. Requests are served by the thread of TransferQueue that serves the
    writers too, so an answer is never torn; a snapshot of its controller is copied by another one and can be.
    """
    client, partition = tq.get_client(), batch.partition_id
    asked = client.kv_retrieve_meta(keys=batch.keys, partition_id=partition, create=False)
    known = client._run_coroutine(client._get_partition_meta(partition)).field_names
    common, partial = list(asked.field_names), {}
    for name in known:
        if name in common:
            continue
        indexes, filled = client.get_production_status(data_fields=[name], partition_id=partition)
        having = set(indexes[filled[:, 0] == 1].tolist())
        rows = [row for row, index in enumerate(asked.global_indexes) if index in having]
        if rows:
            partial[name] = rows
    return common, partial


def _storable(column: Any) -> Any:
    """Tensors and objects as they are; what the queue could only nest in torch's old layout becomes objects."""
    is_old = isinstance(column, torch.Tensor) and column.is_nested and column.layout is not torch.jagged
    if isinstance(column, torch.Tensor | NonTensorStack) and not is_old:
        return column
    return stack(_cells(column))


def _cells(column: Any) -> list[Any]:
    if isinstance(column, torch.Tensor):
        return list(column.unbind())
    return column.tolist() if isinstance(column, NonTensorStack) else list(column)
