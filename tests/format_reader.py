"""A reader of dumps, written from docs/format.md, that shares no code with the package.

It supports what the tests record: the number encodings of verl's rollouts, and cells of JSON, tensors and images.
Everything is read into lists.
"""

from __future__ import annotations

import hashlib
import json
import re
from array import array
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import xxhash

_CODES = {"torch.int64": "q", "torch.int32": "i", "torch.float32": "f", "torch.float64": "d"}


_INPUT_LENGTHS = ("input_length", "input_response_length")


class DamagedError(Exception):
    """A file has changed since it was written."""


def read_json(path: Path) -> dict[str, Any]:
    """Read a manifest, training or record, and check its checksum."""
    data = path.read_bytes()
    body, _, end = data.rpartition(b',\n  "checksum": "')
    if end != xxhash.xxh3_128(body + b"\n}").hexdigest().encode() + b'"\n}\n':
        raise DamagedError(f"{path}: its checksum is wrong")
    fields: dict[str, Any] = json.loads(data)
    if fields.get("format_version", 2) != 2:
        raise DamagedError(f"{path}: it is of another version")
    return fields


def canonical_hash(flat: dict[str, Any]) -> str:
    """The hash of a fingerprint."""
    return hashlib.sha256(json.dumps(_whole(flat), sort_keys=True).encode("ascii")).hexdigest()


def _whole(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: _whole(item) for key, item in value.items()}
    if isinstance(value, list):
        return [_whole(item) for item in value]
    return int(value) if isinstance(value, float) and value == int(value) else value


def variants(dump_dir: Path) -> dict[Path, dict[str, Any]]:
    """The manifests below a dump_dir, by variant folder."""
    return {path.parent: read_json(path) for path in sorted(dump_dir.glob("*/*/manifest.json"))}


def trainings(variant: Path) -> list[dict[str, Any]]:
    return [read_json(path) for path in sorted(variant.glob("trainings/[!.]*.json"))]


def keys(variant: Path) -> list[tuple[int, int]]:
    """Step and generation batch of each committed entry."""
    found = []
    for path in variant.glob("step_*/gen_*.json"):
        if re.fullmatch(r"step_\d{6,}", path.parent.name) and re.fullmatch(r"gen_\d{3,}\.json", path.name):
            found.append((int(path.parent.name[5:]), int(path.name[4:-5])))
    return sorted(found)


class Entry:
    """One rollout: its record, and its output and input as lists by key."""

    def __init__(self, variant: Path, step: int, gen_batch: int) -> None:
        folder, name = variant / f"step_{step:06d}", f"gen_{gen_batch:03d}"
        self.record = read_json(folder / f"{name}.json")
        self.rollout = Rollout([self._read(folder, name, part) for part in self.record["parts"]])
        self.description = self.rollout.description
        self.output, self.input = self.rollout.output, self.rollout.input

    @staticmethod
    def _read(folder: Path, name: str, part: dict[str, Any]) -> bytes:
        if part["file"] != f"{name}.{part['digest']}.parquet":
            raise DamagedError(f"{part['file']} is not the name of a part")
        data = (folder / part["file"]).read_bytes()
        if (len(data), xxhash.xxh3_128(data).hexdigest()) != (part["bytes"], part["digest"]):
            raise DamagedError(f"{folder / part['file']} has another size or digest than its record says")
        return data


