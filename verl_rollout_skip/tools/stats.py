"""Statistics of a recorded rollout step: scores, lengths, groups and pass rate.

Only the needed columns are read, and torch is not imported. A number that the recording does not contain is None,
never a guess. Where a number depends on a convention, an enum names the convention.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from enum import Enum
from typing import Any

import numpy as np

from verl_rollout_skip.key import RolloutKey
from verl_rollout_skip.runs.manifest import Manifest
from verl_rollout_skip.store.reader import (
    PROMPT_DIGEST,
    PROMPT_LENGTH,
    RESPONSE_LENGTH,
    SCORE,
    EntryReader,
    EntryRecord,
)

ACCURACY = "acc"
_EXTRA_FIELDS = "extra_fields"
_LIMIT_SETTINGS = (("actor_rollout_ref", "rollout", "response_length"), ("data", "max_response_length"))


class PassSource(str, Enum):
    """What counts as a passed trajectory."""

    ACC = "acc"
    """The reward function returned ``acc`` as 0 or 1 along with the score: 1 is a pass."""
    ACC_POSITIVE = "acc > 0"
    """It returned other values of ``acc``: above 0 is a pass."""
    SCORE_POSITIVE = "score > 0"
    """No ``acc`` was recorded: a score above 0 is a pass. Wrong for rewards that give partial credit."""
    NONE = "none"
    """Neither ``acc`` nor scores were recorded."""


class LimitSource(str, Enum):
    """How the maximum response length was determined."""

    CONFIG = "config"
    """From the configuration in the manifest: ``rollout.response_length``, else ``data.max_response_length``."""
    PADDING = "padding"
    """From the width to which the recorded responses were padded."""
    NONE = "none"
    """Unknown: there is no manifest, and the responses are not padded."""


@dataclass(frozen=True)
class StepColumns:
    """The columns that statistics need, one value per trajectory; None if not recorded.

    ``groups`` numbers the prompts in order of appearance: trajectories of the same prompt have the same number.
    """

    record: EntryRecord
    prompt_lengths: np.ndarray | None
    response_lengths: np.ndarray | None
    scores: np.ndarray | None
    groups: np.ndarray | None
    accuracies: np.ndarray | None
    response_width: int | None

    @property
    def pass_source(self) -> PassSource:
        if self.accuracies is not None:
            binary = np.isin(self.accuracies, (0, 1)).all()
            return PassSource.ACC if binary else PassSource.ACC_POSITIVE
        return PassSource.NONE if self.scores is None else PassSource.SCORE_POSITIVE

    @property
    def passed(self) -> np.ndarray | None:
        """Which trajectories passed, by ``pass_source``."""
        found = self.scores if self.accuracies is None else self.accuracies
        return None if found is None else found > 0


@dataclass(frozen=True)
class ScoreStatistics:
    """Statistics of the finite scores of a step. ``std`` is the population standard deviation (divided by n)."""

    mean: float
    std: float
    min: float
    max: float
    nonfinite: int
    """Trajectories with a NaN or infinite score. They are excluded from the numbers above."""


@dataclass(frozen=True)
class LengthStatistics:
    """Statistics of the response lengths, in tokens."""

    mean: float
    p95: float
    max: int
    limit: int | None
    limit_source: LimitSource
    at_limit: float | None
    """The fraction of responses that reach the limit: truncated, or exactly that long."""


@dataclass(frozen=True)
class GroupStatistics:
    """Statistics of groups of trajectories with the same prompt. Only groups of two or more have a variance."""

    count: int
    largest: int
    compared: int
    """Groups of two or more trajectories."""
    zero_variance: int | None
    """Compared groups whose scores are all equal. Their advantage is zero, so GRPO learns nothing from them."""
    all_passed: int | None
    none_passed: int | None


@dataclass(frozen=True)
class StepStatistics:
    """The statistics of one recorded rollout step."""

    key: RolloutKey
    rows: int
    prompt_tokens: int | None
    response_tokens: int | None
    score: ScoreStatistics | None
    pass_rate: float | None
    pass_source: PassSource
    length: LengthStatistics | None
    groups: GroupStatistics | None
    generate_s: float | None
    bytes: int
    created_at: str


def step_columns(entry: EntryReader) -> StepColumns:
    """Read the columns that statistics need."""
    digests = entry.texts(PROMPT_DIGEST)
    scores = entry.numbers(SCORE)
    return StepColumns(
        record=entry.record,
        prompt_lengths=entry.numbers(PROMPT_LENGTH),
        response_lengths=entry.numbers(RESPONSE_LENGTH),
        scores=None if scores is None else scores.astype(np.float64),
        groups=None if digests is None else _numbered(digests),
        accuracies=_accuracies(entry),
        response_width=entry.response_width,
    )


def step_statistics(columns: StepColumns, response_limit: int | None = None) -> StepStatistics:
    """The statistics of one step; ``response_limit`` is what ``configured_limit`` finds in the manifest."""
    record, passed = columns.record, columns.passed
    return StepStatistics(
        key=record.key,
        rows=record.rows,
        prompt_tokens=record.prompt_tokens,
        response_tokens=record.response_tokens,
        score=_score_statistics(columns.scores),
        pass_rate=None if passed is None or not len(passed) else float(passed.mean()),
        pass_source=columns.pass_source,
        length=_length_statistics(columns, response_limit),
        groups=_group_statistics(columns),
        generate_s=_seconds(record),
        bytes=record.bytes,
        created_at=record.created_at,
    )


def configured_limit(manifest: Manifest | None) -> int | None:
    """The maximum response length according to the configuration in a manifest."""
    if manifest is None:
        return None
    for path in _LIMIT_SETTINGS:
        node: object = manifest.config
        for name in path:
            node = node.get(name) if isinstance(node, dict) else None
        if isinstance(node, int) and not isinstance(node, bool) and node > 0:
            return node
    return None


def weighted_mean(values: Iterable[tuple[float | None, int]]) -> float | None:
    """The mean of several steps' means, weighted by rows; unknown means are ignored."""
    known = [(value, rows) for value, rows in values if value is not None and rows]
    rows = sum(count for _, count in known)
    return sum(value * count for value, count in known) / rows if rows else None


