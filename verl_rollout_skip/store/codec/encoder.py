"""Writes a rollout step to Parquet files, its parts. Splits the rows into parts, and each part into row groups.

A part describes itself in its key-value metadata. Readers that ignore the metadata see ordinary columns, with one row
per trajectory.
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
from verl_rollout_skip.store.codec.cells import blob_view
from verl_rollout_skip.store.codec.columns import EncodedBatch, Key, added_columns, counts, keys_of
from verl_rollout_skip.store.codec.encodings import Stored, list_type
from verl_rollout_skip.store.codec.numbers import NumberColumn
from verl_rollout_skip.store.codec.objects import LARGE, BlobPool
from verl_rollout_skip.store.codec.snapshot import Prepared
from verl_rollout_skip.store.format import (
    BLOB_SIZES,
    BLOBS,
    FORMAT_VERSION,
    METADATA_KEY,
    PROMPT_LENGTH,
    RESPONSE_LENGTH,
    SAME_IN_ALL_PARTS,
    SCORE,
    Side,
)
from verl_rollout_skip.store.sizes import format_size
from verl_rollout_skip.store.threads import map_in_threads

_GROUP_BYTES = 96 << 20
# Arrow cannot read a footer with more than 100,000,000 bytes of text, which includes names and statistics.
_MAX_DESCRIPTION_BYTES = 98_000_000


@dataclass(frozen=True)
class Summary:
    """Key figures of a written rollout, for its record."""

    rows: int
    prompt_tokens: int | None
    response_tokens: int | None
    mean_score: float | None
    content_digest: str


class Plan:
    """How a rollout step is stored: the encoding of each column, and the slices of rows that become parts.

    Call ``write`` once for each slice that ``split`` returns, in order, and then ``summary``.
    """

    def __init__(self, prepared: Prepared) -> None:
        output = EncodedBatch(prepared.output)
        input_batch = None if prepared.input is None else EncodedBatch(prepared.input, output)
        self._batches = {Side.OUTPUT: output, **({} if input_batch is None else {Side.INPUT: input_batch})}
        self._rows = output.rows
        self._pool = BlobPool(blob for batch in prepared.batches for blob in batch.blobs())
        names: set[str] = set()
        outputs = list(keys_of(output, self._pool, names))
        inputs = [] if input_batch is None else list(keys_of(input_batch, self._pool, names, outputs))
        self._keys = outputs + inputs
        self._description: dict[str, Any] = {
            "format_version": FORMAT_VERSION,
            "output": _describe(output, outputs),
            "input": None if input_batch is None else _describe(input_batch, inputs),
        }
        size = len(json.dumps(self._description))
        if size > _MAX_DESCRIPTION_BYTES:
            raise UnsupportedBatchError(
                f"Cannot store a description of {format_size(size)}: a Parquet file with more than "
                f"{format_size(_MAX_DESCRIPTION_BYTES)} cannot be read. Most of it is meta_info: store less there."
            )
        self._added = added_columns(output, input_batch, self._pool)
        fields = [column for key in self._keys for column in key.fields]
        if self._pool.blobs:
            fields.append(pa.field(BLOBS, pa.binary(), nullable=False))
            fields.append(pa.field(BLOB_SIZES, list_type(pa.int64()), nullable=False))
        self._schema = pa.schema([*fields, *(column for column, _ in self._added)])
        self._costs = np.sum([batch.row_costs() for batch in self._batches.values()], axis=0)
        # Parts are named after their content. With the token, no two commits write the same part (see commit.py).
        self._token = secrets.token_hex(8)

    def split(self, max_bytes: int) -> list[slice]:
        """The rows of each part, up to ``max_bytes`` in memory. If possible, no two parts need the same large blob."""
        rows = self._rows
        shared, costs = np.zeros(rows + 1, np.int64), self._costs.copy()
        for number, (first, last) in self._rows_of_blobs().items():
            costs[first] += self._pool.sizes[number]
            if self._pool.sizes[number] >= LARGE:
                shared[first + 1] += 1
                shared[last + 1] -= 1
        unshared = np.flatnonzero(np.cumsum(shared) == 0)
        ends = np.concatenate([[0], np.cumsum(costs)])
        cuts = [0]
        while True:
            start = cuts[-1]
            stop = max(start + 1, int(np.searchsorted(ends, ends[start] + max_bytes, side="right")) - 1)
            if stop >= rows:
                return [slice(first, last) for first, last in pairwise([*cuts, rows])]
            # Don't cut in the first half, which would make many more parts.
            candidates = unshared[(unshared > start + (stop - start) // 2) & (unshared <= stop)]
            cuts.append(int(candidates[-1]) if len(candidates) else stop)

    def write(self, rows: slice, sink: Any) -> None:
        """Write the part with these rows to ``sink``, a file-like object or a pyarrow stream."""
        description = {**self._description, "rows": rows.stop - rows.start, "commit": self._token}
        numbers, new_blobs = self._number_blobs(rows)
        with pq.ParquetWriter(sink, self._schema, **self._parquet_options()) as writer:
            writer.add_key_value_metadata({METADATA_KEY: json.dumps(description).encode()})
            # Build the next row group while the current one is compressed.
            table: pa.Table | None = None
            for group in [*self._row_groups(rows, new_blobs), None]:
                jobs: list[Callable[[], Any]] = []
                if group is not None:
                    new = new_blobs[group.start - rows.start : group.stop - rows.start]
                    jobs.append(partial(self._table, group, numbers, new))
                if table is not None:
                    jobs.append(partial(writer.write_table, table, row_group_size=table.num_rows or 1))
                table = map_in_threads(lambda job: job(), jobs)[0]

    def summary(self) -> Summary:
        """The key figures of the rollout. Call this after all parts have been written."""
        added = {column.name: values for column, values in self._added}
        prompts, responses, scores = (added[name] for name in (PROMPT_LENGTH, RESPONSE_LENGTH, SCORE))
        return Summary(
            rows=self._rows,
            prompt_tokens=None if prompts is None else int(prompts.sum()),
            response_tokens=None if responses is None else int(responses.sum()),
            mean_score=None if scores is None or not len(scores) else float(scores.mean()),
            content_digest=self._content_digest(),
        )

    def kinds(self) -> dict[str, str]:
        """What must be the same in all parts of an entry: the type of each key by name, and the order of the keys."""
        kinds: dict[str, str] = {}
        for side, batch in self._batches.items():
            description = self._description[side.value]
            kinds[side.value] = json.dumps([description[name] for name in SAME_IN_ALL_PARTS])
            for numbers in batch.numbers:
                kinds[f"{side.value}.{'.'.join(numbers.path)}"] = repr(numbers.encoding.kind)
            for objects in batch.snapshot.objects:
                kinds[f"{side.value}.{'.'.join(objects.path)}"] = repr((objects.shape, objects.dtype))
        return kinds

    def _rows_of_blobs(self) -> dict[int, tuple[int, int]]:
        """The first and the last row that contains each blob."""
        rows_of: dict[int, tuple[int, int]] = {}
        for key in self._keys:
            for row, numbers in enumerate(key.blobs or ()):
                for number in numbers:
                    first, last = rows_of.get(number, (row, row))
                    rows_of[number] = min(first, row), max(last, row)
        return rows_of

    def _number_blobs(self, rows: slice) -> tuple[list[int], list[list[int]]]:
        """Number the blobs in a part. Returns the number of each blob of the pool, and the new blobs in each row."""
        numbers = [-1] * len(self._pool.blobs)
        new_blobs: list[list[int]] = []
        count = 0
        for row in range(rows.start, rows.stop):
            new = []
            for number in (number for key in self._keys if key.blobs for number in key.blobs[row]):
                if numbers[number] < 0:
                    numbers[number] = count
                    count += 1
                    new.append(number)
            new_blobs.append(new)
        return numbers, new_blobs

    def _row_groups(self, rows: slice, new_blobs: list[list[int]]) -> list[slice]:
        """Slices of rows of about 96 MiB, encoded one at a time to limit the additional memory for a dump."""
        costs = self._costs[rows] + [sum(self._pool.sizes[number] for number in row) for row in new_blobs]
        ends = np.flatnonzero(np.diff(np.cumsum(costs) // _GROUP_BYTES)) + 1 + rows.start
        return [slice(first, last) for first, last in pairwise([rows.start, *ends.tolist(), rows.stop])]

    def _table(self, rows: slice, numbers: list[int], new_blobs: list[list[int]]) -> pa.Table:
        arrays = [array for key in self._keys for array in key.arrays(rows, self._pool, numbers)]
        if self._pool.blobs:
            arrays += self._blob_columns(new_blobs)
        for column, values in self._added:
            nulls = pa.nulls(rows.stop - rows.start, column.type)
            arrays.append(nulls if values is None else pa.array(values[rows], column.type))
        return pa.Table.from_arrays(arrays, schema=self._schema)

    def _blob_columns(self, new_blobs: list[list[int]]) -> list[pa.Array]:
        sizes = [[self._pool.sizes[number] for number in row] for row in new_blobs]
        offsets = np.cumsum([0, *map(sum, sizes)])
        if offsets[-1] >= 2**31:
            largest = format_size(max(map(sum, sizes)))
            raise UnsupportedBatchError(
                f"Cannot store the cells: one row has {largest} of bulk data, and the limit is 2 GiB. Split the row."
            )
        data = pa.py_buffer(b"".join(blob_view(self._pool.blobs[number]) for row in new_blobs for number in row))
        buffers = [None, pa.py_buffer(offsets.astype(np.int32)), data]
        flat = np.array([size for row in sizes for size in row], np.int64)
        return [
            pa.Array.from_buffers(pa.binary(), len(new_blobs), buffers),
            Stored(flat, counts(sizes)).to_arrow(pa.int64()),
        ]

    def _content_digest(self) -> str:
        """A digest of the content. It ignores the column order, because verl takes the input columns from a set."""
        digest = xxhash.xxh3_128()
        for side, batch in self._batches.items():
            description = {**self._description[side.value], "meta": batch.snapshot.stable_meta}
            for field in ("order", "arrays", "numbers", "objects"):
                description[field] = sorted(json.dumps(item, sort_keys=True) for item in description[field])
            digest.update(json.dumps(description, sort_keys=True).encode())
            digest.update(f"{batch.rows} rows".encode())
            if batch.spans is not None:  # masks and position ids are derived from these
                for lengths in (batch.spans.prompt_lengths, batch.spans.response_lengths):
                    digest.update(lengths.astype(np.int64).tobytes())
        columns = {
            column.name: column_digest
            for key in self._keys
            if key.source.path[-1] != "uid"
            for column, column_digest in zip(key.fields, key.digests, strict=True)
        }
        for name in sorted(columns):
            digest.update(columns[name].digest())
        return digest.hexdigest()

    def _parquet_options(self) -> dict[str, Any]:
        encodings, dictionary = {}, []
        added = [column.name for column, _ in self._added]
        for column in self._schema:
            nested = pa.types.is_list(column.type)
            leaf = f"{column.name}.list.element" if nested else column.name
            kind = column.type.value_type if nested else column.type
            if pa.types.is_string(kind) and column.name not in added:
                dictionary.append(leaf)
            elif pa.types.is_floating(kind) and column.name not in added:
                # No dictionary: its lookup does not distinguish -0.0 from 0.0, or one NaN from another. Integers stay
                # plain, because few readers support this encoding for integers (DuckDB since 2.0).
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


def _describe(encoded: EncodedBatch, keys: list[Key]) -> dict[str, Any]:
    batch, spans = encoded.snapshot.batch, encoded.spans
    numbers = [key.spec for key in keys if isinstance(key.source, NumberColumn)]
    return {
        "kind": batch.kind.value,
        "nodes": [[list(path), list(size[1:])] for path, size in batch.nodes.items()],
        "order": [list(path) for path in batch.order],
        "device": batch.device,
        "arrays": [list(path) for path in batch.arrays],
        "spans": None if spans is None else [spans.prompt_width, spans.response_width],
        "numbers": numbers,
        "objects": [key.spec for key in keys[len(numbers) :]],
        "meta": encoded.snapshot.meta,
    }