class Rollout:
    """The parts of an entry, joined row by row."""

    def __init__(self, parts: list[bytes]) -> None:
        self.parts = [Part(data) for data in parts]
        self.description = self.parts[0].description
        self.output = self._joined([part.output for part in self.parts])
        self.input = self._joined([part.input for part in self.parts])

    @staticmethod
    def _joined(parts: list[dict[str, Any]]) -> dict[str, Any]:
        return {key: [row for part in parts for row in part[key]] for key in parts[0]}

    def column(self, name: str) -> list[Any]:
        return [value for part in self.parts for value in part.column(name)]

    def meta(self, batch: str) -> dict[str, Any]:
        return {str(key): value for key, value in json.loads(self.description[batch]["meta"]["json"])}

    def content(self) -> str:
        """The digest of the recorded values."""
        digest = xxhash.xxh3_128()
        columns = set()
        for batch in ("output", "input"):
            described = self.description[batch]
            if described is None:
                continue
            lasting = [pair for pair in json.loads(described["meta"]["json"]) if pair[0] != "timing"]
            text = json.dumps(lasting, ensure_ascii=False, separators=(",", ":"))
            described = {**described, "meta": {**described["meta"], "json": text}}
            for item in (*described["numbers"], *described["objects"]):
                if item["path"][-1] != "uid":
                    columns |= {item["column"], f"skip__shape__{item['column']}", item.get("object"), item.get("blobs")}
            for listed in ("order", "arrays", "numbers", "objects"):
                described[listed] = sorted(json.dumps(item, sort_keys=True) for item in described[listed])
            digest.update(json.dumps(described, sort_keys=True).encode())
            digest.update(f"{sum(part.table.num_rows for part in self.parts)} rows".encode())
            if described["spans"] is not None:
                names = ("prompt_length", "response_length") if batch == "output" else _INPUT_LENGTHS
                for name in names:
                    found = [part.table[f"skip__{name}"].to_pylist() for part in self.parts]
                    digest.update(array("q", [length for lengths in found for length in lengths]).tobytes())
        for name in sorted(columns & set(self.parts[0].table.column_names)):
            values, lengths = xxhash.xxh3_128(), xxhash.xxh3_128()
            for part in self.parts:
                for value, length in part.digested(name):
                    values.update(value)
                    lengths.update(b"" if length is None else array("q", [length]).tobytes())
            digest.update(values.digest() + lengths.digest())
        return digest.hexdigest()

    def prompt_digests(self) -> list[str]:
        """One digest per row of an input without tensors."""
        objects = sorted(self.description["input"]["objects"], key=lambda item: item["path"])
        digests = [xxhash.xxh3_128() for _ in self.column("skip__prompt_digest")]
        for item in objects:
            if item["path"][-1] == "uid":
                continue
            for digest, cell in zip(digests, self.column(item["column"]), strict=True):
                digest.update(f"{tuple(item['path'])}={cell!r};".encode())
        return [digest.hexdigest() for digest in digests]

    def identity(self) -> str:
        """The digest of the values that a training learns from, for padded tensors."""
        digest = xxhash.xxh3_128()
        for name in ("responses", "rm_scores"):
            rows = self.output.get(name)
            if rows is not None:
                (item,) = [item for item in self.description["output"]["numbers"] if item["path"] == [name]]
                kind = f"torch.{item['element']['name']}"
                digest.update(f"{name} {kind} {(len(rows), *item['shape'])}".encode())
                digest.update(array(_CODES[kind], [value for row in rows for value in row]).tobytes())
        return digest.hexdigest()


class Part:
    """One Parquet file: its columns, its blobs, and its rows of output and input as lists by key."""

    def __init__(self, data: bytes) -> None:
        self.table = pq.read_table(pa.BufferReader(data))
        self.description = json.loads(self.table.schema.metadata[b"rollout_skip"])
        self.blobs: list[bytes] = []
        if "skip__blobs" in self.table.column_names:
            for joined, sizes in zip(self.column("skip__blobs"), self.column("skip__blob_sizes"), strict=True):
                ends = [sum(sizes[: index + 1]) for index in range(len(sizes))]
                self.blobs += [joined[end - size : end] for end, size in zip(ends, sizes, strict=True)]
        self.output = self._batch("output", "skip__prompt_length", "skip__response_length")
        self.input = self._batch("input", "skip__input_length", "skip__input_response_length")

    def column(self, name: str) -> list[Any]:
        values: list[Any] = self.table[name].to_pylist()
        return values

    def digested(self, name: str) -> list[tuple[bytes, int | None]]:
        """The contribution of a column to the content digest: the bytes of each row, and its length if it has one."""
        kind, rows = self.table.schema.field(name).type, self.column(name)
        if name.startswith("skip__blobs_of__"):
            digests = [xxhash.xxh3_128(blob).digest() for blob in self.blobs]
            return [(b"".join(digests[number] for number in row), len(row)) for row in rows]
        if pa.types.is_string(kind):
            return [(b"", -1) if row is None else (row.encode(), len(row.encode())) for row in rows]
        if pa.types.is_list(kind):
            return [(_bytes(row, kind.value_type), len(row)) for row in rows]
        if self.table.schema.field(name).nullable:
            return [(_bytes([row or 0], kind), int(row is not None)) for row in rows]
        return [(_bytes([row], kind), None) for row in rows]

    def _batch(self, name: str, prompt_length: str, response_length: str) -> dict[str, Any]:
        part = self.description[name]
        if part is None:
            return {}
        lengths = None
        if part["spans"] is not None:
            lengths = list(zip(self.column(prompt_length), self.column(response_length), strict=True))
        found: dict[str, Any] = {}
        # Tensors that follow from others come after those.
        for item in sorted(part["numbers"], key=lambda item: item["form"] in _DERIVED):
            found[".".join(item["path"])] = self._numbers(item, part["spans"], lengths, found)
        for item in part["objects"]:
            cells = self.column(item["column"])
            if item["cells"] == "json":
                numbers = self.column(item["blobs"]) if item["blobs"] else [[]] * len(cells)
                blobs = [[self.blobs[number] for number in row] for row in numbers]
                cells = [_cell(json.loads(cell), own) for cell, own in zip(cells, blobs, strict=True)]
            found[".".join(item["path"])] = cells
        return found

    def _numbers(self, item: dict[str, Any], spans: Any, lengths: Any, found: dict[str, Any]) -> list[Any]:
        form, path = item["form"], ".".join(item["path"])
        if form in ("dense", "jagged"):
            return self.column(item["column"])
        if form == "same":
            source = found if item["of"] else self.output
            same: list[Any] = source[item["of"] or path]
            return same
        if form in ("concat", "jagged_concat"):
            return [[*left, *right] for left, right in zip(found["prompts"], found["responses"], strict=True)]
        if form == "jagged_positions":
            pairs = zip(found["prompts"], found["responses"], strict=True)
            return [list(range(len(left) + len(right))) for left, right in pairs]
        if form == "positions":
            return [_positions(item["rule"], spans, *row) for row in lengths]
        windows = [_window(item["window"], spans, *row) for row in lengths]
        if form == "mask":
            return [[int(first <= position < last) for position in range(width)] for first, last, width in windows]
        if form == "ragged" and item["axis"] == 0 and len(item["shape"]) == 1:
            rows = zip(self.column(item["column"]), windows, strict=True)
            pad = _pad(item)
            return [[*[pad] * first, *row, *[pad] * (width - last)] for row, (first, last, width) in rows]
        raise NotImplementedError(f"{path} has the form {form}")


