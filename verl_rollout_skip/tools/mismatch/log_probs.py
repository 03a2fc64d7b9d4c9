"""``LogProbs``: the log-probs of the tokens that one update trains on, and figures of them.

The formulas are those of verl's rollout correction (``verl/trainer/ppo/rollout_corr_helper.py``), which logs them as
``rollout_corr/*``. A ratio is the probability of a token under the trainer divided by that under the rollout engine.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property

import numpy as np

from verl_rollout_skip.errors import CorruptEntryError

SAFE = 20.0
"""verl limits log-ratios to ±20 before it computes weights from them."""
PERCENTILES = (0.1, 1.0, 5.0, 50.0, 95.0, 99.0, 99.9)
TAILS = (1.1, 2.0, 5.0)


@dataclass(frozen=True)
class LogProbs:
    """Flat arrays with one element per trained token: log-probs, and the row and position of each.

    ``turn`` numbers the parts of a response that the model generated, between the replies of tools. ``rows`` is the
    number of all rows, with or without tokens. Tokens with a log-prob that is not finite are only counted.
    """

    rows: int
    old: np.ndarray
    rollout: np.ndarray
    row: np.ndarray
    position: np.ndarray
    turn: np.ndarray
    nonfinite: int = 0

    @classmethod
    def of(
        cls, old: Sequence[np.ndarray], rollout: Sequence[np.ndarray], mask: Sequence[np.ndarray], what: str
    ) -> LogProbs:
        """Select the tokens that ``mask`` selects. Rows may be padded to different widths at their end."""
        found: list[tuple[np.ndarray, ...]] = []
        for row, (left, right, chosen) in enumerate(zip(old, rollout, mask, strict=True)):
            positions = np.flatnonzero(chosen)
            if positions.size and positions[-1] >= min(len(left), len(right)):
                raise CorruptEntryError(
                    f"{what}: row {row} has {len(left)} log-probs of the trainer and {len(right)} of the rollout, but "
                    f"its response mask selects token {positions[-1] + 1}."
                )
            turns = np.cumsum(np.diff(positions, prepend=positions[:1]) > 1)
            values = (left[positions].astype(np.float64), right[positions].astype(np.float64))
            found.append((*values, np.full(len(positions), row), positions, turns))
        columns = [np.concatenate(column) for column in zip(*found, strict=True)] if found else [np.empty(0)] * 5
        finite = np.isfinite(columns[0] - columns[1])
        kept = [column[finite] for column in columns]
        return cls(len(old), kept[0], kept[1], kept[2], kept[3], kept[4], int((~finite).sum()))

    @property
    def tokens(self) -> int:
        return len(self.old)

    @cached_property
    def log_ratio(self) -> np.ndarray:
        return self.old - self.rollout

    @cached_property
    def ratio(self) -> np.ndarray:
        return np.exp(np.clip(self.log_ratio, -SAFE, SAFE))

    @cached_property
    def k3(self) -> np.ndarray:
        """The k3 estimate of the KL divergence of each token."""
        with np.errstate(over="ignore", invalid="ignore"):
            return np.exp(self.log_ratio) - self.log_ratio - 1.0

    @cached_property
    def lengths(self) -> np.ndarray:
        """The number of tokens of each row."""
        return np.bincount(self.row.astype(np.int64), minlength=self.rows)

    def sums(self, values: np.ndarray) -> np.ndarray:
        """The sum of some values of the tokens for each row."""
        return np.bincount(self.row.astype(np.int64), values, minlength=self.rows)

    def means(self, values: np.ndarray) -> np.ndarray:
        """The mean for each row, 0 for a row without tokens."""
        return self.sums(values) / np.maximum(self.lengths, 1)


@dataclass(frozen=True)
class Figures:
    """How far trainer and rollout are apart in one update. Percentiles and tails are those of the ratio."""

    tokens: int
    rows: int
    nonfinite: int
    k1: float
    k3: float
    mean_abs: float
    max_abs: float
    probability_diff: float
    probability_diff_max: float
    chi2_token: float
    chi2_seq: float
    rollout_ppl: float
    training_ppl: float
    correlation: float | None
    percentiles: dict[str, float]
    tails: dict[str, float]


def figures_of(found: LogProbs) -> Figures | None:
    """The figures of an update; None if no token is trained on."""
    if not found.tokens:
        return None
    with np.errstate(over="ignore"):  # an infinite k3 or perplexity is the result
        distance = np.abs(found.log_ratio)
        sequence = np.clip(found.sums(found.log_ratio), -SAFE, SAFE)
        gaps = np.abs(np.exp(found.old) - np.exp(found.rollout))
        varies = found.tokens > 1 and found.old.std() > 0 and found.rollout.std() > 0
        return Figures(
            tokens=found.tokens,
            rows=found.rows,
            nonfinite=found.nonfinite,
            k1=float(-found.log_ratio.mean()),
            k3=float(found.k3.mean()),
            mean_abs=float(distance.mean()),
            max_abs=float(distance.max()),
            probability_diff=float(gaps.mean()),
            probability_diff_max=float(gaps.max()),
            chi2_token=float(np.square(found.ratio).mean() - 1.0),
            chi2_seq=float(np.exp(2.0 * sequence).mean() - 1.0),
            rollout_ppl=float(np.exp(-found.means(found.rollout)).mean()),
            training_ppl=float(np.exp(-found.means(found.old)).mean()),
            correlation=float(np.corrcoef(found.old, found.rollout)[0, 1]) if varies else None,
            percentiles={
                f"p{percentile:g}": float(value)
                for percentile, value in zip(PERCENTILES, np.percentile(found.ratio, PERCENTILES), strict=True)
            },
            tails={
                **{f"below 1/{limit:g}": float((found.ratio < 1 / limit).mean()) for limit in TAILS},
                **{f"above {limit:g}": float((found.ratio > limit).mean()) for limit in TAILS},
            },
        )
