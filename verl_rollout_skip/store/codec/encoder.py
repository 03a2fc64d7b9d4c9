"""A rollout step into Parquet files, its parts.

``columns.prepare`` takes what must be taken on the training thread, ``plan`` does the rest. A part describes itself
in its key-value metadata; readers that know nothing of that see one row per trajectory with ordinary columns. Names: a
key of the output keeps its name, inputs are ``in__<key>``, and what this package adds is ``skip__<name>``; an output
key that begins with one of these prefixes becomes ``out__<key>``.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import xxhash

from verl_rollout_skip.errors import UnsupportedBatchError
from verl_rollout_skip.store.codec import cells, columns
from verl_rollout_skip.store.codec.columns import Numbers, Objects, Part, Prepared, cell_type
from verl_rollout_skip.store.codec.encodings import Jagged, Rows, Same, form_to_json
from verl_rollout_skip.store.codec.padding import Spans
from verl_rollout_skip.store.codec.table import list_array, list_field
from verl_rollout_skip.store.format import FORMAT_VERSION, METADATA_KEY
from verl_rollout_skip.store.threads import map_in_threads

_RESERVED = ("skip__", "in__", "out__")
_GROUP_BYTES = 96 << 20


@dataclass(frozen=True)
class Summary:
    """What is worth knowing of a written rollout without opening it."""

    rows: int
    prompt_tokens: int | None
    response_tokens: int | None
    mean_score: float | None
    content_digest: str


@dataclass(frozen=True)
class Column:
    """One Parquet column (or a few that belong together) and where its arrays come from."""

    spec: dict[str, Any]
    fields: list[pa.Field]
    source: Numbers | Objects
    spans: Spans | None

    def arrays(self, rows: slice) -> list[pa.Array]:
        if isinstance(self.source, Numbers):
            return self.source.form.write(self.source.bits, rows, self.spans)
        return _object_arrays(self.source, self.fields, rows)


class Plan:
    """How a rollout step is stored: one encoding for each column, and the slices of rows that become parts.

    ``write`` is called once for each slice of ``split``, in order; ``summary`` is known after the last.
    """

    def __init__(self, prepared: Prepared) -> None:
        self._prepared = prepared
        output, given = prepared.output, prepared.input
        columns.choose_encodings(output)
        if given is not None:
            columns.choose_encodings(given, echoed=output)
        names = _Names()
        output_layout = list(_layout(output, names, "", None))
        input_layout = [] if given is None else list(_layout(given, names, "in__", output_layout))
        self._layout = output_layout + input_layout
        self._spec = {
            "format_version": FORMAT_VERSION,
            "output": _part_spec(output, output_layout),
            "input": None if given is None else _part_spec(given, input_layout),
        }
        self._extras = _extra_columns(prepared)
        fields = [field for column in self._layout for field in column.fields]
        self._schema = pa.schema([*fields, *(field for field, _ in self._extras)])
        self._digests = [xxhash.xxh3_128() for _ in self._layout]
        self._scores: list[np.ndarray] = []

    def split(self, max_bytes: int) -> list[slice]:
        """The rows of each part."""
        return [slice(0, self._prepared.output.batch.rows)]

    def write(self, rows: slice, sink: Any) -> None:
        """Write the part with these rows into ``sink``, a file-like object or a pyarrow stream."""
        spec = {**self._spec, "rows": rows.stop - rows.start}
        with pq.ParquetWriter(sink, self._schema, **_parquet_options(self._layout, self._extras)) as writer:
            writer.add_key_value_metadata({METADATA_KEY: json.dumps(spec).encode()})
            # While one row group is compressed the next one is gathered.
            table: pa.Table | None = None
            for group in [*_row_groups(self._prepared), None]:
                jobs: list[Callable[[], Any]] = []
                if group is not None:
                    jobs.append(partial(self._row_group, group))
                if table is not None:
                    jobs.append(partial(writer.write_table, table, row_group_size=table.num_rows or 1))
                table = map_in_threads(lambda job: job(), jobs)[0]

    def summary(self) -> Summary:
        """What is worth knowing of the rollout, after all its parts were written."""
        output = self._prepared.output
        lengths = _token_lengths(output)
        score = np.concatenate(self._scores) if self._scores else None
        return Summary(
            rows=output.batch.rows,
            prompt_tokens=None if lengths is None else int(lengths[0].sum()),
            response_tokens=None if lengths is None else int(lengths[1].sum()),
            mean_score=None if score is None or not len(score) else float(score.mean()),
            content_digest=_content_digest(self._prepared, self._spec, self._layout, self._digests),
        )

    def _row_group(self, rows: slice) -> pa.Table:
        arrays = []
        for column, digest in zip(self._layout, self._digests, strict=True):
            made = column.arrays(rows)
            arrays.extend(made)
            if column.source.path[-1] != "uid":
                for array in made:
                    _digest_array(digest, array)
        arrays.extend(_extra_array(values, rows, self._scores, self._prepared.output) for _, values in self._extras)
        return pa.Table.from_arrays(arrays, schema=self._schema)


def plan(prepared: Prepared) -> Plan:
    """Choose how a rollout step is stored."""
    return Plan(prepared)


class _Names:
    """Column names: the key where it can be, always unique."""

    def __init__(self) -> None:
        self._taken: set[str] = set()

    def take(self, path: tuple[str, ...], prefix: str) -> str:
        # A dot would be read as a path into a nested column.
        label = "__".join(path).replace(".", "_")
        if not prefix and (not label or label.startswith(_RESERVED)):
            prefix = "out__"
        name = unique = prefix + label.encode("utf-8", "replace").decode()
        number = 2
        while unique.lower() in self._taken:
            unique, number = f"{name}__{number}", number + 1
        self._taken.add(unique.lower())
        return unique


def _layout(part: Part, names: _Names, prefix: str, echoed: list[Column] | None) -> Iterator[Column]:
    for numbers in part.numbers:
        name = names.take(numbers.path, prefix)
        spec = {"path": list(numbers.path), "column": name, **form_to_json(numbers.form)}
        yield Column(spec, numbers.form.fields(name), numbers, part.spans)
    for objects in part.objects:
        name = names.take(objects.path, prefix)
        encoded = objects.cells
        twin = _twin_column(objects, echoed, name)
        fields = [] if twin else [pa.field(name, cell_type(encoded.form))]
        if encoded.alias is not None:
            fields.append(pa.field(f"skip__alias__{name}", pa.int32(), nullable=False))
        if encoded.blobs is not None:
            fields.append(pa.field(f"skip__blobs__{name}", pa.binary(), nullable=False))
            fields.append(list_field(f"skip__blob_sizes__{name}", pa.int64()))
        spec = {
            "path": list(objects.path),
            "column": twin or name,
            "cells": encoded.form,
            "shape": list(objects.shape),
            "dtype": objects.dtype,
            "alias": None if encoded.alias is None else f"skip__alias__{name}",
            "blobs": None if encoded.blobs is None else name,
        }
        yield Column(spec, fields, objects, None)


def _twin_column(objects: Objects, echoed: list[Column] | None, name: str) -> str | None:
    """The column of the output that holds the very same cells: what a rollout hands through is stored once."""
    for column in echoed or ():
        other = column.source
        if isinstance(other, Objects) and other.path == objects.path and other.cells.form == objects.cells.form:
            # Floats compare equal that are not the same, so they are stored twice.
            plain = objects.cells.blobs is None and other.cells.blobs is None and objects.cells.form != "float"
            if plain and other.cells.values == objects.cells.values:
                return str(column.spec["column"])
    return None


def _object_arrays(objects: Objects, fields: list[pa.Field], rows: slice) -> list[pa.Array]:
    encoded = objects.cells
    arrays = []
    if fields and not fields[0].name.startswith("skip__"):
        arrays.append(pa.array(encoded.values[rows], fields[0].type))
    if encoded.alias is not None:
        arrays.append(pa.array(encoded.alias[rows], pa.int32()))
    if encoded.blobs is not None:
        # One value a row, not a list of values: readers can then bound the memory that it takes.
        if sum(cells.blob_size(blob) for row in encoded.blobs[rows] for blob in row) >= 2**31:
            raise UnsupportedBatchError(
                f"Cannot store {'.'.join(objects.path)}: a single row has more than 2 GiB of bulk data."
            )
        blobs = [[cells.blob_bytes(blob) for blob in row] for row in encoded.blobs[rows]]
        sizes = np.array([len(blob) for row in blobs for blob in row], np.int64)
        arrays.append(pa.array([b"".join(row) for row in blobs], pa.binary()))
        arrays.append(list_array(sizes, np.array([len(row) for row in blobs]), pa.int64()))
    return arrays


def _part_spec(part: Part, layout: list[Column]) -> dict[str, Any]:
    batch = part.batch
    return {
        "kind": batch.kind.value,
        "nodes": [[list(path), list(size)] for path, size in batch.nodes.items()],
        "order": [list(path) for path in batch.order],
        "device": batch.device,
        "arrays": [list(path) for path in batch.arrays],
        "spans": None if part.spans is None else [part.spans.prompt_width, part.spans.response_width],
        "numbers": [column.spec for column in layout if isinstance(column.source, Numbers)],
        "objects": [column.spec for column in layout if isinstance(column.source, Objects)],
        "meta": part.meta,
    }


def _row_groups(prepared: Prepared) -> Iterator[slice]:
    """Slices of rows of some tens of megabytes: what is encoded at once, and so the extra memory of a dump."""
    rows = prepared.output.batch.rows
    costs = sum(_row_costs(part) for part in prepared.parts)
    ends = np.flatnonzero(np.diff(np.cumsum(costs) // _GROUP_BYTES)) + 1
    starts = [0, *(int(end) for end in ends)]
    for start, stop in zip(starts, [*starts[1:], rows], strict=True):
        yield slice(start, stop)


def _row_costs(part: Part) -> np.ndarray:
    """How many bytes each row has in memory."""
    rows = part.batch.rows
    costs = np.zeros(rows)
    for column in part.numbers:
        if isinstance(column.form, Rows):
            costs += [row.nbytes for row in column.bits]
        elif isinstance(column.form, Jagged):
            costs += np.diff(column.bits[1]) * (column.bits[0].nbytes / max(len(column.bits[0]), 1))
        elif not isinstance(column.form, Same):
            costs += column.bits.nbytes / max(rows, 1)
    for objects in part.objects:
        if objects.cells.blobs is not None:
            costs += [sum(cells.blob_size(blob) for blob in row) for row in objects.cells.blobs]
    return costs


def _token_lengths(part: Part) -> tuple[np.ndarray, np.ndarray] | None:
    if part.spans is not None:
        return part.spans.prompt_lengths, part.spans.response_lengths
    jagged = {column.path[-1]: column for column in part.numbers if isinstance(column.form, Jagged)}
    if "prompts" in jagged and "responses" in jagged:
        return np.diff(jagged["prompts"].bits[1]), np.diff(jagged["responses"].bits[1])
    return None


def _extra_columns(prepared: Prepared) -> list[tuple[pa.Field, Any]]:
    """The columns for people and SQL, and those that the spans are read from."""
    output, given = prepared.output, prepared.input
    lengths = _token_lengths(output) or (None, None)
    digests = _row_digests(output, only_prompts=True) if given is None else _row_digests(given)
    extras = [
        (pa.field("skip__prompt_length", pa.int32()), lengths[0]),
        (pa.field("skip__response_length", pa.int32()), lengths[1]),
        (pa.field("skip__score", pa.float64()), "score"),
        (
            pa.field("skip__prompt_digest", pa.string()),
            digests,
        ),
    ]
    if given is not None and given.spans is not None:
        extras.append((pa.field("skip__input_length", pa.int32()), given.spans.prompt_lengths))
        extras.append((pa.field("skip__input_response_length", pa.int32()), given.spans.response_lengths))
    return extras


def _extra_array(values: Any, rows: slice, scores: list[np.ndarray], output: Part) -> pa.Array:
    if isinstance(values, str):
        with np.errstate(invalid="ignore"):  # a NaN among the rewards is a NaN in the sum, no more
            score = _scores(output, rows)
        if score is None:
            return pa.nulls(rows.stop - rows.start, pa.float64())
        scores.append(score)
        return pa.array(score)
    if values is None:
        return pa.nulls(rows.stop - rows.start, pa.int32())
    return pa.array(values[rows], pa.string() if isinstance(values, list) else pa.int32())


def _scores(part: Part, rows: slice) -> np.ndarray | None:
    """The sum of the rewards of each row."""
    for column in part.numbers:
        if column.path != ("rm_scores",) or column.form.element.name not in ("float32", "float64"):
            continue
        if isinstance(column.form, Jagged):
            values, offsets = column.bits
            starts, ends = offsets[rows.start : rows.stop], offsets[rows.start + 1 : rows.stop + 1]
            score = np.zeros(len(starts))
            filled = starts < ends  # reduceat gives the next value for an empty row
            if filled.any():
                score[filled] = np.add.reduceat(values[: ends[-1]], starts[filled], dtype=np.float64)
            return score
        if isinstance(column.bits, np.ndarray) and column.bits.ndim == 2:
            return column.bits[rows].sum(axis=1, dtype=np.float64)
    return None


def prompt_digests(inputs: Any) -> list[str] | None:
    """One digest for each row of a rollout step's input: equal rows have equal digests, whatever their uids."""
    part = columns.take(inputs)
    columns.choose_encodings(part)
    return _row_digests(part)


