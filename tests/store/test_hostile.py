"""Malicious run folders: digests, records and Parquet files are consistent, but their content is hostile.

Loading such an entry raises a named error or returns a batch. It never crashes, hangs, executes code, exceeds the
memory limit or leaves the run folder. Each case runs in a forked process with memory and time limits.

``FUZZ_SECONDS`` makes the random part longer than its default.
"""

from __future__ import annotations

import copy
import io
import itertools
import json
import os
import pickle
import random
import resource
import shutil
import signal
import sys
import traceback
from collections import Counter
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import torch
import xxhash
from tensordict import NonTensorData, TensorDict

from tests.batches import assert_same_batch, objects, rollout_input, rollout_output
from tests.entry_files import part_file, record_file
from tests.environment import Forked, Report
from tests.store.test_damage import DAMAGES
from verl_rollout_skip import RolloutKey, RolloutStore
from verl_rollout_skip.errors import (
    CorruptEntryError,
    NewerFormatError,
    StoreError,
    UnreadableEntryError,
    UnsafePathError,
)
from verl_rollout_skip.store import names
from verl_rollout_skip.store.format import BLOB_SIZES, BLOBS, Side
from verl_rollout_skip.store.reader import EntryReader, StoreReader
from verl_rollout_skip.store.record import RecordedPart, record_bytes

K = RolloutKey(1)
METADATA = b"rollout_skip"
MAX_LOAD_BYTES = 200_000_000
# Overhead of pyarrow and Python on top of the decoded data.
MEMORY_SLACK = 400_000_000
FUZZ_SECONDS = float(os.environ.get("FUZZ_SECONDS", "60"))


def padded_rollout() -> tuple[Any, Any]:
    """A DataProto with every way to store a column, and its input."""
    batch = rollout_output(8, seed=1)
    batch.batch["half"] = torch.randn(8, 10).bfloat16()
    batch.batch["image_positions"] = torch.arange(8 * 3 * 16).reshape(8, 3, 16)
    batch.batch["complex"] = torch.randn(8, 2, dtype=torch.complex64)
    batch.non_tensor_batch["word"] = np.array(["one", "two", "three", "four"] * 2)
    batch.non_tensor_batch["grid"] = np.array([[1, "a"], [None, 2.5]] * 4, dtype=object)
    batch.non_tensor_batch["when"] = np.arange(8).astype("datetime64[s]")
    shared = {"image": torch.ones(3, 4), "raw": b"bytes", "tuple": (1, float("nan")), "array": np.eye(2)}
    batch.non_tensor_batch["multi_modal_inputs"] = objects([shared, shared, {}, None, [1], "text", 7, shared])
    batch.meta_info["nested"] = {"tensor": torch.ones(2), "none": None, 3: (4,)}
    return batch, rollout_input(8, seed=1)


def jagged_rollout() -> tuple[Any, Any]:
    """A TensorDict as the V1 trainers use it: nested tensors, a nested TensorDict, data without rows."""

    def jagged(lengths: list[int], start: int) -> torch.Tensor:
        rows = [torch.arange(start, start + length) for length in lengths]
        return torch.nested.as_nested_tensor(rows, layout=torch.jagged)

    prompts, responses = jagged([1, 2, 3], 10), jagged([3, 1, 2], 50)
    both = [torch.cat(pair) for pair in zip(prompts.unbind(), responses.unbind(), strict=True)]
    mask = torch.nested.nested_tensor_from_jagged(torch.ones(6, dtype=torch.int64), responses.offsets())
    batch = TensorDict(
        {
            "prompts": prompts,
            "responses": responses,
            "input_ids": torch.nested.as_nested_tensor(both, layout=torch.jagged),
            "position_ids": jagged([4, 3, 5], 0),
            "response_mask": mask,
            "loss_mask": mask.clone(),
            "rows": torch.nested.nested_tensor([torch.ones(2, 3), torch.ones(1, 1), torch.ones(4, 2)]),
            "scores": torch.tensor([0.0, float("nan"), -0.0]),
            "inner": TensorDict({"x": torch.ones(3, 2)}, batch_size=[3, 2]),
            "temperature": NonTensorData(0.5),
        },
        batch_size=[3],
    )
    given = TensorDict({"prompts": prompts, "index": torch.arange(3)}, batch_size=[3])
    return batch, given


ROLLOUTS = {"padded": padded_rollout, "jagged": jagged_rollout}


class Forger:
    """Rewrites an entry consistently, as an attacker who knows the code would."""

    def __init__(self, folder: Path, batch: Any, inputs: Any = None) -> None:
        self.store = RolloutStore(folder, background=False, max_load_bytes=MAX_LOAD_BYTES)
        self.store.put(K, batch, inputs=inputs)
        self.record = self.store.record(K)
        self.data_file = part_file(folder)
        self.record_file = record_file(folder)
        self.data = self.data_file.read_bytes()
        file = pq.ParquetFile(io.BytesIO(self.data))
        self.table = file.read().replace_schema_metadata(None)
        self.description = json.loads(file.metadata.metadata[METADATA])

    def commit(self, data: bytes, part: dict[str, Any] | None = None, **changes: Any) -> None:
        """Replace the part with these bytes, with a matching record, except for the given changes."""
        digest = xxhash.xxh3_128(data).hexdigest()
        self.data_file = self.data_file.with_name(names.part_name(K, digest))
        self.data_file.write_bytes(data)
        rows = changes.get("rows", self.record.rows)
        made = {"file": self.data_file.name, "rows": rows, "bytes": len(data), "digest": digest, **(part or {})}
        parts = (RecordedPart(**made),)
        self.record_file.write_bytes(record_bytes(replace(self.record, **{"parts": parts, **changes})))

    def write(self, description: Any = None, table: pa.Table | None = None, **options: Any) -> None:
        """Write the Parquet file again with another description or other columns."""
        table = self.table if table is None else table
        text = description if isinstance(description, bytes) else json.dumps(description or self.description).encode()
        sink = io.BytesIO()
        kinds = (pa.string(), pa.dictionary(pa.int32(), pa.string()))
        texts = [field.name for field in table.schema if field.type in kinds]
        settings = {"compression": "zstd", "store_schema": False, "write_page_checksum": True, "use_dictionary": texts}
        settings |= options
        with pq.ParquetWriter(sink, table.schema, **settings) as writer:
            writer.add_key_value_metadata({METADATA: text})
            writer.write_table(table)
        self.commit(sink.getvalue(), rows=table.num_rows)

    def numbers(self, name: str, part: str = "output") -> tuple[dict[str, Any], dict[str, Any]]:
        """A copy of the description, and its item for a column."""
        description = copy.deepcopy(self.description)
        items = [*description[part]["numbers"], *description[part]["objects"]]
        return description, next(item for item in items if item["path"] == [name])


