"""A rollout step into Parquet files, its parts.

``prepare`` takes what must be taken on the training thread, ``plan`` does the rest. A part describes itself in its
key-value metadata; readers that know nothing of that see one row per trajectory with ordinary columns. Names: a key of
the output keeps its name, inputs are ``in__<key>``, and what this package adds is ``skip__<name>``; an output key that
begins with one of these prefixes becomes ``out__<key>``.
"""

from __future__ import annotations

import json
import secrets
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from itertools import pairwise
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import xxhash

from verl_rollout_skip.errors import UnsupportedBatchError
from verl_rollout_skip.sizes import format_size
from verl_rollout_skip.store.codec.blobs import LARGE, BlobPool, blob_view
from verl_rollout_skip.store.codec.columns import choose_encodings
from verl_rollout_skip.store.codec.encodings import Same, Stored, list_type
from verl_rollout_skip.store.codec.jagged import JaggedBits
from verl_rollout_skip.store.codec.keys import Key, Names, counts, keys_of
from verl_rollout_skip.store.codec.prepared import Numbers, Objects, Prepared, TakenBatch
from verl_rollout_skip.store.codec.rows import row_digests, row_scores, token_lengths
from verl_rollout_skip.store.format import (
    BLOB_SIZES,
    BLOBS,
    FORMAT_VERSION,
    INPUT_LENGTH,
    INPUT_RESPONSE_LENGTH,
    METADATA_KEY,
    PROMPT_DIGEST,
    PROMPT_LENGTH,
    RESPONSE_LENGTH,
    SCORE,
)
from verl_rollout_skip.store.threads import map_in_threads

_GROUP_BYTES = 96 << 20


@dataclass(frozen=True)
class Summary:
    """What is worth knowing of a written rollout without opening it."""

    rows: int
    prompt_tokens: int | None
    response_tokens: int | None
    mean_score: float | None
    content_digest: str


