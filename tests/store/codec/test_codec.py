"""What a dumped rollout looks like from outside, and what the codec guarantees besides exactness."""

from __future__ import annotations

import copy
import io
import json
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import torch
from PIL import Image
from tensordict import LazyStackedTensorDict, NonTensorData, NonTensorStack, TensorDict
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
from verl_rollout_skip.errors import (
    CorruptEntryError,
    EntryTooLargeError,
    NewerFormatError,
    StoreError,
    UnsupportedBatchError,
)
from verl_rollout_skip.store import codec
from verl_rollout_skip.store.codec import encoder, snapshot
from verl_rollout_skip.store.codec.batch import BatchKind, flatten, unflatten
from verl_rollout_skip.store.format import FORMAT_VERSION, METADATA_KEY


def table_of(data: bytes) -> pa.Table:
    return pq.read_table(io.BytesIO(data))


def columns_of(data: bytes) -> list[str]:
    return table_of(data).column_names


def summary_of(batch: Any, inputs: Any = None) -> codec.Summary:
    return dump_parts(batch, inputs)[1]


def written(prepared: codec.Prepared) -> bytes:
    """The Parquet file of a rollout step that is already prepared."""
    plan, sink = codec.Plan(prepared), io.BytesIO()
    (rows,) = plan.split(1 << 40)
    plan.write(rows, sink)
    return sink.getvalue()


def tensor_bytes(proto: DataProto) -> int:
    return sum(tensor.nbytes for tensor in proto.batch.values())


def as_jagged(proto: DataProto, keys: tuple[str, ...] = ("prompts", "responses", "rm_scores")) -> TensorDict:
    """The same rollout in V1's form, without padding."""
    prompt_width = proto.batch["prompts"].shape[1]
    inside = proto.batch["attention_mask"].bool()
    rows = {}
    for key in keys:
        mask = inside[:, :prompt_width] if key == "prompts" else inside[:, prompt_width:]
        rows[key] = [row[kept] for row, kept in zip(proto.batch[key], mask, strict=True)]
    tensors = {key: torch.nested.as_nested_tensor(value, layout=torch.jagged) for key, value in rows.items()}
    return TensorDict(tensors, batch_size=[len(proto)])


def test_padding_is_not_stored() -> None:
    rollout = rollout_output(rows=64, prompt_width=64, response_width=512)
    wide = rollout_output(rows=64, prompt_width=64, response_width=512)
    filler = torch.zeros(64, 3000, dtype=torch.int64)
    for key in ("responses", "response_mask", "rollout_log_probs", "rm_scores"):
        wide.batch[key] = torch.cat([wide.batch[key], filler.to(wide.batch[key].dtype)], dim=1)
    for key in ("input_ids", "attention_mask"):
        wide.batch[key] = torch.cat([wide.batch[key], filler], dim=1)
    last = wide.batch["position_ids"][:, -1:]
    wide.batch["position_ids"] = torch.cat([wide.batch["position_ids"], last.expand(-1, 3000)], dim=1)
    narrow_file, wide_file = assert_comes_back(rollout), assert_comes_back(wide)
    assert len(narrow_file) < tensor_bytes(rollout) / 10
    assert len(wide_file) < len(narrow_file) * 1.02


def test_what_follows_from_other_columns_is_not_stored() -> None:
    stored = columns_of(assert_comes_back(rollout_output()))
    assert {"prompts", "responses", "rollout_log_probs", "rm_scores"} <= set(stored)
    assert not {"input_ids", "attention_mask", "position_ids", "response_mask"} & set(stored)


def test_a_response_mask_with_tool_turns_is_stored() -> None:
    rollout = rollout_output()
    rollout.batch["response_mask"][:, 1] = 0
    stored = columns_of(assert_comes_back(rollout))
    assert "response_mask" in stored
    assert not {"input_ids", "attention_mask", "position_ids"} & set(stored)


@pytest.mark.parametrize("key", ["input_ids", "attention_mask", "position_ids"])
def test_a_column_that_does_not_follow_is_stored_whole(key: str) -> None:
    rollout = rollout_output()
    rollout.batch[key][3, 2] += 5
    assert key in columns_of(assert_comes_back(rollout))


