"""Every element type keeps its bits, and is stored as a readable number where that is exact."""

from __future__ import annotations

import io
from typing import Any

import numpy as np
import pyarrow.parquet as pq
import pytest
import torch

from tests.batches import assert_comes_back, bits_of, data_proto, dump
from verl_rollout_skip.errors import UnsupportedBatchError
from verl_rollout_skip.store.codec.dtypes import as_integers, from_stored, narrow_element, same_bits, to_stored
from verl_rollout_skip.store.codec.encodings import Encoding, Form
from verl_rollout_skip.store.codec.numbers import (
    TORCH_DTYPES,
    element_of,
    make_column,
    tensor_bits,
    tensor_from_bits,
)


def every_pattern(name: str) -> torch.Tensor:
    """A tensor with every bit pattern of small dtypes, and with random ones of large dtypes."""
    dtype = TORCH_DTYPES[name]
    if dtype is torch.bool:
        return torch.tensor([False, True])
    size = torch.empty(0, dtype=dtype).element_size()
    if size <= 2:
        patterns = np.arange(2 ** (8 * size), dtype=f"u{size}")
    else:
        patterns = np.random.default_rng(0).integers(0, 256, 4096 * size).astype(np.uint8)
    return torch.from_numpy(np.ascontiguousarray(patterns).view(np.uint8).copy()).view(dtype)


@pytest.mark.parametrize("name", sorted(TORCH_DTYPES))
def test_every_bit_pattern_survives_storage(name: str) -> None:
    tensor = every_pattern(name)
    element, bits = element_of(tensor, "x")
    element = narrow_element(element, bits)
    stored = to_stored(element, bits)
    assert stored.dtype == np.dtype(element.stored)
    back = make_column(Encoding(Form.DENSE, element, ()), from_stored(element, stored), {})
    assert isinstance(back, torch.Tensor)
    assert back.dtype == tensor.dtype
    assert bits_of(back) == bits_of(tensor)


@pytest.mark.parametrize("name", sorted(TORCH_DTYPES))
def test_every_bit_pattern_survives_the_file(name: str) -> None:
    assert_comes_back(data_proto({"column": every_pattern(name), "matrix": every_pattern(name).reshape(-1, 1)}))
    assert_comes_back(data_proto({"matrix": every_pattern(name).reshape(2, -1)}))


@pytest.mark.parametrize("name", sorted(TORCH_DTYPES))
def test_bits_share_memory_with_a_contiguous_tensor(name: str) -> None:
    tensor = every_pattern(name)
    bits = tensor_bits(tensor)
    assert bits.ctypes.data == tensor.data_ptr()
    assert tensor_from_bits(bits, name).data_ptr() == tensor.data_ptr()


@pytest.mark.parametrize(
    ("values", "stored"),
    [
        (torch.tensor([0, 2**31 - 1, -(2**31)]), "int32"),
        (torch.tensor([0, 2**31]), "int64"),
        (torch.tensor([-(2**31) - 1]), "int64"),
        (torch.tensor([], dtype=torch.int64), "int32"),
        (torch.tensor([1.0], dtype=torch.bfloat16), "float32"),
        (torch.tensor([1.0, float("nan"), -0.0], dtype=torch.float16), "float32"),
        (torch.tensor([0x7C01], dtype=torch.int16).view(torch.float16), "uint16"),
        (torch.tensor([True]), "bool"),
        (torch.tensor([1.0]).to(torch.float8_e4m3fn), "uint8"),
        (np.array([1, 2]), "int32"),
        (np.array(["2026-01-01"], "M8[ns]"), "int64"),
        (np.array([2**63], np.uint64), "uint64"),
    ],
    ids=str,
)
def test_numbers_are_stored_as_narrow_as_is_exact(values: Any, stored: str) -> None:
    element, bits = element_of(values, "x")
    assert narrow_element(element, bits).stored == stored


def test_half_precision_reads_as_the_same_numbers_for_everyone() -> None:
    numbers = [0.5, -2.0, 65504.0, 2**-24]
    data = dump(
        data_proto({"half": torch.tensor(numbers, dtype=torch.float16), "brain": torch.tensor([0.5] * 4).bfloat16()})
    )
    table = pq.read_table(io.BytesIO(data))
    assert table["half"].to_pylist() == numbers
    assert table["brain"].to_pylist() == [0.5] * 4


@pytest.mark.parametrize("code", ["?", "b", "B", "<i2", ">u2", "<i8", ">i8", "<f2", ">f4", "<f8", "<c8", ">c16"])
def test_numpy_arrays_keep_their_byte_order(code: str) -> None:
    raw = np.random.default_rng(1).integers(0, 256, 64 * np.dtype(code).itemsize).astype(np.uint8)
    array = (raw & 1).view(code) if code == "?" else raw.view(code)
    assert_comes_back(data_proto(column=array, matrix=array.reshape(64, 1)))
    assert_comes_back(data_proto(matrix=array.reshape(4, 2, 8), strided=array.reshape(4, 16)[:, ::3]))


@pytest.mark.parametrize("code", ["M8[ns]", ">M8[D]", "m8[25s]", "M8[us]"])
def test_dates_and_times_come_back(code: str) -> None:
    array = np.array([0, 1, -(2**63), 2**40], np.int64).astype(np.dtype(code).newbyteorder("=")).astype(code)
    assert_comes_back(data_proto(column=array, matrix=array.reshape(4, 1)))


@pytest.mark.parametrize(
    "array",
    [np.zeros(2, np.longdouble), np.zeros(2, np.clongdouble), np.zeros(2, "V3"), np.zeros(2, [("a", "i4")])],
    ids=lambda array: str(array.dtype),
)
def test_arrays_without_an_exact_form_are_refused_by_name(array: np.ndarray) -> None:
    with pytest.raises(UnsupportedBatchError, match=r"strange.*dtype"):
        dump(data_proto(strange=array))


@pytest.mark.filterwarnings("ignore:Sparse CSR")
@pytest.mark.parametrize("layout", ["to_sparse", "to_sparse_csr"])
def test_tensors_without_an_exact_form_are_refused_by_name(layout: str) -> None:
    with pytest.raises(UnsupportedBatchError, match="strange"):
        dump(data_proto({"strange": getattr(torch.eye(2), layout)()}))


def test_equal_means_the_same_bits() -> None:
    zero, nan = np.array([0.0, 1.0]), np.array([0x7FF8000000000001], np.uint64).view(np.float64)
    assert same_bits(nan, nan.copy())
    assert not same_bits(zero, np.array([-0.0, 1.0]))
    assert not same_bits(nan, np.array([float("nan")]))
    assert not same_bits(zero, zero.astype(np.float32))
    assert not same_bits(zero, zero.reshape(2, 1))
    assert as_integers(np.zeros((2, 3), np.complex64)).shape == (2, 3, 2)
