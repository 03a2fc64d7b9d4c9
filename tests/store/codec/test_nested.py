"""TensorDicts as V1 uses them: nested tensors of every kind, nested TensorDicts, non-tensors between tensors."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from tensordict import NonTensorData, NonTensorStack, TensorDict
from verl.utils.tensordict_utils import (
    concat_nested_tensors,
    get_tensordict,
    list_of_dict_to_tensordict,
    maybe_fix_3d_position_ids,
    nested_tensor_from_tensor_list,
)

from tests.batches import assert_comes_back, assert_same_batch, data_proto, dump, load
from verl_rollout_skip.errors import UnsupportedBatchError

from_jagged = torch.nested.nested_tensor_from_jagged


def batch_of(**values: Any) -> TensorDict:
    return TensorDict(values, batch_size=[2])


def jagged(*lengths: int, dtype: torch.dtype = torch.int64) -> Any:
    rows = [torch.arange(length, dtype=dtype) for length in lengths]
    return torch.nested.as_nested_tensor(rows, layout=torch.jagged)


def test_nested_tensors_can_be_computed_with_after_loading() -> None:
    offsets = torch.tensor([0, 2, 5])
    mask, values = from_jagged(torch.tensor([1, 0, 1, 1, 0]), offsets), from_jagged(torch.arange(5.0), offsets)
    loaded, _ = load(assert_comes_back(batch_of(mask=mask, values=values)))
    product = loaded["mask"] * loaded["values"]
    assert product.values().tolist() == [0.0, 0.0, 2.0, 3.0, 0.0]


def test_known_sequence_lengths_are_known_again() -> None:
    batch = batch_of(known=jagged(3, 1), unknown=from_jagged(torch.arange(4), torch.tensor([0, 3, 4])))
    loaded, _ = load(dump(batch))
    assert loaded["known"]._metadata_cache.keys() == {"min_seqlen", "max_seqlen"}
    assert (loaded["known"]._min_seqlen, loaded["known"]._max_seqlen) == (1, 3)
    assert not loaded["unknown"]._metadata_cache


def test_holes_between_rows_are_dropped_and_the_rows_kept() -> None:
    holes = from_jagged(torch.arange(8), torch.tensor([0, 3, 8]), lengths=torch.tensor([2, 4]))
    loaded, _ = load(assert_comes_back(batch_of(holes=holes)))
    assert [row.tolist() for row in loaded["holes"].unbind()] == [[0, 1], [3, 4, 5, 6]]


def test_tensors_that_share_offsets_but_not_lengths_come_back() -> None:
    offsets = torch.tensor([0, 3, 8])
    whole = from_jagged(torch.arange(8), offsets)
    part = from_jagged(torch.arange(8.0), offsets, lengths=torch.tensor([2, 4]))
    assert_comes_back(batch_of(whole=whole, part=part))


def test_ragged_in_another_dimension() -> None:
    offsets = torch.tensor([0, 2, 6])
    assert_comes_back(batch_of(built=from_jagged(torch.arange(18).reshape(3, 6), offsets, jagged_dim=2)))
    assert_comes_back(batch_of(transposed=from_jagged(torch.arange(18).reshape(6, 3), offsets).transpose(1, 2)))
    rows = [torch.arange(6).reshape(3, 2), torch.arange(12).reshape(3, 4)]
    assert_comes_back(batch_of(torch_chose=torch.nested.as_nested_tensor(rows, layout=torch.jagged)))
    assert_comes_back(batch_of(between=from_jagged(torch.arange(36).reshape(3, 6, 2), offsets, jagged_dim=2)))


def test_position_ids_that_verl_makes_ragged_by_hand_come_back() -> None:
    rows = [torch.arange(6).reshape(3, 2), torch.arange(12).reshape(3, 4)]
    positions = nested_tensor_from_tensor_list(rows)
    loaded, _ = load(assert_comes_back(batch_of(position_ids=positions)))
    for row, loaded_row in zip(rows, loaded["position_ids"].unbind(), strict=True):
        assert torch.equal(row, loaded_row)
    both = TensorDict({"position_ids": concat_nested_tensors([positions, positions])}, batch_size=[4])
    assert_comes_back(both)


def test_a_nested_tensor_that_does_not_fit_its_values_is_refused_until_verl_fixes_it() -> None:
    # Position ids of vision models after tensordict has pickled them.
    broken = from_jagged(torch.arange(18).reshape(3, 6), torch.tensor([0, 2, 6]))
    batch = batch_of(position_ids=broken)
    with pytest.raises(UnsupportedBatchError, match="position_ids"):
        dump(batch)
    maybe_fix_3d_position_ids(batch)
    assert_comes_back(batch)


def test_a_loss_mask_that_belongs_to_the_responses_still_does() -> None:
    responses = jagged(2, 3)
    ones = torch.ones(5, dtype=torch.int64)
    batch = batch_of(
        response_mask=from_jagged(ones, torch.tensor([0, 2, 5])),
        responses=responses,
        loss_mask=from_jagged(ones.clone(), responses.offsets()),
        prompts=jagged(1, 1),
    )
    loaded, _ = load(assert_comes_back(batch))
    assert (loaded["loss_mask"] * loaded["responses"]).values().tolist() == [0, 1, 0, 1, 2]


@pytest.mark.parametrize("lengths", [(0, 0), (0, 3), (3, 0)], ids=str)
def test_empty_rows_come_back(lengths: tuple[int, int]) -> None:
    assert_comes_back(batch_of(prompts=jagged(*lengths), responses=jagged(*lengths), rm_scores=jagged(*lengths)))


def test_batches_of_nested_tensors_without_rows_come_back() -> None:
    nothing = from_jagged(torch.zeros(0), torch.tensor([0]))
    assert_comes_back(TensorDict({"jagged": nothing}, batch_size=[0]))
    assert_comes_back(TensorDict({"strided": torch.nested.nested_tensor([])}, batch_size=[0]))


def test_rows_of_different_shapes_come_back() -> None:
    rows = [torch.randn(3, 2, 5), torch.randn(3, 4, 3)]
    strided = torch.nested.nested_tensor(rows, layout=torch.strided)
    assert_comes_back(batch_of(image=strided, half=strided.bfloat16()))


def test_a_dot_in_a_key_is_not_a_path() -> None:
    nested = TensorDict({"b": torch.zeros(2)}, batch_size=[2])
    assert_comes_back(batch_of(**{"a": nested, "a.b": torch.ones(2), "a__b": torch.full((2,), 2.0)}))
    deep = TensorDict({"b.c": torch.zeros(2), "b": TensorDict({"c": torch.ones(2)}, batch_size=[2])}, batch_size=[2])
    assert_comes_back(batch_of(a=deep, **{"a.b": TensorDict({"c": torch.full((2,), 2.0)}, batch_size=[2])}))


def test_empty_tensordicts_keep_their_place() -> None:
    batch = batch_of(first=TensorDict({}, batch_size=[2]), second=torch.ones(2))
    batch["second_empty"] = TensorDict({"inner": TensorDict({}, batch_size=[2, 3])}, batch_size=[2])
    assert_comes_back(batch)


def test_nested_tensordicts_may_have_more_batch_dimensions() -> None:
    inner = TensorDict({"x": torch.arange(12).reshape(2, 3, 2)}, batch_size=[2, 3])
    assert_comes_back(TensorDict({"inner": inner, "y": torch.ones(2, 3)}, batch_size=[2]))
    assert_comes_back(TensorDict({"inner": inner, "y": torch.ones(2, 3)}, batch_size=[2, 3], device="cpu"))


def test_non_tensors_come_back_between_tensors() -> None:
    cells = [{"a": [1]}, None]
    batch = batch_of(
        z=torch.ones(2),
        cells=NonTensorStack.from_list([NonTensorData(cell) for cell in cells]),
        a=torch.zeros(2),
        step=NonTensorData(7),
        lists=NonTensorStack(*([1, 2], [3, 4])),
        meta=NonTensorData({"validate": False, "tuple": (1,)}),
    )
    batch["nested"] = TensorDict({"step": NonTensorData("inner"), "x": torch.ones(2)}, batch_size=[2])
    assert_comes_back(batch)


def test_what_verl_helpers_build_comes_back() -> None:
    rows = [{"tokens": torch.arange(n), "uid": str(n), "same": torch.ones(2), "info": {"n": [n]}} for n in (2, 3)]
    assert_comes_back(list_of_dict_to_tensordict(rows))
    columns = {"x": torch.ones(2), "text": ["a", "b"], "lists": [[], [1]], "dicts": [{}, {"a": 1}]}
    assert_comes_back(get_tensordict(columns, {"global_steps": 3, "config": {"a": [1]}}))


def test_the_input_has_its_own_derived_columns() -> None:
    output = data_proto({"response_mask": torch.tensor([[1, 0]]), "echo": torch.tensor([[1]])})
    given = data_proto(
        {
            "response_mask": torch.tensor([[1, 1]]),
            "loss_mask": torch.tensor([[1, 1]]),
            "echo": torch.tensor([[1]]),
        }
    )
    assert_comes_back(output, given)
    output = data_proto({"prompts": torch.tensor([[1, 0]]), "responses": torch.tensor([[1, 0]])})
    given = data_proto(
        {
            "prompts": torch.tensor([[1, 1]]),
            "responses": torch.tensor([[1, 0]]),
            "input_ids": torch.tensor([[1, 1, 1, 0]]),
        }
    )
    assert_comes_back(output, given)


def test_an_input_that_is_almost_an_echo_comes_back() -> None:
    assert_comes_back(data_proto(x=[0.0, 1.0]), data_proto(x=[-0.0, 1.0]))
    shared = {"a": 1}
    assert_comes_back(data_proto(x=[{"a": 1}, {"a": 1}]), data_proto(x=[shared, shared]))
    assert_comes_back(data_proto(x=[shared, shared]), data_proto(x=[{"a": 1}, {"a": 1}]))
    assert_comes_back(data_proto({"x": torch.zeros(2)}), data_proto({"x": torch.tensor([0.0, -0.0])}))
    assert_comes_back(data_proto({"x": torch.zeros(2)}), data_proto(x=torch.zeros(2).numpy()))


def test_one_key_may_name_a_tensor_and_an_array() -> None:
    assert_comes_back(data_proto({"x": torch.zeros(2)}, x=[1, "two"]), data_proto({"x": torch.ones(2)}, x=[1, "two"]))


def test_a_key_that_is_not_valid_text_is_refused() -> None:
    with pytest.raises(UnsupportedBatchError, match="not valid Unicode"):
        dump(data_proto(**{"\ud83d\ude00": [1]}))


def test_a_stack_of_non_tensors_over_two_batch_dimensions_is_refused() -> None:
    stack = NonTensorStack.from_list([[NonTensorData(place) for place in range(3)] for _ in range(2)])
    with pytest.raises(UnsupportedBatchError, match="cells"):
        dump(TensorDict({"cells": stack}, batch_size=[2, 3]))


def test_loading_twice_gives_two_batches() -> None:
    data = dump(batch_of(x=jagged(2, 3), cells=NonTensorStack(*({"a": 1}, {"b": 2}))))
    one, other = load(data)[0], load(data)[0]
    one["x"].values().zero_()
    one["cells"][0]["a"] = 5
    assert_same_batch(other, load(data)[0])