def spring(forger: Forger) -> dict[str, Any]:
    """Load the entry in every way and use what comes back."""
    outcomes = {}
    for load in (forger.store.get, forger.store.inputs, forger.store.verify, forger.store.record):
        try:
            found = load(K)
            if load in (forger.store.get, forger.store.inputs) and found is not None:
                use(found)
            outcomes[load.__name__] = "loaded"
        except StoreError as error:
            outcomes[load.__name__] = type(error).__name__
    return outcomes


def use(batch: Any) -> None:
    """Touch every value: a tensor that reaches beyond its memory would crash here."""
    tensordict = batch if isinstance(batch, TensorDict) else batch.batch
    for key in tensordict.keys(True, True) if tensordict is not None else ():
        value = tensordict.get(key)
        if isinstance(value, torch.Tensor):
            try:
                pieces = value.unbind() if value.is_nested else [value]
                for piece in pieces:
                    piece.clone().view(-1)[:1].tolist()
                    hash(piece.contiguous().numpy().tobytes()) if piece.dtype is not torch.bfloat16 else None
            except (RuntimeError, TypeError, ValueError, IndexError):
                pass  # torch refuses to compute with it, which is not a crash
    if not isinstance(batch, TensorDict):
        repr(batch.non_tensor_batch)
        repr(batch.meta_info)


def memory(field: str) -> int:
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith(field):
            return int(line.split()[1]) * 1024
    raise KeyError(field)


def forget_peak() -> int:
    """Reset the peak of the resident memory; return what is resident."""
    Path("/proc/self/clear_refs").write_text("5")
    return memory("VmRSS")


def fence(seconds: int, address_space: int = 4 << 30) -> None:
    """A process that takes too much memory or too long ends by a signal, and leaves no core file."""
    limit = memory("VmSize") + address_space
    resource.setrlimit(resource.RLIMIT_AS, (limit, limit))
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    signal.signal(signal.SIGALRM, signal.SIG_DFL)
    signal.alarm(seconds)


def load_in_a_fence(
    fork: Callable[..., Forked], forger: Forger, allowed: int = MAX_LOAD_BYTES + MEMORY_SLACK
) -> dict[str, Any]:
    """The result of loading the entry in a separate process, whose peak memory is checked."""

    def work(report: Report) -> None:
        forger.store.keys()
        fence(seconds=30)
        before = forget_peak()
        outcomes = spring(forger)
        outcomes["memory"] = memory("VmHWM") - before
        report(json.dumps(outcomes))

    child = fork(work)
    lines = child.lines()
    assert child.exit_code == 0, f"the process ended with {child.exit_code} (negative: a signal; -14: it hung)"
    outcomes = json.loads(lines[-1])
    taken = outcomes.pop("memory")
    assert taken < allowed, f"{taken / 1e6:.0f} MB were taken, {allowed / 1e6:.0f} allowed"
    return outcomes


@pytest.fixture(params=ROLLOUTS)
def forger(request: pytest.FixtureRequest, tmp_path: Path) -> Forger:
    return Forger(tmp_path / "run", *ROLLOUTS[request.param]())


@pytest.fixture
def padded(tmp_path: Path) -> Forger:
    return Forger(tmp_path / "run", *padded_rollout())


def test_the_forger_forges_well(forger: Forger, fork: Callable[..., Forked]) -> None:
    """Otherwise every other test here would prove nothing: a rewritten entry without a trap loads as before."""
    before = forger.store.get(K)
    forger.write()
    assert_same_batch(before, forger.store.get(K))
    assert set(load_in_a_fence(fork, forger).values()) == {"loaded"}


def refused(outcomes: dict[str, Any]) -> bool:
    return outcomes["get"] != "loaded"


@pytest.mark.parametrize("size", [10**12, 2**39, 2**31, 2**63, -1, 10**30])
def test_a_shape_that_cannot_be_held_is_refused_before_anything_is_allocated(
    padded: Forger, fork: Callable[..., Forked], size: int
) -> None:
    for name in ("responses", "attention_mask", "input_ids", "half", "complex", "word", "grid", "acc"):
        description, item = padded.numbers(name)
        item["shape"] = [size]
        padded.write(description)
        assert refused(load_in_a_fence(fork, padded)), name


@pytest.mark.parametrize("width", [10**12, 2**31, 2**63, -1, 1, "6", None, 1e9])
def test_padding_of_any_width_is_checked(padded: Forger, fork: Callable[..., Forked], width: Any) -> None:
    for index in (0, 1):
        description = copy.deepcopy(padded.description)
        description["output"]["spans"][index] = width
        padded.write(description)
        load_in_a_fence(fork, padded)
        # All columns that are as wide as the padding claim the new width too.
        for item in description["output"]["numbers"]:
            if isinstance(width, int):
                item["shape"] = [width if size in (6, 10) else width + 16 for size in item["shape"]]
        padded.write(description)
        load_in_a_fence(fork, padded)


@pytest.mark.parametrize("width", [2**28, 2**31, 2**39])
def test_a_batch_without_rows_takes_no_memory_however_wide_it_claims_to_be(
    tmp_path: Path, fork: Callable[..., Forked], width: int
) -> None:
    forger = Forger(tmp_path / "run", *ROLLOUTS["padded"]())
    description = copy.deepcopy(forger.description)
    description["rows"] = 0
    for side in ("output", "input"):
        if description[side]["spans"] is not None:
            description[side]["spans"] = [width, width]
        for item in description[side]["numbers"]:
            # As wide as the prompts, the responses or both.
            item["shape"] = [{6: width, 10: width, 16: 2 * width}.get(size, size) for size in item["shape"]]
        for item in description[side]["objects"]:
            item["shape"] = [width] if item["shape"] else []
    forger.write(description, forger.table.slice(0, 0))
    load_in_a_fence(fork, forger)


@pytest.mark.parametrize("rows", [10**12, 2**63, -1, 0, 7, "8", None, True])
def test_a_claimed_number_of_rows_is_compared(forger: Forger, fork: Callable[..., Forked], rows: Any) -> None:
    description = copy.deepcopy(forger.description)
    description["rows"] = rows
    forger.write(description)
    assert refused(load_in_a_fence(fork, forger))
    forger.write()
    forger.commit(forger.data, rows=rows)
    assert refused(load_in_a_fence(fork, forger))


@pytest.mark.parametrize("dtype", ["<U100000000", "|S2000000000", "<U0", "|O", "|V8", "<U-1", "O", "f8", 5, None])
def test_a_text_array_of_any_width_is_checked(padded: Forger, fork: Callable[..., Forked], dtype: Any) -> None:
    description, item = padded.numbers("word")
    item["dtype"] = dtype
    padded.write(description)
    load_in_a_fence(fork, padded)


