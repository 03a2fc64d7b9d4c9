"""The parts of an entry back into the batch they were made from, bit for bit.

The bytes may be damaged or hostile: every claim of a part is compared before anything is allocated for it, whatever
cannot be decoded is a ``CorruptEntryError``, and nothing in it can run code. Each part is decoded into bits with its
own encodings; tensors are made of the bits of all parts.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from concurrent.futures import Future
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import numpy as np
import pyarrow as pa
import torch

from verl_rollout_skip.errors import CorruptEntryError, EntryTooLargeError
from verl_rollout_skip.sizes import format_size
from verl_rollout_skip.store.codec import cells
from verl_rollout_skip.store.codec.batch import Batch, BatchKind
from verl_rollout_skip.store.codec.blobs import StoredBlobs, part_blobs, row_blobs
from verl_rollout_skip.store.codec.cell_columns import CELL_TYPES, decode_column, text_dtype
from verl_rollout_skip.store.codec.encodings import DenseEncoding, Encoding, Mask, Positions, Reading, Same, natural
from verl_rollout_skip.store.codec.jagged import Jagged, JaggedBits, NestedEncoding, encoding_from_json
from verl_rollout_skip.store.codec.memory import ZeroedMemory
from verl_rollout_skip.store.codec.padding import Spans
from verl_rollout_skip.store.codec.part import PartFile, damage_is_corruption
from verl_rollout_skip.store.codec.tensors import dense_column, jagged_tensor, strided_tensor
from verl_rollout_skip.store.format import (
    BLOB_SIZES,
    BLOBS,
    INPUT_LENGTH,
    INPUT_RESPONSE_LENGTH,
    PROMPT_DIGEST,
    PROMPT_LENGTH,
    RESPONSE_LENGTH,
)
from verl_rollout_skip.store.threads import map_in_threads, worker_count

# A Python object takes at least so much memory, however little it takes in the file.
_OBJECT_BYTES = 100
_LENGTHS = {
    "output": (PROMPT_LENGTH, RESPONSE_LENGTH),
    "input": (INPUT_LENGTH, INPUT_RESPONSE_LENGTH),
}
_Place = tuple[bool, tuple[str, ...]]
"""Where a value belongs: among the tensors or not, and under which path."""


@dataclass(frozen=True)
class _Layout:
    """What one part says of the output or of the input, and what was decoded of it."""

    part: PartFile
    rows: slice
    spans: Spans | None
    numbers: dict[_Place, tuple[str, Encoding]]
    objects: dict[_Place, dict[str, Any]]

    @cached_property
    def done(self) -> dict[_Place, Future[Any]]:
        """The bits of each number, once they are decoded."""
        return {place: Future() for place in self.numbers}

    def turn(self, place: _Place) -> int:
        """When a number is decoded: it can need those of earlier turns. What follows from the lengths alone comes late
        and keeps threads busy that would wait for others."""
        _, encoding = self.numbers[place]
        if isinstance(encoding, Same):
            return 4 if encoding.of else 1
        if isinstance(encoding, Mask | Positions):
            return 3
        return 2 if encoding.needs else 0

    @property
    def kinds(self) -> dict[_Place, Any]:
        """What must be the same in all parts."""
        numbers = {place: encoding.kind for place, (_, encoding) in self.numbers.items()}
        return numbers | {place: (item["shape"], item["dtype"]) for place, item in self.objects.items()}

    @property
    def object_columns(self) -> set[str]:
        names = {item[kind] for item in self.objects.values() for kind in ("column", "object", "blobs")}
        return {*names, BLOB_SIZES, BLOBS} - {None}


class Reader:
    """The parts of an entry, whose bytes are in memory: output and input are decoded on demand.

    ``limit`` is the most memory, in bytes, that decoding may take; what the parts claim is compared with it before
    anything is allocated. Large blobs are shared by all that is decoded by one reader.
    """

    def __init__(self, datas: Sequence[Any], limit: int) -> None:
        self._limit = limit
        self._parts = [PartFile(data, limit) for data in datas]
        self._blobs = [part_blobs(part, limit) for part in self._parts]
        with damage_is_corruption():
            self.rows = sum(part.rows for part in self._parts)
            given = self._parts[0].description["input"]
            self.has_input = given is not None
            if any((part.description["input"] is not None) != self.has_input for part in self._parts):
                raise CorruptEntryError("Some parts of the entry have an input and others have none.")
            self.input_kind = None if given is None else BatchKind(given["kind"])

    def output(self) -> Batch:
        """The recorded batch."""
        with damage_is_corruption():
            return self._decode("output", [])

    def input(self) -> Batch:
        """The recorded input of the rollout step."""
        with damage_is_corruption():
            return self._decode("input", [_echoed(layout) for layout in self._layouts("output")])

    def prompt_digests(self) -> list[str] | None:
        """One digest for each row of the recorded input, or None if it has none."""
        digests: list[str] = []
        with damage_is_corruption():
            for part in self._parts:
                texts, codes = part.texts(PROMPT_DIGEST)
                if (codes < 0).any():
                    return None
                digests += [texts[code] for code in codes]
        return digests

    def _layouts(self, side: str) -> list[_Layout]:
        """The layout of one batch in each part, all of the same keys, types and shapes."""
        layouts, start = [], 0
        first = self._parts[0].description[side]
        for part in self._parts:
            described = part.description[side]
            if any(described[name] != first[name] for name in ("kind", "nodes", "order", "device", "arrays", "meta")):
                raise CorruptEntryError(f"The parts of the entry do not describe one {side}.")
            layouts.append(_parse(part, side, slice(start, start + part.rows)))
            if layouts[-1].kinds != layouts[0].kinds:
                raise CorruptEntryError(f"The parts of the entry hold an {side} of different keys, types or shapes.")
            start += part.rows
        return layouts

    def _decode(self, side: str, echoed: list[_Layout]) -> Batch:
        layouts = self._layouts(side)
        self._check_size(layouts, echoed)
        if echoed:
            _decode_numbers(echoed, [])
        bits = _decode_numbers(layouts, echoed)
        made: dict[_Place, Any] = {}
        groups: dict[int, torch.Tensor] = {}
        for place, (_, encoding) in layouts[0].numbers.items():
            if isinstance(encoding, Jagged):
                made[place] = jagged_tensor(encoding, bits[place], groups)
            elif isinstance(encoding, DenseEncoding):
                made[place] = dense_column(encoding.element, bits[place])
            else:
                made[place] = strided_tensor(encoding.element, bits[place])
        for place in layouts[0].objects:
            made[place] = self._object_array(place, layouts)
        described = self._parts[0].description[side]
        return Batch(
            kind=BatchKind(described["kind"]),
            rows=self.rows,
            tensors={path: value for (is_tensor, path), value in made.items() if is_tensor},
            arrays={tuple(path): made[False, tuple(path)] for path in described["arrays"]},
            meta=dict(cells.decode_inline(described["meta"])),
            order=[tuple(path) for path in described["order"]],
            nodes={tuple(path): (self.rows, *map(natural, sizes)) for path, sizes in described["nodes"]},
            device=None if described["device"] is None else "cpu",
        )

    def _check_size(self, layouts: list[_Layout], echoed: list[_Layout]) -> None:
        """Compare what the parts claim with the limit, before anything is allocated."""
        in_flight: list[int] = []
        needed = 0
        for layout in [*echoed, *layouts]:
            for name in layout.object_columns if layout.objects else ():
                # Blobs are in memory twice while objects are made of them.
                needed += layout.part.stored_bytes(name, _OBJECT_BYTES) * (2 if name == BLOBS else 1)
            sizes: dict[_Place, int] = {}
            for place in sorted(layout.numbers, key=layout.turn):
                column, encoding = layout.numbers[place]
                stored = [layout.part.stored_bytes(field.name) for field in encoding.fields(column)]
                derived = sum(sizes.get((True, (name,)), 0) for name in encoding.needs)
                sizes[place] = encoding.row_bytes * layout.part.rows or sum(stored) or derived
                in_flight += stored
            needed += sum(sizes.values())
        # Columns are read a few at a time and let go when they are decoded; Python objects stay.
        needed += sum(sorted(in_flight)[-worker_count() :])
        if needed > self._limit:
            raise EntryTooLargeError(
                f"Loading it would take {format_size(needed)} of memory and {format_size(self._limit)} are allowed. "
                "Load it on a larger machine or raise max_load_bytes."
            )

    def _object_array(self, place: _Place, layouts: list[_Layout]) -> np.ndarray:
        first = layouts[0].objects[place]
        shape = tuple(natural(size) for size in first["shape"])
        objects: dict[int, tuple[str, Any]] = {}
        pieces = [
            self._cells(layout.part, stored, layout.objects[place], objects)
            for layout, stored in zip(layouts, self._blobs, strict=True)
        ]
        if first["dtype"] != "|O":
            dtype = text_dtype(first["dtype"])
            if self.rows * math.prod(shape) * dtype.itemsize > self._limit:
                raise EntryTooLargeError(f"{place[1]} claims more memory than {format_size(self._limit)}.")
            found = [cell for piece in pieces for cell in piece]
            return np.array(found, dtype).reshape(self.rows, *shape)
        array = np.empty((self.rows, *shape), dtype=object)
        for layout, piece in zip(layouts, pieces, strict=True):
            if not shape:
                array[layout.rows] = piece
                continue
            for row, cell in zip(array[layout.rows], piece, strict=True):
                for index, value in zip(np.ndindex(shape), cell, strict=True):
                    row[index] = value
        return array

    def _cells(
        self, part: PartFile, stored: StoredBlobs, item: dict[str, Any], objects: dict[int, tuple[str, Any]]
    ) -> np.ndarray:
        """The cells of one part as a sequence; ``objects`` are those that earlier rows hold."""
        form, column = item["cells"], item["column"]
        if form not in ("text", "json"):
            return _object_column(part.objects(column, CELL_TYPES[form]))
        texts, codes = part.texts(column)
        if form == "text":
            return _object_column([*texts, None])[codes]
        identity = None
        if item["object"] is not None:
            identity = part.all_numbers(item["object"], pa.int64())
            if len(identity) and identity.min() < 0:
                raise CorruptEntryError(f"Column {item['object']!r} holds negative numbers.")
        blobs = row_blobs(part, item["blobs"], stored)
        decoded = decode_column(texts, codes.tolist(), blobs, None if identity is None else identity.tolist(), objects)
        return _object_column(decoded)


def _parse(part: PartFile, side: str, rows: slice) -> _Layout:
    described = part.description[side]
    spans = None
    if described["spans"] is not None:
        prompt_width, response_width = (natural(width) for width in described["spans"])
        prompt, response = (part.all_numbers(name, pa.int32()).astype(np.int64) for name in _LENGTHS[side])
        spans = Spans(prompt_width, response_width, prompt, response)
        for length, width in ((prompt, prompt_width), (response, response_width)):
            if (length < 0).any() or (length > width).any():
                raise CorruptEntryError("The stored prompt and response lengths do not fit the widths.")
    numbers: dict[_Place, tuple[str, Encoding]] = {}
    columns: list[str] = []
    for item in described["numbers"]:
        encoding = encoding_from_json(item, spans)
        place = encoding.element.holder == "torch", tuple(item["path"])
        columns += [field.name for field in encoding.fields(item["column"])]
        if place in numbers:
            raise CorruptEntryError("The file lists a key twice.")
        numbers[place] = item["column"], encoding
    objects = {(False, tuple(item["path"])): item for item in described["objects"]}
    if (
        len(set(columns)) != len(columns)
        or len(objects) != len(described["objects"])
        or objects.keys() & numbers.keys()
    ):
        raise CorruptEntryError("The file lists a key or a column twice.")
    return _Layout(part, rows, spans, numbers, objects)


def _echoed(layout: _Layout) -> _Layout:
    """The numbers of the output that numbers of the input may be stored as, and what those are derived from."""
    given = layout.part.description["input"]["numbers"]
    echoes = {
        (item["element"]["holder"] == "torch", tuple(item["path"]))
        for item in given
        if item["form"] == Same.name and not item["of"]
    }
    found = [encoding for place, (_, encoding) in layout.numbers.items() if place in echoes]
    needed = {(True, (name,)) for encoding in found for name in (*encoding.needs, getattr(encoding, "of", ""))}
    kept = {place: value for place, value in layout.numbers.items() if place in echoes | needed}
    return _Layout(layout.part, layout.rows, layout.spans, kept, {})


def _decode_numbers(layouts: list[_Layout], echoed: list[_Layout]) -> dict[_Place, Any]:
    """The bits of all numeric columns, parts joined. ``echoed`` is what was decoded of the output before."""
    arrays = _allocate(layouts)

    def decode(job: tuple[int, _Place]) -> None:
        number, place = job
        layout = layouts[number]
        column, encoding = layout.numbers[place]

        def done(name: str) -> Any:
            other = (True, (name,)) if name else place
            found = layout if name else echoed[number] if echoed else None
            if found is None or other not in found.numbers or (name and found.turn(other) >= layout.turn(place)):
                raise CorruptEntryError(f"The file derives {column!r} from {name!r}, which it does not hold.")
            return found.done[other].result()

        try:
            reading = Reading(layout.part, layout.spans, done)
            if isinstance(encoding, NestedEncoding):
                bits = encoding.read(column, reading)
            else:
                assert isinstance(encoding, DenseEncoding)
                bits = arrays[place][layout.rows]
                encoding.read_into(bits, column, reading)
        except BaseException as error:
            layout.done[place].set_exception(error)
            raise
        layout.done[place].set_result(bits)

    # In order of their turns: a column waits only for columns that were begun before it.
    jobs = [(number, place) for number, layout in enumerate(layouts) for place in layout.numbers]
    for layout in layouts:
        _ = layout.done  # made before the threads start: two that made it at once would not see each other's results
    map_in_threads(decode, sorted(jobs, key=lambda job: layouts[job[0]].turn(job[1])))
    nested = layouts[0].numbers.keys() - arrays.keys()
    return arrays | {place: _join([layout.done[place].result() for layout in layouts]) for place in nested}


def _allocate(layouts: list[_Layout]) -> dict[_Place, np.ndarray]:
    """Zeros for all rows of every dense column."""
    memory, rows = ZeroedMemory(), layouts[-1].rows.stop
    numbers = {place: encoding for place, (_, encoding) in layouts[0].numbers.items()}
    places = [place for place, encoding in numbers.items() if isinstance(encoding, DenseEncoding)]

    def allocate(place: _Place) -> np.ndarray:
        return memory.zeros((rows, *numbers[place].shape), numbers[place].element.bits)

    return dict(zip(places, map_in_threads(allocate, places), strict=True))


def _join(pieces: list[Any]) -> Any:
    """The bits of a nested tensor from those of its parts."""
    if not isinstance(pieces[0], JaggedBits):
        return [row for piece in pieces for row in piece]
    if len(pieces) == 1:
        return pieces[0]
    return JaggedBits(*(np.concatenate([getattr(piece, name) for piece in pieces]) for name in ("values", "lengths")))


def _object_column(values: Sequence[Any]) -> np.ndarray:
    return np.fromiter(values, dtype=object, count=len(values))
