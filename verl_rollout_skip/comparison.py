"""How two recorded rollout steps differ: their prompts, their responses token by token, scores, lengths, columns.

Rows are paired by the tokens of their prompts, the first response to a prompt with the first, and so on; so another
order of the prompts is told from other prompts. Nothing is decoded that is not compared, and torch is not imported.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import pyarrow as pa
import xxhash

from verl_rollout_skip.fingerprint import difference
from verl_rollout_skip.layout import layout_difference
from verl_rollout_skip.manifest import Manifest
from verl_rollout_skip.store.reader import PROMPT_DIGEST, RESPONSE_LENGTH, SCORE, EntryReader

_UNCOMPARED = ("uid", "in__uid", PROMPT_DIGEST)


@dataclass(frozen=True)
class SettingsDifference:
    """How two manifests differ, one line a setting. ``rollout`` and ``training`` count, the others inform."""

    rollout: list[str]
    training: list[str]
    layout: list[str]
    versions: list[str]

    @property
    def counts(self) -> bool:
        return bool(self.rollout or self.training)


@dataclass(frozen=True)
class PromptDifference:
    """Rows by their prompts: in both, only in one, and whether those in both stand in another order."""

    both: int
    only_a: int
    only_b: int
    reordered: bool
    other_inputs: int | None
    """Rows with the same prompt whose other inputs (answer, data source …) differ; None without digests."""


@dataclass(frozen=True)
class FirstDifference:
    """The first token in which a pair of responses differs, counted from 0, and the responses."""

    row_a: int
    row_b: int
    token: int
    response_a: tuple[int, ...]
    response_b: tuple[int, ...]


@dataclass(frozen=True)
class ResponseDifference:
    """Over the pairs of rows with the same prompt."""

    same: int
    differ: int
    earliest: int | None
    """The smallest place at which a pair differs."""
    median: float | None
    """The median of those places."""
    first: FirstDifference | None
    """The first pair that differs."""


@dataclass(frozen=True)
class Shift:
    """A number of each row: its mean on both sides over the paired rows, and how many rows changed."""

    mean_a: float
    mean_b: float
    changed: int


@dataclass(frozen=True)
class EntryDifference:
    """All of it. ``columns`` are those that differ where all rows pair up in the same order; elsewhere None."""

    identical: bool
    rows_a: int
    rows_b: int
    prompts: PromptDifference | None = None
    responses: ResponseDifference | None = None
    score: Shift | None = None
    length: Shift | None = None
    columns: list[str] | None = None


def compare_settings(a: Manifest, b: Manifest) -> SettingsDifference:
    """What two manifests say about how their rollouts were made."""
    names = sorted({*a.versions, *b.versions})
    versions = [
        f"{name}: {a.versions.get(name, 'not there')} → {b.versions.get(name, 'not there')}"
        for name in names
        if a.versions.get(name) != b.versions.get(name)
    ]
    return SettingsDifference(
        rollout=difference(a.fingerprint, b.fingerprint),
        training=difference(a.training, b.training),
        layout=layout_difference(a.gpu_layout, b.gpu_layout),
        versions=versions,
    )


def compare_entries(a: EntryReader, b: EntryReader) -> EntryDifference:
    """Compare two entries. Equal digests of their content need no further look."""
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


def _prompts(entry: EntryReader) -> list[str] | None:
    """One text a row that is equal for equal prompts."""
    tokens = entry.tokens("prompts")
    if tokens is None:
        return entry.texts(PROMPT_DIGEST)
    return [xxhash.xxh3_128(row.astype(np.int64).tobytes()).hexdigest() for row in tokens]


def _pair(a: Sequence[str], b: Sequence[str]) -> list[tuple[int, int]]:
    waiting: dict[str, list[int]] = defaultdict(list)
    for row in reversed(range(len(b))):
        waiting[b[row]].append(row)
    return [(row, waiting[prompt].pop()) for row, prompt in enumerate(a) if waiting[prompt]]


def _prompt_difference(
    a: EntryReader, b: EntryReader, prompts_a: list[str], prompts_b: list[str], pairs: list[tuple[int, int]]
) -> PromptDifference:
    digests_a, digests_b = a.texts(PROMPT_DIGEST), b.texts(PROMPT_DIGEST)
    other = None
    if digests_a is not None and digests_b is not None:
        other = sum(digests_a[one] != digests_b[two] for one, two in pairs)
    places = [two for _, two in pairs]
    return PromptDifference(
        both=len(pairs),
        only_a=len(prompts_a) - len(pairs),
        only_b=len(prompts_b) - len(pairs),
        reordered=places != sorted(places),
        other_inputs=other,
    )


def _response_difference(a: _Rows | None, b: _Rows | None, pairs: list[tuple[int, int]]) -> ResponseDifference | None:
    if a is None or b is None or not pairs:
        return None
    places: list[int] = []
    first = None
    for row_a, row_b in pairs:
        place = _first_difference(a[row_a], b[row_b])
        if place is None:
            continue
        places.append(place)
        if first is None:
            first = FirstDifference(row_a, row_b, place, tuple(a[row_a].tolist()), tuple(b[row_b].tolist()))
    return ResponseDifference(
        same=len(pairs) - len(places),
        differ=len(places),
        earliest=min(places, default=None),
        median=float(np.median(places)) if places else None,
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
    ours, theirs = (column[list(rows)] for column, rows in zip((a, b), zip(*pairs, strict=True), strict=True))
    changed = (ours != theirs) & ~(np.isnan(ours) & np.isnan(theirs))
    return Shift(float(ours.mean()), float(theirs.mean()), int(changed.sum()))


def _other_columns(a: EntryReader, b: EntryReader) -> list[str]:
    """The names of the columns that differ or that only one side has."""

    def differs(name: str) -> bool:
        if name not in a.names or name not in b.names or not _same_bits(a.column(name), b.column(name)):
            return True
        return a.bulk_digests(name) != b.bulk_digests(name)

    return [name for name in sorted(a.names | b.names) if name not in _UNCOMPARED and differs(name)]


def _same_bits(a: pa.ChunkedArray, b: pa.ChunkedArray) -> bool:
    """Equal, and NaN equals the same NaN."""
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
