"""``SampledSlices``: a sample that tasks read from TransferQueue and write as parts of an entry, slice by slice."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import xxhash
from transfer_queue import KVBatchMeta

from verl_rollout_skip.errors import RolloutSkipError, UnsupportedBatchError
from verl_rollout_skip.key import RolloutKey
from verl_rollout_skip.replay.lineage import join_row_digests
from verl_rollout_skip.replay.recorder import SlicedRollout
from verl_rollout_skip.store.codec import Summary
from verl_rollout_skip.store.record import RecordedPart
from verl_rollout_skip.trainers.v1.in_flight import PromptRows
from verl_rollout_skip.trainers.v1.transfer.pool import LocalPool, TaskPool
from verl_rollout_skip.trainers.v1.transfer.rows import Fields
from verl_rollout_skip.trainers.v1.transfer.tasks import EncodedSlice, SliceRequest, SliceSummary

# Token ids, masks, positions and log-probs of one token in TransferQueue.
BYTES_PER_TOKEN = 56


def cut(batch: KVBatchMeta, positions: list[int], fields: Fields, part_bytes: int) -> list[SliceRequest]:
    """Cut a sample into slices of up to ``part_bytes``, estimated from the token counts in the tags of its rows."""
    return [
        SliceRequest(
            rows,
            batch.keys[rows.start : rows.stop],
            [dict(tag) for tag in batch.tags[rows.start : rows.stop]],
            positions[rows.start : rows.stop],
            fields.of_rows(rows),
        )
        for rows in row_ranges(batch.tags, part_bytes)
    ]


def row_ranges(tags: Sequence[dict[str, Any]], part_bytes: int) -> list[range]:
    """The rows of each slice."""
    ranges, start, size = [], 0, 0
    for row, tag in enumerate(tags):
        row_bytes = _token_count(tag) * BYTES_PER_TOKEN
        if size and size + row_bytes > part_bytes:
            ranges.append(range(start, row))
            start, size = row, 0
        size += row_bytes
    return [*ranges, range(start, len(tags))]


def size_of(tags: Sequence[dict[str, Any]]) -> int:
    """The approximate size in memory of the rows with these tags."""
    return sum(map(_token_count, tags)) * BYTES_PER_TOKEN


def _token_count(tag: dict[str, Any]) -> int:
    """The length of a trajectory. If an agent loop does not set it, a typical length bounds the rows of a slice."""
    length = tag.get("seq_len")
    return length if isinstance(length, int) and length > 0 else 4096


class SampledSlices(SlicedRollout):
    """A sample that tasks have read from TransferQueue and encoded. ``failure`` says why it cannot be stored."""

    def __init__(
        self, pool: TaskPool | LocalPool, requests: list[SliceRequest], prompts: PromptRows, whole: dict[str, Any]
    ) -> None:
        self._pool = pool
        self._rows = [len(request.rows) for request in requests]
        self._encoded = pool.encode(requests, prompts, whole)
        self.digest = join_row_digests(each.digests for each, _ in self._encoded)
        self.failure = _explain_failure(self._encoded)
        differing = [] if self.failure is not None else _differing_keys(self._encoded)
        if differing:
            # Values that are tensors in one slice and something else in another are objects in all of them.
            outputs = [name.removeprefix("output.") for name in differing if name.startswith("output.")]
            self._encoded = pool.encode(requests, prompts, whole, outputs)
            self.failure = _explain_failure(self._encoded)
            if self.failure is None and _differing_keys(self._encoded):
                names = ", ".join(_differing_keys(self._encoded))
                self.failure = UnsupportedBatchError(f"The rows of the sample differ in the types or order of {names}.")
        self.size = sum(each.size for each, _ in self._encoded)

    def write(self, folder: str, key: RolloutKey) -> tuple[Summary, list[RecordedPart]]:
        references = [data for _, data in self._encoded]
        parts = self._pool.write(folder, key, list(zip(self._rows, references, strict=True)))
        return _join_summaries(_summaries(self._encoded)), parts


def _explain_failure(encoded: list[tuple[EncodedSlice, Any]]) -> RolloutSkipError | None:
    return next((each.failure for each, _ in encoded if each.failure is not None), None)


def _summaries(encoded: list[tuple[EncodedSlice, Any]]) -> list[SliceSummary]:
    return [each.summary for each, _ in encoded if each.summary is not None]


def _differing_keys(encoded: list[tuple[EncodedSlice, Any]]) -> list[str]:
    """The names in ``kinds`` that are not the same in all slices."""
    slices = _summaries(encoded)
    names = {name for found in slices for name in found.kinds}
    return sorted(name for name in names if len({found.kinds.get(name) for found in slices}) > 1)


def _join_summaries(slices: Sequence[SliceSummary]) -> Summary:
    """The key figures of the entry that consists of these slices, in order.

    Its content digest depends on where the rows were split, because each slice has its own encodings.
    """
    found = [each.summary for each in slices]
    rows = sum(each.rows for each in found)

    def total(name: str) -> Any:
        values = [getattr(each, name) for each in found]
        return None if None in values else sum(values)

    scores = [None if each.mean_score is None else each.mean_score * each.rows for each in found]
    return Summary(
        rows=rows,
        prompt_tokens=total("prompt_tokens"),
        response_tokens=total("response_tokens"),
        mean_score=None if None in scores or not rows else sum(map(float, filter(None, scores))) / rows,
        content_digest=xxhash.xxh3_128_hexdigest("".join(each.content_digest for each in found).encode()),
    )
