"""Compares two recorded rollout steps: prompts, responses token by token, scores, lengths and columns.

Rows are paired by the tokens of their prompts: the first response to a prompt with the first, and so on. This
distinguishes reordered prompts from different ones. Only what is compared is decoded, and torch is not imported.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import pyarrow as pa

from verl_rollout_skip.fingerprint.fingerprint import difference
from verl_rollout_skip.fingerprint.layout import layout_difference
from verl_rollout_skip.runs.manifest import Manifest
from verl_rollout_skip.store.reader import PROMPT_DIGEST, RESPONSE_LENGTH, SCORE, EntryReader

_UNCOMPARED = ("uid", "in__uid", PROMPT_DIGEST)


@dataclass(frozen=True)
class SettingsDifference:
    """How two manifests differ, one line per setting. ``layout`` and ``versions`` are only informational."""

    rollout: list[str]
    training: list[str]
    layout: list[str]
    versions: list[str]

    @property
    def counts(self) -> bool:
        return bool(self.rollout or self.training)


@dataclass(frozen=True)
class PromptDifference:
    """How many rows have prompts that are in both entries or only in one, and whether their order differs."""

    both: int
    only_a: int
    only_b: int
    reordered: bool
    other_inputs: int | None
    """Rows with the same prompt but different other inputs (answer, data source …); None if not recorded."""


@dataclass(frozen=True)
class FirstDifference:
    """A pair of responses, and the position of the first token in which they differ, counted from 0."""

    row_a: int
    row_b: int
    token: int
    response_a: tuple[int, ...]
    response_b: tuple[int, ...]


@dataclass(frozen=True)
class ResponseDifference:
    """How the responses differ, over pairs of rows with the same prompt."""

    same: int
    differ: int
    earliest: int | None
    """The smallest position at which a pair differs."""
    median: float | None
    """The median of those positions."""
    first: FirstDifference | None
    """The first pair that differs."""


@dataclass(frozen=True)
class Shift:
    """The means of a per-row number over the paired rows of both entries, and how many rows changed."""

    mean_a: float
    mean_b: float
    changed: int


@dataclass(frozen=True)
class EntryDifference:
    """The complete comparison. ``columns`` lists those that differ; None unless all rows pair up in the same order."""

    identical: bool
    rows_a: int
    rows_b: int
    prompts: PromptDifference | None = None
    responses: ResponseDifference | None = None
    score: Shift | None = None
    length: Shift | None = None
    columns: list[str] | None = None


def compare_settings(a: Manifest, b: Manifest) -> SettingsDifference:
    """Compare the settings, layouts and versions of two manifests."""
    return SettingsDifference(
        rollout=difference(a.fingerprint, b.fingerprint),
        training=difference(a.training, b.training),
        layout=layout_difference(a.gpu_layout, b.gpu_layout),
        versions=difference(a.versions, b.versions),
    )


def compare_entries(a: EntryReader, b: EntryReader) -> EntryDifference:
    """Compare two entries. If the digests of their content are equal, nothing else is read."""
    if a.record.content == b.record.content:
        return EntryDifference(True, a.record.rows, b.record.rows)
    prompts_a, prompts_b = _prompts(a), _prompts(b)
    pairs: list[tuple[int, int]] = []
    prompts = None
    if prompts_a is not None and prompts_b is not None:
        pairs = _pair(prompts_a, prompts_b)
        prompts = _prompt_difference(a, b, prompts_a, prompts_b, pairs)
    in_order = prompts is not None and not (prompts.only_a or prompts.only_b or prompts.reordered)
    return EntryDifference(
        identical=False,
        rows_a=a.record.rows,
        rows_b=b.record.rows,
        prompts=prompts,
        responses=_response_difference(a.tokens("responses"), b.tokens("responses"), pairs),
        score=_shift(a.numbers(SCORE), b.numbers(SCORE), pairs),
        length=_shift(a.numbers(RESPONSE_LENGTH), b.numbers(RESPONSE_LENGTH), pairs),
        columns=_other_columns(a, b) if in_order else None,
    )


_Rows = list[np.ndarray]


def _prompts(entry: EntryReader) -> list[bytes] | None:
    """The tokens of each prompt, or its digest if the tokens were not recorded."""
    tokens = entry.tokens("prompts")
    if tokens is not None:
        return [row.astype(np.int64).tobytes() for row in tokens]
    digests = entry.texts(PROMPT_DIGEST)
    return None if digests is None else [digest.encode() for digest in digests]


def _pair(a: Sequence[bytes], b: Sequence[bytes]) -> list[tuple[int, int]]:
    waiting: dict[bytes, list[int]] = defaultdict(list)
    for row in reversed(range(len(b))):
        waiting[b[row]].append(row)
    return [(row, waiting[prompt].pop()) for row, prompt in enumerate(a) if waiting[prompt]]


def _prompt_difference(
    a: EntryReader, b: EntryReader, prompts_a: list[bytes], prompts_b: list[bytes], pairs: list[tuple[int, int]]
) -> PromptDifference:
    digests_a, digests_b = a.texts(PROMPT_DIGEST), b.texts(PROMPT_DIGEST)
    other = None
    if digests_a is not None and digests_b is not None:
        other = sum(digests_a[row_a] != digests_b[row_b] for row_a, row_b in pairs)
    rows_b = [row for _, row in pairs]
    return PromptDifference(
        both=len(pairs),
        only_a=len(prompts_a) - len(pairs),
        only_b=len(prompts_b) - len(pairs),
        reordered=rows_b != sorted(rows_b),
        other_inputs=other,
    )


def _response_difference(a: _Rows | None, b: _Rows | None, pairs: list[tuple[int, int]]) -> ResponseDifference | None:
    if a is None or b is None or not pairs:
        return None
    positions: list[int] = []
    first = None
    for row_a, row_b in pairs:
        position = _first_difference(a[row_a], b[row_b])
        if position is None:
            continue
        positions.append(position)
        if first is None:
            first = FirstDifference(row_a, row_b, position, tuple(a[row_a].tolist()), tuple(b[row_b].tolist()))
    return ResponseDifference(
        same=len(pairs) - len(positions),
        differ=len(positions),
        earliest=min(positions, default=None),
        median=float(np.median(positions)) if positions else None,
        first=first,
    )


def _first_difference(a: np.ndarray, b: np.ndarray) -> int | None:
    shared = min(len(a), len(b))
    unequal = np.flatnonzero(a[:shared] != b[:shared])
    if len(unequal):
        return int(unequal[0])
    return None if len(a) == len(b) else shared


def _shift(a: np.ndarray | None, b: np.ndarray | None, pairs: list[tuple[int, int]]) -> Shift | None:
    if a is None or b is None or not pairs:
        return None
    values_a, values_b = (column[list(rows)] for column, rows in zip((a, b), zip(*pairs, strict=True), strict=True))
    changed = (values_a != values_b) & ~(np.isnan(values_a) & np.isnan(values_b))
    return Shift(float(values_a.mean()), float(values_b.mean()), int(changed.sum()))


def _other_columns(a: EntryReader, b: EntryReader) -> list[str]:
    """The names of the columns that differ or that only one entry has."""

    def differs(name: str) -> bool:
        if name not in a.names or name not in b.names or not _same_bits(a.column(name), b.column(name)):
            return True
        return a.bulk_digests(name) != b.bulk_digests(name)

    return [name for name in sorted(a.names | b.names) if name not in _UNCOMPARED and differs(name)]


def _same_bits(a: pa.ChunkedArray, b: pa.ChunkedArray) -> bool:
    """Whether two columns are equal bit by bit, NaN included."""
    if a.type != b.type or a.equals(b):
        return bool(a.type == b.type)
    one, two = (column.combine_chunks() for column in (a, b))
    if pa.types.is_list(a.type):
        if not one.value_lengths().equals(two.value_lengths()):
            return False
        one, two = one.flatten(), two.flatten()
    if not pa.types.is_floating(one.type) or one.null_count or two.null_count:
        return False
    return bool(one.to_numpy(zero_copy_only=False).tobytes() == two.to_numpy(zero_copy_only=False).tobytes())
