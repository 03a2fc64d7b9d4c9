"""Token positions in a padded batch, and the tensors derived from them."""

from __future__ import annotations

import numpy as np
import pytest

from verl_rollout_skip.store.codec.dtypes import Element
from verl_rollout_skip.store.codec.encodings import Encoding, Form
from verl_rollout_skip.store.codec.numbers import is_lossless
from verl_rollout_skip.store.codec.padding import Spans, find_spans, row_chunks

EVERYTHING = slice(None)


def mask(*rows: str, dtype: str = "int64") -> np.ndarray:
    return np.array([[int(cell) for cell in row] for row in rows], dtype).reshape(len(rows), -1)


def lengths(spans: Spans | None) -> tuple[list[int], list[int]]:
    assert spans is not None
    return spans.prompt_lengths.tolist(), spans.response_lengths.tolist()


@pytest.mark.parametrize("dtype", ["int64", "int32", "uint8", "bool"])
def test_lengths_are_read_from_the_attention_mask(dtype: str) -> None:
    spans = find_spans(mask("0111100", "1111111", "0010000", "0001110", dtype=dtype), response_width=4)
    assert lengths(spans) == ([2, 3, 1, 0], [2, 4, 0, 3])


def test_a_row_without_tokens_has_lengths_of_zero() -> None:
    assert lengths(find_spans(mask("0000", "0110"), 2)) == ([0, 1], [0, 1])


@pytest.mark.parametrize(
    ("rows", "width"),
    [
        (["0101100"], 4),  # a hole in the response
        (["1011000"], 4),  # a hole in the prompt
        (["1100000"], 4),  # ends before the seam
        (["0000110"], 4),  # begins after it
        (["0211000"], 4),  # not a mask of ones
        (["0110000"], 8),  # wider than the mask
    ],
)
def test_a_mask_that_is_not_one_run_around_the_seam_describes_no_padding(rows: list[str], width: int) -> None:
    assert find_spans(mask(*rows), width) is None
    assert find_spans(mask("0" * (7 - min(width, 7)) + "1" * min(width, 7), *rows), width) is None


def test_masks_of_other_kinds_describe_no_padding() -> None:
    assert find_spans(None, 2) is None
    assert find_spans(np.ones((2, 3, 4), np.int64), 2) is None
    assert find_spans(np.ones((2, 4), np.float32), 2) is None


def test_inputs_have_a_prompt_and_no_response() -> None:
    spans = find_spans(mask("0011", "1111"), 0)
    assert lengths(spans) == ([2, 4], [0, 0])
    assert spans is not None
    assert (spans.prompt_width, spans.response_width) == (4, 0)


@pytest.mark.parametrize(("rows", "width"), [(0, 4), (0, 0), (3, 0)])
def test_empty_batches_have_spans(rows: int, width: int) -> None:
    spans = find_spans(np.zeros((rows, width), np.int64), 0)
    assert lengths(spans) == ([0] * rows, [0] * rows)


def test_masks_and_bounds_agree_with_the_lengths() -> None:
    spans = Spans(3, 4, np.array([2, 3, 0]), np.array([1, 4, 0]))
    assert spans.mask("full", EVERYTHING).tolist() == mask("0111000", "1111111", "0000000").tolist()
    assert spans.mask("prompt", EVERYTHING).tolist() == mask("011", "111", "000").tolist()
    assert spans.mask("response", slice(0, 2)).tolist() == mask("1000", "1111").tolist()
    assert [spans.width(window) for window in ("prompt", "response", "full")] == [3, 4, 7]
    assert spans.lengths("full").tolist() == [3, 7, 0]


def test_position_ids_of_both_verl_versions() -> None:
    spans = Spans(3, 4, np.array([2, 3, 0]), np.array([1, 4, 0]))
    counted = spans.positions("counted", EVERYTHING)
    continued = spans.positions("continued", EVERYTHING)
    assert counted.tolist() == [[0, 0, 1, 2, 2, 2, 2], [0, 1, 2, 3, 4, 5, 6], [0, 0, 0, 0, 0, 0, 0]]
    assert continued[:2].tolist() == [[0, 0, 1, 2, 3, 4, 5], [0, 1, 2, 3, 4, 5, 6]]


def test_a_rule_is_proved_by_every_element() -> None:
    spans = Spans(3, 4, np.array([2, 3]), np.array([1, 4]))
    positions = spans.positions("counted", EVERYTHING).astype(np.int64)
    encoding = Encoding(Form.POSITIONS, Element("torch", "int64", "int64"), (7,), rule="counted")
    assert is_lossless(encoding, positions, spans, {}.get)
    for index in np.ndindex(positions.shape):
        wrong = positions.copy()
        wrong[index] += 1
        assert not is_lossless(encoding, wrong, spans, {}.get)


@pytest.mark.parametrize(("rows", "row_bytes"), [(0, 8), (1, 1 << 30), (1000, 100_000), (5, 0)])
def test_chunks_cover_every_row_once(rows: int, row_bytes: int) -> None:
    covered = [row for chunk in row_chunks(rows, row_bytes) for row in range(rows)[chunk]]
    assert covered == list(range(rows))
