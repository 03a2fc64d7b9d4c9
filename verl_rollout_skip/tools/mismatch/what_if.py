"""What importance-ratio truncation and rejection would have done to a recorded update, for any threshold.

A ``Rule`` is written like verl's settings in ``algorithm.rollout_correction``: truncation is ``rollout_is`` with
``rollout_is_threshold``, rejection is ``rollout_rs`` with ``rollout_rs_threshold``. A test compares the results with
those of verl's own functions.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from enum import Enum
from functools import partial

import numpy as np

from verl_rollout_skip.errors import ConfigError
from verl_rollout_skip.tools.mismatch.log_probs import SAFE, LogProbs


class Kind(str, Enum):
    """The two corrections."""

    TRUNCATION = "rollout_is"
    """Weight each token by its ratio, limited by a threshold."""
    REJECTION = "rollout_rs"
    """Leave out tokens or sequences that are too far apart."""


_LEVELS = {
    Kind.TRUNCATION: ("token", "sequence"),
    Kind.REJECTION: (
        *(f"token_k{number}" for number in (1, 2, 3)),
        *(f"seq_{reduction}_k{number}" for reduction in ("sum", "mean") for number in (1, 2, 3)),
        *(f"seq_max_k{number}" for number in (2, 3)),
    ),
}


@dataclass(frozen=True)
class Rule:
    """A correction with its threshold: an upper bound, and a lower one for ``lower_upper``."""

    kind: Kind
    level: str
    upper: float
    lower: float | None = None

    @property
    def threshold(self) -> str:
        """The threshold as in verl's settings."""
        return f"{self.upper:g}" if self.lower is None else f"{self.lower:g}_{self.upper:g}"

    @property
    def settings(self) -> str:
        """The settings that turn this correction on."""
        prefix = f"algorithm.rollout_correction.{self.kind.value}"
        return f"{prefix}={self.level} {prefix}_threshold={self.threshold}"


def parse_rule(kind: Kind, text: str) -> Rule:
    """A rule from ``token:2`` or ``seq_mean_k1:0.999_1.001``. Raises ``ConfigError`` for what verl would refuse too."""
    level, _, threshold = text.partition(":")
    if level not in _LEVELS[kind]:
        raise ConfigError(
            f"{text!r} is not a {kind.value}. Use LEVEL:THRESHOLD with one of {', '.join(_LEVELS[kind])}."
        )
    lower, separator, upper = threshold.rpartition("_")
    try:
        bounds = [float(bound) for bound in ((lower, upper) if separator else (upper,))]
    except ValueError:
        bounds = []
    if not bounds or not all(0 < bound < math.inf for bound in bounds) or bounds != sorted(bounds):
        raise ConfigError(f"{text!r} has no valid threshold. Use LEVEL:UPPER or LEVEL:LOWER_UPPER, e.g. {level}:0.5_2.")
    if kind is Kind.REJECTION and not level.endswith("k1") and len(bounds) > 1:
        raise ConfigError(f"{text!r} has a lower bound, but {level} has only an upper one, e.g. {level}:{bounds[1]:g}.")
    if kind is Kind.REJECTION and level.endswith("k1") and len(bounds) == 1:
        bounds = [1 / bounds[0], bounds[0]]  # as in verl
    return Rule(kind, level, bounds[-1], bounds[0] if len(bounds) > 1 else None)


TRUNCATIONS = tuple(
    parse_rule(Kind.TRUNCATION, text)
    for text in ("token:1.5", "token:2", "token:5", "token:0.5_2", "token:0.5_5", "sequence:2", "sequence:5")
)
"""The truncations that are shown by default."""
REJECTIONS = tuple(
    parse_rule(Kind.REJECTION, text)
    for text in (
        "token_k1:0.5_2",
        "token_k3:0.1",
        "seq_mean_k1:0.999_1.001",
        "seq_mean_k1:0.99_1.01",
        "seq_mean_k3:0.001",
        "seq_mean_k3:0.01",
        "seq_max_k3:0.1",
        "seq_sum_k1:0.5_2",
    )
)
"""The rejections that are shown by default."""


@dataclass(frozen=True)
class Effect:
    """What a rule does to one update. ``tokens`` and ``sequences`` are the fractions that are truncated or rejected.

    The others describe the weights of a truncation: ``effective`` is the effective sample size as a fraction.
    """

    tokens: float
    sequences: float
    mean_weight: float | None = None
    max_weight: float | None = None
    effective: float | None = None


def apply(rule: Rule, found: LogProbs) -> Effect:
    """The effect of a rule on an update with at least one token."""
    with np.errstate(all="ignore"):
        return _truncate(rule, found) if rule.kind is Kind.TRUNCATION else _reject(rule, found)


def _truncate(rule: Rule, found: LogProbs) -> Effect:
    if rule.level == "token":
        raw = found.ratio
    else:
        raw = np.exp(np.clip(found.sums(found.log_ratio), -SAFE, SAFE))[found.row.astype(np.int64)]
    outside = raw > rule.upper
    if rule.lower is None:
        weights = np.minimum(raw, rule.upper)
    else:
        outside |= raw < rule.lower
        weights = np.where(outside, 0.0, raw)
    normalized = weights / (weights.mean() + 1e-8)
    spread = float(np.square(normalized).mean())
    return Effect(
        tokens=float(outside.mean()),
        sequences=_rows_with(found, outside),
        mean_weight=float(weights.mean()),
        max_weight=float(weights.max()),
        effective=1.0 / spread if spread else None,
    )


def _reject(rule: Rule, found: LogProbs) -> Effect:
    safe = np.clip(found.log_ratio, -SAFE, SAFE)
    scope, _, estimate = rule.level.rpartition("_")
    values = {"k1": -safe, "k2": 0.5 * safe**2, "k3": np.exp(safe) - 1.0 - safe}[estimate]
    if estimate == "k1":
        assert rule.lower is not None
        lower, upper = math.log(rule.lower), math.log(rule.upper)
    else:
        lower, upper = -math.inf, rule.upper
    if scope == "token":
        rejected = ~((values >= lower) & (values <= upper))
    else:
        reduce: dict[str, Callable[[np.ndarray], np.ndarray]] = {
            "seq_sum": found.sums,
            "seq_mean": found.means,
            "seq_max": partial(_largest, found),
        }
        sequence = reduce[scope](values)
        rejected = ~((sequence >= lower) & (sequence <= upper))[found.row.astype(np.int64)]
    return Effect(tokens=float(rejected.mean()), sequences=_rows_with(found, rejected))


def _largest(found: LogProbs, values: np.ndarray) -> np.ndarray:
    largest = np.full(found.rows, -math.inf)
    np.maximum.at(largest, found.row.astype(np.int64), values)
    return np.where(np.isneginf(largest), 0.0, largest)


def _rows_with(found: LogProbs, chosen: np.ndarray) -> float:
    """The fraction of rows with at least one chosen token."""
    return float((found.sums(chosen.astype(np.float64)) > 0).mean())
