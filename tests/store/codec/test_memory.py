"""Zeroed memory for large arrays: like ``np.zeros``, and padding that is never written takes no memory."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np
import pytest
import torch

from verl_rollout_skip.store.codec.memory import ZeroedMemory

MB = 1 << 20


@pytest.mark.parametrize("huge_pages", [True, False])
@pytest.mark.parametrize("dtype", ["bool", "uint8", "float16", "int64", "complex128", "M8[s]"])
@pytest.mark.parametrize("shape", [(), (0,), (3, 0, 2), (5,), (3, 1_000_001), (2, 3, 700_001)])
def test_memory_is_zero_and_writable(shape: tuple[int, ...], dtype: str, huge_pages: bool) -> None:
    array = ZeroedMemory(huge_pages).zeros(shape, dtype)

    expected = np.zeros(shape, dtype)
    assert (array.shape, array.dtype, array.strides) == (expected.shape, expected.dtype, expected.strides)
    assert np.array_equal(array, expected)
    array[...] = 1
    assert np.array_equal(array, np.ones(shape, "int64").astype(dtype))


def test_an_array_outlives_what_made_it_and_becomes_a_tensor() -> None:
    tensor = torch.from_numpy(ZeroedMemory().zeros((1024, 1025), np.int64))

    tensor += 7

    assert tensor.sum() == 7 * 1024 * 1025
    assert tensor.is_contiguous()


def test_threads_get_separate_memory() -> None:
    memory = ZeroedMemory()

    def fill(number: int) -> np.ndarray:
        array = memory.zeros((6 * MB,), np.uint8)
        array += number
        return array

    with ThreadPoolExecutor(4) as pool:
        arrays = list(pool.map(fill, range(16)))

    assert [np.unique(array).tolist() for array in arrays] == [[number] for number in range(16)]


def test_what_is_never_written_takes_no_memory_on_small_pages() -> None:
    before = _resident()
    array = ZeroedMemory(huge_pages=False).zeros((256, MB), np.uint8)
    array[:, :4096] = 1

    assert _resident() - before < 64 * MB


def _resident() -> int:
    pages = int(Path("/proc/self/statm").read_text().split()[1])
    return pages * 4096
