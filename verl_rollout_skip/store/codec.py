"""One rollout step as one Parquet file, and back, bit for bit.

``prepare`` takes what must be taken on the training thread, ``write`` makes the file, ``read`` makes the batch
again. The file describes itself in its key-value metadata; readers that know nothing of that see one row a
trajectory with ordinary columns. Names: a key of the output keeps its name, inputs are ``in__<key>``, and what this
package adds is ``skip__<name>``; an output key that begins with one of these prefixes becomes ``out__<key>``.
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
import torch
import xxhash

from verl_rollout_skip.errors import CorruptEntryError, EntryTooLargeError, NewerFormatError, StoreError
from verl_rollout_skip.key import RolloutKey
from verl_rollout_skip.store import cells, columns
from verl_rollout_skip.store.batch import Batch, BatchKind, take_apart
from verl_rollout_skip.store.columns import Numbers, Objects, Part, cell_type
from verl_rollout_skip.store.forms import Form, Jagged, Reading, Rows, Same, form_from_json, form_to_json
from verl_rollout_skip.store.padding import Spans
from verl_rollout_skip.store.table import ColumnReader
from verl_rollout_skip.store.threads import map_in_threads

FORMAT_VERSION = 1
METADATA_KEY = b"rollout_skip"
_RESERVED = ("skip__", "in__", "out__")
_GROUP_BYTES = 96 << 20
_BLOBS = pa.list_(pa.field("element", pa.binary(), nullable=False))


@dataclass
class Prepared:
    """A rollout step that is ready to be written and that later changes of the batch's containers cannot reach."""

    output: Part
    input: Part | None


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


def prepare(batch: Any, inputs: Any = None) -> Prepared:
    """Take a snapshot of a rollout step's output and, if given, of its input."""
    output = take_apart(batch)
    given = None if inputs is None else take_apart(inputs)
    if given is not None and given.rows != output.rows:
        raise StoreError(
            f"The input has {given.rows} rows and the output {output.rows}; a rollout is stored with one input row "
            "for each trajectory (repeat the input as the generate call does)."
        )
    return Prepared(columns.snapshot(output), None if given is None else columns.snapshot(given))


def write(prepared: Prepared, key: RolloutKey, sink: Any) -> Summary:
    """Write the Parquet file into ``sink``, a file-like object or a pyarrow stream."""
    output, given = prepared.output, prepared.input
    columns.plan(output)
    if given is not None:
        columns.plan(given, echoed=output)
    names = _Names()
    layout = [*_layout(output, names, "", None), *(_layout(given, names, "in__", output) if given else ())]
    spec = {
        "format_version": FORMAT_VERSION,
        "key": [key.step, key.gen_batch],
        "rows": output.batch.rows,
        "output": _part_spec(output, [c for c in layout if c.spec["column"][:4] != "in__"]),
        "input": None if given is None else _part_spec(given, [c for c in layout if c.spec["column"][:4] == "in__"]),
    }
    extras = _extra_columns(prepared)
    fields = [field for column in layout for field in column.fields]
    schema = pa.schema([*fields, *(field for field, _ in extras)])
    digest = _content_digest(prepared, spec)
    scores: list[np.ndarray] = []

    def row_group(rows: slice) -> pa.Table:
        arrays = []
        for column in layout:
            made = column.arrays(rows)
            arrays.extend(made)
            if column.source.path[-1] != "uid":
                for array in made:
                    _digest_array(digest, array)
        arrays.extend(_extra_array(values, rows, scores, output) for _, values in extras)
        return pa.Table.from_arrays(arrays, schema=schema)

    with pq.ParquetWriter(sink, schema, **_parquet_options(layout, extras)) as writer:
        writer.add_key_value_metadata({METADATA_KEY: json.dumps(spec).encode()})
        # While one row group is compressed the next one is gathered.
        table: pa.Table | None = None
        for rows in [*_row_groups(prepared), None]:
            jobs: list[Callable[[], Any]] = []
            if rows is not None:
                jobs.append(partial(row_group, rows))
            if table is not None:
                jobs.append(partial(writer.write_table, table, row_group_size=table.num_rows or 1))
            table = map_in_threads(lambda job: job(), jobs)[0]
    lengths = _token_lengths(output)
    score = np.concatenate(scores) if scores else None
    return Summary(
        rows=output.batch.rows,
        prompt_tokens=None if lengths is None else int(lengths[0].sum()),
        response_tokens=None if lengths is None else int(lengths[1].sum()),
        mean_score=None if score is None or not len(score) else float(score.mean()),
        content_digest=digest.hexdigest(),
    )


