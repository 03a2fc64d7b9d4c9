"""Compares generated responses with recorded ones: which rows differ, from which token on, and their log-probs."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch

LOG_PROBS = "rollout_log_probs"
COMPARED = ("responses", LOG_PROBS)
"""The columns that are compared."""

Decode = Callable[[list[int]], str]

_SHOWN_ROWS = 3
_SHOWN_TOKENS = 12


@dataclass(frozen=True)
class Response:
    """The response of one row without padding. ``row`` is its number in the recording; None if it is not recorded."""

    tokens: torch.Tensor
    log_probs: torch.Tensor | None
    row: int | None = None


Responses = Mapping[Any, Response]
"""Responses by what identifies a row in both rollouts."""


@dataclass(frozen=True)
class Difference:
    """A row that differs, and the position of the first token that does. One side is None if it has no such row."""

    position: int
    recorded: Response | None
    generated: Response | None

    def describe(self, decode: Decode | None) -> str:
        """The row around its first difference, as text if tokens can be decoded."""
        if self.recorded is None:
            return f"  a row that is not recorded was generated: {_text(self._around(self.generated), decode)}"
        name = f"  row {self.recorded.row}"
        if self.generated is None:
            return f"{name} was not generated: {_text(self._around(self.recorded), decode)}"
        lines = [f"{name} differs from token {self.position} on"]
        for side, response in (("recorded", self.recorded), ("generated", self.generated)):
            before = response.tokens[max(self.position - _SHOWN_TOKENS, 0) : self.position].tolist()
            after = self._around(response)
            follows = _text(after, decode) if after else "(ends)"
            lines.append(f"    {side:9} {_text(before, decode)} then {follows}")
        return "\n".join(lines)

    def _around(self, response: Response | None) -> list[int]:
        tokens: list[int] = []
        if response is not None:
            tokens = response.tokens[self.position : self.position + _SHOWN_TOKENS].tolist()
        return tokens


@dataclass(frozen=True)
class Comparison:
    """The result for one rollout step. Log-probs are compared in front of the first difference of each row."""

    rows: int
    differences: list[Difference] = field(default_factory=list)
    log_prob_max: float = 0.0
    log_prob_sum: float = 0.0
    log_prob_count: int = 0

    @property
    def match_ratio(self) -> float:
        """The share of identical rows; 0 if no row could be compared."""
        return (self.rows - len(self.differences)) / self.rows if self.rows else 0.0

    def describe(self, decode: Decode | None) -> str:
        """The first few rows that differ."""
        shown = [difference.describe(decode) for difference in self.differences[:_SHOWN_ROWS]]
        more = len(self.differences) - len(shown)
        return "\n".join([*shown, *([f"  … and {more} more"] if more else [])])


def responses_of(batch: Any, names: Iterable[Any] | None = None) -> dict[Any, Response]:
    """The responses of a V0 or V1 batch, by ``names``, one for each row, or by row number."""
    columns = getattr(batch, "batch", batch)
    tokens = _rows(columns["responses"])
    log_probs = _rows(columns.get(LOG_PROBS, None)) or [None] * len(tokens)
    mask = columns.get("attention_mask", None)
    found = {}
    for row, name in enumerate(range(len(tokens)) if names is None else names):
        response, probs = tokens[row], log_probs[row]
        if isinstance(mask, torch.Tensor) and not mask.is_nested:  # it covers the prompt, then the response
            valid = mask[row][-len(response) :].bool() if len(response) else mask[row][:0].bool()
            response, probs = response[valid], None if probs is None else probs[valid]
        found[name] = Response(response, probs, row)
    return found


def compare(recorded: Responses, generated: Responses) -> Comparison:
    """Compare row by row. A row that only one side has counts as different from its first token on."""
    differences: list[Difference] = []
    largest, total, count = 0.0, 0.0, 0
    names = [*recorded, *(name for name in generated if name not in recorded)]
    for name in names:
        one, other = recorded.get(name), generated.get(name)
        if one is None or other is None:
            differences.append(Difference(0, one, other))
            continue
        first = _first_difference(one.tokens, other.tokens)
        if first is not None:
            differences.append(Difference(first, one, other))
        if one.log_probs is not None and other.log_probs is not None:
            apart = _distances(one.log_probs[:first], other.log_probs[:first])
            if len(apart):
                largest = max(largest, float(apart.max()))
                total += float(apart.sum())
                count += len(apart)
    return Comparison(len(names), differences, largest, total, count)


def _first_difference(one: torch.Tensor, other: torch.Tensor) -> int | None:
    length = min(len(one), len(other))
    different = torch.nonzero(one[:length] != other[:length])
    if len(different):
        return int(different[0])
    return None if len(one) == len(other) else length


def _distances(one: torch.Tensor, other: torch.Tensor) -> torch.Tensor:
    length = min(len(one), len(other))
    left, right = one[:length].double(), other[:length].double()
    is_same = (left == right) | (left.isnan() & right.isnan())  # infinities too
    return torch.where(is_same, 0.0, (left - right).abs()).nan_to_num(nan=torch.inf, posinf=torch.inf)


def _rows(column: Any) -> Sequence[Any]:
    """The rows of a padded or jagged tensor, or of a column of objects; empty if there is no such column."""
    if column is None:
        return []
    return column.unbind() if isinstance(column, torch.Tensor) else list(column.tolist())


def _text(tokens: list[int], decode: Decode | None) -> str:
    if decode is None:
        return f"tokens {tokens}"
    try:
        return repr(decode(tokens))
    except Exception:  # a tokenizer that does not know a token must not end the training
        return f"tokens {tokens} (they cannot be decoded)"
