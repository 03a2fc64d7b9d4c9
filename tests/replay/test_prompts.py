"""Messages about inputs that differ, and the uids of both kinds of batches."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from tensordict import NonTensorData, NonTensorStack, TensorDict
from verl import DataProto

from tests.batches import data_proto, rollout_input, rollout_output
from verl_rollout_skip import RolloutKey, RolloutStore
from verl_rollout_skip.errors import UnsupportedBatchError
from verl_rollout_skip.replay.prompts import adopt_uids, explain_mismatch, sampling_of, shallow_copy
from verl_rollout_skip.store import codec
from verl_rollout_skip.store.loaded import LoadedEntry

K = RolloutKey(1)


def recorded(tmp_path: Path, inputs: Any, rows: int = 8) -> LoadedEntry:
    store = RolloutStore(tmp_path, background=False)
    store.put(K, rollout_output(rows), inputs=inputs)
    return store.load(K)


def test_the_same_prompts_with_other_uids_are_the_same(tmp_path: Path) -> None:
    entry, current = recorded(tmp_path, rollout_input()), rollout_input()
    current.non_tensor_batch["uid"][:] = "another"
    assert explain_mismatch(entry, current) is None


def test_the_same_columns_in_another_order_are_the_same(tmp_path: Path) -> None:
    """verl iterates over a set of column names, so their order differs between processes."""
    entry, current = recorded(tmp_path, rollout_input()), rollout_input()
    current.non_tensor_batch = dict(reversed(current.non_tensor_batch.items()))
    assert explain_mismatch(entry, current) is None


def test_rows_that_share_objects_have_the_same_digests_as_rows_with_copies(tmp_path: Path) -> None:
    """The n samples of a prompt share their objects; some columns may have one object per row."""
    rows = rollout_input(4)
    shared = DataProto(None, {key: np.repeat(column, 2) for key, column in rows.non_tensor_batch.items()})
    shared.non_tensor_batch["turn"] = np.array([{"first": row in (2, 7)} for row in range(8)], dtype=object)
    assert explain_mismatch(recorded(tmp_path, copy.deepcopy(shared)), shared) is None
    text = explain_mismatch(
        recorded(tmp_path / "other", shared),
        DataProto(None, {**shared.non_tensor_batch, "turn": shared.non_tensor_batch["turn"][::-1]}),
    )
    assert text is not None
    assert text.startswith("4 of 8 rows differ")


def test_a_row_that_cannot_be_stored_is_named_even_if_earlier_rows_share_objects() -> None:
    cells = np.empty(6, dtype=object)
    cells[:5], cells[5] = [{"a": 1}] * 5, [object()]
    with pytest.raises(UnsupportedBatchError, match=r"raw_prompt\[5\]"):
        codec.prompt_digests(DataProto(None, {"raw_prompt": cells}))


def test_a_changed_prompt_is_shown_with_both_texts(tmp_path: Path) -> None:
    entry, current = recorded(tmp_path, rollout_input()), rollout_input()
    current.non_tensor_batch["raw_prompt"][3] = [{"role": "user", "content": "What is 9 + 3?"}]
    text = explain_mismatch(entry, current)
    assert text is not None
    assert text.startswith("1 of 8 rows differ. The first is row 3:\n  raw_prompt: recorded [{")
    old = rollout_input().non_tensor_batch["raw_prompt"][3][0]["content"]
    assert old in text.splitlines()[1]
    assert "current  [{" in text.splitlines()[2]
    assert "What is 9 + 3?" in text.splitlines()[2]


def test_a_changed_answer_alone_is_a_difference(tmp_path: Path) -> None:
    entry, current = recorded(tmp_path, rollout_input()), rollout_input()
    current.non_tensor_batch["reward_model"][5] = {"style": "rule", "ground_truth": "6"}
    text = explain_mismatch(entry, current)
    assert text is not None
    assert "row 5" in text
    assert '"ground_truth": "6"' in text
    assert "raw_prompt" not in text


def test_prompts_in_a_different_order_are_reported_as_such(tmp_path: Path) -> None:
    text = explain_mismatch(recorded(tmp_path, rollout_input()), rollout_input()[np.arange(7, -1, -1)])
    assert text is not None
    assert text.startswith("8 of 8 rows differ; they are the same prompts in a different order (did data.seed")


def test_a_long_prompt_is_shown_around_the_first_difference(tmp_path: Path) -> None:
    inputs, current = rollout_input(2), rollout_input(2)
    inputs.non_tensor_batch["raw_prompt"][0] = "x" * 5000 + "recorded end"
    current.non_tensor_batch["raw_prompt"][0] = "x" * 5000 + "current end"
    text = explain_mismatch(recorded(tmp_path, inputs, rows=2), current)
    assert text is not None
    assert "recorded end" in text
    assert "current end" in text
    assert len(text) < 1000


def test_inputs_of_verl_061_are_compared_too(tmp_path: Path) -> None:
    """In this version the input has tensors, and the prompts of the output are the input_ids of the input."""
    output = rollout_output(4)
    width = output.batch["prompts"].shape[1]

    def inputs() -> Any:
        given = rollout_input(4)
        columns = {
            "input_ids": output.batch["prompts"].clone(),
            "attention_mask": output.batch["attention_mask"][:, :width].clone(),
            "position_ids": output.batch["position_ids"][:, :width].clone(),
        }
        proto = data_proto(columns, **{key: value for key, value in given.non_tensor_batch.items() if key != "uid"})
        proto.meta_info = {"global_steps": 1}
        return proto

    store = RolloutStore(tmp_path, background=False)
    store.put(K, output, inputs=inputs())
    assert explain_mismatch(store.load(K), inputs()) is None
    changed = inputs()
    changed.batch["input_ids"][2, -1] += 1
    text = explain_mismatch(store.load(K), changed)
    assert text is not None
    assert "row 2" in text
    assert "input_ids" in text


def test_an_entry_without_input_never_matches(tmp_path: Path) -> None:
    text = explain_mismatch(recorded(tmp_path, None), rollout_input())
    assert text == "the recorded rollout step has no prompts to compare."


def test_meta_info_about_the_run_does_not_count_as_sampling_settings() -> None:
    inputs = rollout_input()
    inputs.meta_info = {"global_steps": 3, "validate": False, "timing": {}, "do_sample": True, "temperature": 0.7}
    assert sampling_of(inputs) == {"do_sample": "True", "temperature": "0.7"}


@pytest.fixture
def tensordict() -> TensorDict:
    uids = NonTensorStack.from_list([NonTensorData(uid) for uid in ("a", "b")])
    return TensorDict({"x": torch.arange(2), "uid": uids, "temperature": NonTensorData(1.0)}, batch_size=[2])


def test_uids_of_a_tensordict_are_adopted(tensordict: TensorDict) -> None:
    current = tensordict.clone()
    current.set("uid", NonTensorStack.from_list([NonTensorData(uid) for uid in ("c", "d")]))
    adopt_uids(tensordict, current)
    assert tensordict.get("uid").tolist() == ["c", "d"]
    assert sampling_of(tensordict) == {"temperature": "1.0"}


def test_uids_are_added_only_on_request() -> None:
    batch, inputs = rollout_output(), rollout_input()
    adopt_uids(batch, inputs)
    assert "uid" not in batch.non_tensor_batch
    adopt_uids(batch, inputs, add=True)
    assert batch.non_tensor_batch["uid"].tolist() == inputs.non_tensor_batch["uid"].tolist()


def test_a_snapshot_keeps_its_columns(tensordict: TensorDict) -> None:
    inputs = rollout_input()
    kept = shallow_copy(inputs)
    inputs.non_tensor_batch.pop("raw_prompt")
    inputs.meta_info["do_sample"] = False
    assert "raw_prompt" in kept.non_tensor_batch
    assert "do_sample" not in kept.meta_info
    kept = shallow_copy(tensordict)
    del tensordict["x"]
    assert "x" in kept.keys()  # noqa: SIM118 - `in` of a TensorDict asks for something else
