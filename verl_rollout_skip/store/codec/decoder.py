"""Decodes the parts of an entry into the original batch, bit for bit.

The bytes may be damaged or hostile. Every size in a part is checked before anything is allocated for it, a part that
cannot be decoded raises ``CorruptEntryError``, and decoding never runs code. Each part has its own encodings and is
decoded to bits. Then tensors are built from the bits of all parts.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import torch

from verl_rollout_skip.errors import CorruptEntryError
from verl_rollout_skip.store.codec import cells
from verl_rollout_skip.store.codec.batch import Batch, BatchKind
from verl_rollout_skip.store.codec.dtypes import checked_size
from verl_rollout_skip.store.codec.encodings import Bits, Form, JaggedBits
from verl_rollout_skip.store.codec.memory import ZeroedMemory
from verl_rollout_skip.store.codec.numbers import make_column
from verl_rollout_skip.store.codec.objects import PartObjects
from verl_rollout_skip.store.codec.padding import row_chunks
from verl_rollout_skip.store.codec.part import ColumnId, Layout, PartFile, check_memory, decoding
from verl_rollout_skip.store.format import BLOB_SIZES, BLOBS, PROMPT_DIGEST, SAME_IN_ALL_PARTS, Side
from verl_rollout_skip.store.threads import map_in_threads, worker_count

# The minimum memory for a Python object, no matter how small it is in the file.
_OBJECT_BYTES = 100


class Reader:
    """Decodes the output and the input of an entry from its parts, which are already in memory.

    ``limit`` is the maximum memory for decoding, in bytes. The sizes in the parts are checked against it before
    anything is allocated. All objects that one reader decodes share their large blobs. Each error message begins with
    ``error_prefix`` and the names of the ``files``.
    """

    def __init__(self, part_data: Sequence[Any], limit: int, error_prefix: str = "", files: Sequence[str] = ()) -> None:
        self._limit = limit
        self.error_prefix = f"{error_prefix}: {', '.join(files)}." if files else error_prefix
        names = [f"{error_prefix}: {file}." for file in files] or [error_prefix] * len(part_data)
        self._parts: list[PartFile] = []
        for data, name in zip(part_data, names, strict=True):
            self._parts.append(PartFile(data, limit, name, sum(part.rows for part in self._parts)))
        self._objects = [PartObjects(part) for part in self._parts]
        with decoding(self.error_prefix):
            self.rows = sum(part.rows for part in self._parts)
            description = self._parts[0].description["input"]
            self.has_input = description is not None
            if any((part.description["input"] is not None) != self.has_input for part in self._parts):
                raise CorruptEntryError("Only some of its parts have an input.")
            self.input_kind = None if description is None else BatchKind(description["kind"])

    def output(self) -> Batch:
        """The recorded batch."""
        with decoding(self.error_prefix):
            return self._decode(Side.OUTPUT)

    def input(self) -> Batch:
        """The recorded input of the rollout step."""
        with decoding(self.error_prefix):
            return self._decode(Side.INPUT)

    def prompt_digests(self) -> list[str] | None:
        """One digest per row of the recorded input, or None if the rows have no digests."""
        digests: list[str] = []
        for part in self._parts:
            with decoding(part.error_prefix):
                texts, codes = part.texts(PROMPT_DIGEST)
                if (codes < 0).any():
                    return None
                digests += [texts[code] for code in codes]
        return digests

    def _layouts(self, side: Side) -> list[Layout]:
        """The layout of one batch in each part. Raises unless all parts have the same keys, types and shapes."""
        layouts: list[Layout] = []
        first = self._parts[0].description[side.value]
        for part in self._parts:
            with decoding(part.error_prefix):
                layouts.append(part.layout(side))
                is_same = all(part.description[side.value][name] == first[name] for name in SAME_IN_ALL_PARTS)
                if not is_same or layouts[-1].kinds != layouts[0].kinds:
                    raise CorruptEntryError(f"Its parts have an {side.value} with different keys or types.")
        return layouts

    def _output_layouts(self, layouts: list[Layout]) -> list[Layout]:
        """The layouts of the output, with only the columns that those of the input are derived from."""
        encodings = [(key, encoding) for layout in layouts for key, (_, encoding) in layout.numbers.items()]
        needed = {key for key, encoding in encodings if encoding.form is Form.SAME and not encoding.of}
        outputs = self._layouts(Side.OUTPUT) if needed else []
        for key in [key for layout in outputs for key in needed & layout.numbers.keys()]:
            needed |= {(True, (name,)) for layout in outputs for name in layout.numbers[key][1].dependencies}
        return [
            replace(layout, numbers={key: layout.numbers[key] for key in layout.numbers if key in needed}, objects={})
            for layout in outputs
        ]

    def _decode(self, side: Side) -> Batch:
        layouts = self._layouts(side)
        outputs = self._output_layouts(layouts) if side is Side.INPUT else []
        check_memory(_needed_memory([*outputs, *layouts]), self._limit)
        bits = _decode_numbers(layouts, _decode_numbers(outputs, {}) if outputs else {})
        groups: dict[int, torch.Tensor] = {}
        columns: dict[ColumnId, Any] = {
            key: make_column(encoding, bits[key], groups) for key, (_, encoding) in layouts[0].numbers.items()
        }
        columns |= {key: self._object_array(key, layouts) for key in layouts[0].objects}
        description = self._parts[0].description[side.value]
        return Batch(
            kind=BatchKind(description["kind"]),
            rows=self.rows,
            tensors={path: value for (is_tensor, path), value in columns.items() if is_tensor},
            arrays={tuple(path): columns[False, tuple(path)] for path in description["arrays"]},
            meta=dict(cells.decode_inline(description["meta"])),
            order=[tuple(path) for path in description["order"]],
            nodes={tuple(path): (self.rows, *map(checked_size, sizes)) for path, sizes in description["nodes"]},
            device=None if description["device"] is None else "cpu",
        )

    def _object_array(self, key: ColumnId, layouts: list[Layout]) -> np.ndarray:
        description = layouts[0].objects[key]
        shape = tuple(checked_size(size) for size in description["shape"])
        dtype = np.dtype(object) if description["dtype"] == "|O" else cells.numpy_dtype(description["dtype"])
        if dtype.kind not in "OUS":
            raise CorruptEntryError(f"Key {'.'.join(key[1])!r} is of type {dtype}, which cannot contain objects.")
        check_memory(self.rows * math.prod(shape) * dtype.itemsize, self._limit, f"Key {'.'.join(key[1])!r}")
        shared_objects: dict[int, tuple[str, Any]] = {}
        values: list[Any] = []
        for layout, objects in zip(layouts, self._objects, strict=True):
            with decoding(layout.part.error_prefix):
                values += objects.decode(layout.objects[key], shared_objects)
        if shape:
            if any(len(cell) != math.prod(shape) for cell in values):
                raise CorruptEntryError(f"Key {'.'.join(key[1])!r} has a cell that is not of shape {shape}.")
            values = [value for cell in values for value in cell]
        flat = np.fromiter(values, object, len(values)) if dtype.kind == "O" else np.array(values, dtype)
        return flat.reshape(self.rows, *shape)


def _needed_memory(layouts: list[Layout]) -> int:
    """The memory for decoding, according to the sizes in the parts."""
    in_flight: list[int] = []
    needed = 0
    for layout in layouts:
        part = layout.part
        names = {item[name] for item in layout.objects.values() for name in ("column", "object", "blobs")} - {None}
        # While objects are built from blobs, these are in memory twice.
        for name in (*names, BLOB_SIZES, BLOBS, BLOBS) if names else ():
            needed += part.stored_bytes(name, _OBJECT_BYTES)
        sizes: dict[ColumnId, int] = {}
        for key, (column, encoding) in sorted(layout.numbers.items(), key=lambda item: len(item[1][1].dependencies)):
            stored = [part.stored_bytes(field.name) for field in encoding.fields(column)]
            derived = sum(sizes.get((True, (name,)), 0) for name in encoding.dependencies)
            sizes[key] = encoding.row_bytes * part.rows or sum(stored) or derived
            in_flight += stored
        needed += sum(sizes.values())
    # Columns are read a few at a time and freed after decoding, but Python objects stay.
    return needed + sum(sorted(in_flight)[-worker_count() :])


def _decode_numbers(layouts: list[Layout], output_bits: dict[ColumnId, Bits]) -> dict[ColumnId, Bits]:
    """The bits of all numeric columns, from all parts. ``output_bits`` are those of the output, for an input."""
    memory, total = ZeroedMemory(), layouts[-1].part.entry_rows.stop
    encodings = {key: encoding for key, (_, encoding) in layouts[0].numbers.items()}
    dense = [key for key, encoding in encodings.items() if not encoding.is_nested]
    shapes = [((total, *encodings[key].shape), encodings[key].element.bits) for key in dense]
    arrays = dict(zip(dense, map_in_threads(lambda shape: memory.zeros(*shape), shapes), strict=True))
    nested: list[dict[ColumnId, JaggedBits]] = [{} for _ in layouts]

    def decode(job: tuple[int, ColumnId, slice]) -> None:
        number, key, rows = job
        layout = layouts[number]
        part, (column, encoding) = layout.part, layout.numbers[key]

        def source(name: str) -> Any:
            other = (True, (name,)) if name else key
            if name and (other not in layout.numbers or layout.numbers[other][1].dependencies):
                raise CorruptEntryError(f"Column {column!r} is derived from {name!r}, which is not in the file.")
            bits = arrays.get(other, nested[number].get(other)) if name else output_bits.get(key)
            return bits[part.entry_rows] if isinstance(bits, np.ndarray) else bits

        with decoding(part.error_prefix):
            if encoding.is_nested:
                nested[number][key] = encoding.join(source) if encoding.dependencies else encoding.read(part, column)
            elif encoding.is_stored:
                encoding.read_into(arrays[key][part.entry_rows], part, column, layout.spans)
            else:
                out = arrays[key][part.entry_rows]
                for chunk in row_chunks(rows.stop, encoding.row_bytes, rows.start):
                    encoding.fill(out[chunk], chunk, layout.spans, source)

    # Columns that are derived from others are decoded after these. Dense columns are derived in slices of rows, so that
    # no thread works on a large column while the others are idle.
    stored: list[tuple[int, ColumnId, slice]] = []
    derived: list[tuple[int, ColumnId, slice]] = []
    dependent: list[tuple[int, ColumnId, slice]] = []
    for number, layout in enumerate(layouts):
        rows = layout.part.rows
        step = max(1, -(-rows // worker_count()))
        slices = [slice(start, min(start + step, rows)) for start in range(0, rows, step)]
        for key, (_, encoding) in layout.numbers.items():
            jobs = dependent if encoding.dependencies else stored if encoding.is_stored else derived
            is_whole = encoding.is_nested or encoding.is_stored
            jobs += [(number, key, part) for part in ([slice(0, rows)] if is_whole else slices)]
    map_in_threads(decode, [*stored, *derived])
    map_in_threads(decode, dependent)
    joined = {key: _join([part_bits[key] for part_bits in nested]) for key in encodings.keys() - arrays.keys()}
    return {**arrays, **joined}


def _join(pieces: list[JaggedBits]) -> JaggedBits:
    """Concatenate the bits of a nested tensor in all parts."""
    if len(pieces) == 1:
        return pieces[0]
    values, lengths = (np.concatenate([getattr(piece, name) for piece in pieces]) for name in ("values", "lengths"))
    shapes = [piece.shapes for piece in pieces if piece.shapes is not None]
    return JaggedBits(values, lengths, _join(shapes) if shapes else None)
