"""``Shadow``: compares what the engine generates with the recording, in mode ``shadow``.

Tokens decide whether a row matches. Log-probs are only reported, because an engine may compute the same tokens with
log-probs that differ in their last bits. This module counts and reports; ``divergence.py`` compares rows.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

from verl_rollout_skip.config.skip_config import BLOCK
from verl_rollout_skip.errors import ShadowError
from verl_rollout_skip.key import RolloutKey
from verl_rollout_skip.replay.divergence import Comparison, Decode, Responses, compare, responses_of
from verl_rollout_skip.replay.results import Rollout, replace_timings
from verl_rollout_skip.runs.mismatch import all_differences, indented
from verl_rollout_skip.runs.variants import Run

logger = logging.getLogger(__name__)

PREFIX = "rollout_skip/shadow/"

_SYNC = (
    "the weight sync: the engine did not receive all weights of the last update, or received them changed (a wrong "
    "name, shape, dtype or shard, or a cache that was not reset)"
)
_NONDETERMINISTIC = (
    "an engine that is not deterministic: sampling without a seed per request, or kernels whose results depend on how "
    "requests are batched"
)
_CHANGED = (
    "a changed engine: its version, kernels, hardware, parallel sizes or settings, or the code that calls it and its "
    "tools"
)


@dataclass
class Tally:
    """The comparisons of one step, or of a whole training."""

    rows: int = 0
    different: int = 0
    first_min: int | None = None
    first_sum: int = 0
    log_prob_max: float = 0.0
    log_prob_sum: float = 0.0
    log_prob_count: int = 0

    @property
    def ratio(self) -> float:
        """The share of identical rows; 0 if no row could be compared."""
        return (self.rows - self.different) / self.rows if self.rows else 0.0

    @property
    def matches(self) -> bool:
        return self.rows > 0 and self.different == 0

    def add(self, found: Comparison) -> None:
        self.rows += found.rows
        self.different += len(found.differences)
        for difference in found.differences:
            first = difference.position
            self.first_min = first if self.first_min is None else min(first, self.first_min)
            self.first_sum += first
        self.log_prob_max = max(self.log_prob_max, found.log_prob_max)
        self.log_prob_sum += found.log_prob_sum
        self.log_prob_count += found.log_prob_count

    def metrics(self) -> dict[str, float]:
        metrics = {"match_ratio": self.ratio, "rows": float(self.rows)}
        if self.first_min is not None:
            metrics["first_difference/min"] = float(self.first_min)
            metrics["first_difference/mean"] = self.first_sum / self.different
        if self.log_prob_count:
            metrics["log_prob_diff/max"] = self.log_prob_max
            metrics["log_prob_diff/mean"] = self.log_prob_sum / self.log_prob_count
        return {f"{PREFIX}{name}": value for name, value in metrics.items()}


class Shadow:
    """The comparisons of a training. The metrics of a step cover all of its generation batches so far."""

    def __init__(self, run: Run) -> None:
        self._run = run
        self._min_match = run.settings.shadow_min_match
        self._decode: Decode | None = None
        self._total = Tally()
        self._step = Tally()
        self._last: int | None = None
        self._steps: dict[int, bool] = {}
        self._seconds = 0.0

    def show_text(self, decode: Callable[[list[int]], str]) -> None:
        """Show rows that differ as text. Without this, their token ids are shown."""
        self._decode = decode

    def follow(self, key: RolloutKey, rollout: Rollout, generate: Callable[[Any], Any]) -> Rollout:
        """Generate from the input of a recorded rollout and compare, row by row. Returns the recorded rollout."""
        started = time.perf_counter()
        generated = generate(rollout.inputs)
        seconds = time.perf_counter() - started
        rollout = self.compare(key, rollout, responses_of(rollout.batch), responses_of(generated), seconds)
        timings = (getattr(generated, "meta_info", None) or {}).get("timing") or {}
        replace_timings(rollout.batch, {**timings, **rollout.metrics})
        return rollout

    def compare(
        self, key: RolloutKey, rollout: Rollout, recorded: Responses, generated: Responses, seconds: float
    ) -> Rollout:
        """Compare the responses of a recorded rollout with generated ones, which took ``seconds``.

        Returns the recorded rollout with the metrics of its step. Raises if too few rows match.
        """
        found = compare(recorded, generated)
        if key.step != self._last:
            self._last, self._step = key.step, Tally()
        self._step.add(found)
        self._total.add(found)
        self._seconds += seconds
        had_difference = not all(self._steps.values())
        matches = found.rows > 0 and not found.differences
        self._steps[key.step] = self._steps.get(key.step, True) and matches
        is_off_policy = bool(rollout.metrics.get("rollout_skip/off_policy"))
        if self._min_match is not None and found.match_ratio < self._min_match:
            raise ShadowError(
                f"{key}: {self._describe(found)} The match ratio {found.match_ratio:.4g} is below "
                f"{BLOCK}.shadow_min_match={self._min_match:g}, so the training stops before it trains on this step. "
                f"{self._explain(key, found, is_off_policy)}\nFix the cause, or lower {BLOCK}.shadow_min_match."
            )
        if not matches and not had_difference:
            logger.warning(
                "%s: %s The training continues on the recorded rows. %s",
                *(key, self._describe(found), self._explain(key, found, is_off_policy)),
            )
        return replace(rollout, metrics={**rollout.metrics, **self._step.metrics()}, generate_s=seconds)

    @property
    def notes(self) -> list[str]:
        """What the summary of the training says."""
        total, steps = self._total, self._steps
        if not steps:
            return []
        if total.matches:
            text = f"shadow: all {total.rows} rows of {len(steps)} steps are identical to the recording"
        else:
            first = next(step for step, matches in steps.items() if not matches)
            text = (
                f"shadow: {total.rows - total.different} of {total.rows} rows are identical to the recording; "
                f"{sum(steps.values())} of {len(steps)} steps match completely, step {first} is the first that does not"
            )
        if total.log_prob_count:
            text += f"; log-probs before the first difference differ by at most {total.log_prob_max:.2g}"
        return [f"{text} (generated in {self._seconds:.1f} s)"]

    @staticmethod
    def _describe(found: Comparison) -> str:
        if not found.rows:
            return "none of the recorded prompts was generated, so no row can be compared with the recording."
        return f"{len(found.differences)} of {found.rows} generated rows differ from the recording."

    def _explain(self, key: RolloutKey, found: Comparison, is_off_policy: bool) -> str:
        """The likely causes, then what differs in the settings, then some rows."""
        lines = [self._likely_causes(key, is_off_policy)]
        for source in self._run.sources:
            differences = all_differences(source.manifest, self._run.fingerprint, self._run.config)
            if differences:
                lines.append(f"What differs from {source.folder}:\n{indented(differences)}")
        rows = found.describe(self._decode)
        if rows:
            lines.append(f"The first rows that differ:\n{rows}")
        return "\n".join(lines)

    def _likely_causes(self, key: RolloutKey, is_off_policy: bool) -> str:
        causes = self._causes_in_engine(key)
        if not is_off_policy:
            return causes
        return (
            "The rollout counts as off-policy (rollout_skip/off_policy): the settings or the code of this training, or "
            "the rollouts that it has learned from, differ from those of the recording. If its weights differ too, the "
            f"engine has to generate something else. If they do not: {causes}"
        )

    def _causes_in_engine(self, key: RolloutKey) -> str:
        before = [matches for step, matches in self._steps.items() if step < key.step]
        if before and all(before):
            return (
                "The steps before it match, so the engine can reproduce the recording, and since then only its weights "
                f"have changed. The most likely cause is {_SYNC}. Otherwise: {_listed(_NONDETERMINISTIC, _CHANGED)}."
            )
        if key.step > 1:
            return f"Likely causes, the most likely first: {_listed(_SYNC, _NONDETERMINISTIC, _CHANGED)}."
        return (
            "It is the first step, before any update, so the weights are those of the model. Likely causes, the most "
            f"likely first: {_listed(_NONDETERMINISTIC, _CHANGED, _SYNC)}."
        )


def _listed(*causes: str) -> str:
    return "; ".join(f"({number}) {cause}" for number, cause in enumerate(causes, 1))
