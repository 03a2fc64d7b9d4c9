"""The Parquet columns of a rollout step: one or more per key, and some that are added for queries and prompt checks.

A key of the output keeps its name, a key of the input becomes ``in__<key>``, and columns that this package adds are
named ``skip__<name>``. A key of the output that starts with one of these prefixes becomes ``out__<key>``.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
import pyarrow as pa
import xxhash

from verl_rollout_skip.errors import UnsupportedBatchError
from verl_rollout_skip.store.codec.batch import Batch, flatten
from verl_rollout_skip.store.codec.encodings import Form, JaggedBits, Stored, list_type
from verl_rollout_skip.store.codec.numbers import NumberColumn, choose_encodings, plain_columns
from verl_rollout_skip.store.codec.objects import CELL_TYPES, BlobPool, ObjectColumn
from verl_rollout_skip.store.codec.padding import Spans
from verl_rollout_skip.store.codec.part import as_numpy, byte_offsets
from verl_rollout_skip.store.codec.snapshot import BatchSnapshot, take_snapshot
from verl_rollout_skip.store.format import (
    BLOBS_OF,
    INPUT_LENGTH,
    INPUT_RESPONSE_LENGTH,
    OBJECT,
    PROMPT_DIGEST,
    PROMPT_LENGTH,
    RESPONSE_LENGTH,
    SCORE,
)

_RESERVED = ("skip__", "in__", "out__")


class EncodedBatch:
    """A batch with the encodings of its numeric columns. For an input, ``output`` is the output of the same step."""

    def __init__(self, snapshot: BatchSnapshot, output: EncodedBatch | None = None) -> None:
        self.snapshot, self.rows = snapshot, snapshot.batch.rows
        plain = plain_columns(snapshot.restore(), snapshot.batch.arrays)
        self.numbers: list[NumberColumn]
        self.numbers, self.spans = choose_encodings(plain, [] if output is None else output.numbers)

    def row_costs(self) -> np.ndarray:
        """The memory of each row for its numbers and its text, in bytes."""
        costs = np.zeros(self.rows)
        for column in self.numbers:
            if isinstance(column.bits, JaggedBits):
                costs += column.bits.lengths * (column.bits.values.nbytes / max(len(column.bits.values), 1))
            elif column.encoding.form is not Form.SAME:
                costs += column.bits.nbytes / max(self.rows, 1)
        for objects in self.snapshot.objects:
            if objects.form in ("text", "json"):
                texts = (text or "" for text in objects.values)
                costs += [len(text) if text.isascii() else len(text.encode()) for text in texts]
        return costs


@dataclass
class Key:
    """A key of a batch: its description, its Parquet columns, and a digest of each.

    ``blobs`` contains, for each row, the numbers of its blobs in the pool.
    """

    source: NumberColumn | ObjectColumn
    spec: dict[str, Any]
    fields: list[pa.Field]
    spans: Spans | None = None
    blobs: list[list[int]] | None = None
    digests: list[ColumnDigest] = field(default_factory=list)

    def arrays(self, rows: slice, pool: BlobPool, numbers: list[int]) -> Iterator[pa.Array]:
        """The columns of some rows. ``numbers`` maps the number of a blob in the pool to its number in the part."""
        self.digests = self.digests or [ColumnDigest() for _ in self.fields]
        if isinstance(self.source, NumberColumn):
            columns: list[Any] = self.source.encoding.store(self.source.bits, rows, self.spans)
        else:
            columns = [self._objects(self.source, column.name, rows, pool, numbers) for column in self.fields]
        for column, digest, content in zip(self.fields, self.digests, columns, strict=True):
            digest.add(content)
            kind = column.type.value_type if pa.types.is_list(column.type) else column.type
            yield content if isinstance(content, pa.Array) else content.to_arrow(kind)

    def _objects(self, source: ObjectColumn, name: str, rows: slice, pool: BlobPool, numbers: list[int]) -> Any:
        if name == self.spec["column"]:
            return pa.array(source.values[rows], CELL_TYPES[source.form])
        if name == self.spec["object"]:
            return Stored(np.array((source.first_rows or [])[rows], np.int64))
        row_blobs = (self.blobs or [])[rows]
        flat = [number for row in row_blobs for number in row]
        content = b"".join(pool.digests[number] for number in flat)
        return Stored(np.array([numbers[number] for number in flat], np.int32), counts(row_blobs), content)


class ColumnDigest:
    """A digest of the values in one column and of their lengths. It does not depend on how the rows are split."""

    def __init__(self) -> None:
        self._values, self._lengths = xxhash.xxh3_128(), xxhash.xxh3_128()

    def add(self, column: Stored | pa.Array) -> None:
        if isinstance(column, pa.Array):
            # None is represented by length -1 for text, and by length 0 for numbers.
            valid = as_numpy(column.is_valid())
            if pa.types.is_string(column.type):
                lengths = np.where(valid, np.diff(byte_offsets(column)), -1)
                column = Stored(np.empty(0), lengths, column.buffers()[2] or b"")
            else:
                column = Stored(np.where(valid, as_numpy(column), 0), valid)
        values: Any = np.ascontiguousarray(column.values) if column.content is None else column.content
        self._values.update(values)
        if column.lengths is not None:
            self._lengths.update(column.lengths.astype(np.int64).data)

    def digest(self) -> bytes:
        return bytes(self._values.digest() + self._lengths.digest())


def keys_of(
    batch: EncodedBatch, pool: BlobPool, used_names: set[str], outputs: list[Key] | None = None
) -> Iterator[Key]:
    """The keys of a batch. For an input, ``outputs`` are the keys of the output.

    ``used_names`` are all column names so far, in lowercase.
    """
    prefix = "" if outputs is None else "in__"
    for numbers in batch.numbers:
        name = _unique_name(numbers.path, prefix, used_names)
        spec = {"path": list(numbers.path), "column": name, **numbers.encoding.to_json()}
        yield Key(numbers, spec, numbers.encoding.fields(name), batch.spans)
    for objects in batch.snapshot.objects:
        name = _unique_name(objects.path, prefix, used_names)
        blobs = None if objects.blobs is None else [pool.numbers(row) for row in objects.blobs]
        columns = {
            "column": pa.field(name, CELL_TYPES[objects.form]),
            "object": pa.field(f"{OBJECT}{name}", pa.int64(), nullable=False) if objects.first_rows else None,
            "blobs": pa.field(f"{BLOBS_OF}{name}", list_type(pa.int32()), nullable=False) if blobs else None,
        }
        spec = {
            "path": list(objects.path),
            "column": name,
            "cells": objects.form,
            "shape": list(objects.shape),
            "dtype": objects.dtype,
        }
        names = {kind: None if column is None else column.name for kind, column in columns.items()}
        for output_key in outputs or ():
            if _has_same_cells(output_key, objects, blobs):
                # Cells that a rollout copies from its input to its output are stored once.
                shared = {"column", "blobs"}
                if isinstance(output_key.source, ObjectColumn) and output_key.source.first_rows == objects.first_rows:
                    shared.add("object")
                names |= {kind: output_key.spec[kind] for kind in shared}
                columns = {kind: column for kind, column in columns.items() if kind not in shared}
                break
        fields = [column for column in columns.values() if column is not None]
        yield Key(objects, {**spec, **names}, fields, blobs=blobs)


def _has_same_cells(key: Key, objects: ObjectColumn, blobs: list[list[int]] | None) -> bool:
    other = key.source
    if not isinstance(other, ObjectColumn) or (other.path, other.form) != (objects.path, objects.form):
        return False
    # Equal floats can have different bits (0.0 and -0.0), so they are stored twice.
    return objects.form != "float" and other.values == objects.values and key.blobs == blobs


def _unique_name(path: tuple[str, ...], prefix: str, used_names: set[str]) -> str:
    """A unique column name: the key itself if possible."""
    # Parquet readers interpret a dot as a path into a nested column.
    label = "__".join(path).replace(".", "_")
    if not prefix and (not label or label.startswith(_RESERVED)):
        prefix = "out__"
    name = unique = prefix + label.encode("utf-8", "replace").decode()
    number = 2
    while unique.lower() in used_names:
        unique, number = f"{name}__{number}", number + 1
    used_names.add(unique.lower())
    return unique


def counts(rows: list[list[int]]) -> np.ndarray:
    """The length of each list."""
    return np.array([len(row) for row in rows], np.int64)


def added_columns(output: EncodedBatch, input_batch: EncodedBatch | None, pool: BlobPool) -> list[tuple[pa.Field, Any]]:
    """The columns for queries, and those with the lengths of the spans. None stands for a column of nulls."""
    prompt_lengths, response_lengths = _token_lengths(output) or (None, None)
    if input_batch is None:
        prompts = [column for column in output.numbers if column.path == ("prompts",)]
        digests = _row_digests(output.rows, prompts, [], pool)
    else:
        digests = _row_digests(input_batch.rows, input_batch.numbers, input_batch.snapshot.objects, pool)
    added: list[tuple[pa.Field, Any]] = [
        (pa.field(PROMPT_LENGTH, pa.int32()), prompt_lengths),
        (pa.field(RESPONSE_LENGTH, pa.int32()), response_lengths),
        (pa.field(SCORE, pa.float64()), _row_scores(output)),
        (pa.field(PROMPT_DIGEST, pa.string()), digests),
    ]
    if input_batch is not None and input_batch.spans is not None:
        added.append((pa.field(INPUT_LENGTH, pa.int32()), input_batch.spans.prompt_lengths))
        added.append((pa.field(INPUT_RESPONSE_LENGTH, pa.int32()), input_batch.spans.response_lengths))
    return added


def _token_lengths(batch: EncodedBatch) -> tuple[np.ndarray, np.ndarray] | None:
    """The numbers of tokens in the prompt and in the response of each row, if they are known."""
    if batch.spans is not None:
        return batch.spans.prompt_lengths, batch.spans.response_lengths
    jagged = {column.path[-1]: column.bits for column in batch.numbers if column.encoding.plain_form is Form.JAGGED}
    if "prompts" in jagged and "responses" in jagged:
        return jagged["prompts"].lengths, jagged["responses"].lengths
    return None


def _row_scores(batch: EncodedBatch) -> np.ndarray | None:
    """The sum of the rewards of each row."""
    for column in batch.numbers:
        bits = column.bits
        if column.path != ("rm_scores",) or column.encoding.element.name not in ("float32", "float64"):
            continue
        with np.errstate(invalid="ignore"):  # a NaN reward makes the sum NaN
            if column.encoding.plain_form is Form.JAGGED:
                scores = np.zeros(len(bits.lengths))
                is_filled = bits.lengths > 0  # for an empty row, reduceat would return the next value
                if is_filled.any():
                    scores[is_filled] = np.add.reduceat(bits.values, bits.offsets[:-1][is_filled], dtype=np.float64)
                return scores
            if isinstance(bits, np.ndarray) and bits.ndim == 2:
                return bits.sum(axis=1, dtype=np.float64)
    return None


def prompt_digests(inputs: Any) -> list[str] | None:
    """One digest per row of a rollout step's input. Rows that differ only in their uid have equal digests."""
    # This runs on the training thread. The n samples of a prompt contain the same objects, so only one is digested.
    distinct, index_of = _distinct_rows(flatten(inputs))
    try:
        batch = take_snapshot(distinct)
    except UnsupportedBatchError:
        take_snapshot(inputs)  # raises an error with the original row number
        raise
    numbers = plain_columns(batch.restore(), batch.batch.arrays)
    digests = _row_digests(batch.batch.rows, numbers, batch.objects, BlobPool(batch.blobs()))
    return digests if digests is None or index_of is None else [digests[row] for row in index_of]