def test_a_column_that_is_claimed_a_thousand_times_does_not_take_a_thousand_times_the_memory(
    tmp_path: Path, fork: Callable[..., Forked]
) -> None:
    """Ten megabytes in the file, and a description that references them repeatedly."""
    halves = torch.tensor([0, 600_000, 1_200_000])
    lists = {
        name: torch.nested.nested_tensor_from_jagged(torch.zeros(1_200_000), halves)
        for name in ("prompts", "responses")
    }
    batch = TensorDict({**lists, "dense": torch.zeros(2, 600_000)}, batch_size=[2])
    forger = Forger(tmp_path / "run", batch)
    jagged_item = forger.numbers("prompts")[1]
    items = {
        "dense": forger.numbers("dense")[1],
        "jagged": jagged_item,
        "jagged positions": {**jagged_item, "form": "jagged_positions"},
        "jagged concat": {**jagged_item, "form": "jagged_concat"},
        "same": {**forger.numbers("dense")[1], "form": "same", "of": "dense", "shape": []},
    }
    for name, item in items.items():
        for number_of_paths in (1, 1000):
            description = copy.deepcopy(forger.description)
            for index in range(1000):
                description["output"]["numbers"].append({**item, "path": [f"copy{index % number_of_paths}"]})
            forger.write(description)
            assert load_in_a_fence(fork, forger)["get"] in ("EntryTooLargeError", "CorruptEntryError"), name


@pytest.mark.parametrize("of", ["x", "nowhere", "prompts", "response_mask", "", "copy0", None, 3])
def test_columns_that_stand_for_one_another_in_a_circle_are_refused(
    forger: Forger, fork: Callable[..., Forked], of: Any
) -> None:
    description, item = forger.numbers("prompts")
    forged = {**item, "form": "same", "of": of}
    description["output"]["numbers"] += [
        {**forged, "path": ["x"]},
        {**forged, "path": ["copy0"], "of": "copy1"},
        {**forged, "path": ["copy1"], "of": "copy0"},
    ]
    forger.write(description)
    assert refused(load_in_a_fence(fork, forger))


@pytest.mark.parametrize("name", ["prompts", "responses"])
def test_prompts_made_of_themselves_are_refused(padded: Forger, fork: Callable[..., Forked], name: str) -> None:
    """Columns are decoded on several threads, and one that waits for itself would wait forever."""
    description, item = padded.numbers(name)
    item["form"] = "concat"
    padded.write(description)
    assert refused(load_in_a_fence(fork, padded))


def test_a_long_text_repeated_in_many_rows_is_refused(tmp_path: Path, fork: Callable[..., Forked]) -> None:
    """A dictionary page stores a string once for all rows: forty kilobytes in the file, twenty gigabytes in memory."""
    rows = 20_000
    forger = Forger(tmp_path / "run", TensorDict({"text": ["x"] * rows, "y": torch.arange(rows)}, batch_size=[rows]))
    table = forger.table
    (item,) = forger.description["output"]["objects"]
    texts = pa.DictionaryArray.from_arrays(pa.array(np.zeros(rows, np.int32)), pa.array(["x" * 1_000_000]))
    index = table.schema.names.index(item["column"])
    forged = table.set_column(index, item["column"], texts.cast(pa.dictionary(pa.int32(), pa.string())))
    for options in ({}, {"use_dictionary": [item["column"]]}):
        forger.write(table=forged, **options)
        assert forger.data_file.stat().st_size < 1_000_000
        assert refused(load_in_a_fence(fork, forger))


def test_texts_that_no_row_contains_are_not_decoded(tmp_path: Path, fork: Callable[..., Forked]) -> None:
    """Each short text of a dictionary page takes fifty bytes as a Python object, whether a row refers to it or not."""
    forger = Forger(tmp_path / "run", TensorDict({"text": ["x"] * 8, "y": torch.arange(8)}, batch_size=[8]))
    (item,) = forger.description["output"]["objects"]
    forger.store = RolloutStore(tmp_path / "run", background=False, max_load_bytes=40_000_000)
    dictionary = pa.array(np.arange(10**6, 4 * 10**6)).cast(pa.string())
    texts = pa.DictionaryArray.from_arrays(pa.array(np.zeros(8, np.int32)), dictionary)
    table = forger.table.set_column(forger.table.schema.names.index(item["column"]), item["column"], texts)
    forger.write(table=table, dictionary_pagesize_limit=1 << 30)
    outcomes = load_in_a_fence(fork, forger, allowed=150_000_000)
    assert outcomes["get"] == outcomes["verify"] == "EntryTooLargeError"


@pytest.mark.parametrize("footer", ["that tells", "that does not tell"])
def test_bulk_data_repeated_in_many_rows_is_refused(tmp_path: Path, fork: Callable[..., Forked], footer: str) -> None:
    """The same for bulk data: sixty kilobytes in a dictionary page stand for more than a gigabyte of copies."""
    rows, size = 20_000, 60_000
    cells = [b"x", *[None] * (rows - 1)]
    forger = Forger(tmp_path / "run", TensorDict({"raw": cells, "y": torch.arange(rows)}, batch_size=[rows]))
    index = forger.table.schema.names.index(BLOBS)
    blobs = pa.DictionaryArray.from_arrays(pa.array(np.zeros(rows, np.int32)), pa.array([b"x" * size]))
    table = forger.table.set_column(index, pa.field(BLOBS, blobs.type, nullable=False), blobs)
    kind = forger.table.schema.field(BLOB_SIZES)
    sizes = pa.array([[size]] * rows, kind.type)
    table = table.set_column(table.schema.names.index(BLOB_SIZES), kind, sizes)
    forger.write(table=table, use_dictionary=[BLOBS])
    data = forger.data_file.read_bytes()
    assert len(data) < 1_000_000
    if footer == "that does not tell":
        column = pq.ParquetFile(io.BytesIO(data)).metadata.row_group(0).column(index)
        start = len(data) - 8 - int.from_bytes(data[-8:-4], "little")
        # Fields of Thrift's compact protocol: where the data pages begin, then where the dictionary page does.
        told = b"\x26" + varint(column.data_page_offset) + b"\x26" + varint(column.dictionary_page_offset)
        untold = b"\x26" + varint(column.dictionary_page_offset) + b"\x26" + varint(0)
        assert told in data[start:]
        changed = data[start:-8].replace(told, untold)
        forger.commit(data[:start] + changed + len(changed).to_bytes(4, "little") + b"PAR1")
    outcomes = load_in_a_fence(fork, forger)
    assert outcomes["get"] == "CorruptEntryError", outcomes


