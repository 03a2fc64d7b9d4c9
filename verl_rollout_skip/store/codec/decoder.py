"""A Parquet file back into the batch it was made from, bit for bit.

The bytes may be damaged or hostile: every claim of the file is compared before anything is allocated for it, whatever
cannot be decoded is a ``CorruptEntryError``, and nothing in it can run code.
"""

from __future__ import annotations

import json
import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import torch

from verl_rollout_skip.errors import CorruptEntryError, EntryTooLargeError, RolloutSkipError
from verl_rollout_skip.sizes import format_size
from verl_rollout_skip.store.codec import cells
from verl_rollout_skip.store.codec.batch import Batch, BatchKind
from verl_rollout_skip.store.codec.columns import cell_type
from verl_rollout_skip.store.codec.encodings import FORMS, Form, Reading, Same, form_from_json, natural
from verl_rollout_skip.store.codec.padding import Spans
from verl_rollout_skip.store.codec.pages import read_columns
from verl_rollout_skip.store.codec.table import ColumnReader
from verl_rollout_skip.store.format import METADATA_KEY, check_version
from verl_rollout_skip.store.threads import map_in_threads, worker_count

# A Python object takes at least so much memory, however little it takes in the file.
_OBJECT_BYTES = 100
_WIDTHS = {"BOOLEAN": 1, "INT32": 4, "FLOAT": 4}
_LENGTHS = {
    "output": ["skip__prompt_length", "skip__response_length"],
    "input": ["skip__input_length", "skip__input_response_length"],
}