class Reader:
    """A Parquet file whose bytes are in memory: output and input are decoded on demand.

    ``limit`` is the most memory, in bytes, that decoding may take; the file's own claims are compared with it
    before anything is allocated.
    """

    def __init__(self, data: Any, limit: int) -> None:
        self._limit = limit
        with _damage_is_corruption():
            self._data = pa.py_buffer(data)
            self._metadata = pq.read_metadata(pa.BufferReader(self._data))
            self._spec = self._read_spec()
            key, rows = self._spec["key"], self._spec["rows"]
            self.key = RolloutKey(*key)
            if type(rows) is not int or rows != self._metadata.num_rows:
                raise CorruptEntryError(f"The file claims {rows!r} rows and holds {self._metadata.num_rows}.")
            self.rows: int = rows
            self.has_input = self._spec["input"] is not None

    def output(self) -> Batch:
        """The recorded batch."""
        with _damage_is_corruption():
            return self._decode("output", self._spec["output"], None)

    def input(self) -> Batch:
        """The recorded input of the rollout step."""
        with _damage_is_corruption():
            spec = self._spec["input"]
            echoed = {item["of"] for item in spec["numbers"] if item["form"] == Same.name}
            echoed |= {item["path"][0] for item in spec["objects"] if item.get("same")}
            return self._decode("input", spec, self._only(self._spec["output"], echoed) if echoed else None)

    def _only(self, spec: dict[str, Any], names: set[str]) -> dict[str, Any]:
        wanted = names | {"prompts", "responses", "response_mask"}
        numbers = [item for item in spec["numbers"] if ".".join(item["path"]) in wanted]
        objects = [item for item in spec["objects"] if item["path"][0] in names]
        return {**spec, "numbers": numbers, "objects": objects}

    def _read_spec(self) -> dict[str, Any]:
        text = (self._metadata.metadata or {}).get(METADATA_KEY)
        if text is None:
            raise CorruptEntryError("It is a Parquet file, but not one that this package wrote: it has no description.")
        spec = json.loads(text)
        check_version(spec["format_version"])
        return spec

    def _decode(self, name: str, spec: dict[str, Any], echoed: dict[str, Any] | None) -> Batch:
        specs = [spec] if echoed is None else [echoed, spec]
        parsed = [self._parse(item, "output" if item is echoed else name) for item in specs]
        wanted = list(dict.fromkeys(column for part in parsed for column in part.columns))
        self._check_size(wanted, parsed)
        reader = ColumnReader(self._data, self._metadata)
        done: dict[str, Any] = {}
        for part in parsed:
            earlier, done = done, {}
            self._decode_numbers(part, reader, done, earlier)
            self._decode_objects(part, reader, done, earlier)
        return _batch(spec, parsed[-1], done, self.rows)

    def _parse(self, spec: dict[str, Any], name: str) -> _ParsedPart:
        widths = spec["spans"]
        lengths = ["skip__input_length"] if name == "input" else ["skip__prompt_length", "skip__response_length"]
        spans = None
        if widths is not None:
            reader = ColumnReader(self._data, self._metadata)
            values = [np.asarray(reader.objects(column, pa.int32()), np.int64) for column in lengths]
            prompt, response = values[0], values[1] if len(values) > 1 else np.zeros(self.rows, np.int64)
            spans = Spans(int(widths[0]), int(widths[1]), prompt, response)
            for length, width in ((prompt, spans.prompt_width), (response, spans.response_width)):
                if len(length) != self.rows or (length < 0).any() or (length > width).any():
                    raise CorruptEntryError("The stored prompt and response lengths do not fit the widths.")
        forms = [(item, form_from_json(item, spans)) for item in spec["numbers"]]
        return _ParsedPart(spec, spans, forms)

    def _check_size(self, wanted: list[str], parsed: list[_ParsedPart]) -> None:
        decoded = sum(form.row_bytes() for part in parsed for _, form in part.forms) * self.rows
        stored = 0
        metadata = self._metadata
        for group in range(metadata.num_row_groups):
            for index in range(metadata.num_columns):
                column = metadata.row_group(group).column(index)
                if column.path_in_schema.split(".")[0] in wanted:
                    stored += max(column.total_uncompressed_size, column.num_values * 8, 0)
        if decoded + stored > self._limit:
            raise EntryTooLargeError(
                f"Loading {self.key} would take {(decoded + stored) / 1e9:.1f} GB of memory and "
                f"{self._limit / 1e9:.1f} GB are allowed. Load it on a larger machine or raise max_load_bytes."
            )

    def _decode_numbers(
        self, part: _ParsedPart, reader: ColumnReader, done: dict[str, Any], earlier: dict[str, Any]
    ) -> None:
        def value_of(name: str) -> Any:
            source = earlier if earlier else done
            if name not in source:
                raise CorruptEntryError(f"The file derives a column from {name!r}, which it does not hold.")
            return source[name]

        reading = Reading(self.rows, reader, part.spans, value_of)
        derived = [bool(form.needs) or isinstance(form, Same) for _, form in part.forms]
        for stage in (False, True):
            jobs = [item for item, late in zip(part.forms, derived, strict=True) if late is stage]
            values = map_in_threads(lambda job: job[1].read(job[0]["column"], reading), jobs)
            done.update({".".join(job[0]["path"]): value for job, value in zip(jobs, values, strict=True)})

    def _decode_objects(
        self, part: _ParsedPart, reader: ColumnReader, done: dict[str, Any], earlier: dict[str, Any]
    ) -> None:
        for item in part.spec["objects"]:
            name = ".".join(item["path"])
            done[name] = earlier[name].copy() if item.get("same") else self._object_array(item, reader)

    def _object_array(self, item: dict[str, Any], reader: ColumnReader) -> np.ndarray:
        form, column = item["cells"], item["column"]
        values = reader.objects(column, cell_type(form))
        alias = reader.objects(f"skip__alias__{column}", pa.int32()) if item["alias"] else None
        blobs = reader.objects(f"skip__blobs__{column}", _BLOBS) if item["blobs"] else None
        if alias is not None and any(
            type(first) is not int or not 0 <= first <= row for row, first in enumerate(alias)
        ):
            raise CorruptEntryError(f"Column {column!r} repeats rows that do not come before it.")
        decoded = cells.decode_column(cells.CellColumn(form, values, blobs, alias))
        shape = tuple(int(size) for size in item["shape"])
        if item["dtype"] == "|O":
            array = np.empty((self.rows, *shape), dtype=object)
            for row, cell in enumerate(decoded):
                if shape:
                    array[row].flat = cell
                else:
                    array[row] = cell
            return array
        dtype = cells.text_dtype(item["dtype"])
        return np.array(decoded, dtype).reshape(self.rows, *shape)