def whole_mean(values: Iterable[tuple[float | None, int]]) -> float | None:
    """The mean over all rows of several steps; None if the mean of any step is unknown."""
    found = [(value, rows) for value, rows in values if rows]
    return None if any(value is None for value, _ in found) else weighted_mean(found)


def _numbered(digests: list[str]) -> np.ndarray:
    first: dict[str, int] = {}
    return np.array([first.setdefault(digest, len(first)) for digest in digests], np.int64)


def _accuracies(entry: EntryReader) -> np.ndarray | None:
    """The reward extra ``acc``. verl's V1 trainers keep it in a dict among the extra fields of each trajectory."""
    cells: list[Any] | None = entry.cells(ACCURACY)
    if cells is None:
        try:
            cells = [fields["reward_extra_info"][ACCURACY] for fields in entry.cells(_EXTRA_FIELDS) or ()]
        except (TypeError, KeyError):
            return None
    if not cells or not all(isinstance(cell, int | float | np.number | np.bool_) for cell in cells):
        return None
    return np.array(cells, np.float64)


def _score_statistics(scores: np.ndarray | None) -> ScoreStatistics | None:
    if scores is None:
        return None
    finite = scores[np.isfinite(scores)]
    if not len(finite):
        return None
    return ScoreStatistics(
        mean=float(finite.mean()),
        std=float(finite.std()),
        min=float(finite.min()),
        max=float(finite.max()),
        nonfinite=len(scores) - len(finite),
    )


def _length_statistics(columns: StepColumns, configured: int | None) -> LengthStatistics | None:
    lengths = columns.response_lengths
    if lengths is None or not len(lengths):
        return None
    limit, source = configured, LimitSource.CONFIG
    if limit is None:
        limit = columns.response_width
        source = LimitSource.NONE if limit is None else LimitSource.PADDING
    return LengthStatistics(
        mean=float(lengths.mean()),
        p95=float(np.percentile(lengths, 95)),
        max=int(lengths.max()),
        limit=limit,
        limit_source=source,
        at_limit=None if limit is None else float((lengths >= limit).mean()),
    )


def _group_statistics(columns: StepColumns) -> GroupStatistics | None:
    groups, passed = columns.groups, columns.passed
    if groups is None or not len(groups):
        return None
    sizes = np.bincount(groups)
    compared = sizes > 1
    all_passed = none_passed = None
    if passed is not None:
        passes = np.bincount(groups, passed)
        all_passed = int((compared & (passes == sizes)).sum())
        none_passed = int((compared & (passes == 0)).sum())
    return GroupStatistics(
        count=len(sizes),
        largest=int(sizes.max()),
        compared=int(compared.sum()),
        zero_variance=_zero_variance(groups, sizes, columns.scores),
        all_passed=all_passed,
        none_passed=none_passed,
    )


def _zero_variance(groups: np.ndarray, sizes: np.ndarray, scores: np.ndarray | None) -> int | None:
    if scores is None:
        return None
    low, high = np.full(len(sizes), np.inf), np.full(len(sizes), -np.inf)
    with np.errstate(invalid="ignore"):  # NaN propagates, so a group with a NaN never counts as equal
        np.minimum.at(low, groups, scores)
        np.maximum.at(high, groups, scores)
    return int(((sizes > 1) & (low == high)).sum())


def _seconds(record: EntryRecord) -> float | None:
    value = record.info.get("generate_s")
    return float(value) if isinstance(value, int | float) and not isinstance(value, bool) else None