@pytest.mark.parametrize("column", [BLOBS, "responses", "word"])
@pytest.mark.parametrize("nested", [False, True])
def test_a_dictionary_of_bulk_data_is_refused_before_it_is_expanded(
    tmp_path: Path, fork: Callable[..., Forked], column: str, nested: bool
) -> None:
    """In any column: a few bytes in the file, gigabytes once Arrow has copied them for every row."""
    forger = Forger(tmp_path / "run", *padded_rollout())
    rows, size = forger.table.num_rows, 40_000_000
    kind = pa.binary() if column == BLOBS or nested else pa.string()
    values: Any = pa.DictionaryArray.from_arrays(pa.array(np.zeros(8 * rows, np.int32)), pa.array(["x" * size], kind))
    if nested:
        values = pa.ListArray.from_arrays(pa.array(np.arange(rows + 1, dtype=np.int32) * 8), values)
    else:
        values = values[:rows]
    index = forger.table.schema.names.index(column)
    leaf = f"{column}.list.element" if nested else column
    forger.write(table=forger.table.set_column(index, column, values), use_dictionary=[leaf])
    assert forger.data_file.stat().st_size < 1_000_000
    outcomes = load_in_a_fence(fork, forger, allowed=150_000_000)
    assert outcomes["get"] in ("CorruptEntryError", "EntryTooLargeError")


@pytest.mark.parametrize("rollout", ROLLOUTS)
@pytest.mark.parametrize("width", [2**28, 2**39])
def test_a_part_without_rows_takes_no_memory_however_wide_its_keys_claim_to_be(
    tmp_path: Path, fork: Callable[..., Forked], rollout: str, width: int
) -> None:
    """Each key is checked when the batch is loaded and when its columns are read."""
    forger = Forger(tmp_path / "run", *ROLLOUTS[rollout]())
    empty = forger.table.slice(0, 0)

    def work(report: Report) -> None:
        for side in ("output", "input"):
            for kind in ("numbers", "objects"):
                for number, item in enumerate(forger.description[side][kind]):
                    description = copy.deepcopy(forger.description)
                    description["rows"] = 0
                    forged = description[side][kind][number]
                    forged["shape"] = [width] if len(item["shape"]) < 2 else [width, *item["shape"][1:]]
                    if item.get("window") or item.get("rule"):
                        description[side]["spans"] = [width, 0] if item.get("window") != "response" else [0, width]
                    forger.write(description, empty)
                    spring(forger)
                    look(forger.store.path, item["path"][0], Side(side))
        report(str(memory("VmHWM") - before))

    before = forget_peak()
    child = fork(work)
    lines = child.lines()
    assert child.exit_code == 0
    assert int(lines[-1]) < MEMORY_SLACK


def look(path: str, name: str, side: Side) -> None:
    """Read a key through every public method."""
    calls: list[Callable[[EntryReader], Any]] = [
        lambda entry: entry.cells(name, side=side),
        lambda entry: entry.tokens(name),
        lambda entry: entry.response_width,
        lambda entry: entry.simple_keys(),
    ]
    for call in calls:
        try:
            call(StoreReader.at(path).entry(K))
        except StoreError:
            pass


@pytest.mark.parametrize("load", ["get", "inputs", "verify"])
def test_an_entry_that_cannot_be_decoded_is_named_with_its_file(forger: Forger, load: str) -> None:
    side = "input" if load == "inputs" else "output"
    for change in ({"numbers": [{}]}, {"objects": [{"path": ["x"]}]}, {"meta": {}}, {"kind": "Pickle"}, {"order": [3]}):
        forger.write({**forger.description, side: {**forger.description[side], **change}})
        with pytest.raises(UnreadableEntryError) as found:
            getattr(forger.store, load)(K)
        text = str(found.value)
        assert text.count("The entry of step 1, generation batch 0 cannot be used") == 1, text
        assert text.count(str(forger.data_file)) == 1, text


def varint(number: int) -> bytes:
    """As Thrift's compact protocol writes an integer: zigzag, seven bits per byte."""
    number = (number << 1) ^ (number >> 63)
    out = bytearray()
    while number >= 0x80:
        out.append(number & 0x7F | 0x80)
        number >>= 7
    return bytes([*out, number])


def test_a_footer_that_lies_about_sizes_is_not_believed(tmp_path: Path, fork: Callable[..., Forked]) -> None:
    """The pages expand to gigabytes of zeros; the footer says that they are small."""
    values = 40_000_000
    forger = Forger(tmp_path / "run", TensorDict({"x": torch.zeros(1, 4, dtype=torch.int64)}, batch_size=[1]))
    forger.store = RolloutStore(tmp_path / "run", background=False, max_load_bytes=20_000_000)
    item = forger.numbers("x")[1]
    kind = pa.list_(pa.field("element", pa.type_for_alias(item["element"]["stored"]), nullable=False))
    zeros = pa.array(np.zeros(values, kind.value_type.to_pandas_dtype()))
    wide = pa.ListArray.from_arrays(pa.array([0, values], pa.int32()), zeros, type=kind)
    index = forger.table.schema.names.index(item["column"])
    table = forger.table.set_column(index, pa.field(item["column"], kind, nullable=False), wide)
    nested = {"ragged_idx": 1, "laid_out": 1, "group": 0, "bounds": False, "shape": []}
    for change in ({}, {"form": "jagged", **nested}):
        description = copy.deepcopy(forger.description)
        description["output"]["numbers"][0] |= change
        forger.write(description, table, use_dictionary=False)
        data = forger.data_file.read_bytes()
        assert len(data) < 100_000
        column = pq.ParquetFile(io.BytesIO(data)).metadata.row_group(0).column(index)
        start = len(data) - 8 - int.from_bytes(data[-8:-4], "little")
        footer = data[start:-8]
        for size in (column.total_uncompressed_size, column.num_values):
            assert varint(size) in footer
            footer = footer.replace(varint(size), varint(4))
        forger.commit(data[:start] + footer + len(footer).to_bytes(4, "little") + b"PAR1")
        assert refused(load_in_a_fence(fork, forger, allowed=200_000_000)), change


def test_a_footer_that_contradicts_its_own_schema_does_not_crash_the_process(
    forger: Forger, fork: Callable[..., Forked]
) -> None:
    """The schema says that a column is never null, the statistics count nulls: pyarrow throws an uncaught exception."""
    start = len(forger.data) - 8 - int.from_bytes(forger.data[-8:-4], "little")
    forged = 0
    for name in forger.table.schema.names:
        # A field of a schema in Thrift's compact protocol: repetition (1: optional, 0: required), then the name.
        end = b"\x18" + bytes([len(name)]) + name.encode()
        footer = forger.data[start:].replace(b"\x25\x02" + end, b"\x25\x00" + end)
        if footer != forger.data[start:]:
            forged += 1
            forger.commit(forger.data[:start] + footer)
            load_in_a_fence(fork, forger)
    assert forged >= 2


DEEP = b"[" * 200_000 + b"]" * 200_000