@dataclass(frozen=True)
class _ParsedPart:
    spec: dict[str, Any]
    spans: Spans | None
    forms: list[tuple[dict[str, Any], Form]]

    @property
    def columns(self) -> list[str]:
        names = [
            column for item, form in self.forms for column in (field.name for field in form.fields(item["column"]))
        ]
        for item in self.spec["objects"]:
            if not item.get("same"):
                names.append(item["column"])
                names += [f"skip__{extra}__{item['column']}" for extra in ("alias", "blobs") if item[extra]]
        return names


def check_version(version: Any) -> None:
    """Refuse what a later version of this package wrote."""
    if type(version) is not int or version < 1:
        raise CorruptEntryError(f"It gives {version!r} as its format version; that is no version.")
    if version > FORMAT_VERSION:
        raise NewerFormatError(
            f"It is of format version {version}, this package reads up to {FORMAT_VERSION}. "
            "Upgrade verl-rollout-skip to read it."
        )


class _damage_is_corruption:
    """Whatever goes wrong while decoding bytes from outside means that the bytes are wrong."""

    def __enter__(self) -> None: ...

    def __exit__(self, kind: Any, error: BaseException | None, trace: Any) -> None:
        if isinstance(error, Exception) and not isinstance(error, StoreError | ImportError):
            raise CorruptEntryError(f"It cannot be decoded ({type(error).__name__}: {error}).") from error


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