class Plan:
    """How a rollout step is stored: one encoding for each column, and the slices of rows that become parts.

    ``write`` is called once for each slice of ``split``, in order; ``summary`` is known after the last.
    """

    def __init__(self, prepared: Prepared) -> None:
        self._output, self._input = prepared.output, prepared.input
        choose_encodings(prepared.output)
        if prepared.input is not None:
            choose_encodings(prepared.input, echoed=prepared.output)
        self._pool = BlobPool(blob for batch in prepared.batches for blob in batch.blobs())
        names = Names()
        outputs = list(keys_of(prepared.output, self._pool, names))
        inputs = [] if prepared.input is None else list(keys_of(prepared.input, self._pool, names, outputs))
        self._all_keys = outputs + inputs
        self._description: dict[str, Any] = {
            "format_version": FORMAT_VERSION,
            "output": _describe(prepared.output, outputs),
            "input": None if prepared.input is None else _describe(prepared.input, inputs),
        }
        self._scores = row_scores(prepared.output)
        self._lengths = token_lengths(prepared.output)
        self._extras = self._extra_columns()
        self._fields = [column for key in self._all_keys for column in key.fields]
        if self._pool.blobs:
            self._fields.append(pa.field(BLOBS, pa.binary(), nullable=False))
            self._fields.append(pa.field(BLOB_SIZES, list_type(pa.int64()), nullable=False))
        self._fields += [column for column, _ in self._extras]
        self._blob_rows = self._rows_of_blobs()
        self._costs = np.sum([_row_costs(batch) for batch in prepared.batches], axis=0)
        # Parts are named after their content. This makes each the part of one commit only (see commit.py).
        self._token = secrets.token_hex(8)

    def split(self, max_bytes: int) -> list[slice]:
        """The rows of each part, up to ``max_bytes`` in memory; no large blob is on both sides of a cut if possible."""
        rows = self._output.batch.rows
        shared, costs = np.zeros(rows + 1, np.int64), self._costs.copy()
        for number, (first, last) in self._blob_rows.items():
            costs[first] += self._pool.sizes[number]
            if self._pool.sizes[number] >= LARGE:
                shared[first + 1] += 1
                shared[last + 1] -= 1
        clean = np.flatnonzero(np.cumsum(shared) == 0)
        ends = np.concatenate([[0], np.cumsum(costs)])
        cuts = [0]
        while True:
            start = cuts[-1]
            stop = max(start + 1, int(np.searchsorted(ends, ends[start] + max_bytes, side="right")) - 1)
            if stop >= rows:
                return [slice(first, last) for first, last in pairwise([*cuts, rows])]
            # Not so early that there are many more parts.
            candidates = clean[(clean > start + (stop - start) // 2) & (clean <= stop)]
            cuts.append(int(candidates[-1]) if len(candidates) else stop)

    def write(self, rows: slice, sink: Any) -> None:
        """Write the part with these rows into ``sink``, a file-like object or a pyarrow stream."""
        description = {**self._description, "rows": rows.stop - rows.start, "commit": self._token}
        numbers, new_blobs = self._number_blobs(rows)
        schema = pa.schema(self._fields)
        with pq.ParquetWriter(sink, schema, **_parquet_options(self._fields, self._extras)) as writer:
            writer.add_key_value_metadata({METADATA_KEY: json.dumps(description).encode()})
            # While one row group is compressed the next one is gathered.
            table: pa.Table | None = None
            for group in [*self._row_groups(rows, new_blobs), None]:
                jobs: list[Callable[[], Any]] = []
                if group is not None:
                    new = new_blobs[group.start - rows.start : group.stop - rows.start]
                    jobs.append(partial(self._table, schema, group, numbers, new))
                if table is not None:
                    jobs.append(partial(writer.write_table, table, row_group_size=table.num_rows or 1))
                table = map_in_threads(lambda job: job(), jobs)[0]

    def summary(self) -> Summary:
        """What is worth knowing of the rollout, after all its parts were written."""
        scores, lengths = self._scores, self._lengths
        return Summary(
            rows=self._output.batch.rows,
            prompt_tokens=None if lengths is None else int(lengths[0].sum()),
            response_tokens=None if lengths is None else int(lengths[1].sum()),
            mean_score=None if scores is None or not len(scores) else float(scores.mean()),
            content_digest=self._content_digest(),
        )

    def _extra_columns(self) -> list[tuple[pa.Field, Any]]:
        """The columns for people and SQL, and those that the spans are read from."""
        output, given = self._output, self._input
        lengths = self._lengths or (None, None)
        if given is None:
            prompts = [column for column in output.numbers if column.path == ("prompts",)]
            digests = row_digests(output, self._pool, prompts, []) if prompts else None
        else:
            digests = row_digests(given, self._pool, given.numbers, given.objects)
        extras: list[tuple[pa.Field, Any]] = [
            (pa.field(PROMPT_LENGTH, pa.int32()), lengths[0]),
            (pa.field(RESPONSE_LENGTH, pa.int32()), lengths[1]),
            (pa.field(SCORE, pa.float64()), self._scores),
            (pa.field(PROMPT_DIGEST, pa.string()), digests),
        ]
        if given is not None and given.spans is not None:
            extras.append((pa.field(INPUT_LENGTH, pa.int32()), given.spans.prompt_lengths))
            extras.append((pa.field(INPUT_RESPONSE_LENGTH, pa.int32()), given.spans.response_lengths))
        return extras

    def _rows_of_blobs(self) -> dict[int, tuple[int, int]]:
        """The first and the last row that holds each blob."""
        found: dict[int, tuple[int, int]] = {}
        for key in self._all_keys:
            for row, numbers in enumerate(key.blobs or ()):
                for number in numbers:
                    first, last = found.get(number, (row, row))
                    found[number] = min(first, row), max(last, row)
        return found

    def _number_blobs(self, rows: slice) -> tuple[list[int], list[list[int]]]:
        """The number in a part of each blob of the pool, and for each row the blobs that are new in it."""
        numbers = [-1] * len(self._pool.blobs)
        new_blobs: list[list[int]] = []
        count = 0
        for row in range(rows.start, rows.stop):
            new = []
            for number in (number for key in self._all_keys if key.blobs for number in key.blobs[row]):
                if numbers[number] < 0:
                    numbers[number] = count
                    count += 1
                    new.append(number)
            new_blobs.append(new)
        return numbers, new_blobs

    def _row_groups(self, rows: slice, new_blobs: list[list[int]]) -> list[slice]:
        """Slices of rows of some tens of megabytes: what is encoded at once, and so the extra memory of a dump."""
        costs = self._costs[rows] + [sum(self._pool.sizes[number] for number in row) for row in new_blobs]
        ends = np.flatnonzero(np.diff(np.cumsum(costs) // _GROUP_BYTES)) + 1 + rows.start
        return [slice(first, last) for first, last in pairwise([rows.start, *ends.tolist(), rows.stop])]

    def _table(self, schema: pa.Schema, rows: slice, numbers: list[int], new_blobs: list[list[int]]) -> pa.Table:
        arrays = [array for key in self._all_keys for array in key.arrays(rows, self._pool, numbers)]
        if self._pool.blobs:
            arrays += self._blob_columns(new_blobs)
        for column, values in self._extras:
            if values is None:
                arrays.append(pa.nulls(rows.stop - rows.start, column.type))
            else:
                arrays.append(pa.array(values[rows], column.type))
        return pa.Table.from_arrays(arrays, schema=schema)

    def _blob_columns(self, new_blobs: list[list[int]]) -> list[pa.Array]:
        sizes = [[self._pool.sizes[number] for number in row] for row in new_blobs]
        offsets = np.cumsum([0, *map(sum, sizes)])
        if offsets[-1] >= 2**31:
            largest = format_size(max(map(sum, sizes)))
            raise UnsupportedBatchError(
                f"Cannot store the cells: those of one row have {largest} of bulk data, over 2 GiB."
            )
        data = pa.py_buffer(b"".join(blob_view(self._pool.blobs[number]) for row in new_blobs for number in row))
        buffers = [None, pa.py_buffer(offsets.astype(np.int32)), data]
        flat = np.array([size for row in sizes for size in row], np.int64)
        return [
            pa.Array.from_buffers(pa.binary(), len(new_blobs), buffers),
            Stored(flat, counts(sizes)).to_arrow(pa.int64()),
        ]

    def _content_digest(self) -> str:
        """A digest of what is recorded, whatever the order of the columns: verl takes those of the input from a set."""
        digest = xxhash.xxh3_128()
        for name, batch in (("output", self._output), ("input", self._input)):
            if batch is not None:
                described = {**self._description[name], "meta": batch.lasting_meta}
                for listed in ("order", "arrays", "numbers", "objects"):
                    described[listed] = sorted(json.dumps(item, sort_keys=True) for item in described[listed])
                digest.update(json.dumps(described, sort_keys=True).encode())
                digest.update(f"{batch.batch.rows} rows".encode())
                if batch.spans is not None:  # masks and position ids are made of nothing else
                    for lengths in (batch.spans.prompt_lengths, batch.spans.response_lengths):
                        digest.update(lengths.astype(np.int64).tobytes())
        columns = {
            column.name: digested
            for key in self._all_keys
            if key.source.path[-1] != "uid"
            for column, digested in zip(key.fields, key.digests, strict=True)
        }
        for name in sorted(columns):
            digest.update(columns[name].digest())
        return digest.hexdigest()


plan = Plan


def _describe(taken: TakenBatch, keys: list[Key]) -> dict[str, Any]:
    batch = taken.batch
    return {
        "kind": batch.kind.value,
        "nodes": [[list(path), list(size[1:])] for path, size in batch.nodes.items()],
        "order": [list(path) for path in batch.order],
        "device": batch.device,
        "arrays": [list(path) for path in batch.arrays],
        "spans": None if taken.spans is None else [taken.spans.prompt_width, taken.spans.response_width],
        "numbers": [key.spec for key in keys if isinstance(key.source, Numbers)],
        "objects": [key.spec for key in keys if isinstance(key.source, Objects)],
        "meta": taken.meta,
    }


def _row_costs(batch: TakenBatch) -> np.ndarray:
    """How many bytes the numbers of each row have in memory."""
    rows = batch.batch.rows
    costs = np.zeros(rows)
    for column in batch.numbers:
        if isinstance(column.bits, JaggedBits):
            costs += column.bits.lengths * (column.bits.values.nbytes / max(len(column.bits.values), 1))
        elif isinstance(column.bits, list):
            costs += [row.nbytes for row in column.bits]
        elif not isinstance(column.encoding, Same):
            costs += column.bits.nbytes / max(rows, 1)
    return costs


def _parquet_options(fields: list[pa.Field], extras: list[tuple[pa.Field, Any]]) -> dict[str, Any]:
    encodings, dictionary = {}, []
    added = [column.name for column, _ in extras]
    for column in fields:
        nested = pa.types.is_list(column.type)
        leaf = f"{column.name}.list.element" if nested else column.name
        kind = column.type.value_type if nested else column.type
        if pa.types.is_string(kind) and column.name not in added:
            dictionary.append(leaf)
        elif pa.types.is_floating(kind) and column.name not in added:
            # Not a dictionary: its lookup takes -0.0 for 0.0 and all NaNs for one. Integers stay plain, because
            # readers learn to undo a split of integers only now (DuckDB with 2.0).
            encodings[leaf] = "BYTE_STREAM_SPLIT"
    return {
        "compression": "zstd",
        "compression_level": 1,
        "use_dictionary": dictionary or False,
        "column_encoding": encodings or None,
        "write_statistics": added,
        "write_page_checksum": True,
        "store_schema": False,
    }
