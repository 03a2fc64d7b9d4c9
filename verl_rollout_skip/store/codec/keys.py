"""The Parquet columns that each key of a batch is stored in, and a digest of each."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import pyarrow as pa
import xxhash

from verl_rollout_skip.store.codec.blobs import BlobPool
from verl_rollout_skip.store.codec.cell_columns import CELL_TYPES
from verl_rollout_skip.store.codec.encodings import Stored, encoding_to_json, list_type
from verl_rollout_skip.store.codec.part import as_numpy, byte_offsets
from verl_rollout_skip.store.codec.prepared import Numbers, Objects, TakenBatch
from verl_rollout_skip.store.format import BLOBS_OF, OBJECT

_RESERVED = ("skip__", "in__", "out__")


class _Digest:
    """A digest of one column that does not depend on how its rows were cut: of its values, and of their lengths."""

    def __init__(self) -> None:
        self._values, self._lengths = xxhash.xxh3_128(), xxhash.xxh3_128()

    def add(self, made: Stored | pa.Array) -> None:
        if isinstance(made, pa.Array):
            made = _digested(made)
        values: Any = np.ascontiguousarray(made.values) if made.content is None else made.content
        self._values.update(values)
        if made.lengths is not None:
            lengths: Any = made.lengths.astype(np.int64)
            self._lengths.update(lengths)

    def digest(self) -> bytes:
        return bytes(self._values.digest() + self._lengths.digest())


@dataclass
class Key:
    """A key of a batch: its description, and the Parquet columns that it is stored in."""

    source: Numbers | Objects
    taken: TakenBatch
    spec: dict[str, Any]
    fields: list[pa.Field]
    blobs: list[list[int]] | None = None
    digests: list[_Digest] = field(default_factory=list)

    def arrays(self, rows: slice, pool: BlobPool, numbers: list[int]) -> Iterator[pa.Array]:
        """The columns for some rows; ``numbers`` are those that the blobs of the pool have in the part."""
        self.digests = self.digests or [_Digest() for _ in self.fields]
        if isinstance(self.source, Numbers):
            made = self.source.encoding.store(self.source.bits, rows, self.taken.spans)
        else:
            made = [self._object_column(self.source, column.name, rows, pool, numbers) for column in self.fields]
        for column, digest, found in zip(self.fields, self.digests, made, strict=True):
            digest.add(found)
            kind = column.type.value_type if pa.types.is_list(column.type) else column.type
            yield found if isinstance(found, pa.Array) else found.to_arrow(kind)

    def _object_column(
        self, source: Objects, name: str, rows: slice, pool: BlobPool, numbers: list[int]
    ) -> Stored | pa.Array:
        if name == self.spec["column"]:
            return pa.array(source.cells.values[rows], CELL_TYPES[source.cells.form])
        if name == self.spec["object"]:
            return Stored(np.array((source.cells.first_rows or [])[rows], np.int64))
        held = (self.blobs or [])[rows]
        flat = [number for row in held for number in row]
        content = b"".join(pool.digests[number] for number in flat)
        return Stored(np.array([numbers[number] for number in flat], np.int32), counts(held), content)


def keys_of(batch: TakenBatch, pool: BlobPool, names: Names, outputs: list[Key] | None = None) -> Iterator[Key]:
    """The keys of a batch; ``outputs`` are those of the output, when this is the input."""
    prefix = "" if outputs is None else "in__"
    for numbers in batch.numbers:
        name = names.take(numbers.path, prefix)
        spec = {"path": list(numbers.path), "column": name, **encoding_to_json(numbers.encoding)}
        yield Key(numbers, batch, spec, numbers.encoding.fields(name))
    for objects in batch.objects:
        name, cells = names.take(objects.path, prefix), objects.cells
        blobs = None if cells.blobs is None else [pool.numbers(row) for row in cells.blobs]
        twin = _twin(objects, blobs, outputs or [])
        spec = {
            "path": list(objects.path),
            "column": name,
            "cells": cells.form,
            "shape": list(objects.shape),
            "dtype": objects.dtype,
            "object": None if cells.first_rows is None else f"{OBJECT}{name}",
            "blobs": None if blobs is None else f"{BLOBS_OF}{name}",
        }
        fields = [pa.field(name, CELL_TYPES[cells.form])]
        if twin is not None:
            fields = []
            spec |= {"column": twin.spec["column"], "blobs": twin.spec["blobs"]}
            if isinstance(twin.source, Objects) and twin.source.cells.first_rows == cells.first_rows:
                spec["object"] = twin.spec["object"]
        if spec["object"] == f"{OBJECT}{name}":
            fields.append(pa.field(spec["object"], pa.int64(), nullable=False))
        if blobs is not None and twin is None:
            fields.append(pa.field(spec["blobs"], list_type(pa.int32()), nullable=False))
        yield Key(objects, batch, spec, fields, blobs)


class Names:
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


def _twin(objects: Objects, blobs: list[list[int]] | None, outputs: list[Key]) -> Key | None:
    """The key of the output that holds the very same cells: what a rollout hands through is stored once."""
    for key in outputs:
        other = key.source
        if not isinstance(other, Objects) or (other.path, other.cells.form) != (objects.path, objects.cells.form):
            continue
        # Floats compare equal that are not the same, so they are stored twice.
        if objects.cells.form != "float" and other.cells.values == objects.cells.values and key.blobs == blobs:
            return key
    return None


def counts(rows: list[list[int]]) -> np.ndarray:
    """The length of each list."""
    return np.array([len(row) for row in rows], np.int64)


def _digested(array: pa.Array) -> Stored:
    """What is digested of the cells of a column; -1 as the length of a text, or 0 as that of a number, is None."""
    valid = as_numpy(array.is_valid())
    if pa.types.is_string(array.type):
        return Stored(np.empty(0), np.where(valid, np.diff(byte_offsets(array)), -1), array.buffers()[2] or b"")
    return Stored(np.where(valid, as_numpy(array), 0), valid)