def _layout(part: Part, names: _Names, prefix: str, echoed: Part | None) -> Iterator[Column]:
    for numbers in part.numbers:
        name = names.take(numbers.path, prefix)
        spec = {"path": list(numbers.path), "column": name, **form_to_json(numbers.form)}
        yield Column(spec, numbers.form.fields(name), numbers, part.spans)
    for objects in part.objects:
        name = names.take(objects.path, prefix)
        encoded = objects.cells
        spec = {
            "path": list(objects.path),
            "column": name,
            "cells": encoded.form,
            "shape": list(objects.shape),
            "dtype": objects.dtype,
            "alias": encoded.alias is not None,
            "blobs": encoded.blobs is not None,
        }
        if echoed is not None and any(_same_objects(objects, other) for other in echoed.objects):
            yield Column({**spec, "same": True}, [], objects, None)
            continue
        fields = [pa.field(name, cell_type(encoded.form))]
        if encoded.alias is not None:
            fields.append(pa.field(f"skip__alias__{name}", pa.int32(), nullable=False))
        if encoded.blobs is not None:
            fields.append(pa.field(f"skip__blobs__{name}", _BLOBS, nullable=False))
        yield Column(spec, fields, objects, None)


def _same_objects(left: Objects, right: Objects) -> bool:
    same = (left.path, left.shape, left.dtype, left.cells.form) == (
        right.path,
        right.shape,
        right.dtype,
        right.cells.form,
    )
    return same and left.cells.blobs is None and right.cells.blobs is None and left.cells.values == right.cells.values


def _object_arrays(objects: Objects, fields: list[pa.Field], rows: slice) -> list[pa.Array]:
    encoded = objects.cells
    sources: list[Any] = [encoded.values[rows]]
    if encoded.alias is not None:
        sources.append(encoded.alias[rows])
    if encoded.blobs is not None:
        sources.append([[cells.blob_bytes(blob) for blob in row] for row in encoded.blobs[rows]])
    return [pa.array(values, field.type) for values, field in zip(sources, fields, strict=False)]


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


def _batch(spec: dict[str, Any], parsed: _ParsedPart, done: dict[str, Any], rows: int) -> Batch:
    kind = BatchKind(spec["kind"])
    arrays = {tuple(path): done[".".join(path)] for path in spec["arrays"]}
    tensors = {
        tuple(item["path"]): done[".".join(item["path"])]
        for item, _ in parsed.forms
        if tuple(item["path"]) not in arrays
    }
    if any(not isinstance(value, torch.Tensor) for value in tensors.values()):
        raise CorruptEntryError("The file lists an array among the tensors.")
    pairs = cells.decode_inline(spec["meta"])
    return Batch(
        kind=kind,
        rows=rows,
        tensors=tensors,
        arrays=arrays,
        meta=dict(pairs),
        order=[tuple(path) for path in spec["order"]],
        nodes={tuple(path): tuple(int(size) for size in sizes) for path, sizes in spec["nodes"]},
        device=None if spec["device"] is None else "cpu",
    )


