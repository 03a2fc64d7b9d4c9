"""One recorded rollout step as JSON for the page: statistics of all rows, and some groups with their text.

The JSON contains model output, which is untrusted: the page inserts it only as text.
"""

from __future__ import annotations

import json
import math
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np

from verl_rollout_skip.key import RolloutKey
from verl_rollout_skip.report.sampling import Sampling, ranked_rows
from verl_rollout_skip.report.tokens import Piece, TokenTexts
from verl_rollout_skip.store.reader import PROMPT_DIGEST, EntryReader, StoreReader
from verl_rollout_skip.tools.stats import StepColumns, StepStatistics, step_columns, step_statistics
from verl_rollout_skip.tools.trajectories import Trajectory, json_value, read_trajectories

Json = dict[str, Any]

_PERCENTILES = (10, 50, 90)
_MAX_EXTRAS = 16
_MAX_TEXT = 4000
_MAX_LOG_PROB = 9999


@dataclass
class Counted:
    """How much was read, and how much of it is shown."""

    rows: int = 0
    groups: int = 0
    shown_groups: int = 0
    shown_group_rows: int = 0
    shown_responses: int = 0
    cut_texts: int = 0

    def add(self, other: Counted) -> None:
        for name, value in vars(other).items():
            setattr(self, name, getattr(self, name) + value)


@dataclass(frozen=True)
class EntryView:
    """A rollout step for the page. ``broken`` is the reason if it cannot be read; then it has no data."""

    key: RolloutKey
    broken: str | None
    json: Json
    counted: Counted = field(default_factory=Counted)


class EntryViews:
    """Creates the views of a variant's rollout steps."""

    def __init__(self, entries: StoreReader, texts: TokenTexts, sampling: Sampling, response_limit: int | None) -> None:
        self._entries = entries
        self._texts = texts
        self._sampling = sampling
        self._limit = response_limit

    def view(self, key: RolloutKey, groups: int) -> EntryView:
        """A rollout step with this many groups. If it cannot be read, the view says why."""
        try:
            return self._open(key).view(groups)
        except Exception as error:  # a damaged file can raise anything, and must not hide the other entries
            return broken_view(key, error)

    def more_groups(self, key: RolloutKey, start: int, count: int) -> Json:
        """The next groups of a step, in the order of the sample."""
        step = self._open(key)
        return {"groups": step.groups(step.order[start : start + count]), "vocabulary": step.vocabulary.json}

    def whole_group(self, key: RolloutKey, number: int) -> Json:
        """One group with all its responses."""
        step = self._open(key, responses=1 << 30)
        return {"groups": step.groups([number] if number in step.order else []), "vocabulary": step.vocabulary.json}

    def _open(self, key: RolloutKey, responses: int | None = None) -> _Step:
        sampling = self._sampling
        if responses is not None:
            sampling = replace(sampling, responses=responses)
        return _Step(self._entries.entry(key, check_digest=True), self._texts, sampling, self._limit)


def broken_view(key: RolloutKey, error: BaseException) -> EntryView:
    """The view of an entry that cannot be read."""
    text = " ".join(str(error).split()) or type(error).__name__
    return EntryView(key, text, {"step": key.step, "gen_batch": key.gen_batch, "broken": text, "groups": []})


class _Vocabulary:
    """The distinct pieces of a step. Responses refer to them by number."""

    def __init__(self) -> None:
        self._numbers: dict[tuple[int, ...], int] = {}
        self._pieces: list[Piece] = []

    def numbers(self, pieces: list[Piece]) -> list[int]:
        for piece in pieces:
            if piece.tokens not in self._numbers:
                self._numbers[piece.tokens] = len(self._pieces)
                self._pieces.append(piece)
        return [self._numbers[piece.tokens] for piece in pieces]

    @property
    def json(self) -> list[list[Any]]:
        return [[piece.text, int(piece.kind), list(piece.tokens)] for piece in self._pieces]


@dataclass(frozen=True)
class _Pieces:
    """Consecutive tokens as numbers of pieces, with the positions at which each piece starts and ends."""

    numbers: list[int] = field(default_factory=list)
    starts: list[int] = field(default_factory=list)
    ends: list[int] = field(default_factory=list)


