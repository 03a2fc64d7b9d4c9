"""A sampled batch out of TransferQueue, and a recorded one back into it.

A batch is recorded as a TensorDict with one row a trajectory: the fields that the queue held, and beside them what made
up the trajectory's key and its tag. The rows keep their order, which decides the micro-batches of a training.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
import transfer_queue as tq
from tensordict import NonTensorData, NonTensorStack, TensorDict
from transfer_queue import KVBatchMeta

from verl_rollout_skip.errors import QueueError, UnsupportedBatchError
from verl_rollout_skip.prompts import UID, OtherInput
from verl_rollout_skip.store.codec import cells
from verl_rollout_skip.store.codec.batch import BatchKind
from verl_rollout_skip.store.loaded import LoadedEntry
from verl_rollout_skip.trainers.v1.compat import PARTITION, field_names

# The key of a trajectory is "{uid}_{session}_{index}"; the uids of a recording are replaced by a place (see InFlight).
PLACE, SESSION, INDEX, TAG, SAMPLE = "tq_place", "tq_session", "tq_index", "tq_tag", "tq_sample"
_PARTS = {"keys", "tags", "partition_id", "fields", "extra_info"}
_OWN = (PLACE, SESSION, INDEX, TAG, SAMPLE)


@dataclass(frozen=True)
class Sample:
    """What belongs to a sampled batch as a whole.

    ``drawn`` are the digests of the prompts that were taken from the dataloader since the sample before, refills
    included; ``gone`` the places of the prompts in flight that this sample took or dropped. ``metrics`` are those that
    the replay buffer reported, and ``partial`` says of fields that only some rows have which rows those are.
    ``extra_info`` and ``fields`` are what the sampler has put into its ``KVBatchMeta``, and ``pack`` adds them.
    """

    drawn: list[str]
    gone: list[int]
    metrics: dict[str, Any]
    partial: dict[str, list[int]] = field(default_factory=dict)
    extra_info: dict[str, Any] | None = field(default_factory=dict)
    fields: list[str] | None = None


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
    """A column of Python objects."""
    return NonTensorStack.from_list([NonTensorData(value) for value in values])


def fetch(batch: KVBatchMeta, wanted: Collection[str] | None = None) -> tuple[TensorDict, dict[str, list[int]]]:
    """The fields of the rows of a batch, and for those that only some rows have, which rows.

    TransferQueue hands out the fields that all of the asked rows have, so the others are asked for by themselves.
    ``wanted`` names the fields that are needed, as far as there are any; None stands for all.
    """
    with _reading():
        common, partial = _fields(batch, wanted)
        columns: dict[str, Any] = {}
        if common:
            found = tq.kv_batch_get(keys=batch.keys, partition_id=batch.partition_id, select_fields=common)
            columns = {name: _storable(found.get(name)) for name in common}
        for name, rows in partial.items():
            some = tq.kv_batch_get(
                keys=[batch.keys[row] for row in rows], partition_id=batch.partition_id, select_fields=[name]
            )
            values: list[Any] = [None] * len(batch.keys)
            for row, value in zip(rows, _values(some.get(name)), strict=True):
                values[row] = value
            columns[name] = stack(values)
    return TensorDict(columns, batch_size=[len(batch.keys)]), partial


def pack(found: TensorDict, batch: KVBatchMeta, places: list[int], sample: Sample) -> None:
    """Add to the fields of a sampled batch what else is recorded of it."""
    for name in _OWN:
        if name in found.keys():  # noqa: SIM118 - iterating a TensorDict walks its rows
            raise UnsupportedBatchError(f"The rollout has a field {name!r}, a name that recordings use for themselves.")
    _check_restorable(batch)
    trajectories = [Trajectory.parse(key) for key in batch.keys]
    whole = {
        **vars(sample),
        "extra_info": _copied_extra_info(batch, {trajectory.uid for trajectory in trajectories}),
        "fields": batch.fields,
    }
    found.set(PLACE, torch.tensor(places))
    found.set(SESSION, torch.tensor([trajectory.session for trajectory in trajectories]))
    found.set(INDEX, torch.tensor([trajectory.index for trajectory in trajectories]))
    found.set(TAG, stack([dict(tag) for tag in batch.tags]))
    found.set(SAMPLE, NonTensorData(whole))


def _check_restorable(batch: KVBatchMeta) -> None:
    """A replay makes a ``KVBatchMeta`` from its parts. Refuse one that has others."""
    others = sorted(name for name in vars(batch).keys() - _PARTS if not name.startswith("_"))
    if type(batch) is not KVBatchMeta or others:
        parts = f" with {', '.join(others)}" if others else ""
        raise UnsupportedBatchError(
            f"The sampler returned a {type(batch).__name__}{parts}. Recorded are {', '.join(sorted(_PARTS))} of a "
            "KVBatchMeta and nothing else: put the rest into extra_info."
        )
    if batch.partition_id != PARTITION:
        raise UnsupportedBatchError(
            f"The sampler returned a batch of the partition {batch.partition_id!r}, and a replay puts it into "
            f"{PARTITION!r}, from which it was asked to sample."
        )


def _copied_extra_info(batch: KVBatchMeta, uids: Collection[str]) -> dict[str, Any] | None:
    """As it is now: verl adds to it while it trains. What cannot be stored is named, before the training goes on."""
    stored = cells.encode_inline(batch.extra_info, "extra_info of the KVBatchMeta that was sampled")
    named = next((uid for uid in uids if f'"{uid}' in stored["json"]), None)
    if named is not None:
        raise UnsupportedBatchError(
            f"extra_info of the KVBatchMeta that was sampled names the prompt {named}, and uids are new in every run. "
            "Name prompts by their rows in the batch."
        )
    copied: dict[str, Any] | None = cells.decode_inline(stored)
    return copied


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
    common = recorded.exclude(*_OWN, *sample.partial)
    common.set(UID, stack(uids))
    tq.kv_batch_put(keys=keys, partition_id=PARTITION, fields=common, tags=tags)
    for name, rows in sample.partial.items():
        values = recorded.get(name).tolist()
        some = TensorDict({name: stack([values[row] for row in rows])}, batch_size=[len(rows)])
        tq.kv_batch_put(keys=[keys[row] for row in rows], partition_id=PARTITION, fields=some)
    return KVBatchMeta(partition_id=PARTITION, keys=keys, tags=tags, fields=sample.fields, extra_info=sample.extra_info)


def waiting_prompts() -> dict[str, dict[str, Any]]:
    """The prompts that TransferQueue holds, with their tags, in the order in which they came."""
    with _reading():
        listed = (tq.kv_list(PARTITION) or {}).get(PARTITION, {})
    return {key: tag for key, tag in listed.items() if tag.get("is_prompt", False)}


@contextmanager
def _reading() -> Iterator[None]:
    try:
        yield
    except Exception as error:  # of TransferQueue, ZeroMQ, Ray, a storage backend …
        raise QueueError(f"TransferQueue cannot be read: {type(error).__name__}: {error}") from error


def _fields(batch: KVBatchMeta, wanted: Collection[str] | None) -> tuple[list[str], dict[str, list[int]]]:
    """The fields that all rows of a batch have, and for others that some have, which rows those are.

    Agent loops write while a batch is recorded. Requests are served by the thread of TransferQueue that serves the
    writers too, so an answer is never torn; a snapshot of its controller is copied by another one and can be.
    """
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
    return common, partial


def _storable(column: Any) -> Any:
    """Tensors and objects as they are; what the queue could only nest in torch's old layout becomes objects."""
    is_old = isinstance(column, torch.Tensor) and column.is_nested and column.layout is not torch.jagged
    if isinstance(column, torch.Tensor | NonTensorStack) and not is_old:
        return column
    return stack(_values(column))


def _values(column: Any) -> list[Any]:
    if isinstance(column, torch.Tensor):
        return list(column.unbind())
    return column.tolist() if isinstance(column, NonTensorStack) else list(column)