def _distinct_rows(batch: Batch) -> tuple[Batch, list[int] | None]:
    """Remove rows that contain the same objects as an earlier row, not counting uids.

    Returns the remaining batch, and the index in it for each original row. If the rows cannot be compared by identity,
    returns the whole batch and None.
    """
    compared = {path: array for path, array in batch.arrays.items() if path[-1] != "uid"}
    if batch.tensors or not compared or any(array.dtype != object or array.ndim != 1 for array in compared.values()):
        return batch, None
    index_of: dict[tuple[int, ...], int] = {}
    rows = zip(*(map(id, array.tolist()) for array in compared.values()), strict=True)
    indexes = [index_of.setdefault(objects, len(index_of)) for objects in rows]
    first = np.unique(indexes, return_index=True)[1]
    arrays = {path: array[first] for path, array in compared.items()}
    return replace(batch, rows=len(first), arrays=arrays, meta={}), indexes


def _row_digests(
    rows: int, numbers: list[NumberColumn], objects: list[ObjectColumn], pool: BlobPool
) -> list[str] | None:
    """One digest per row over these columns, without uids. None if there are no columns."""
    # verl changes the order of the columns, which has no meaning.
    numbers = sorted((column for column in numbers if column.path[-1] != "uid"), key=lambda column: column.path)
    objects = sorted((column for column in objects if column.path[-1] != "uid"), key=lambda column: column.path)
    if not numbers and not objects:
        return None
    digests = []
    for row in range(rows):
        digest = xxhash.xxh3_128()
        for column in objects:
            digest.update(f"{column.path}={column.values[row]!r};".encode("utf-8", "surrogatepass"))
            for number in pool.numbers(column.blobs[row]) if column.blobs else ():
                digest.update(pool.digests[number])
        for numeric in numbers:
            digest.update(f"{numeric.path}=".encode("utf-8", "surrogatepass"))
            bits = numeric.bits
            digest.update((bits.rows(slice(row, row + 1)) if isinstance(bits, JaggedBits) else bits[row]).tobytes())
        digests.append(digest.hexdigest())
    return digests