def _row_digests(part: Part, only_prompts: bool = False) -> list[str] | None:
    """One digest a row over everything in a part, uid aside, or over its prompts; None if there is nothing of it."""
    numbers = [column for column in part.numbers if not only_prompts or column.path == ("prompts",)]
    objects = [column for column in part.objects if column.path[-1] != "uid" and not only_prompts]
    if not numbers and not objects:
        return None
    numbers.sort(key=lambda column: column.path)  # the order of the columns says nothing, and verl changes it
    objects.sort(key=lambda column: column.path)
    digests = []
    for row in range(part.batch.rows):
        digest = xxhash.xxh3_128()
        for column in objects:
            digest.update(f"{column.path}={column.cells.values[row]!r};".encode("utf-8", "surrogatepass"))
            first = row if column.cells.alias is None else column.cells.alias[row]
            for blob in column.cells.blobs[first] if column.cells.blobs else ():
                digest.update(cells.blob_bytes(blob))
        for numeric in numbers:
            digest.update(f"{numeric.path}=".encode("utf-8", "surrogatepass"))
            digest.update(_row(numeric, row).tobytes())
        digests.append(digest.hexdigest())
    return digests


def _row(column: Numbers, row: int) -> np.ndarray:
    if isinstance(column.bits, tuple):
        values, offsets = column.bits
        return values[offsets[row] : offsets[row + 1]]
    return column.bits[row]


