"""The functions that run as Ray tasks. They move the rows of a large sample between TransferQueue and the store.

The rows never reach the driver, which handles keys, tags and the record:

- To record a sample, ``encode`` fetches the rows of a slice from TransferQueue and encodes them. Ray keeps the encoded
  part, which is much smaller, until ``write`` has written it. The driver commits the parts.
- To load a sample, ``put`` reads a part and puts its rows into TransferQueue.
- For the ledger, ``figures`` computes the digests and moments of the rows that an update receives.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import numpy as np
import pyarrow as pa

from verl_rollout_skip.errors import QueueError, RolloutSkipError
from verl_rollout_skip.key import RolloutKey
from verl_rollout_skip.replay.ledger.figures import FiguresOfRows, rows_figures
from verl_rollout_skip.replay.lineage import row_digests
from verl_rollout_skip.store import committed
from verl_rollout_skip.store.codec import Plan, Reader, Summary, prepare
from verl_rollout_skip.store.codec.batch import BatchKind, unflatten
from verl_rollout_skip.store.commit import write_part
from verl_rollout_skip.store.record import MAX_RECORD_BYTES, RecordedPart
from verl_rollout_skip.store.storage import HERE
from verl_rollout_skip.store.storage.contract import digest_of
from verl_rollout_skip.store.storage.locations import open_storage
from verl_rollout_skip.trainers.v1.compat import connect_queue, update_tensors
from verl_rollout_skip.trainers.v1.in_flight import PromptRows
from verl_rollout_skip.trainers.v1.transfer import rows as queue
from verl_rollout_skip.trainers.v1.transfer.rows import Fields


class SliceRequest(NamedTuple):
    """The rows of a slice: their keys, tags and fields in TransferQueue, and the positions of their prompts."""

    rows: range
    keys: list[str]
    tags: list[dict[str, Any]]
    positions: list[int]
    fields: Fields


@dataclass(frozen=True)
class SliceSummary:
    """Metadata of an encoded slice.

    ``kinds`` must be the same in all slices of an entry (see ``Plan.kinds``).
    """

    summary: Summary
    kinds: dict[str, str]


@dataclass(frozen=True)
class EncodedSlice:
    """A slice that was read from TransferQueue: the digests of its rows, and a summary or why it cannot be stored.

    ``size`` is that of the encoded part.
    """

    digests: bytes
    summary: SliceSummary | None
    size: int = 0
    failure: RolloutSkipError | None = None


@dataclass(frozen=True)
class PutSlice:
    """What the driver needs to know about a slice that was put into TransferQueue."""

    keys: list[str]
    tags: list[dict[str, Any]]
    positions: list[int]
    whole: dict[str, Any]
    prompt_digests: list[str] | None
    input_kind: BatchKind | None


def uid_of(token: str, position: int) -> str:
    """The uid of a prompt whose rows are put into TransferQueue before the prompt itself is drawn."""
    return f"{token}-{position}"


def encode(
    request: SliceRequest, prompts: PromptRows, whole: dict[str, Any], as_objects: Collection[str]
) -> tuple[EncodedSlice, Any]:
    _connect()
    found = queue.fetch_rows(request.keys, request.fields, as_objects)
    digests = row_digests(found)
    try:
        queue.pack_rows(found, request.keys, request.tags, request.positions, whole)
        summary, data = _encode_rows(found, prompts.rows(request.positions), request.rows.start)
    except RolloutSkipError as failure:
        return EncodedSlice(digests, None, failure=failure), None
    return EncodedSlice(digests, summary, data.size), np.frombuffer(data, np.uint8)


def digest(keys: list[str], fields: Fields) -> bytes:
    """The digests of some rows in TransferQueue."""
    _connect()
    return row_digests(queue.fetch_rows(keys, fields))


def figures(keys: list[str], partition: str) -> dict[str, FiguresOfRows]:
    """The figures of some rows that an update receives."""
    _connect()
    return {name: rows_figures(rows) for name, rows in update_tensors(keys, partition).items()}


def _encode_rows(output: Any, inputs: Any, start: int) -> tuple[SliceSummary, pa.Buffer]:
    """Encode some rows of a rollout step as a part; ``start`` is the number of the first row in the entry."""
    prepared = prepare(output, inputs)
    for batch in prepared.batches:
        # Rows that share an object are numbered by row, and the numbers must be unique in the entry.
        batch.objects = [
            replace(column, first_rows=column.first_rows and [row + start for row in column.first_rows])
            for column in batch.objects
        ]
    plan = Plan(prepared)
    sink = pa.BufferOutputStream()
    plan.write(slice(0, prepared.output.batch.rows), sink)
    return SliceSummary(plan.summary(), plan.kinds()), sink.getvalue()


def write(folder: str, key: RolloutKey, rows: int, data: Any) -> RecordedPart:
    return write_part(open_storage(folder), key, rows, data)


def put(
    folder: str,
    key: RolloutKey,
    part: RecordedPart,
    start: int,
    uids: Mapping[int, str] | str,
    limit: int,
    data: Any = None,
) -> PutSlice:
    """Put the rows of a part into TransferQueue. ``start`` is the number of its first row in the entry.

    ``uids`` are those of the prompts to put, by position, or a token from which uids are made for all of them.
    ``data`` is the content of the part, if this node cannot read it.
    """
    _connect()
    storage = open_storage(folder)
    content = committed.read_part(storage, key, part) if data is None else data
    reader = Reader([content], limit, f"The entry of {key} cannot be used", [storage.where(part.file)])
    batch = unflatten(reader.output())
    positions = batch[queue.POSITION].tolist()
    whole = batch.get(queue.SAMPLE).data
    fields = Fields([], whole["partial"]).of_rows(range(start, start + len(positions)))
    given = [uid_of(uids, position) if isinstance(uids, str) else uids.get(position) for position in positions]
    keys, tags = queue.put_rows(batch, given, fields.partial)
    return PutSlice(keys, tags, positions, whole, reader.prompt_digests(), reader.input_kind)


def reaches(folder: str, name: str, digest: str, writes: bool) -> str | None:
    """Why this node does not see the same file in a folder as the driver, or cannot write there; None if it does."""
    storage = open_storage(folder)
    try:
        if digest_of(storage.read(HERE, name, MAX_RECORD_BYTES)) != digest:
            return f"it has a different {name}"
        if writes:
            with storage.stage(HERE):
                pass
    except (OSError, RolloutSkipError) as error:
        return f"{type(error).__name__}: {error}"
    return None


def _connect() -> None:
    try:
        connect_queue()
    except Exception as error:  # from Ray, ZeroMQ …
        raise QueueError(f"TransferQueue cannot be reached: {type(error).__name__}: {error}") from error