@pytest.mark.parametrize(
    "text",
    [DEEP, b"", b"null", b"[]", b"{}", b'"x"', b"NaN", b"\xff\xfe", b"1" * 100_000, b'{"format_version": 2}'],
    ids=lambda text: text[:24].decode("latin-1"),
)
def test_a_description_that_is_none_is_refused(forger: Forger, fork: Callable[..., Forked], text: bytes) -> None:
    forger.write(text)
    assert refused(load_in_a_fence(fork, forger))


@pytest.mark.parametrize(
    "cell",
    [
        DEEP.decode(),
        '{"$type":"tuple","items":' * 3000 + "0" + "}" * 3000,
        '{"$type":"tensor","dtype":"float32","shape":[1000000000000],"blob":0}',
        '{"$type":"tensor","dtype":"float32","shape":[0,1000000000000],"blob":0}',
        '{"$type":"ndarray","dtype":"<U1000000000","shape":[1],"blob":0}',
        '{"$type":"ndarray","dtype":"O","shape":[1000000000000],"items":[]}',
        '{"$type":"ndarray","dtype":"|V8","shape":[1],"blob":0}',
        '{"$type":"numpy","dtype":"O","hex":"0000000000000000"}',
        '{"$type":"image","mode":"RGB","size":[100000,100000],"blob":0}',
        '{"$type":"image","mode":"__class__","size":[1,1],"blob":0}',
        '{"$type":"bytes","blob":-1}',
        '{"$type":"bytes","blob":1000000000000}',
        '{"$type":"int","hex":"__import__"}',
        '{"$type":"__reduce__","items":[]}',
        '{"$type":["tuple"],"items":[]}',
        '{"$type":"dict","items":[[{"$type":"dict","items":[]},1]]}',
        '{"$type":"str","hex":"zz"}',
        "9" * 50_000,
        "",
        None,
    ],
    ids=lambda cell: str(cell)[:60],
)
def test_a_cell_that_is_a_trap_is_refused(padded: Forger, fork: Callable[..., Forked], cell: str | None) -> None:
    column = padded.numbers("multi_modal_inputs")[1]["column"]
    index = padded.table.schema.names.index(column)
    texts = padded.table.column(column).to_pylist()
    texts[2] = cell
    padded.write(table=padded.table.set_column(index, column, pa.array(texts, pa.string())))
    assert refused(load_in_a_fence(fork, padded))


@pytest.mark.parametrize("record", [DEEP, b"null", b"[]", b'"x"', b"1" * 100_000, b"{" * 100, b"\xff" * 1000])
def test_a_record_that_is_none_is_refused(padded: Forger, fork: Callable[..., Forked], record: bytes) -> None:
    padded.record_file.write_bytes(record)
    outcomes = load_in_a_fence(fork, padded)
    assert set(outcomes.values()) == {"CorruptEntryError"}


@pytest.mark.parametrize(
    "changes",
    [
        {"rows": 10**12},
        {"part": {"rows": 10**12}, "rows": 10**12},
        {"part": {"bytes": 10**12}},
        {"part": {"bytes": "many"}},
        {"part": {"bytes": None}},
        {"part": {"digest": 5}},
        {"part": {"digest": "../../../etc/passwd"}},
        {"part": {"file": "../../../etc/passwd"}},
        {"parts": []},
        {"parts": "none"},
        {"content": None},
        {"info": [1]},
        {"created_at": 3},
        {"mean_score": "high"},
        {"key": RolloutKey(10**30, 10**30)},
    ],
    ids=str,
)
def test_a_record_with_a_right_checksum_and_wrong_fields_does_no_harm(
    padded: Forger, fork: Callable[..., Forked], changes: dict[str, Any]
) -> None:
    padded.commit(padded.data, **changes)
    load_in_a_fence(fork, padded)
    with pytest.raises(StoreError):
        padded.store.put(K, rollout_output(4, seed=5))


def test_a_record_of_a_hundred_megabytes_is_not_read(padded: Forger, fork: Callable[..., Forked]) -> None:
    with padded.record_file.open("ab") as file:
        file.truncate(100_000_000)
    outcomes = load_in_a_fence(fork, padded)
    assert set(outcomes.values()) == {"CorruptEntryError"}


@pytest.mark.parametrize("forged", [False, True], ids=["grown by accident", "with a record that agrees"])
def test_a_sparse_file_of_a_terabyte_is_not_read(padded: Forger, fork: Callable[..., Forked], forged: bool) -> None:
    """Loading, recording, pruning and removing encounter the same file; none of them reads it."""
    with padded.data_file.open("ab") as file:
        file.truncate(1 << 40)
    if forged:
        (part,) = padded.record.parts
        padded.record_file.write_bytes(record_bytes(replace(padded.record, parts=(replace(part, bytes=1 << 40),))))
    outcomes = load_in_a_fence(fork, padded)
    assert outcomes["get"] == ("EntryTooLargeError" if forged else "CorruptEntryError")

    def work(report: Report) -> None:
        fence(30)
        before = forget_peak()
        store = RolloutStore(padded.store.path, background=False)
        store.prune(older_than_s=0)
        with pytest.raises(StoreError):
            store.put(K, rollout_output(4))
        if forged:
            store.delete(K)
        else:
            store.set_aside(K)
        store.put(K, rollout_output(4))
        report(str(memory("VmHWM") - before))

    child = fork(work)
    lines = child.lines()
    assert child.exit_code == 0
    assert int(lines[-1]) < MAX_LOAD_BYTES + MEMORY_SLACK
    assert_same_batch(rollout_output(4), padded.store.get(K))


def test_an_entry_of_a_later_format_asks_for_an_upgrade(padded: Forger) -> None:
    padded.write({**padded.description, "format_version": 3})
    with pytest.raises(NewerFormatError, match="Upgrade verl-rollout-skip"):
        padded.store.get(K)
    padded.write()
    fields = json.loads(padded.record_file.read_bytes())
    del fields["checksum"]
    fields = {**fields, "format_version": 3, "something_new": [1]}
    checksum = xxhash.xxh3_128(json.dumps(fields, indent=2).encode()).hexdigest()
    padded.record_file.write_text(json.dumps({**fields, "checksum": checksum}, indent=2) + "\n")
    with pytest.raises(NewerFormatError, match="Upgrade verl-rollout-skip"):
        padded.store.get(K)
    for version in (0, -1, "1", None, True, 1.0):
        padded.write({**padded.description, "format_version": version})
        with pytest.raises(UnreadableEntryError):
            padded.store.get(K)


@pytest.fixture
def canary(tmp_path: Path) -> Path:
    """Things outside of the run folder: a file, and a run folder with a good entry."""
    outside = tmp_path / "outside"
    outside.mkdir()
    (outside / "secret").write_text("not yours")
    with RolloutStore(outside / "run") as store:
        store.put(K, rollout_output(4, seed=77))
        store.put(RolloutKey(1, 1), rollout_output(4, seed=78))
    return outside


