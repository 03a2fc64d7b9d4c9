"""The positions of the tokens in a padded batch.

verl pads prompts on the left to one width, and responses on the right to another. ``Spans`` has both widths and the
lengths of each row. Attention masks and position ids follow from these, and padding does not have to be stored.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np

_CHUNK_BYTES = 1 << 20
WINDOWS = ("response", "full", "prompt")


@dataclass(frozen=True)
class Spans:
    """The number of tokens in the prompt and the response of each row, and the widths that these are padded to."""

    prompt_width: int
    response_width: int
    prompt_lengths: np.ndarray
    response_lengths: np.ndarray

    def width(self, window: str) -> int:
        return self.bounds(window)[2]

    def bounds(self, window: str) -> tuple[np.ndarray, np.ndarray, int]:
        """The start and end of each row's tokens in a tensor as wide as the window, and this width."""
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
        """A mask for some rows: True on tokens, False on padding."""
        start, end, width = self.bounds(window)
        if not len(end[rows]):
            return np.zeros((0, width), bool)  # a file without rows can claim any width
        columns = np.arange(width, dtype=np.int32)
        inside = columns < end[rows, None].astype(np.int32)
        if window != "response":
            inside &= columns >= start[rows, None].astype(np.int32)
        return inside

    def positions(self, rule: str, rows: slice) -> np.ndarray:
        """Position ids. On the right padding, "counted" repeats the last position, and "continued" keeps counting."""
        start, end, width = self.bounds("full")
        if not len(end[rows]):
            return np.zeros((0, width), np.int32)
        position = np.arange(width, dtype=np.int32) - start[rows, None].astype(np.int32)
        np.maximum(position, 0, out=position)
        if rule == "counted":
            np.minimum(position, np.maximum(end - start - 1, 0)[rows, None].astype(np.int32), out=position)
        return position


def row_chunks(rows: int, row_bytes: int, first: int = 0) -> Iterator[slice]:
    """Slices of rows that fit into the CPU cache, so that vectorized code needs few calls and little memory."""
    step = max(1, _CHUNK_BYTES // max(row_bytes, 1))
    for start in range(first, rows, step):
        yield slice(start, min(rows, start + step))


def find_spans(attention_mask: np.ndarray | None, response_width: int) -> Spans | None:
    """The spans in an attention mask.

    None unless the ones in each row are contiguous and touch the border between prompt and response on both sides.
    """
    if attention_mask is None or attention_mask.ndim != 2 or attention_mask.dtype.kind not in "biu":
        return None
    rows, width = attention_mask.shape
    prompt_width = width - response_width
    if prompt_width < 0:
        return None
    chunks = list(row_chunks(rows, width * attention_mask.itemsize))
    start, count = np.empty(rows, np.int64), np.empty(rows, np.int64)
    for chunk in chunks:
        inside = attention_mask[chunk] != 0
        start[chunk] = inside.argmax(axis=1) if width else 0
        count[chunk] = np.count_nonzero(inside, axis=1)
    start = np.where(count == 0, prompt_width, start)
    end = start + count
    if not (np.all(start <= prompt_width) and np.all(end >= prompt_width)):
        return None
    spans = Spans(prompt_width, response_width, prompt_width - start, end - prompt_width)
    is_exact = all(np.array_equal(spans.mask("full", chunk), attention_mask[chunk]) for chunk in chunks)
    return spans if is_exact else None