def test_jagged_rollouts_store_tokens_once_too() -> None:
    batch = as_jagged(rollout_output())
    prompts, responses = batch["prompts"].unbind(), batch["responses"].unbind()
    sequences = [torch.cat(pair) for pair in zip(prompts, responses, strict=True)]
    batch["input_ids"] = torch.nested.as_nested_tensor(sequences, layout=torch.jagged)
    positions = [torch.arange(len(sequence)) for sequence in sequences]
    batch["position_ids"] = torch.nested.as_nested_tensor(positions, layout=torch.jagged)
    stored = columns_of(assert_comes_back(batch))
    assert {"prompts", "responses"} <= set(stored)
    assert not {"input_ids", "position_ids"} & set(stored)


def test_one_row_is_one_trajectory_with_its_tokens() -> None:
    rollout = rollout_output()
    table = table_of(dump(rollout))
    assert table.num_rows == len(rollout)
    inside = rollout.batch["response_mask"].bool()
    tokens = [row[kept].tolist() for row, kept in zip(rollout.batch["responses"], inside, strict=True)]
    assert table["responses"].to_pylist() == tokens
    rewards = [row[kept].tolist() for row, kept in zip(rollout.batch["rm_scores"], inside, strict=True)]
    assert table["rm_scores"].to_pylist() == rewards


def test_prompts_and_answers_are_readable_text() -> None:
    given = rollout_input()
    table = table_of(dump(rollout_output(), given))
    assert table["in__data_source"].to_pylist() == ["arithmetic"] * 8
    assert [json.loads(cell) for cell in table["in__raw_prompt"].to_pylist()] == given.non_tensor_batch[
        "raw_prompt"
    ].tolist()
    assert table["in__index"].to_pylist() == given.non_tensor_batch["index"].tolist()


def test_inputs_that_the_output_echoes_are_stored_once() -> None:
    output, given = rollout_output(), rollout_input()
    output.non_tensor_batch |= given.non_tensor_batch
    output.batch["priority"] = torch.arange(8)
    given.batch = TensorDict({"priority": torch.arange(8)}, batch_size=[8])
    stored = columns_of(assert_comes_back(output, given))
    assert {"raw_prompt", "reward_model", "extra_info", "priority"} <= set(stored)
    assert not [name for name in stored if name.startswith("in__")]


def test_an_input_that_differs_from_its_echo_is_kept() -> None:
    output, given = rollout_output(), rollout_input()
    output.non_tensor_batch |= copy.deepcopy(given.non_tensor_batch)
    given.non_tensor_batch["reward_model"][3]["ground_truth"] = "another answer"
    stored = columns_of(assert_comes_back(output, given))
    assert "in__reward_model" in stored
    assert "in__raw_prompt" not in stored


def test_scores_and_lengths_are_separate_columns() -> None:
    rollout = rollout_output()
    rollout.batch["rm_scores"][2, 0] += 0.25
    table = table_of(dump(rollout))
    mask = rollout.batch["attention_mask"]
    assert table["skip__prompt_length"].to_pylist() == mask[:, :6].sum(1).tolist()
    assert table["skip__response_length"].to_pylist() == mask[:, 6:].sum(1).tolist()
    assert table["skip__score"].to_pylist() == rollout.batch["rm_scores"].double().sum(1).tolist()


def test_scores_and_lengths_of_jagged_rollouts() -> None:
    rollout = rollout_output()
    table, padded = table_of(dump(as_jagged(rollout))), table_of(dump(rollout))
    for column in ("skip__prompt_length", "skip__response_length", "skip__score"):
        assert table[column].to_pylist() == padded[column].to_pylist()


def test_one_broken_reward_does_not_spoil_other_scores() -> None:
    rewards = [torch.tensor([float("nan")]), torch.tensor([]), torch.tensor([2.0**66, 0.5]), torch.tensor([0.5, 0.25])]
    batch = TensorDict({"rm_scores": torch.nested.as_nested_tensor(rewards, layout=torch.jagged)}, batch_size=[4])
    scores = table_of(assert_comes_back(batch))["skip__score"].to_pylist()
    assert np.isnan(scores[0])
    assert scores[1:] == [0.0, 2.0**66, 0.75]


def test_a_rollout_without_rewards_has_no_scores() -> None:
    rollout = rollout_output()
    rollout.batch.pop("rm_scores")
    table = table_of(assert_comes_back(rollout))
    assert table["skip__score"].to_pylist() == [None] * 8
    assert summary_of(rollout).mean_score is None


