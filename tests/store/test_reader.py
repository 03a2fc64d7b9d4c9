"""What ``store.reader`` returns for an entry, checked against the batch that was recorded."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from tensordict import TensorDict

from tests.batches import data_proto, objects, rollout_input, rollout_output
from verl_rollout_skip import RolloutKey, RolloutStore
from verl_rollout_skip.store.reader import PROMPT_DIGEST, RESPONSE_LENGTH, SCORE, EntryReader, Side, StoreReader
from verl_rollout_skip.tools.trajectories import read_trajectories

KEY = RolloutKey(1)


def recorded(folder: Path, batch: Any, inputs: Any = None) -> EntryReader:
    RolloutStore(folder, background=False).put(KEY, batch, inputs=inputs, replace=True)
    return StoreReader.at(str(folder)).entry(KEY)


def lists(rows: list[np.ndarray] | None) -> list[list[Any]]:
    assert rows is not None
    return [row.tolist() for row in rows]


def without_padding(batch: Any, name: str) -> list[list[Any]]:
    values, mask = batch.batch[name], batch.batch["attention_mask"].bool()
    width = values.shape[1]
    part = mask[:, :width] if name in ("prompts", "input_ids") else mask[:, mask.shape[1] - width :]
    return [row[keep].tolist() for row, keep in zip(values, part, strict=True)]


@pytest.mark.parametrize("name", ["prompts", "responses", "input_ids", "rollout_log_probs"])
@pytest.mark.parametrize("padding", ["the same", "noise", "none known", "a mask with holes"])
def test_tokens_have_no_padding_however_they_are_stored(tmp_path: Path, name: str, padding: str) -> None:
    batch = rollout_output()
    mask = batch.batch["attention_mask"]
    if padding == "noise":
        for key in ("prompts", "responses", "rollout_log_probs"):
            part = mask[:, :6] if key == "prompts" else mask[:, 6:]
            noise = (torch.rand(part.shape) * 100).to(batch.batch[key].dtype)
            batch.batch[key] = torch.where(part.bool(), batch.batch[key], noise)
        batch.batch["input_ids"] = torch.cat([batch.batch["prompts"], batch.batch["responses"]], dim=1)
    if padding == "a mask with holes":
        mask[:, 7] = 0
    expected = without_padding(batch, name)
    if padding == "none known":
        del batch.batch["attention_mask"]
        expected = batch.batch[name].tolist()
    assert lists(recorded(tmp_path, batch).tokens(name)) == expected


@pytest.mark.parametrize("layout", [torch.jagged, torch.strided])
def test_tokens_of_nested_tensors(tmp_path: Path, layout: torch.layout) -> None:
    rows = {"prompts": [[1, 2], [3]], "responses": [[4], [5, 6, 7]], "input_ids": [[1, 2, 4], [3, 5, 6, 7]]}
    tensors = {
        name: torch.nested.nested_tensor([torch.tensor(row) for row in values], layout=layout)
        for name, values in rows.items()
    }
    entry = recorded(tmp_path, TensorDict(tensors, batch_size=[2]))
    assert {name: lists(entry.tokens(name)) for name in rows} == rows


def test_what_has_no_value_per_token_has_no_tokens(tmp_path: Path) -> None:
    entry = recorded(tmp_path, rollout_output(), rollout_input())
    assert entry.tokens("nothing") is entry.tokens("__num_turns__") is None


def test_a_mask_that_follows_from_the_lengths_is_one_for_each_token(tmp_path: Path) -> None:
    entry = recorded(tmp_path, rollout_output(), rollout_input())
    whole, masks = entry.tokens("input_ids"), entry.tokens("attention_mask")
    assert whole is not None
    assert masks is not None
    assert [mask.tolist() for mask in masks] == [[1] * len(tokens) for tokens in whole]


def test_arrays_come_back_with_their_padding(tmp_path: Path) -> None:
    """Arrays that are as wide as the responses are stored without padding."""
    batch = rollout_output()
    per_token = batch.batch["rm_scores"].numpy().astype(np.float16) * 3
    batch.non_tensor_batch["process_rewards"] = per_token
    batch.meta_info["reward_extra_keys"] = ["process_rewards"]
    entry = recorded(tmp_path, batch)
    assert entry.cells("process_rewards") == per_token.tolist()
    extras = [trajectory.reward_extra["process_rewards"] for trajectory in read_trajectories(entry, [5, 2])]
    assert extras == per_token[[5, 2]].tolist()


@pytest.mark.parametrize(
    "array",
    [
        np.array([1.5, -2.0, np.inf]),
        np.array([1.5, 0.1, 3.0], np.float16),
        np.array([1 + 2j, 3j, 0]),
        np.array(["2026-01-01", "2026-02-01", "NaT"], "datetime64[D]"),
        np.array([[1, 2], [3, 4], [5, 6]], ">i4"),
        np.array(["a", "bb", ""]),
        np.array([True, False, True]),
        np.array([None, 5, 2**40], object),
        np.array([[{"a": 1}, [1, 2]], [{"b": 2}, [3, 4]], [None, [5, 6]]], object),
        np.array([["x", "y"], ["z", ""], ["", ""]]),
        objects([[[1, 2], [3, 4]], [[5, 6], [7, 8]], [[9, 9], [9, 9]]]).reshape(3, 1).repeat(2, 1),
    ],
    ids=lambda array: f"{array.dtype}{array.shape}",
)
def test_cells_are_the_values_of_the_array(tmp_path: Path, array: np.ndarray) -> None:
    entry = recorded(tmp_path, data_proto(array=array))
    expected = [value.tolist() if isinstance(value, np.ndarray | np.generic) else value for value in array]
    assert entry.cells("array") == expected
    assert entry.cells("array", [2, 0]) == [expected[2], expected[0]]


def test_cells_of_the_input_that_the_output_echoes(tmp_path: Path) -> None:
    batch, inputs = rollout_output(), rollout_input()
    numbers, words = np.arange(8) * 10, objects([[f"word {row}"] for row in range(8)])
    for given in (batch, inputs):
        given.non_tensor_batch |= {"numbers": numbers, "words": words}
    entry = recorded(tmp_path, batch, inputs)
    for side in Side:
        assert entry.cells("numbers", [7, 0], side) == [70, 0]
        assert entry.cells("words", [7, 0], side) == [["word 7"], ["word 0"]]


def test_bulk_data_that_becomes_a_word_is_not_read(tmp_path: Path, monkeypatch: Any) -> None:
    from verl_rollout_skip.store.codec.part import PartFile

    rows = [{"tensor": torch.rand(3, 4), "array": np.arange(row)} for row in range(3)]
    entry = recorded(tmp_path, data_proto(bulk=objects(rows), words=objects([torch.rand(2)] * 3)))
    read: list[str] = []
    buffers = PartFile.buffers
    monkeypatch.setattr(PartFile, "buffers", lambda part, name: read.append(name) or buffers(part, name))
    assert entry.cells("words") == ["(tensor float32 [2])"] * 3
    assert read == []
    [cell] = entry.cells("bulk", [2]) or []
    assert (cell["tensor"], cell["array"].tolist()) == ("(tensor float32 [3, 4])", [0, 1])
    assert read == ["skip__blobs"]


def test_an_entry_without_rows(tmp_path: Path) -> None:
    entry = recorded(tmp_path, rollout_output()[:0])
    assert lists(entry.tokens("responses")) == []
    assert entry.cells("__num_turns__") == []
    assert entry.texts(PROMPT_DIGEST) == []
    for name in (SCORE, RESPONSE_LENGTH):
        numbers = entry.numbers(name)
        assert numbers is not None
        assert len(numbers) == 0
    assert list(read_trajectories(entry)) == []


def test_rewards_in_half_precision_are_summed(tmp_path: Path) -> None:
    batch = rollout_output()
    batch.batch["rm_scores"] = (batch.batch["rm_scores"] * 4).to(torch.bfloat16)
    found = [trajectory.score for trajectory in read_trajectories(recorded(tmp_path, batch))]
    assert found == pytest.approx(batch.batch["rm_scores"].double().sum(-1).tolist())