class Reader:
    """The parts of an entry, whose bytes are in memory: output and input are decoded on demand.

    ``limit`` is the most memory, in bytes, that decoding may take; the file's own claims are compared with it
    before anything is allocated.
    """

    def __init__(self, datas: Sequence[Any], limit: int) -> None:
        self._limit = limit
        with damage_is_corruption():
            (data,) = datas
            self._data = pa.py_buffer(data)
            self._columns = read_columns(memoryview(self._data).cast("B"))
            self._metadata = pq.read_metadata(pa.BufferReader(self._data))
            self._spec = self._read_spec()
            rows = self._spec["rows"]
            if type(rows) is not int or rows != self._metadata.num_rows:
                raise CorruptEntryError(f"The file claims {rows!r} rows and holds {self._metadata.num_rows}.")
            self.rows: int = rows
            self.has_input = self._spec["input"] is not None
            self.input_kind = BatchKind(self._spec["input"]["kind"]) if self.has_input else None

    def output(self) -> Batch:
        """The recorded batch."""
        with damage_is_corruption():
            return self._decode("output", self._spec["output"], None)

    def input(self) -> Batch:
        """The recorded input of the rollout step."""
        with damage_is_corruption():
            return self._decode("input", self._spec["input"], self._echoed())

    def prompt_digests(self) -> list[str] | None:
        """One digest for each row of the recorded input, or None if it has none."""
        with damage_is_corruption():
            digests = ColumnReader(self._data, self._metadata, self._limit).objects("skip__prompt_digest", pa.string())
        return None if None in digests else digests

    def _echoed(self) -> dict[str, Any]:
        """The numbers of the output that numbers of the input are stored as, and what those are derived from."""
        given, items = self._spec["input"]["numbers"], self._spec["output"]["numbers"]
        echoes = {_place(item) for item in given if item["form"] == Same.name and not item["of"]}
        found = [item for item in items if _place(item) in echoes]
        needed = {_tensor(name) for item in found for name in (*FORMS[item["form"]].needs, item.get("of", ""))}
        kept = [item for item in items if _place(item) in echoes | needed]
        return {**self._spec["output"], "numbers": kept, "objects": []}

    def _read_spec(self) -> dict[str, Any]:
        text = (self._metadata.metadata or {}).get(METADATA_KEY)
        if text is None:
            raise CorruptEntryError("It is a Parquet file, but not one that this package wrote: it has no description.")
        spec = json.loads(text)
        check_version(spec["format_version"])
        return spec

    def _decode(self, name: str, spec: dict[str, Any], echoed: dict[str, Any] | None) -> Batch:
        parts = [self._parse(spec, name)]
        if echoed is not None and echoed["numbers"]:
            parts.insert(0, self._parse(echoed, "output"))
        self._check_size(parts)
        reader = ColumnReader(self._data, self._metadata, self._limit)
        done: dict[_Place, Any] = {}
        for part in parts:
            earlier, done = done, {}
            self._decode_numbers(part, reader, done, earlier)
            for item in part.spec["objects"]:
                done[False, tuple(item["path"])] = self._object_array(item, reader)
        return _batch(spec, parts[-1], done, self.rows)

    def _parse(self, spec: dict[str, Any], name: str) -> _ParsedPart:
        widths = spec["spans"]
        lengths = _LENGTHS[name]
        spans = None
        if widths is not None:
            reader = ColumnReader(self._data, self._metadata, self._limit)
            values = [np.asarray(reader.objects(column, pa.int32()), np.int64) for column in lengths]
            prompt, response = values
            spans = Spans(int(widths[0]), int(widths[1]), prompt, response)
            for length, width in ((prompt, spans.prompt_width), (response, spans.response_width)):
                if len(length) != self.rows or (length < 0).any() or (length > width).any():
                    raise CorruptEntryError("The stored prompt and response lengths do not fit the widths.")
        forms = [(item, form_from_json(item, spans)) for item in spec["numbers"]]
        part = _ParsedPart(spec, spans, forms)
        places = [_place(item) for item, _ in forms] + [(False, tuple(item["path"])) for item in spec["objects"]]
        if len(set(places)) != len(places) or len(set(part.number_columns)) != len(part.number_columns):
            raise CorruptEntryError("The file lists a key or a column twice.")
        return part

    def _check_size(self, parts: list[_ParsedPart]) -> None:
        """Compare what the file claims with the limit, before anything is allocated."""
        weights = {name: 0 for part in parts for name in part.number_columns}
        weights |= {name: _OBJECT_BYTES for part in parts for name in part.object_columns}
        stored = dict.fromkeys(weights, 0)
        for chunk in self._columns:
            name = chunk.path.split(".")[0]
            if name in weights:
                width = weights[name] or _WIDTHS.get(chunk.physical, 8)
                stored[name] += max(chunk.uncompressed, chunk.num_values * width)
        # Columns are read a few at a time and let go when they are decoded; Python objects stay.
        needed = sum(sorted(stored.values())[-worker_count() :])
        needed += sum(size for name, size in stored.items() if weights[name])
        sizes: dict[_Place, int] = {}
        for part in parts:
            for item, form in sorted(part.forms, key=lambda job: _stage(job[1])):
                lists = sum(stored[field.name] for field in form.fields(item["column"]))
                others = [_tensor(name) for name in (*form.needs, *([form.of] if isinstance(form, Same) else ()))]
                echoed = [_place(item)] if isinstance(form, Same) and not form.of else []
                derived = sum(sizes.get(place, 0) for place in [*others, *echoed])
                size = form.row_bytes() * self.rows or lists or derived
                sizes[_place(item)] = size
                needed += size
        if needed > self._limit:
            raise EntryTooLargeError(
                f"Loading it would take {format_size(needed)} of memory and {format_size(self._limit)} are "
                "allowed. Load it on a larger machine or raise max_load_bytes."
            )

    def _decode_numbers(
        self, part: _ParsedPart, reader: ColumnReader, done: dict[_Place, Any], earlier: dict[_Place, Any]
    ) -> None:
        def value_of(name: str) -> Any:
            if _tensor(name) not in done:
                raise CorruptEntryError(f"The file derives a column from {name!r}, which it does not hold.")
            return done[_tensor(name)]

        def decode(job: tuple[dict[str, Any], Form]) -> Any:
            item, form = job
            if isinstance(form, Same):
                other = value_of(form.of) if form.of else earlier[_place(item)]
                return other.clone() if isinstance(other, torch.Tensor) else other.copy()
            return form.read(item["column"], reading)

        reading = Reading(self.rows, reader, part.spans, value_of)
        # What is stored first, then what is the same as the output's, then what is made from other columns.
        for stage in range(4):
            jobs = [job for job in part.forms if _stage(job[1]) == stage]
            for (item, _), value in zip(jobs, map_in_threads(decode, jobs), strict=True):
                done[_place(item)] = value

    def _object_array(self, item: dict[str, Any], reader: ColumnReader) -> np.ndarray:
        form, column = item["cells"], item["column"]
        values = reader.objects(column, cell_type(form))
        alias = None if item["alias"] is None else reader.objects(item["alias"], pa.int32())
        blobs = None if item["blobs"] is None else self._blobs(item["blobs"], reader)
        if alias is not None and any(
            type(first) is not int or not 0 <= first <= row for row, first in enumerate(alias)
        ):
            raise CorruptEntryError(f"Column {column!r} repeats rows that do not come before it.")
        decoded = cells.decode_column(cells.CellColumn(form, values, blobs, alias))
        shape = tuple(natural(size) for size in item["shape"])
        if item["dtype"] == "|O":
            array = np.empty((self.rows, *shape), dtype=object)
            places = list(np.ndindex(shape))
            for row, cell in enumerate(decoded):
                for place, value in zip(places, cell if shape else (cell,), strict=True):
                    index = (row, *place)
                    array[index] = value
            return array
        dtype = cells.text_dtype(item["dtype"])
        if self.rows * math.prod(shape) * dtype.itemsize > self._limit:
            raise EntryTooLargeError(f"Column {column!r} claims more memory than the {self._limit} bytes allowed.")
        return np.array(decoded, dtype).reshape(self.rows, *shape)

    def _blobs(self, column: str, reader: ColumnReader) -> list[list[bytes]]:
        counts, sizes = reader.all_lists(f"skip__blob_sizes__{column}", pa.int64())
        joined = reader.objects(f"skip__blobs__{column}", pa.binary())
        rows = []
        for data, of_row in zip(joined, np.split(sizes, np.cumsum(counts)[:-1]), strict=True):
            ends = np.cumsum(of_row)
            if (of_row < 0).any() or len(data) != (ends[-1] if len(ends) else 0):
                raise CorruptEntryError(f"The bulk data of column {column!r} has not the size that the file says.")
            rows.append([data[end - size : end] for end, size in zip(ends, of_row, strict=True)])
        return rows