def _parquet_options(layout: list[Column], extras: list[tuple[pa.Field, Any]]) -> dict[str, Any]:
    encodings, dictionary = {}, []
    for column in layout:
        for field in column.fields:
            nested = pa.types.is_list(field.type)
            leaf = f"{field.name}.list.element" if nested else field.name
            kind = field.type.value_type if nested else field.type
            if pa.types.is_string(kind):
                dictionary.append(leaf)
            elif pa.types.is_floating(kind):
                # Not a dictionary: its lookup takes -0.0 for 0.0 and all NaNs for one. Integers stay plain, because
                # readers learn to undo a split of integers only now (DuckDB with 2.0).
                encodings[leaf] = "BYTE_STREAM_SPLIT"
    return {
        "compression": "zstd",
        "compression_level": 1,
        "use_dictionary": dictionary or False,
        "column_encoding": encodings or None,
        "write_statistics": [field.name for field, _ in extras],
        "write_page_checksum": True,
        "store_schema": False,
    }


def _content_digest(prepared: Prepared, spec: dict[str, Any], layout: list[Column], digests: list[Any]) -> str:
    """A digest of what is recorded, whatever the order of the columns: verl takes those of the input from a set."""
    digest = xxhash.xxh3_128()
    for name, part in (("output", prepared.output), ("input", prepared.input)):
        if part is not None:
            described = {**spec[name], "meta": part.lasting_meta}
            for listed in ("order", "arrays", "numbers", "objects"):
                described[listed] = sorted(json.dumps(item, sort_keys=True) for item in described[listed])
            digest.update(json.dumps(described, sort_keys=True).encode())
    columns_by_name = {
        column.fields[0].name: values for column, values in zip(layout, digests, strict=True) if column.fields
    }
    for name in sorted(columns_by_name):
        digest.update(columns_by_name[name].digest())
    return digest.hexdigest()


def _digest_array(digest: Any, array: pa.Array) -> None:
    for buffer in array.buffers():
        if buffer is not None:
            digest.update(buffer)