class _Step:
    """An open entry."""

    def __init__(self, entry: EntryReader, texts: TokenTexts, sampling: Sampling, limit: int | None) -> None:
        self.columns: StepColumns = step_columns(entry)
        self.statistics: StepStatistics = step_statistics(self.columns, limit)
        self.vocabulary = _Vocabulary()
        self.counted = Counted(rows=self.statistics.rows)
        self._entry = entry
        self._texts = texts
        self._sampling = sampling
        digests = entry.texts(PROMPT_DIGEST)
        # Without prompt digests, each row is its own group.
        numbers = np.arange(entry.record.rows) if self.columns.groups is None else self.columns.groups
        names = [str(row) for row in range(entry.record.rows)] if digests is None else list(dict.fromkeys(digests))
        self._members = _members(numbers, len(names))
        self._names = names
        self.order = sampling.order_of_groups(names)
        self._digest = entry.record.parts[0].digest

    def view(self, count: int) -> EntryView:
        groups = self.groups(sorted(self.order[:count]))
        found = self.statistics
        self.counted.groups = len(self._members)
        self.counted.shown_groups = len(groups)
        self.counted.shown_group_rows = sum(len(group["rows"]) for group in groups)
        view = {
            "step": found.key.step,
            "gen_batch": found.key.gen_batch,
            "broken": None,
            "digest": self._digest,
            "statistics": statistics_json(found, self.columns),
            "all_groups": len(self._members),
            "groups": groups,
            "vocabulary": self.vocabulary.json,
        }
        return EntryView(found.key, None, view, self.counted)

    def groups(self, numbers: Sequence[int]) -> list[Json]:
        found = self.columns
        ranked = [ranked_rows(self._members[number], found.scores, found.response_lengths) for number in numbers]
        shown = [self._sampling.rows_of_group(rows) for rows in ranked]
        wanted = sorted({row for rows in shown for row in rows}.union(min(rows) for rows in ranked))
        trajectories = {trajectory.row: trajectory for trajectory in read_trajectories(self._entry, wanted)}
        extras = self._extras(wanted)
        return [self._group(*group, trajectories, extras) for group in zip(numbers, ranked, shown, strict=True)]

    def _extras(self, rows: list[int]) -> dict[int, Json]:
        """The values of other simple keys, by row."""
        found = {name: self._entry.cells(name, rows) for name in self._entry.simple_keys()[:_MAX_EXTRAS]}
        return {
            row: {name: number(cells[index]) for name, cells in found.items() if cells is not None}
            for index, row in enumerate(rows)
        }

    def _group(
        self, index: int, ranked: list[int], shown: list[int], read: dict[int, Trajectory], extras: dict[int, Json]
    ) -> Json:
        first = read[min(ranked)]
        return {
            "number": index,
            "prompt_digest": self._names[index],
            "prompt": self._text(first.prompt),
            "messages": messages(readable(first.messages)),
            "reference": _short(readable(first.reward_model)),
            "data_source": _short(readable(first.data_source)),
            "rows": [self._row(row) for row in ranked],
            "responses": [self._response(read[row], ranked.index(row), len(ranked), extras[row]) for row in shown],
        }

    def _row(self, row: int) -> Json:
        found = self.columns
        lengths, limit = found.response_lengths, self.statistics.length.limit if self.statistics.length else None
        length = None if lengths is None else int(lengths[row])
        return {
            "row": row,
            "score": None if found.scores is None else number(found.scores[row]),
            "passed": None if found.passed is None else bool(found.passed[row]),
            "length": length,
            "at_limit": length is not None and limit is not None and length >= limit,
        }

    def _response(self, read: Trajectory, rank: int, of: int, extras: Json) -> Json:
        self.counted.shown_responses += 1
        row, ids = read.row, read.response
        length = 0 if ids is None else len(ids)
        log_probs = self._per_token("rollout_log_probs", row, length, "f")
        mask = self._per_token("response_mask", row, length, "biu")
        # Tokens that the model did not generate, such as tool output, are marked.
        shown = self._text(ids, log_probs, None if mask is None or mask.all() else mask == 0)
        mean = None if log_probs is None or not length else number(log_probs.mean(dtype=np.float64))
        return {"row": row, "rank": rank, "of": of, "mean_log_prob": mean, "extras": extras, "text": shown}

    def _per_token(self, name: str, row: int, length: int, kinds: str) -> np.ndarray | None:
        """One value per token of a response; None if the lengths differ."""
        rows = self._entry.tokens(name)
        if rows is None or len(rows[row]) != length or rows[row].dtype.kind not in kinds:
            return None
        return rows[row]

    def _text(
        self, ids: list[int] | None, log_probs: np.ndarray | None = None, not_generated: np.ndarray | None = None
    ) -> Json | None:
        """The pieces of a text and their log-probs. A long text is cut to its beginning and its end."""
        if ids is None:
            return None
        head, tail = self._sampling.shown_tokens(len(ids))
        cut = len(ids) - head - tail
        self.counted.cut_texts += cut > 0
        shown = self._pieces(ids, 0, head)
        end = self._pieces(ids, len(ids) - tail, len(ids)) if cut else _Pieces()
        found: Json = {
            "length": len(ids),
            "cut": cut,
            "pieces": shown.numbers + end.numbers,
            "cut_at": len(shown.numbers) if cut else None,
        }
        starts = shown.starts + end.starts
        if log_probs is not None:
            found["log_probs"] = _sums(log_probs, starts, shown.ends + end.ends)
        if not_generated is not None:
            found["not_generated"] = [int(not_generated[start]) for start in starts]
        return found

    def _pieces(self, ids: list[int], first: int, last: int) -> _Pieces:
        pieces = self._texts.pieces(ids[first:last])
        bounds = np.cumsum([first, *(len(piece.tokens) for piece in pieces)]).tolist()
        return _Pieces(self.vocabulary.numbers(pieces), bounds[:-1], bounds[1:])


