"""Decodes the parts of an entry into the original batch, bit for bit.

The bytes may be damaged or hostile: every size in a part is checked before anything is allocated for it, a part that
cannot be decoded raises ``CorruptEntryError``, and decoding never runs code. Each part is decoded into bits with its
own encodings; tensors are built from the bits of all parts.
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
from verl_rollout_skip.store.codec.dtypes import natural
from verl_rollout_skip.store.codec.encodings import Bits, Form, JaggedBits
from verl_rollout_skip.store.codec.memory import ZeroedMemory
from verl_rollout_skip.store.codec.numbers import make_column
from verl_rollout_skip.store.codec.objects import PartObjects
from verl_rollout_skip.store.codec.padding import row_chunks
from verl_rollout_skip.store.codec.part import ColumnId, Layout, PartFile, check_memory, decoding
from verl_rollout_skip.store.format import BLOB_SIZES, BLOBS, PROMPT_DIGEST, SAME_IN_ALL_PARTS, Side
from verl_rollout_skip.store.threads import map_in_threads, worker_count

# The least memory that a Python object takes, however small it is in the file.
_OBJECT_BYTES = 100


class Reader:
    """The parts of an entry, already in memory; output and input are decoded on demand.

    ``limit`` is the most memory, in bytes, that decoding may take; the sizes in the parts are checked against it before
    anything is allocated. Everything that one reader decodes shares its large blobs. ``what`` and ``files``, the names
    of the parts, are the prefix of every error message.
    """

    def __init__(self, datas: Sequence[Any], limit: int, what: str = "", files: Sequence[str] = ()) -> None:
        self._limit = limit
        self.what = f"{what}: {', '.join(files)}." if files else what
        names = [f"{what}: {file}." for file in files] or [what] * len(datas)
        self._parts: list[PartFile] = []
        for data, name in zip(datas, names, strict=True):
            self._parts.append(PartFile(data, limit, name, sum(part.rows for part in self._parts)))
        self._objects = [PartObjects(part) for part in self._parts]
        with decoding(self.what):
            self.rows = sum(part.rows for part in self._parts)
            given = self._parts[0].description["input"]
            self.has_input = given is not None
            if any((part.description["input"] is not None) != self.has_input for part in self._parts):
                raise CorruptEntryError("Some parts of the entry have an input and others have none.")
            self.input_kind = None if given is None else BatchKind(given["kind"])

    def output(self) -> Batch:
        """The recorded batch."""
        with decoding(self.what):
            return self._decode(Side.OUTPUT)

    def input(self) -> Batch:
        """The recorded input of the rollout step."""
        with decoding(self.what):
            return self._decode(Side.INPUT)

    def prompt_digests(self) -> list[str] | None:
        """One digest for each row of the recorded input, or None if it has none."""
        digests: list[str] = []
        for part in self._parts:
            with decoding(part.what):
                texts, codes = part.texts(PROMPT_DIGEST)
                if (codes < 0).any():
                    return None
                digests += [texts[code] for code in codes]
        return digests

    def _layouts(self, side: Side) -> list[Layout]:
        """The layout of one batch in each part; all must have the same keys, types and shapes."""
        layouts: list[Layout] = []
        first = self._parts[0].description[side.value]
        for part in self._parts:
            with decoding(part.what):
                layouts.append(part.layout(side))
                same = all(part.description[side.value][name] == first[name] for name in SAME_IN_ALL_PARTS)
                if not same or layouts[-1].kinds != layouts[0].kinds:
                    raise CorruptEntryError(
                        f"The parts of the entry contain an {side.value} with different keys or types."
                    )
        return layouts

    def _echoed(self, layouts: list[Layout]) -> list[Layout]:
        """The output, reduced to the numbers that the input refers to and those that they are derived from."""
        encodings = [(key, encoding) for layout in layouts for key, (_, encoding) in layout.numbers.items()]
        echoes = {key for key, encoding in encodings if encoding.form is Form.SAME and not encoding.of}
        outputs = self._layouts(Side.OUTPUT) if echoes else []
        for key in [key for layout in outputs for key in echoes & layout.numbers.keys()]:
            echoes |= {(True, (name,)) for layout in outputs for name in layout.numbers[key][1].needs}
        return [
            replace(layout, numbers={key: found for key, found in layout.numbers.items() if key in echoes}, objects={})
            for layout in outputs
        ]

    def _decode(self, side: Side) -> Batch:
        layouts = self._layouts(side)
        echoed = self._echoed(layouts) if side is Side.INPUT else []
        check_memory(_needed_memory([*echoed, *layouts]), self._limit)
        bits = _decode_numbers(layouts, _decode_numbers(echoed, {}) if echoed else {})
        groups: dict[int, torch.Tensor] = {}
        columns: dict[ColumnId, Any] = {
            key: make_column(encoding, bits[key], groups) for key, (_, encoding) in layouts[0].numbers.items()
        }
        columns |= {key: self._object_array(key, layouts) for key in layouts[0].objects}
        described = self._parts[0].description[side.value]
        return Batch(
            kind=BatchKind(described["kind"]),
            rows=self.rows,
            tensors={path: value for (is_tensor, path), value in columns.items() if is_tensor},
            arrays={tuple(path): columns[False, tuple(path)] for path in described["arrays"]},
            meta=dict(cells.decode_inline(described["meta"])),
            order=[tuple(path) for path in described["order"]],
            nodes={tuple(path): (self.rows, *map(natural, sizes)) for path, sizes in described["nodes"]},
            device=None if described["device"] is None else "cpu",
        )

    def _object_array(self, key: ColumnId, layouts: list[Layout]) -> np.ndarray:
        item = layouts[0].objects[key]
        shape = tuple(natural(size) for size in item["shape"])
        dtype = np.dtype(object) if item["dtype"] == "|O" else cells.numpy_dtype(item["dtype"])
        if dtype.kind not in "OUS":
            raise CorruptEntryError(f"Key {'.'.join(key[1])!r} is of type {dtype}, which cannot contain objects.")
        check_memory(self.rows * math.prod(shape) * dtype.itemsize, self._limit, f"Key {'.'.join(key[1])!r}")
        made: dict[int, tuple[str, Any]] = {}
        found: list[Any] = []
        for layout, objects in zip(layouts, self._objects, strict=True):
            with decoding(layout.part.what):
                found += objects.decode(layout.objects[key], made)
        if shape:
            if any(len(cell) != math.prod(shape) for cell in found):
                raise CorruptEntryError(f"A cell does not have the shape {shape}.")
            found = [value for cell in found for value in cell]
        flat = np.fromiter(found, object, len(found)) if dtype.kind == "O" else np.array(found, dtype)
        return flat.reshape(self.rows, *shape)


def _needed_memory(layouts: list[Layout]) -> int:
    """The memory that decoding takes, according to the parts."""
    in_flight: list[int] = []
    needed = 0
    for layout in layouts:
        part = layout.part
        names = {item[name] for item in layout.objects.values() for name in ("column", "object", "blobs")} - {None}
        # Blobs are in memory twice while objects are built from them.
        for name in (*names, BLOB_SIZES, BLOBS, BLOBS) if names else ():
            needed += part.stored_bytes(name, _OBJECT_BYTES)
        sizes: dict[ColumnId, int] = {}
        for key, (column, encoding) in sorted(layout.numbers.items(), key=lambda item: len(item[1][1].needs)):
            stored = [part.stored_bytes(field.name) for field in encoding.fields(column)]
            derived = sum(sizes.get((True, (name,)), 0) for name in encoding.needs)
            sizes[key] = encoding.row_bytes * part.rows or sum(stored) or derived
            in_flight += stored
        needed += sum(sizes.values())
    # Columns are read a few at a time and freed once they are decoded; Python objects stay.
    return needed + sum(sorted(in_flight)[-worker_count() :])


def _decode_numbers(layouts: list[Layout], echoed: dict[ColumnId, Bits]) -> dict[ColumnId, Bits]:
    """The bits of all numeric columns across the parts. ``echoed`` are those of the output, already decoded."""
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
            if name and (other not in layout.numbers or layout.numbers[other][1].needs):
                raise CorruptEntryError(f"The file derives {column!r} from {name!r}, which it does not contain.")
            bits = arrays.get(other, nested[number].get(other)) if name else echoed.get(key)
            return bits[part.entry_rows] if isinstance(bits, np.ndarray) else bits

        with decoding(part.what):
            if encoding.is_nested:
                nested[number][key] = encoding.join(source) if encoding.needs else encoding.read(part, column)
            elif encoding.is_stored:
                encoding.read_into(arrays[key][part.entry_rows], part, column, layout.spans)
            else:
                out = arrays[key][part.entry_rows]
                for chunk in row_chunks(rows.stop, encoding.row_bytes, rows.start):
                    encoding.fill(out[chunk], chunk, layout.spans, source)

    # Columns that are derived from others come after them. Dense columns are derived in slices of rows, so that no
    # thread works on a large one while the others are idle.
    stored: list[tuple[int, ColumnId, slice]] = []
    derived: list[tuple[int, ColumnId, slice]] = []
    dependent: list[tuple[int, ColumnId, slice]] = []
    for number, layout in enumerate(layouts):
        rows = layout.part.rows
        step = max(1, -(-rows // worker_count()))
        slices = [slice(start, min(start + step, rows)) for start in range(0, rows, step)]
        for key, (_, encoding) in layout.numbers.items():
            jobs = dependent if encoding.needs else stored if encoding.is_stored else derived
            whole = encoding.is_nested or encoding.is_stored
            jobs += [(number, key, part) for part in ([slice(0, rows)] if whole else slices)]
    map_in_threads(decode, [*stored, *derived])
    map_in_threads(decode, dependent)
    joined = {key: _join([found[key] for found in nested]) for key in encodings.keys() - arrays.keys()}
    return {**arrays, **joined}


def _join(pieces: list[JaggedBits]) -> JaggedBits:
    """Concatenate the bits of a nested tensor from all parts."""
    if len(pieces) == 1:
        return pieces[0]
    values, lengths = (np.concatenate([getattr(piece, name) for piece in pieces]) for name in ("values", "lengths"))
    shapes = [piece.shapes for piece in pieces if piece.shapes is not None]
    return JaggedBits(values, lengths, _join(shapes) if shapes else None)