def test_the_summary_counts_tokens_and_scores() -> None:
    rollout = rollout_output()
    summary = summary_of(rollout)
    mask = rollout.batch["attention_mask"]
    assert (summary.rows, summary.prompt_tokens, summary.response_tokens) == (
        8,
        int(mask[:, :6].sum()),
        int(mask[:, 6:].sum()),
    )
    assert summary.mean_score == pytest.approx(rollout.batch["rm_scores"].sum(1).mean().item())


def digests_of(output: DataProto, given: Any) -> list[str]:
    return table_of(dump(output, given))["skip__prompt_digest"].to_pylist()


def test_the_prompt_digest_distinguishes_prompts_but_not_samples_of_one_prompt() -> None:
    digests = digests_of(rollout_output(), rollout_input())
    assert digests[0::2] == digests[1::2]
    assert len(set(digests)) == 4


def test_the_prompt_digest_does_not_depend_on_uid_or_responses() -> None:
    given, again = rollout_input(), rollout_input()
    again.non_tensor_batch["uid"] = objects([f"another-{row}" for row in range(8)])
    assert digests_of(rollout_output(), given) == digests_of(rollout_output(seed=1), again)


def test_the_prompt_digest_depends_on_the_answer() -> None:
    given, other = rollout_input(), rollout_input()
    other.non_tensor_batch["reward_model"][4] = {"style": "rule", "ground_truth": "another answer"}
    before, after = digests_of(rollout_output(), given), digests_of(rollout_output(), other)
    assert [row for row in range(8) if before[row] != after[row]] == [4]


def test_the_prompt_digest_sees_images() -> None:
    def given(pixel: float) -> DataProto:
        image = {"pixel_values": torch.full((2, 3), pixel)}
        return data_proto(multi_modal_inputs=[image, image, {}])

    output = data_proto({"responses": torch.zeros(3, 2)})
    before, after = digests_of(output, given(0.5)), digests_of(output, given(0.25))
    assert [row for row in range(3) if before[row] != after[row]] == [0, 1]


def test_without_inputs_the_prompt_digest_is_of_the_prompt_tokens() -> None:
    rollout, other = rollout_output(), rollout_output()
    other.batch["prompts"][5, -1] += 1
    other.batch["input_ids"][5, 5] += 1
    other.batch["responses"][0, 0] += 1
    other.batch["input_ids"][0, 6] += 1
    before, after = digests_of(rollout, None), digests_of(other, None)
    assert [row for row in range(8) if before[row] != after[row]] == [5]
    jagged = table_of(dump(as_jagged(rollout)))["skip__prompt_digest"].to_pylist()
    assert len(set(jagged)) == 8


def test_column_names_never_collide() -> None:
    names = ["a.b", "a_b", "A_B", "a_b__2", "", "out__", "in__x", "out__in__x", "skip__score", "skip__prompt_length"]
    arrays = {name: objects([{"name": name}, b"x"]) for name in names}
    output = DataProto(TensorDict({"x": torch.ones(2), "X": torch.zeros(2)}, batch_size=[2]), arrays, {})
    given = DataProto(TensorDict({"x": torch.zeros(2)}, batch_size=[2]), dict(arrays), {})
    given.non_tensor_batch["a.b"] = objects([1, 2])
    stored = columns_of(assert_comes_back(output, given))
    assert len({name.lower() for name in stored}) == len(stored)
    assert not [name for name in stored if "." in name or not name]
    assert {"x", "in__x", "skip__score", "out__skip__score"} <= set(stored)


