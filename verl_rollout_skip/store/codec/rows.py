"""What is known of each row of a rollout step besides its columns: token counts, score, and a digest of its prompt."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import xxhash

from verl_rollout_skip.errors import UnsupportedBatchError
from verl_rollout_skip.store.codec.batch import Batch, flatten
from verl_rollout_skip.store.codec.blobs import BlobPool
from verl_rollout_skip.store.codec.columns import plain_columns
from verl_rollout_skip.store.codec.jagged import JaggedBits
from verl_rollout_skip.store.codec.prepared import Numbers, Objects, TakenBatch, take


def token_lengths(batch: TakenBatch) -> tuple[np.ndarray, np.ndarray] | None:
    """How many tokens the prompt and the response of each row have, if the batch tells."""
    if batch.spans is not None:
        return batch.spans.prompt_lengths, batch.spans.response_lengths
    jagged = {column.path[-1]: column.bits for column in batch.numbers if isinstance(column.bits, JaggedBits)}
    if "prompts" in jagged and "responses" in jagged:
        return jagged["prompts"].lengths, jagged["responses"].lengths
    return None


def row_scores(batch: TakenBatch) -> np.ndarray | None:
    """The sum of the rewards of each row."""
    for column in batch.numbers:
        if column.path != ("rm_scores",) or column.encoding.element.name not in ("float32", "float64"):
            continue
        with np.errstate(invalid="ignore"):  # a NaN among the rewards is a NaN in the sum, no more
            if isinstance(column.bits, JaggedBits):
                return _sums(column.bits)
            if isinstance(column.bits, np.ndarray) and column.bits.ndim == 2:
                return column.bits.sum(axis=1, dtype=np.float64)
    return None


def prompt_digests(inputs: Any) -> list[str] | None:
    """One digest for each row of a rollout step's input: equal rows have equal digests, whatever their uids."""
    # This runs on the training thread. The n samples of a prompt hold the same objects, of which one row is digested.
    distinct, which = _distinct_rows(flatten(inputs))
    try:
        batch = take(distinct)
    except UnsupportedBatchError:
        take(inputs)  # names the right row
        raise
    digests = row_digests(batch, BlobPool(batch.blobs()), plain_columns(batch), batch.objects)
    return digests if digests is None or which is None else [digests[row] for row in which]


def _distinct_rows(batch: Batch) -> tuple[Batch, list[int] | None]:
    """The rows of a batch without those that hold the same objects as an earlier one, uid aside, and for each row which
    of those it is; everything and None if rows would have to be compared in another way."""
    counted = {path: array for path, array in batch.arrays.items() if path[-1] != "uid"}
    if batch.tensors or not counted or any(array.dtype != object or array.ndim != 1 for array in counted.values()):
        return batch, None
    number_of: dict[tuple[int, ...], int] = {}
    rows = zip(*(map(id, array.tolist()) for array in counted.values()), strict=True)
    which = [number_of.setdefault(objects, len(number_of)) for objects in rows]
    first = np.unique(which, return_index=True)[1]
    arrays = {path: array[first] for path, array in counted.items()}
    return replace(batch, rows=len(first), arrays=arrays, meta={}), which


def row_digests(batch: TakenBatch, pool: BlobPool, numbers: list[Numbers], objects: list[Objects]) -> list[str] | None:
    """One digest for each row over these columns, uid aside; None if there are none."""
    numbers = [column for column in numbers if column.path[-1] != "uid"]
    objects = [column for column in objects if column.path[-1] != "uid"]
    if not numbers and not objects:
        return None
    # The order of the columns says nothing, and verl changes it.
    numbers = sorted(numbers, key=lambda column: column.path)
    objects = sorted(objects, key=lambda column: column.path)
    digests = []
    for row in range(batch.batch.rows):
        digest = xxhash.xxh3_128()
        for column in objects:
            digest.update(f"{column.path}={column.cells.values[row]!r};".encode("utf-8", "surrogatepass"))
            for number in pool.numbers(column.cells.blobs[row]) if column.cells.blobs else ():
                digest.update(pool.digests[number])
        for numeric in numbers:
            digest.update(f"{numeric.path}=".encode("utf-8", "surrogatepass"))
            bits = numeric.bits
            digest.update((bits.rows(slice(row, row + 1)) if isinstance(bits, JaggedBits) else bits[row]).tobytes())
        digests.append(digest.hexdigest())
    return digests


def _sums(rewards: JaggedBits) -> np.ndarray:
    scores = np.zeros(len(rewards.lengths))
    filled = rewards.lengths > 0  # reduceat gives the next value for an empty row
    if filled.any():
        scores[filled] = np.add.reduceat(rewards.values, rewards.offsets[:-1][filled], dtype=np.float64)
    return scores