def contents(folder: Path) -> dict[str, tuple[bytes, int]]:
    return {
        str(path): (path.read_bytes(), path.stat().st_mtime_ns) for path in sorted(folder.rglob("*")) if path.is_file()
    }


@pytest.fixture
def run(tmp_path: Path) -> Path:
    """A run folder with two good entries, one in a step without a trap."""
    with RolloutStore(tmp_path / "run") as store:
        store.put(RolloutKey(1), rollout_output(4, seed=1))
        store.put(RolloutKey(5), rollout_output(4, seed=5))
    return tmp_path / "run"


def link_the_step_folder(run: Path, outside: Path) -> None:
    shutil.rmtree(run / "step_000001")
    (run / "step_000001").symlink_to(outside / "run" / "step_000001")


def link_the_parquet_file(run: Path, outside: Path) -> None:
    file = part_file(run)
    file.unlink()
    file.symlink_to(part_file(outside / "run"))


def link_the_record(run: Path, outside: Path) -> None:
    file = record_file(run)
    file.unlink()
    file.symlink_to(record_file(outside / "run"))


def link_both(run: Path, outside: Path) -> None:
    link_the_parquet_file(run, outside)
    link_the_record(run, outside)


def dangling_link(run: Path, outside: Path) -> None:
    file = part_file(run)
    file.unlink()
    file.symlink_to(outside / "to be made")


def pipe_for_the_parquet_file(run: Path, outside: Path) -> None:
    file = part_file(run)
    file.unlink()
    os.mkfifo(file)


def pipe_for_the_record(run: Path, outside: Path) -> None:
    file = record_file(run)
    file.unlink()
    os.mkfifo(file)


def folder_for_the_parquet_file(run: Path, outside: Path) -> None:
    file = part_file(run)
    file.unlink()
    file.mkdir()


def folder_for_the_record(run: Path, outside: Path) -> None:
    file = record_file(run)
    file.unlink()
    file.mkdir()


def file_for_the_step_folder(run: Path, outside: Path) -> None:
    shutil.rmtree(run / "step_000001")
    (run / "step_000001").write_text("a file")


def device_for_the_parquet_file(run: Path, outside: Path) -> None:
    file = part_file(run)
    file.unlink()
    try:
        os.mknod(file, 0o600 | 0o020000, os.makedev(1, 5))  # /dev/zero, which never ends
    except PermissionError:
        os.mkfifo(file)


TRAPS = [
    link_the_step_folder,
    link_the_parquet_file,
    link_the_record,
    link_both,
    dangling_link,
    pipe_for_the_parquet_file,
    pipe_for_the_record,
    folder_for_the_parquet_file,
    folder_for_the_record,
    file_for_the_step_folder,
    device_for_the_parquet_file,
]


@pytest.mark.parametrize("trap", TRAPS, ids=lambda trap: trap.__name__)
def test_nothing_outside_the_run_folder_is_read_or_written(
    run: Path, canary: Path, fork: Callable[..., Forked], trap: Callable[[Path, Path], None]
) -> None:
    """Links, pipes, devices and folders instead of files: named errors, no blocking, and nothing outside is touched."""
    trap(run, canary)
    before = contents(canary)

    def work(report: Report) -> None:
        fence(20)
        files = len(os.listdir("/proc/self/fd"))
        store = RolloutStore(run, background=False)
        for load in (store.get, store.inputs, store.verify):
            with pytest.raises(StoreError):
                load(K)
        calls: list[Callable[[], Any]] = [
            lambda: store.record(K),
            lambda: K in store,
            lambda: store.prune(older_than_s=0),
            lambda: store.put(K, rollout_output(4, seed=2)),
            lambda: store.put(RolloutKey(1, 1), rollout_output(4, seed=2)),
            lambda: store.put(K, rollout_output(4, seed=3), replace=True),
            lambda: store.delete(K),
            lambda: store.set_aside(K),
        ]
        for call in calls:
            try:
                call()
            except StoreError:
                pass
        assert RolloutKey(5) in list(store)
        assert_same_batch(rollout_output(4, seed=5), store.get(RolloutKey(5)))
        assert len(os.listdir("/proc/self/fd")) == files, "an open file was left behind"
        report("done")

    child = fork(work)
    assert child.lines() == ["done"], f"it ended with {child.exit_code} (-14: it hung)"
    assert child.exit_code == 0
    assert contents(canary) == before
    assert not (canary / "to be made").exists()


@pytest.mark.parametrize("where", ["../../outside/run/step_000001/{}", "{outside}/run/step_000001/{}", "../step_1/{}"])
def test_a_part_that_a_record_names_cannot_lie_outside_its_folder(run: Path, canary: Path, where: str) -> None:
    """The checksum of the record, and the digest and size of the file outside, are all correct."""
    store = RolloutStore(run, background=False)
    foreign, record = RolloutStore(canary / "run").record(K), store.record(K)
    (part,) = foreign.parts
    name = where.format(part.file, outside=canary)
    assert (run / "step_000001" / name).exists() or where.startswith("../step")
    forged = replace(record, rows=part.rows, parts=(replace(part, file=name),))
    record_file(run).write_bytes(record_bytes(forged))
    before = contents(canary)
    for call in (store.get, store.verify, store.record):
        with pytest.raises(CorruptEntryError, match="not the name of a part of step 1"):
            call(K)
    store.set_aside(K)
    store.put(K, rollout_output(4, seed=2))
    store.delete(K)
    store.prune(older_than_s=-1)
    assert contents(canary) == before


@pytest.mark.parametrize("trap", [link_the_step_folder, link_both])
def test_a_good_entry_behind_a_link_is_not_loaded_and_the_message_says_why(
    run: Path, canary: Path, trap: Callable[[Path, Path], None]
) -> None:
    trap(run, canary)
    with pytest.raises(UnsafePathError, match=r"symbolic link .* not allowed in the store's folder\."):
        RolloutStore(run).get(K)


def test_a_run_folder_that_is_itself_a_link_is_the_users_choice(run: Path, tmp_path: Path) -> None:
    (tmp_path / "latest").symlink_to(run)
    store = RolloutStore(tmp_path / "latest", background=False)
    assert_same_batch(rollout_output(4, seed=1), store.get(K))
    store.put(RolloutKey(9), rollout_output(4))
    assert RolloutKey(9) in RolloutStore(run)