_Place = tuple[bool, tuple[str, ...]]
"""Where a value belongs: among the tensors or not, and under which path."""


def _stage(form: Form) -> int:
    if isinstance(form, Same):
        return 3 if form.of else 1
    return 2 if form.needs else 0


def _tensor(name: str) -> _Place:
    return True, (name,)


def _place(item: dict[str, Any]) -> _Place:
    return item["element"]["holder"] == "torch", tuple(item["path"])


@dataclass(frozen=True)
class _ParsedPart:
    spec: dict[str, Any]
    spans: Spans | None
    forms: list[tuple[dict[str, Any], Form]]

    @property
    def number_columns(self) -> list[str]:
        return [field.name for item, form in self.forms for field in form.fields(item["column"])]

    @property
    def object_columns(self) -> list[str]:
        names = []
        for item in self.spec["objects"]:
            names += [item["column"], item["alias"]]
            names += [f"skip__blobs__{item['blobs']}", f"skip__blob_sizes__{item['blobs']}"]
        return names


class damage_is_corruption:
    """Whatever goes wrong while decoding bytes from outside means that the bytes are wrong."""

    def __enter__(self) -> None: ...

    def __exit__(self, kind: Any, error: BaseException | None, trace: Any) -> None:
        if isinstance(error, Exception) and not isinstance(error, RolloutSkipError | ImportError):
            raise CorruptEntryError(f"It cannot be decoded ({type(error).__name__}: {error}).") from error


def _batch(spec: dict[str, Any], parsed: _ParsedPart, done: dict[_Place, Any], rows: int) -> Batch:
    kind = BatchKind(spec["kind"])
    arrays = {tuple(path): done[False, tuple(path)] for path in spec["arrays"]}
    tensors = {tuple(item["path"]): done[_place(item)] for item, _ in parsed.forms if _place(item)[0]}
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
