"""What a ledger keeps of a tensor: the digest covers every bit, the moments are those of numpy."""

from __future__ import annotations

import math
import pickle

import numpy as np
import pytest
import torch

from verl_rollout_skip.replay.ledger.figures import FiguresOfRows, figures_of, rows_figures


def jagged(*rows: list[float]) -> torch.Tensor:
    return torch.nested.nested_tensor([torch.tensor(row) for row in rows], layout=torch.jagged)


def test_the_figures_of_a_tensor() -> None:
    figures = figures_of(torch.tensor([[1, 2, 3], [4, 5, 7]]))
    assert (figures.dtype, figures.shape, figures.count) == ("int64", (2, 3), 6)
    assert (figures.min, figures.max, figures.mean) == (1.0, 7.0, 22 / 6)


def test_one_changed_bit_changes_the_digest() -> None:
    values = torch.zeros(1000, 7)
    changed = values.clone()
    changed[500, 3] = -0.0
    assert figures_of(values).digest != figures_of(changed).digest


def test_dtype_and_shape_are_part_of_the_digest() -> None:
    values = torch.zeros(4, 6)
    same_bytes = [values, values.view(6, 4), values.to(torch.int32), values.reshape(24), torch.zeros(2, 6)]
    assert len({figures_of(tensor).digest for tensor in same_bytes}) == len(same_bytes)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float64, torch.int8, torch.bool, torch.uint8])
def test_every_dtype_has_figures(dtype: torch.dtype) -> None:
    values = torch.tensor([[0, 1], [1, 1]]).to(dtype)
    figures = figures_of(values)
    assert figures.dtype == str(dtype).removeprefix("torch.")
    assert (figures.min, figures.max, figures.mean) == (0.0, 1.0, 0.75)


def test_a_view_with_other_strides_has_the_same_figures() -> None:
    values = torch.arange(24.0).view(4, 6)
    assert figures_of(values.t()) == figures_of(values.t().contiguous())


def test_nan_is_not_lost_in_the_moments() -> None:
    figures = figures_of(torch.tensor([1.0, math.nan, 2.0]))
    assert all(math.isnan(value) for value in (figures.min, figures.max, figures.mean))


@pytest.mark.parametrize("shape", [(0,), (0, 5), (3, 0)])
def test_an_empty_tensor_has_figures(shape: tuple[int, ...]) -> None:
    figures = figures_of(torch.empty(shape))
    assert (figures.shape, figures.count) == (shape, 0)
    assert math.isnan(figures.mean)


def test_a_number_has_figures() -> None:
    figures = figures_of(torch.tensor(2.5))
    assert (figures.shape, figures.count, figures.mean) == ((), 1, 2.5)


def test_a_jagged_tensor_is_told_from_another_one_with_the_same_values() -> None:
    first, second = jagged([1.0, 2.0], [3.0]), jagged([1.0], [2.0, 3.0])
    assert figures_of(first).shape == (2, 2)
    assert figures_of(first).digest != figures_of(second).digest
    assert figures_of(first).count == 3


def test_a_jagged_tensor_with_equal_rows_is_the_same_as_a_dense_one() -> None:
    assert figures_of(jagged([1.0, 2.0], [3.0, 4.0])) == figures_of(torch.tensor([[1.0, 2.0], [3.0, 4.0]]))


def test_rows_that_arrive_in_slices_have_the_same_figures() -> None:
    rows = [[1.0, 2.0], [3.0, 4.0], [5.0], [6.0, 7.0, 8.0]]
    slices = FiguresOfRows()
    slices.add(torch.tensor(rows[:2]))  # a slice whose rows have the same length may be dense
    slices.add(jagged(*rows[2:]))
    assert slices.result() == figures_of(jagged(*rows))


def test_slices_that_several_processes_read_have_the_same_figures() -> None:
    rows = torch.arange(24.0).view(8, 3)
    whole = rows_figures(rows[:1])
    for start, end in ((1, 4), (4, 4), (4, 8)):
        whole.merge(pickle.loads(pickle.dumps(rows_figures(rows[start:end]))))
    assert whole.result() == figures_of(rows)


def test_slices_of_different_types_are_an_error() -> None:
    slices = FiguresOfRows()
    slices.add(np.zeros((2, 2), np.float32))
    with pytest.raises(ValueError, match="float32 and int64"):
        slices.add(np.zeros((2, 2), np.int64))