def test_strange_names_in_a_run_folder_are_ignored(run: Path, canary: Path) -> None:
    store = RolloutStore(run, background=False)
    before, keys = contents(canary), store.keys()
    for name in ("step_1", "step_0000001", "step_-00001", "step_00000١", "step_000001 ", "STEP_000002", "..x", "a\nb"):
        (run / name).mkdir()
        (run / name / "gen_000.json").write_bytes(b"x")
        (run / name / ".tmp-x").write_bytes(b"x")
    for name in (
        "gen_1.json",
        "gen_0000.json",
        "gen_00٠.json",
        "gen_000.json.bak",
        "gen_000.parquet",
        f"gen_001.{'0' * 31}.parquet",
        "\n",
        "gen_001.JSON",
    ):
        (run / "step_000001" / name).write_bytes(b"x")
    for name in (".gen_000.json", f".gen_000.{'0' * 32}.parquet", ".tmp-"):
        (run / "step_000001" / name).write_bytes(b"x")
    (run / "manifest.json").write_text("{}")
    assert store.keys() == keys
    assert len(store) == 2
    store.prune(older_than_s=0)
    assert (run / "step_1" / ".tmp-x").exists(), "prune went into a folder that is not a step"
    assert (run / "manifest.json").exists()
    assert contents(canary) == before
    assert_same_batch(rollout_output(4, seed=1), store.get(K))


WORDS = [
    "prompts", "responses", "response_mask", "attention_mask", "", ".", "..", "../../outside", "/etc/passwd", "\x00",
    "dense", "ragged", "mask", "positions", "concat", "jagged", "jagged_positions", "jagged_concat", "rows", "same",
    "response", "prompt", "full", "counted", "continued", "torch", "numpy", "int64", "float32", "bfloat16", "bool",
    "complex128", "<i8", "<U9", "<M8[s]", "|O", "json", "text", "int", "DataProto", "TensorDict", "cpu", "cuda", "meta",
    "skip__prompt_length", "x" * 5000,
]  # fmt: skip
NUMBERS = [0, 1, 2, 3, -1, 7, 8, 16, 100, 2**15, 2**31 - 1, 2**31, 2**39, 2**40, 2**48, 2**63, -(2**63), 10**12, 10**30]
OTHERS: list[Any] = [
    None,
    True,
    False,
    1.5,
    1e308,
    [],
    {},
    [[]],
    [[], []],
    ["prompts"],
    [10**12],
    [2**20] * 4,
    {"a": 1},
]


def strange_value(chance: random.Random) -> Any:
    value: Any = chance.choice([chance.choice(WORDS), chance.choice(NUMBERS), copy.deepcopy(chance.choice(OTHERS))])
    for _ in range(chance.choice([0, 0, 0, 0, 1, 2, 150])):
        value = [value]
    return value


def places(tree: Any) -> list[tuple[Any, Any]]:
    """Every place in a JSON tree: its container and its key."""
    found: list[tuple[Any, Any]] = []
    stack = [tree]
    while stack:
        node = stack.pop()
        items = node.items() if isinstance(node, dict) else enumerate(node) if isinstance(node, list) else ()
        for key, value in items:
            found.append((node, key))
            stack.append(value)
    return found


def mutate_description(description: Any, chance: random.Random) -> Any:
    """Change a description in a way its grammar does not allow."""
    for _ in range(chance.choice([1, 1, 1, 2, 3, 8])):
        everywhere = places(description)
        node, key = chance.choice(everywhere)
        action = chance.randrange(7)
        if action <= 2:
            node[key] = strange_value(chance)
        elif action == 3:
            del node[key]
        elif action == 4 and isinstance(node, list):
            node[key:key] = [copy.deepcopy(node[key]) for _ in range(chance.choice([1, 1, 2, 50]))]
        elif action == 5:
            other, place = chance.choice(everywhere)
            try:
                node[key], other[place] = copy.deepcopy(other[place]), copy.deepcopy(node[key])
            except (KeyError, IndexError):
                pass
        elif isinstance(node, dict):
            node |= {
                "form": chance.choice(WORDS[10:20]),
                "window": chance.choice(["response", "full", "prompt"]),
                "rule": chance.choice(["counted", "continued"]),
                "axis": chance.randrange(3),
                "pad": chance.choice(NUMBERS),
                "ragged_idx": chance.randrange(4),
                "laid_out": chance.randrange(4),
                "group": chance.randrange(3),
                "bounds": chance.random() < 0.5,
                "of": chance.choice(WORDS),
                "shape": chance.choice([[], [6], [10], [16], [2, 3], [0], [2**20]]),
            }
    return description


def mutate_column(column: pa.ChunkedArray, chance: random.Random) -> Any:
    """Replace a column with another: other values, lengths, nulls or another type."""
    kind, rows = column.type, len(column)
    action = chance.randrange(6)
    if action == 0:
        return pa.nulls(rows, kind)
    if action == 1:
        others = [pa.string(), pa.int8(), pa.float64(), pa.binary(), pa.list_(pa.int64()), pa.list_(pa.string())]
        other = chance.choice(others)
        return pa.array([None] * rows, other) if chance.random() < 0.3 else pa.array([default_of(other)] * rows, other)
    values = column.to_pylist()
    if action == 2:
        chance.shuffle(values)
    elif action == 3 and pa.types.is_list(kind):
        values = [(value or []) * chance.choice([0, 1, 2, 3]) for value in values]
    elif pa.types.is_list(kind):
        values = [[extreme(kind.value_type, chance) for _ in value or []] for value in values]
    else:
        values = [extreme(kind, chance) if chance.random() < 0.5 else value for value in values]
    return pa.array(values, kind)


def default_of(kind: pa.DataType) -> Any:
    if pa.types.is_list(kind):
        return [default_of(kind.value_type)]
    return {pa.string(): "x", pa.binary(): b"x"}.get(kind, 1)


def extreme(kind: pa.DataType, chance: random.Random) -> Any:
    if pa.types.is_boolean(kind):
        return chance.random() < 0.5
    if pa.types.is_integer(kind):
        bits, signed = kind.bit_width, pa.types.is_signed_integer(kind)
        low, high = (-(1 << bits - 1), (1 << bits - 1) - 1) if signed else (0, (1 << bits) - 1)
        return chance.choice([low, high, 0, 1, max(low, -1)])
    if pa.types.is_floating(kind):
        return chance.choice([float("inf"), float("nan"), -0.0, 1e30])
    if pa.types.is_binary(kind):
        return chance.randbytes(chance.choice([0, 1, 100]))
    tag = {"$type": chance.choice(["tuple", "dict", "bytes", "tensor", "ndarray", "image", "numpy", "int", "str", "x"])}
    for name in ("items", "blob", "dtype", "shape", "hex", "mode", "size"):
        if chance.random() < 0.6:
            tag[name] = strange_value(chance)
    return json.dumps(tag)


def mutate_table(table: pa.Table, chance: random.Random) -> pa.Table:
    for _ in range(chance.choice([1, 1, 2, 4])):
        index = chance.randrange(table.num_columns)
        name = table.schema.names[index]
        action = chance.randrange(8)
        if action == 0:
            table = table.remove_column(index)
        elif action == 1:
            table = table.rename_columns(chance.sample(table.schema.names, table.num_columns))
        elif action == 2:
            table = table.append_column(name, table.column(index))
        else:
            table = table.set_column(index, name, mutate_column(table.column(index), chance))
    return table