@pytest.mark.parametrize("kind", ["tensor", "array", "bytes", "image"])
def test_bulk_data_is_written_in_pieces(kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(encoder, "_GROUP_BYTES", 100_000)
    make = {
        "tensor": lambda row: torch.full((60_000,), row, dtype=torch.uint8),
        "array": lambda row: np.full(60_000, row, np.uint8),
        "bytes": lambda row: bytes([row]) * 60_000,
        "image": lambda row: Image.new("RGB", (200, 100), (row, 0, 0)),
    }[kind]
    data = assert_comes_back(data_proto(x=[{"pixels": make(row)} for row in range(8)]))
    assert pq.read_metadata(io.BytesIO(data)).num_row_groups >= 4


def test_a_dump_is_not_changed_by_what_happens_to_the_batch_afterwards() -> None:
    output, given = rollout_output(), rollout_input()
    output.non_tensor_batch["extra"] = objects([{"turns": [{"role": "user"}]} for _ in range(8)])
    output.meta_info["nested"] = {"list": [1, 2]}
    expected, expected_input = copy.deepcopy(output), copy.deepcopy(given)
    prepared = codec.prepare(output, given)

    output.pop(batch_keys=["rm_scores"], non_tensor_batch_keys=["acc"], meta_info_keys=["timing"])
    output.union(data_proto({"advantages": torch.ones(8, 10)}))
    output.batch["responses"] = torch.zeros(8, 10)
    output.non_tensor_batch["extra"][0]["turns"][0]["role"] = "changed"
    output.non_tensor_batch["extra"][1] = None
    output.meta_info["nested"]["list"].append(3)
    given.non_tensor_batch["raw_prompt"][0].append({"role": "assistant"})
    given.non_tensor_batch.pop("uid")
    given.meta_info.clear()

    loaded, loaded_input = load(written(prepared))
    assert_same_batch(expected, loaded)
    assert_same_batch(expected_input, loaded_input)


def test_a_dumped_tensordict_is_not_changed_by_what_happens_to_it_afterwards() -> None:
    def made() -> TensorDict:
        nested = TensorDict({"inner": torch.ones(2)}, batch_size=[2])
        cells = NonTensorStack.from_list([NonTensorData({"a": [1]}), NonTensorData({"a": [2]})])
        return TensorDict({"nested": nested, "cells": cells, "meta": NonTensorData({"k": [1]})}, batch_size=[2])

    batch = made()
    prepared = codec.prepare(batch)
    batch["nested"].set("inner", torch.zeros(2))
    batch["cells"][0]["a"].append(5)
    batch["meta"]["k"].append(5)
    batch.pop("nested")
    assert_same_batch(made(), load(written(prepared))[0])


def test_dumping_changes_nothing_in_the_batch() -> None:
    output, given = rollout_output(), rollout_input()
    expected, expected_input = copy.deepcopy(output), copy.deepcopy(given)
    dump(output, given)
    assert_same_batch(expected, output)
    assert_same_batch(expected_input, given)


def test_loaded_batches_share_no_memory_with_each_other() -> None:
    output, given = rollout_output(), rollout_input()
    given.batch = TensorDict({"prompts": output.batch["prompts"].clone()}, batch_size=[8])
    output.non_tensor_batch["raw_prompt"] = given.non_tensor_batch["raw_prompt"]
    data = dump(output, given)
    loaded, loaded_input = load(data)
    for tensor in loaded.batch.values():
        tensor.zero_()
    loaded_input.non_tensor_batch["raw_prompt"][0].clear()
    assert_same_batch(given.batch, loaded_input.batch)
    assert loaded.non_tensor_batch["raw_prompt"][0]
    assert_same_batch(output, load(data)[0])


def test_the_same_rollout_has_the_same_content_regardless_of_uid_and_timing() -> None:
    output, given, again = rollout_output(), rollout_input(), rollout_input()
    slower = rollout_output()
    slower.meta_info["timing"] = {"agent_loop/generate_sequences/mean": 99.0}
    again.non_tensor_batch["uid"] = objects([f"another-{row}" for row in range(8)])
    content = summary_of(output, given).content_digest
    assert summary_of(slower, again).content_digest == content
    slower.batch["responses"][0, 0] += 1
    slower.batch["input_ids"][0, 6] += 1
    assert summary_of(slower, again).content_digest != content


def test_another_attention_mask_is_another_content_even_if_no_tensor_lost_its_padding() -> None:
    """Tokens after the end of a response are stored as is; only the mask says where it ends."""
    contents = set()
    for response_length in (3, 4):
        mask = torch.ones(2, 10, dtype=torch.int64)
        mask[:, 4 + response_length :] = 0
        tensors = {
            "prompts": torch.arange(1, 9).reshape(2, 4),
            "responses": torch.arange(1, 13).reshape(2, 6),
            "attention_mask": mask,
        }
        contents.add(summary_of(DataProto.from_dict(tensors=tensors)).content_digest)
    assert len(contents) == 2


@pytest.mark.parametrize("key", ["prompts", "responses", "response_mask", "position_ids", "rollout_log_probs"])
def test_any_changed_value_changes_the_content(key: str) -> None:
    output, other = rollout_output(), rollout_output()
    other.batch[key][0, -1] = other.batch[key][0, -1] + 1
    assert summary_of(output).content_digest != summary_of(other).content_digest


def test_a_dataproto_reads_as_the_tensordict_that_verl_makes_of_it() -> None:
    rollout = rollout_output()
    rollout.non_tensor_batch["extra"] = objects([{"a": [row]} for row in range(8)])
    as_tensordict = unflatten(codec.Reader([dump(rollout)], 1 << 30).output(), BatchKind.TENSORDICT)
    assert_same_batch(rollout.to_tensordict(), as_tensordict)


@pytest.mark.parametrize(
    ("proto", "key"),
    [
        (DataProto(TensorDict({"x": torch.ones(2)}, batch_size=[2]), meta_info={"x": "meta"}), "x"),
        (DataProto(TensorDict({"x": torch.ones(2)}, batch_size=[2]), {"x": np.zeros(2)}), "x"),
        (DataProto(None, {"x": np.zeros(2)}, {"x": "meta"}), "x"),
        (DataProto(TensorDict({"x": torch.ones(2)}, batch_size=[2]), meta_info={1: "a", "1": "b"}), "1"),
    ],
    ids=["tensor and meta_info", "tensor and array", "array and meta_info", "1 and '1'"],
)
def test_a_dataproto_whose_names_clash_is_not_read_as_a_tensordict(proto: DataProto, key: str) -> None:
    assert_comes_back(proto)
    with pytest.raises(UnsupportedBatchError, match=key):
        unflatten(codec.Reader([dump(proto)], 1 << 30).output(), BatchKind.TENSORDICT)


def test_non_tensors_without_rows_cannot_be_read_as_a_tensordict() -> None:
    with pytest.raises(UnsupportedBatchError, match="0 rows"):
        unflatten(codec.Reader([dump(rollout_output(0))], 1 << 30).output(), BatchKind.TENSORDICT)


def test_a_tensordict_is_not_turned_into_a_dataproto() -> None:
    with pytest.raises(UnsupportedBatchError, match="recorded as a TensorDict"):
        unflatten(flatten(TensorDict({"a": torch.ones(2)}, batch_size=[2])), BatchKind.DATAPROTO)


def foreign_file() -> bytes:
    sink = io.BytesIO()
    pq.write_table(pa.table({"responses": [[1, 2], [3]]}), sink)
    return sink.getvalue()


def with_description(data: bytes, change: dict[str, Any]) -> bytes:
    """The same file with another description of itself."""
    table = table_of(data)
    described = json.loads(pq.read_metadata(io.BytesIO(data)).metadata[METADATA_KEY])
    sink = io.BytesIO()
    with pq.ParquetWriter(sink, table.schema.remove_metadata(), store_schema=False) as writer:
        writer.write_table(table)
        writer.add_key_value_metadata({METADATA_KEY: json.dumps({**described, **change}).encode()})
    return sink.getvalue()


def test_a_parquet_file_of_somebody_else_is_named_as_such() -> None:
    with pytest.raises(CorruptEntryError, match="this package did not write it"):
        codec.Reader([foreign_file()], 1 << 30)


@pytest.mark.parametrize("data", [b"", b"PAR1", b"not parquet at all" * 100], ids=["empty", "magic", "text"])
def test_a_file_that_is_not_parquet_is_corrupt(data: bytes) -> None:
    with pytest.raises(CorruptEntryError):
        codec.Reader([data], 1 << 30)


def test_a_newer_format_asks_for_an_upgrade() -> None:
    data = with_description(dump(rollout_output()), {"format_version": FORMAT_VERSION + 1})
    with pytest.raises(NewerFormatError, match="Upgrade verl-rollout-skip"):
        codec.Reader([data], 1 << 30)


@pytest.mark.parametrize("version", [0, -1, None, "1", 1.0, True, [1]])
def test_a_format_version_that_is_none_is_corrupt(version: Any) -> None:
    with pytest.raises(CorruptEntryError):
        codec.Reader([with_description(dump(rollout_output()), {"format_version": version})], 1 << 30)


@pytest.mark.parametrize("change", [{"rows": 7}, {"rows": -1}, {"output": None}, {"rows": True}])
def test_a_description_that_does_not_fit_is_corrupt(change: dict) -> None:
    data = with_description(dump(rollout_output()), change)
    with pytest.raises(CorruptEntryError):
        codec.Reader([data], 1 << 30).output()


def test_the_memory_that_loading_takes_is_bounded() -> None:
    data = dump(rollout_output(rows=64, prompt_width=64, response_width=512))
    with pytest.raises(EntryTooLargeError, match="max_load_bytes"):
        codec.Reader([data], 100_000).output()


def test_input_and_output_must_have_the_same_rows() -> None:
    with pytest.raises(StoreError, match="4 rows, and the output has 8"):
        codec.prepare(rollout_output(8), rollout_input(4))


@pytest.mark.parametrize(
    ("batch", "message"),
    [
        ([1, 2], "builtins.list"),
        ({"responses": torch.zeros(2)}, "builtins.dict"),
        (TensorDict({"x": torch.zeros(2)}, batch_size=[]), "batch dimension"),
        (
            LazyStackedTensorDict(
                *(TensorDict({"x": torch.zeros(size)}, batch_size=[]) for size in (2, 3)), stack_dim=0
            ),
            "LazyStackedTensorDict",
        ),
        (DataProto(TensorDict({"x": NonTensorData("text")}, batch_size=[2])), "non_tensor_batch"),
    ],
    ids=["list", "dict", "no batch dimension", "lazy stack", "non-tensors among tensors"],
)
def test_an_object_that_is_not_a_rollout_is_refused(batch: Any, message: str) -> None:
    with pytest.raises(UnsupportedBatchError, match=message):
        codec.prepare(batch)


def test_non_tensors_with_other_rows_are_refused() -> None:
    proto = rollout_output()
    proto.non_tensor_batch["short"] = np.zeros(3)
    with pytest.raises(UnsupportedBatchError, match=r"short.*8 rows"):
        codec.prepare(proto)
    proto.non_tensor_batch["short"] = [1] * 8  # type: ignore[assignment]
    with pytest.raises(UnsupportedBatchError, match="short"):
        codec.prepare(proto)


@pytest.mark.parametrize("rows", [0, 1])
@pytest.mark.parametrize("widths", [(0, 0), (6, 0), (0, 10), (5, 5)])
def test_rollouts_at_the_edges_come_back(rows: int, widths: tuple[int, int]) -> None:
    assert_comes_back(rollout_output(rows, *widths), rollout_input(rows))


def test_a_dataproto_with_nothing_in_it_comes_back() -> None:
    assert_comes_back(DataProto())
    assert_comes_back(DataProto(TensorDict({}, batch_size=[3])))
    assert_comes_back(DataProto(batch=None, non_tensor_batch={}, meta_info={"global_steps": 3}))


@pytest.mark.parametrize("value", ["ä" * 400, '"' * 700, "𝄞" * 200, "x" * 2100], ids=["umlaut", "quote", "clef", "x"])
def test_meta_info_that_is_too_long_in_the_file_is_refused(monkeypatch: pytest.MonkeyPatch, value: str) -> None:
    """The description of a file is JSON in ASCII, so a character can take up to twelve bytes in it."""
    monkeypatch.setattr(snapshot, "_MAX_META_BYTES", 2000)
    with pytest.raises(UnsupportedBatchError, match="meta_info"):
        codec.prepare(DataProto(batch=None, non_tensor_batch={}, meta_info={"x": value}))
    codec.prepare(DataProto(batch=None, non_tensor_batch={}, meta_info={"x": value[:100]}))


def test_two_batches_whose_meta_info_fills_the_description_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each alone fits, but a file with both in its footer could be written and never read."""
    monkeypatch.setattr(encoder, "_MAX_DESCRIPTION_BYTES", 10_000)
    batch, given = (data_proto(x=np.arange(2)) for _ in range(2))
    batch.meta_info["x"] = given.meta_info["x"] = '"' * 1500
    codec.Plan(codec.prepare(batch))
    with pytest.raises(UnsupportedBatchError, match=r"description of .* cannot be read"):
        codec.Plan(codec.prepare(batch, given))


@pytest.mark.slow
def test_the_largest_description_that_is_written_can_be_read(monkeypatch: pytest.MonkeyPatch) -> None:
    batch, given = (data_proto(x=np.arange(2)) for _ in range(2))
    batch.meta_info["x"] = given.meta_info["x"] = '"' * 11_990_000
    assert_comes_back(batch, given)