def statistics_json(found: StepStatistics, columns: StepColumns) -> Json:
    """The statistics of a step as a flat dict, for the charts and the table."""
    score, length, groups = found.score, found.length, found.groups
    lengths = columns.response_lengths
    percentiles: list[float | None] = [None] * len(_PERCENTILES)
    if lengths is not None and len(lengths):
        percentiles = np.percentile(lengths, _PERCENTILES).tolist()
    compared = groups.compared if groups is not None else 0
    zero = None if groups is None else groups.zero_variance
    return {
        "rows": found.rows,
        "response_tokens": found.response_tokens,
        "score": None if score is None else number(score.mean),
        "score_std": None if score is None else number(score.std),
        "score_min": None if score is None else number(score.min),
        "score_max": None if score is None else number(score.max),
        "nonfinite": 0 if score is None else score.nonfinite,
        "pass_rate": found.pass_rate,
        "pass_source": found.pass_source.value,
        "length": None if length is None else length.mean,
        **{f"length_p{percent}": value for percent, value in zip(_PERCENTILES, percentiles, strict=True)},
        "length_max": None if length is None else length.max,
        "limit": None if length is None else length.limit,
        "at_limit": None if length is None else length.at_limit,
        "groups": None if groups is None else groups.count,
        "compared_groups": None if groups is None else compared,
        "zero_variance": None if zero is None or not compared else zero / compared,
        "generate_s": found.generate_s,
        "bytes": found.bytes,
        "created_at": found.created_at,
    }


def readable(cell: Any) -> Any:
    """A cell as readable JSON."""
    return json_value(cell, nonfinite=str)


def messages(cell: Any) -> list[list[str]] | None:
    """A conversation as pairs of role and text; None if the cell is not a conversation."""
    if not isinstance(cell, list) or not cell:
        return None
    found = []
    for message in cell:
        if not isinstance(message, dict) or "content" not in message:
            return None
        content = message["content"]
        if isinstance(content, list):
            content = "\n".join(_part(part) for part in content)
        found.append([str(message.get("role", "")), _short(content) or ""])
    return found


def number(value: Any) -> Any:
    """A value that JSON can represent: NaN, infinities and anything that is not a number become strings."""
    if isinstance(value, bool | np.bool_):
        return bool(value)
    if isinstance(value, int | np.integer):
        return int(value) if abs(int(value)) < 2**53 else str(int(value))
    if isinstance(value, float | np.floating):
        plain = float(value)
        return float(f"{plain:.6g}") if math.isfinite(plain) else str(plain)
    return None if value is None else _short(value)


def _part(part: Any) -> str:
    if isinstance(part, dict):
        return str(part["text"]) if "text" in part else f"({part.get('type', 'part')})"
    return str(part)


def _short(value: Any) -> str | None:
    if value is None:
        return None
    text = value if isinstance(value, str) else json.dumps(value, ensure_ascii=False, default=str)
    more = len(text) - _MAX_TEXT
    return text if more <= 0 else f"{text[:_MAX_TEXT]}… ({more} more characters)"


def _members(numbers: np.ndarray, count: int) -> list[np.ndarray]:
    """The rows of each group."""
    order = np.argsort(numbers, kind="stable")
    return np.split(order, np.searchsorted(numbers[order], np.arange(1, count))) if count else []


def _sums(log_probs: np.ndarray, starts: list[int], ends: list[int]) -> list[int | None]:
    """The negated log-prob of each piece in hundredths; None for NaN."""
    if not starts:
        return []
    totals = np.concatenate(
        [[0.0], np.cumsum(np.nan_to_num(log_probs.astype(np.float64), nan=0.0, posinf=1e6, neginf=-1e6))]
    )
    broken = np.concatenate([[0], np.cumsum(np.isnan(log_probs))])
    sums = (totals[starts] - totals[ends]) * 100
    unknown = broken[ends] > broken[starts]
    hundredths = np.clip(sums.round(), -_MAX_LOG_PROB, _MAX_LOG_PROB).astype(int).tolist()
    return [None if bad else value for bad, value in zip(unknown.tolist(), hundredths, strict=True)]