_DERIVED = ("concat", "jagged_concat", "jagged_positions", "same")


def _window(window: str, spans: tuple[int, int], prompt: int, response: int) -> tuple[int, int, int]:
    wide, after = spans
    if window == "prompt":
        return wide - prompt, wide, wide
    if window == "response":
        return 0, response, after
    return wide - prompt, wide + response, wide + after


def _positions(rule: str, spans: tuple[int, int], prompt: int, response: int) -> list[int]:
    positions = [max(position - (spans[0] - prompt), 0) for position in range(sum(spans))]
    return [min(position, max(prompt + response - 1, 0)) for position in positions] if rule == "counted" else positions


def _pad(item: dict[str, Any]) -> Any:
    """The padding value from its bits."""
    kind = {"float32": "f", "float64": "d"}.get(item["element"]["name"])
    size = {"f": 4, "d": 8}.get(kind or "")
    return (
        item["pad"] if size is None else array(str(kind), (item["pad"] % 2 ** (8 * size)).to_bytes(size, "little"))[0]
    )


def _bytes(values: list[Any], kind: pa.DataType) -> bytes:
    """The bytes of numbers in memory order."""
    if pa.types.is_boolean(kind):
        return bytes(values)
    return bytes(pa.array(values, kind).buffers()[1] or b"")


def _cell(value: Any, blobs: list[bytes]) -> Any:
    """A cell, with tensors and images as tuples of their description and their bytes."""
    if isinstance(value, list):
        return [_cell(item, blobs) for item in value]
    if not isinstance(value, dict):
        return value
    kind = value.get("$type")
    if kind is None:
        return {key: _cell(item, blobs) for key, item in value.items()}
    if kind == "bytes":
        return blobs[value["blob"]]
    if kind == "tuple":
        return tuple(_cell(item, blobs) for item in value["items"])
    if kind in ("tensor", "ndarray") and "blob" in value:
        return value["dtype"], value["shape"], blobs[value["blob"]]
    if kind == "image":
        return value["mode"], value["size"], blobs[value["blob"]]
    raise NotImplementedError(f"a cell with $type {kind}")


def history(entries: list[Entry], step: int) -> str:
    """The lineage of a step, for a training that recorded all steps from the first."""
    known = "start"
    for earlier in range(1, step):
        identities = [entry.rollout.identity() for entry in entries if entry.record["key"]["step"] == earlier]
        known = xxhash.xxh3_128("\n".join([known, *identities]).encode()).hexdigest()
    return known
