"""An entry may be cut into several Parquet files, each readable on its own, and repeated bulk data is stored once."""

from __future__ import annotations

import copy
import io
import json
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from PIL import Image
from tensordict import NonTensorData, NonTensorStack, TensorDict
from verl import DataProto

from tests.batches import (
    assert_comes_back,
    assert_same_batch,
    data_proto,
    dump,
    dump_parts,
    load,
    objects,
    rollout_input,
    rollout_output,
)
from verl_rollout_skip.errors import CorruptEntryError, EntryTooLargeError
from verl_rollout_skip.store import codec
from verl_rollout_skip.store.codec import encoder, part
from verl_rollout_skip.store.codec.batch import unflatten
from verl_rollout_skip.store.format import METADATA_KEY

PROMPTS, SAMPLES = 4, 4
ROWS = PROMPTS * SAMPLES


def pixels(seed: int, size: int = 60_000) -> torch.Tensor:
    return torch.randn(size, generator=torch.Generator().manual_seed(seed))


def vision_rollout(size: int = 60_000) -> tuple[DataProto, DataProto]:
    """Each prompt has an image; every sample has a copy of it, in the input and in the output."""
    output, inputs = rollout_output(ROWS), rollout_input(ROWS)

    def cells() -> np.ndarray:
        made = [{"pixel_values": pixels(row // SAMPLES, size), "grid": torch.tensor([1, row])} for row in range(ROWS)]
        return objects(made)

    output.non_tensor_batch["multi_modal_inputs"], inputs.non_tensor_batch["multi_modal_inputs"] = cells(), cells()
    picture = [Image.fromarray(np.full((200, 200, 3), 40 * prompt, np.uint8)) for prompt in range(PROMPTS)]
    inputs.non_tensor_batch["images"] = objects([[picture[row // SAMPLES].copy()] for row in range(ROWS)])
    return output, inputs


def rewritten(data: bytes, change: Callable[[dict, pa.Table], pa.Table]) -> bytes:
    """The same part with another description or other columns."""
    table = pq.read_table(io.BytesIO(data)).replace_schema_metadata(None)
    description = json.loads(pq.read_metadata(io.BytesIO(data)).metadata[METADATA_KEY])
    table = change(description, table)
    sink = io.BytesIO()
    with pq.ParquetWriter(sink, table.schema, store_schema=False, use_dictionary=False) as writer:
        writer.add_key_value_metadata({METADATA_KEY: json.dumps(description).encode()})
        writer.write_table(table)
    return sink.getvalue()


def blob_sizes(data: bytes) -> list[int]:
    return [size for row in pq.read_table(io.BytesIO(data))["skip__blob_sizes"].to_pylist() for size in row]


def with_column(name: str, values: list[Any]) -> Callable[[dict, pa.Table], pa.Table]:
    def change(description: dict, table: pa.Table) -> pa.Table:
        index = table.schema.names.index(name)
        return table.set_column(index, table.schema.field(index), pa.array(values, table.schema.field(index).type))

    return change


def test_repeated_images_are_stored_once_and_come_back_shared() -> None:
    output, inputs = vision_rollout()
    data = assert_comes_back(output, inputs)
    once = PROMPTS * 60_000 * 4
    assert once * 0.8 < len(data) < once
    loaded, loaded_inputs = load(data)
    tensors = [
        cell["pixel_values"]
        for batch in (loaded, loaded_inputs)
        for cell in batch.non_tensor_batch["multi_modal_inputs"]
    ]
    assert len({tensor.data_ptr() for tensor in tensors}) == PROMPTS
    images = [cell[0] for cell in loaded_inputs.non_tensor_batch["images"]]
    assert len({id(image) for image in images}) == PROMPTS


def test_output_and_input_share_images_in_any_reading_order() -> None:
    output, inputs = vision_rollout()
    reader = codec.Reader([dump(output, inputs)], 1 << 30)
    found: list[Any] = [reader.input(), reader.output(), reader.input()]
    for column in (batch.arrays[("multi_modal_inputs",)] for batch in found):
        assert [cell["pixel_values"].data_ptr() for cell in column] == [
            cell["pixel_values"].data_ptr() for cell in found[0].arrays[("multi_modal_inputs",)]
        ]
    assert_same_batch(output, unflatten(found[1]))
    assert_same_batch(inputs, unflatten(found[2]))


def test_small_values_come_back_as_copies() -> None:
    batch = data_proto(x=[{"grid": torch.tensor([1, 2])}, {"grid": torch.tensor([1, 2])}])
    data = assert_comes_back(batch)
    assert blob_sizes(data) == [16]
    cells = load(data)[0].non_tensor_batch["x"]
    cells[0]["grid"].zero_()
    assert cells[1]["grid"].tolist() == [1, 2]


def test_equal_bytes_of_other_types_are_stored_once_and_not_mixed_up() -> None:
    numbers = pixels(1)
    raw = numbers.numpy().tobytes()
    cells = [numbers, numbers.view(torch.int32), numbers.numpy().copy(), raw, numbers.reshape(2, -1)]
    data = assert_comes_back(data_proto(x=[[cell] for cell in cells]))
    assert len(data) < len(raw) * 1.1
    assert blob_sizes(data) == [len(raw)]


def test_an_image_is_not_shared_with_one_that_says_something_else_of_itself() -> None:
    images = [Image.new("RGB", (200, 200), (7, 8, 9)) for _ in range(4)]
    images[1].info["exif"] = b"turned" * 9
    images[2].info["exif"] = b"upside"
    loaded = load(assert_comes_back(data_proto(x=images)))[0].non_tensor_batch["x"]
    assert [image.info for image in loaded] == [image.info for image in images]
    assert loaded[0] is loaded[3]


def test_a_column_with_images_that_the_output_hands_through_is_stored_once() -> None:
    output, inputs = vision_rollout(size=10)
    stored = pq.read_table(io.BytesIO(assert_comes_back(output, inputs))).column_names
    assert "multi_modal_inputs" in stored
    assert "in__images" in stored
    assert not [name for name in stored if "in__multi_modal_inputs" in name]


@pytest.mark.parametrize("cuts", [[1], [5], [4, 8, 12], [0, 3, 3, 16], list(range(1, 8))])
def test_objects_that_rows_shared_are_shared_across_parts(cuts: list[int]) -> None:
    shared = [{"image": pixels(number, 20_000), "turns": [number]} for number in range(3)]
    batch = data_proto(x=[shared[row % 3] for row in range(ROWS)], y=["text", [1]] * 8)
    parts, _ = dump_parts(batch, cuts=cuts)
    loaded = load(*parts)[0]
    assert_same_batch(batch, loaded)
    cells = loaded.non_tensor_batch["x"]
    assert all(cells[row] is cells[row % 3] for row in range(ROWS))
    assert all(cells[row] is not cells[row + 1] for row in range(2))


def test_each_part_is_read_alone() -> None:
    output, inputs = vision_rollout()
    output.non_tensor_batch["shared"] = objects([{"prompt": 1}] * ROWS)
    parts, _ = dump_parts(output, inputs, cuts=[6, 13])
    for data, rows in zip(parts, (slice(0, 6), slice(6, 13), slice(13, 16)), strict=True):
        loaded, loaded_inputs = load(data)
        assert_same_batch(output[rows], loaded)
        assert_same_batch(inputs[rows], loaded_inputs)


def stack(cells: list[Any]) -> NonTensorStack:
    return NonTensorStack.from_list([NonTensorData(cell) for cell in cells])


@given(st.data())
def test_rollouts_with_images_come_back_from_any_parts(data: st.DataObject) -> None:
    chosen = data.draw(st.lists(st.integers(0, 3), min_size=1, max_size=8), "images")
    pool: list[Any] = [
        lambda: pixels(0, 17_000),
        lambda: pixels(1, 5).bfloat16(),
        lambda: Image.new("RGB", (150, 150), (1, 2, 3)),
        lambda: b"raw" * 30_000,
    ]
    kept = [make() for make in pool]
    cells = [{"x": kept[number] if data.draw(st.booleans(), "same object") else pool[number]()} for number in chosen]
    lengths = [number + 1 for number in chosen]
    ragged = torch.nested.as_nested_tensor([torch.arange(length) for length in lengths], layout=torch.jagged)
    batch = TensorDict({"jagged": ragged, "dense": torch.arange(len(chosen) * 2).reshape(-1, 2)}, [len(chosen)])
    batch.set("cells", stack(cells))
    inputs = TensorDict({"cells": stack(data.draw(st.permutations(cells), "input"))}, [len(chosen)])
    cuts = data.draw(st.lists(st.integers(0, len(chosen)), max_size=7), "cuts")
    assert_comes_back(batch, inputs, cuts)
    assert len({dump_parts(batch, inputs, where)[1].content_digest for where in ((), cuts)}) == 1


def test_parts_are_as_large_as_asked_and_not_cut_within_the_samples_of_an_image() -> None:
    output, inputs = vision_rollout(size=1_000_000)
    plan = codec.Plan(codec.prepare(output, inputs))
    assert plan.split(1 << 40) == [slice(0, ROWS)]
    assert plan.split(10_000_000) == [slice(0, 8), slice(8, 16)]
    assert plan.split(5_000_000) == [slice(start, start + 4) for start in (0, 4, 8, 12)]
    assert plan.split(1) == [slice(row, row + 1) for row in range(ROWS)]
    parts = []
    for rows in plan.split(5_000_000):
        parts.append(io.BytesIO())
        plan.write(rows, parts[-1])
    loaded, loaded_inputs = load(*(part.getvalue() for part in parts))
    assert_same_batch(output, loaded)
    assert_same_batch(inputs, loaded_inputs)
    assert sum(len(part.getvalue()) for part in parts) < PROMPTS * 4_000_000 * 1.01
    assert plan.summary().content_digest == dump_parts(output, inputs)[1].content_digest


def test_blobs_that_an_earlier_part_has_too_are_written_in_pieces(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(encoder, "_GROUP_BYTES", 100_000)
    images = [pixels(number, 20_000) for number in range(8)]
    batch = data_proto(x=[[images[row % 8]] for row in range(ROWS)])
    parts, _ = dump_parts(batch, cuts=[8])
    assert [pq.read_metadata(io.BytesIO(part)).num_row_groups for part in parts] == [7, 7]
    assert_same_batch(batch, load(*parts)[0])


def test_parts_may_have_different_encodings() -> None:
    """Several processes may write the parts of one entry, and each proves its encodings on its own rows."""
    output, inputs = rollout_output(ROWS), rollout_input(ROWS)
    output.batch["response_mask"][10, 1] = 0
    output.batch["position_ids"][3, 2] = 77
    output.batch["big"] = torch.arange(ROWS) << 30
    output.non_tensor_batch["mixed"] = objects(["text"] * 8 + [1] * 8)
    inputs.batch = TensorDict({"big": output.batch["big"].clone()}, batch_size=[ROWS])
    inputs.batch["big"][12] += 1
    for key in ("raw_prompt", "reward_model", "extra_info"):  # no object is in two rows
        inputs.non_tensor_batch[key] = objects([copy.deepcopy(cell) for cell in inputs.non_tensor_batch[key]])
    parts = [dump(output[rows], inputs[rows]) for rows in (slice(0, 1), slice(1, 8), slice(8, ROWS))]
    loaded, loaded_inputs = load(*parts)
    assert_same_batch(output, loaded)
    assert_same_batch(inputs, loaded_inputs)
    assert codec.Reader(parts, 1 << 30).prompt_digests() == codec.prompt_digests(inputs)


def changed(**tensors: torch.Tensor) -> DataProto:
    batch = rollout_output(4)
    for name, tensor in tensors.items():
        batch.batch[name] = tensor
    return batch


def without(key: str) -> DataProto:
    batch = rollout_output(4)
    batch.pop(batch_keys=[key])
    return batch


OTHERS: dict[str, Callable[[], tuple[Any, Any]]] = {
    "another key": lambda: (changed(extra=torch.zeros(4)), None),
    "a key less": lambda: (without("rm_scores"), None),
    "another dtype": lambda: (changed(rm_scores=rollout_output(4).batch["rm_scores"].double()), None),
    "another width": lambda: (rollout_output(4, response_width=11), None),
    "another kind": lambda: (TensorDict(dict(rollout_output(4).batch.items()), batch_size=[4]), None),
    "an input": lambda: (rollout_output(4), rollout_input(4)),
    "other meta_info": lambda: (DataProto(rollout_output(4).batch, rollout_output(4).non_tensor_batch, {"x": 1}), None),
}


@pytest.mark.parametrize("other", OTHERS)
def test_parts_of_different_rollouts_are_not_joined(other: str) -> None:
    first, second = dump(rollout_output(4)), dump(*OTHERS[other]())
    for parts in ([first, second], [second, first]):
        with pytest.raises(CorruptEntryError):
            codec.Reader(parts, 1 << 30).output()


def test_an_entry_without_parts_is_corrupt() -> None:
    with pytest.raises(CorruptEntryError):
        codec.Reader([], 1 << 30)


BLOBS_OF, OBJECT = "skip__blobs_of__x", "skip__object__x"
TRAPS = {
    "a blob that is not there": with_column(BLOBS_OF, [[0], [1], [2], [0]]),
    "a negative blob": with_column(BLOBS_OF, [[0], [-1], [1], [0]]),
    "no blob": with_column(BLOBS_OF, [[0], [], [1], [0]]),
    "a negative size": with_column("skip__blob_sizes", [[16], [16], [-1, 1], []]),
    "sizes that are too large": with_column("skip__blob_sizes", [[16], [1 << 40], [], []]),
    "sizes that are too small": with_column("skip__blob_sizes", [[16], [8], [], []]),
    "sizes of nothing": with_column("skip__blob_sizes", [[16], [16], [1], []]),
    "bulk data that is cut": with_column("skip__blobs", [b"x" * 16, b"x" * 15, b"", b""]),
    "a negative object": with_column(OBJECT, [-1, 1, 2, -1]),
    "objects that differ": with_column(OBJECT, [0, 0, 0, 0]),
    "missing cells": with_column("x", [None] * 4),
    "no blobs": lambda description, table: table.drop_columns(["skip__blobs"]),
    "missing blob numbers": lambda description, table: table.drop_columns([BLOBS_OF]),
    "no objects": lambda description, table: table.drop_columns([OBJECT]),
}


def small_part() -> bytes:
    shared = {"a": torch.tensor([1, 2])}
    return dump(data_proto(x=[shared, {"b": torch.tensor([3, 4])}, {"c": torch.tensor([3, 4])}, shared]))


def test_a_rewritten_part_without_a_trap_is_read() -> None:
    assert_same_batch(load(small_part())[0], load(rewritten(small_part(), lambda _, table: table))[0])


@pytest.mark.parametrize("trap", TRAPS)
def test_wrong_numbers_of_blobs_and_objects_are_corrupt(trap: str) -> None:
    data = rewritten(small_part(), TRAPS[trap])
    with pytest.raises(CorruptEntryError):
        codec.Reader([data], 1 << 30).output()


def test_a_blob_that_many_cells_copy_does_not_exceed_the_limit() -> None:
    """Sixty kilobytes in the file, sixty megabytes in a thousand cells."""
    blob = torch.zeros(60_000, dtype=torch.uint8)
    data = dump(data_proto(x=[[blob] for _ in range(1000)]))
    assert len(data) < 100_000
    with pytest.raises(EntryTooLargeError, match="max_load_bytes"):
        codec.Reader([data], 10_000_000).output()
    codec.Reader([data], 100_000_000).output()


def test_the_parts_of_an_entry_count_together_against_the_limit() -> None:
    parts = [dump(rollout_output(64, prompt_width=64, response_width=512)) for _ in range(4)]
    codec.Reader(parts[:1], 4_000_000).output()
    with pytest.raises(EntryTooLargeError, match="max_load_bytes"):
        codec.Reader(parts, 4_000_000).output()


@pytest.mark.parametrize("encoding", ["DELTA_BYTE_ARRAY", "DELTA_LENGTH_BYTE_ARRAY"])
def test_text_in_an_encoding_that_can_expand_is_refused(encoding: str) -> None:
    sink = io.BytesIO()
    texts = pa.table({"text": ["x" * length for length in range(1000)]})
    pq.write_table(texts, sink, use_dictionary=False, column_encoding={"text": encoding})
    with pytest.raises(CorruptEntryError, match="encoding"):
        codec.Reader([sink.getvalue()], 1 << 30)


def test_sizes_that_are_given_for_a_column_of_another_name_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    """Arrow reads by position: under a false name the size of a column would not be compared with the limit."""
    (data,), _ = dump_parts(rollout_output(4))
    chunks = part.read_columns(memoryview(data))
    codec.Reader([data], 1 << 30)
    false = [replace(chunks[0], path=chunks[0].path + "x"), *chunks[1:]]
    monkeypatch.setattr(part, "read_columns", lambda _: false)
    with pytest.raises(CorruptEntryError, match="do not match its schema"):
        codec.Reader([data], 1 << 30)


def test_text_counts_when_an_entry_is_cut_into_parts() -> None:
    texts = [f"{row} ümlaut" * 100_000 for row in range(8)]
    plan = codec.Plan(codec.prepare(data_proto(words=objects(texts), cells=objects([[text] for text in texts]))))
    size = len(texts[0].encode())
    assert plan.split(5 * size) == [slice(start, start + 2) for start in (0, 2, 4, 6)]
