"""Where a padded batch has its tokens, and the tensors that follow from that alone.

verl pads prompts on the left to one width and responses on the right to another. ``Spans`` holds the lengths; the
attention mask, the position ids and the input ids can be computed from them. ``rows`` of each such rule is used
both to prove at dump time that the rule gives the recorded tensor and to make the tensor again at load time.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np

_CHUNK_BYTES = 1 << 20


@dataclass(frozen=True)
class Spans:
    """How many tokens each row's prompt and response have, and the widths they are padded to."""

    prompt_width: int
    response_width: int
    prompt_lengths: np.ndarray
    response_lengths: np.ndarray

    def width(self, window: str) -> int:
        return self.bounds(window)[2]

    def bounds(self, window: str) -> tuple[np.ndarray, np.ndarray, int]:
        """Start and end of each row's tokens in a tensor of that window's width, and the width."""
        zero = np.zeros_like(self.prompt_lengths)
        if window == "response":
            return zero, self.response_lengths, self.response_width
        start = self.prompt_width - self.prompt_lengths
        if window == "prompt":
            return start, zero + self.prompt_width, self.prompt_width
        return start, self.prompt_width + self.response_lengths, self.prompt_width + self.response_width

    def lengths(self, window: str) -> np.ndarray:
        start, end, _ = self.bounds(window)
        return end - start

    def mask(self, window: str, rows: slice) -> np.ndarray:
        """True where the tokens are, for some of the rows."""
        start, end, width = self.bounds(window)
        columns = np.arange(width, dtype=np.int32)
        inside = columns < end[rows, None].astype(np.int32)
        if window != "response":
            inside &= columns >= start[rows, None].astype(np.int32)
        return inside


WINDOWS = ("response", "full", "prompt")


def row_chunks(rows: int, row_bytes: int) -> Iterator[slice]:
    """Slices of rows that fit the processor's cache: few enough calls, little memory."""
    step = max(1, _CHUNK_BYTES // max(row_bytes, 1))
    for start in range(0, rows, step):
        yield slice(start, min(rows, start + step))


def find_spans(attention_mask: np.ndarray | None, response_width: int) -> Spans | None:
    """The spans that an attention mask describes, or None if it is not one run of ones a row, around the seam."""
    if attention_mask is None or attention_mask.ndim != 2 or attention_mask.dtype.kind not in "biu":
        return None
    rows, width = attention_mask.shape
    prompt_width = width - response_width
    if prompt_width < 0:
        return None
    start = np.empty(rows, np.int64)
    count = np.empty(rows, np.int64)
    for chunk in row_chunks(rows, width * attention_mask.itemsize):
        inside = attention_mask[chunk] != 0
        start[chunk] = inside.argmax(axis=1) if width else 0
        count[chunk] = np.count_nonzero(inside, axis=1)
    start = np.where(count == 0, prompt_width, start)
    end = start + count
    if not (np.all(start <= prompt_width) and np.all(end >= prompt_width)):
        return None
    spans = Spans(prompt_width, response_width, prompt_width - start, end - prompt_width)
    return spans if proves(mask_rows, "full", spans, attention_mask) else None


def mask_rows(window: str, spans: Spans, rows: slice, dtype: np.dtype) -> np.ndarray:
    """1 on tokens, 0 on padding."""
    return spans.mask(window, rows).astype(dtype, copy=False)


def position_rows(rule: str, spans: Spans, rows: slice, dtype: np.dtype) -> np.ndarray:
    """Position ids: "counted" stays at the last token's position in the padding, "continued" goes on counting."""
    start, end, width = spans.bounds("full")
    position = np.arange(width, dtype=np.int32) - start[rows, None].astype(np.int32)
    np.maximum(position, 0, out=position)
    if rule == "counted":
        np.minimum(position, np.maximum(end - start - 1, 0)[rows, None].astype(np.int32), out=position)
    return position.astype(dtype, copy=False)


def proves(make, rule: str, spans: Spans, actual: np.ndarray) -> bool:  # type: ignore[no-untyped-def]
    """Whether a rule gives exactly the recorded tensor, shown by making it."""
    rows = len(actual)
    return all(
        np.array_equal(make(rule, spans, chunk, actual.dtype), actual[chunk])
        for chunk in row_chunks(rows, actual.nbytes // max(rows, 1))
    )