def mutate(forger: Forger, chance: random.Random) -> str:
    """Create one trap and return its kind."""
    action = chance.randrange(10)
    if action < 5:
        forger.write(mutate_description(copy.deepcopy(forger.description), chance))
        return "description"
    options = {
        "compression": chance.choice(["none", "snappy", "zstd"]),
        "write_page_checksum": chance.random() < 0.5,
        "data_page_version": chance.choice(["1.0", "2.0"]),
        "use_dictionary": chance.random() < 0.5,
        "data_page_size": chance.choice([1, 64, 1 << 20]),
    }
    if action < 7:
        forger.write(table=mutate_table(forger.table, chance), **options)
        return "columns"
    if action == 7:
        description = mutate_description(copy.deepcopy(forger.description), chance)
        forger.write(description, mutate_table(forger.table, chance), **options)
        return "description and columns"
    if action == 8:
        forger.write(**options)
    data = bytearray(forger.data_file.read_bytes() if action == 8 else forger.data)
    footer = len(data) - 8 - int.from_bytes(data[-8:-4], "little")
    part = data[footer:-8] if chance.random() < 0.5 else data
    for _ in range(chance.choice([1, 1, 2, 5])):
        if part:
            chance.choice(DAMAGES)(part, chance)
    if part is not data:
        data = data[:footer] + part + len(part).to_bytes(4, "little") + b"PAR1"
    forger.commit(bytes(data))
    return "bytes"


EVENTS = {
    *("exec", "compile", "code.__new__", "import", "pickle.find_class", "ctypes.dlopen"),
    *("subprocess.Popen", "os.system", "os.exec", "os.fork", "os.posix_spawn", "socket.connect"),
    *("os.remove", "os.rename", "os.symlink", "os.link", "os.mkdir", "os.chmod", "shutil.rmtree"),
}
KNOWN = {"verl_rollout_skip", "numpy", "torch", "pyarrow", "tensordict", "PIL", "verl", "xxhash"}


class CodeWatch:
    """Records attempts to run code or change files while enabled. Code installed with Python is allowed."""

    def __init__(self) -> None:
        self.on = False
        self.seen: list[str] = []
        self._library = (sys.prefix, sys.base_prefix, "<frozen")
        self._modules = sys.stdlib_module_names | KNOWN
        sys.addaudithook(self._hook)

    def _hook(self, event: str, arguments: tuple[Any, ...]) -> None:
        if not self.on or event not in EVENTS:
            return
        installed = event == "import" and arguments[0].partition(".")[0] in self._modules
        if event in ("exec", "code.__new__"):
            installed = str(getattr(arguments[0], "co_filename", "")).startswith(self._library)
        if not installed:
            self.seen.append(f"{event} {arguments!r:.300}")


def test_the_watch_for_code_sees_code(fork: Callable[..., Forked]) -> None:
    """Otherwise its silence would prove nothing."""

    def work(report: Report) -> None:
        watch = CodeWatch()
        watch.on = True
        eval("1 + 1")
        pickle.loads(pickle.dumps(os.getcwd))
        os.system("true")
        watch.on = False
        report(" ".join(entry.split()[0] for entry in watch.seen))

    (events,) = fork(work).lines()
    assert {"compile", "exec", "pickle.find_class", "os.system"} <= set(events.split())


def fuzz(report: Report, folder: Path, rollout: str, seed: int, seconds: float) -> None:
    """Run traps until the time is up, and report every violation."""
    forger = Forger(folder, *ROLLOUTS[rollout]())
    chance = random.Random(seed)
    # Import and compile everything that is loaded on first use: a forged entry may change the kind of rollout.
    for name, make in ROLLOUTS.items():
        spring(Forger(folder.with_name(f"{folder.name}-as-{name}"), *make()))
    for _ in range(30):
        mutate(forger, chance)
        try:
            spring(forger)
        except Exception:
            pass
    fence(int(seconds) + 60)
    watch = CodeWatch()
    counts: Counter[str] = Counter()
    failures: dict[str, str] = {}
    end = time_used() + seconds
    for case in itertools.count():
        if time_used() > end:
            break
        kind = mutate(forger, chance)
        counts[kind] += 1
        before = forget_peak()
        signal.alarm(40)
        watch.on = True
        try:
            for call, outcome in spring(forger).items():
                counts[f"{call}: {outcome}"] += 1
        except Exception as error:
            watch.on = False
            where = traceback.extract_tb(error.__traceback__)[-1]
            name = f"{kind}: {type(error).__name__} in {Path(where.filename).name}:{where.lineno}"
            if name not in failures:
                failures[name] = traceback.format_exc()[-1500:]
                shutil.copytree(folder, folder.with_name(f"{folder.name}-failure-{len(failures)}"))
        watch.on = False
        taken = memory("VmHWM") - before
        if taken > MAX_LOAD_BYTES + MEMORY_SLACK and "memory" not in failures:
            failures["memory"] = f"{kind}, case {case}: {taken / 1e6:.0f} MB"
            shutil.copytree(folder, folder.with_name(f"{folder.name}-failure-memory"))
    if watch.seen:
        failures["code"] = "; ".join(watch.seen[:5])
    signal.alarm(60)
    report(json.dumps({"counts": counts, "failures": failures}))


def time_used() -> float:
    return resource.getrusage(resource.RUSAGE_SELF).ru_utime + resource.getrusage(resource.RUSAGE_SELF).ru_stime


@pytest.mark.slow
@pytest.mark.timeout(FUZZ_SECONDS * 4 + 300)
def test_thousands_of_forged_entries_are_refused_or_loaded_but_do_no_harm(
    tmp_path: Path, fork: Callable[..., Forked]
) -> None:
    seed = int(os.environ.get("FUZZ_SEED", "1"))
    children = {
        rollout: fork(fuzz, tmp_path / rollout, rollout, seed + index, FUZZ_SECONDS / len(ROLLOUTS))
        for index, rollout in enumerate(ROLLOUTS)
    }
    total = 0
    problems: list[str] = []
    for rollout, child in children.items():
        lines = child.lines()
        assert child.exit_code == 0, f"{rollout} ended with {child.exit_code}; the last trap is in {tmp_path / rollout}"
        result = json.loads(lines[-1])
        counts = result["counts"]
        print(rollout, json.dumps(counts, indent=1))
        problems += [f"{rollout}: {name}\n{text}" for name, text in result["failures"].items()]
        total += sum(number for name, number in counts.items() if ":" not in name)
        assert counts["get: CorruptEntryError"] > 50
        assert counts["get: loaded"] > 10, "no trap was ever entered"
    assert not problems, f"traps are kept in {tmp_path}\n" + "\n\n".join(problems)
    assert total > 500