def _row_groups(prepared: Prepared) -> Iterator[slice]:
    """Slices of rows of some tens of megabytes: what is encoded at once, and so the extra memory of a dump."""
    rows = prepared.output.batch.rows
    total = sum(_payload_bytes(part) for part in (prepared.output, prepared.input) if part is not None)
    step = max(1, _GROUP_BYTES * rows // max(total, 1))
    for start in range(0, max(rows, 1), step):
        yield slice(start, min(rows, start + step))


def _payload_bytes(part: Part) -> int:
    total = 0
    for column in part.numbers:
        if isinstance(column.form, Rows):
            total += sum(row.nbytes for row in column.bits)
        elif not isinstance(column.form, Same):
            total += column.bits[0].nbytes if isinstance(column.form, Jagged) else column.bits.nbytes
    for objects in part.objects:
        blobs = objects.cells.blobs or ()
        total += sum(getattr(blob, "nbytes", 0) or 0 for row in blobs for blob in row)
    return total


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
    extras = [
        (pa.field("skip__prompt_length", pa.int32()), lengths[0]),
        (pa.field("skip__response_length", pa.int32()), lengths[1]),
        (pa.field("skip__score", pa.float64()), "score"),
        (pa.field("skip__prompt_digest", pa.string()), prompt_digests(given or output)),
    ]
    if given is not None and given.spans is not None:
        extras.append((pa.field("skip__input_length", pa.int32()), given.spans.prompt_lengths))
    return extras


def _extra_array(values: Any, rows: slice, scores: list[np.ndarray], output: Part) -> pa.Array:
    if isinstance(values, str):
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
            sums = np.concatenate([[0.0], np.cumsum(values, dtype=np.float64)])
            return sums[offsets[rows.start + 1 : rows.stop + 1]] - sums[offsets[rows.start : rows.stop]]
        if isinstance(column.bits, np.ndarray) and column.bits.ndim == 2:
            return column.bits[rows].sum(axis=1, dtype=np.float64)
    return None


def prompt_digests(part: Part) -> list[str] | None:
    """One digest a row over everything that was put into the rollout step, uid aside.

    Without inputs, over the prompts of the output; None if there are none either.
    """
    numbers = [column for column in part.numbers if isinstance(column.bits, np.ndarray)]
    objects = [column for column in part.objects if column.path[-1] != "uid"]
    if "responses" in {column.path[-1] for column in part.numbers}:
        numbers, objects = [column for column in numbers if column.path == ("prompts",)], []
    if not numbers and not objects:
        return None
    digests = []
    for row in range(part.batch.rows):
        digest = xxhash.xxh3_128()
        for column in objects:
            digest.update(f"{column.path}={column.cells.values[row]!r};".encode("utf-8", "surrogatepass"))
            first = row if column.cells.alias is None else column.cells.alias[row]
            for blob in column.cells.blobs[first] if column.cells.blobs else ():
                digest.update(cells.blob_bytes(blob))
        for numeric in numbers:
            digest.update(f"{numeric.path}=".encode())
            digest.update(numeric.bits[row].tobytes())
        digests.append(digest.hexdigest())
    return digests


def _parquet_options(layout: list[Column], extras: list[tuple[pa.Field, Any]]) -> dict[str, Any]:
    encodings, dictionary = {}, []
    for column in layout:
        for field in column.fields:
            nested = pa.types.is_list(field.type)
            leaf = f"{field.name}.list.element" if nested else field.name
            kind = field.type.value_type if nested else field.type
            if pa.types.is_string(kind):
                dictionary.append(leaf)
            elif pa.types.is_integer(kind) or pa.types.is_floating(kind):
                # Not a dictionary: its lookup takes -0.0 for 0.0 and all NaNs for one.
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


def _content_digest(prepared: Prepared, spec: dict[str, Any]) -> Any:
    digest = xxhash.xxh3_128()
    for name, part in (("output", prepared.output), ("input", prepared.input)):
        if part is not None:
            described = {**spec[name], "meta": part.lasting_meta}
            digest.update(json.dumps(described, sort_keys=True).encode())
    return digest


def _digest_array(digest: Any, array: pa.Array) -> None:
    for buffer in array.buffers():
        if buffer is not None:
            digest.update(buffer)
