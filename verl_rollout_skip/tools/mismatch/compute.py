"""``measure_mismatch``: reads the training columns of a variant step by step, and compares trainer and rollout."""

from __future__ import annotations

import heapq
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from verl_rollout_skip.errors import EntryNotFoundError, RolloutSkipError, StoreError
from verl_rollout_skip.key import RolloutKey
from verl_rollout_skip.runs.columns import columns_folder, columns_of, trainings_with_columns
from verl_rollout_skip.runs.manifest import Manifest
from verl_rollout_skip.store.reader import StoreReader
from verl_rollout_skip.tools.columns import MASK, Place, RecordedRows, Update, actor_updates, read_update
from verl_rollout_skip.tools.mismatch.groups import Group, Sums
from verl_rollout_skip.tools.mismatch.log_probs import Figures, LogProbs, figures_of
from verl_rollout_skip.tools.mismatch.what_if import REJECTIONS, TRUNCATIONS, Effect, Rule, apply

OLD, ROLLOUT = "old_log_probs", "rollout_log_probs"
HOW_TO_RECORD = (
    "Train with rollout_skip.training_columns=log_probs and actor_rollout_ref.rollout.calculate_log_probs=True. If the "
    "rollouts are recorded with their log-probs, a replay of them is enough: it needs no inference engine."
)
_UNKNOWN = -1
_BEFORE, _AFTER = 24, 8

Progress = Callable[[list[RolloutKey]], Iterable[RolloutKey]]


@dataclass(frozen=True)
class StepMismatch:
    """One update: its figures (None if it trains on no token), and the effect of each rule on it."""

    key: RolloutKey
    figures: Figures | None
    effects: dict[Rule, Effect]


@dataclass(frozen=True, order=True)
class WorstToken:
    """A token whose log-probs are far apart, with the tokens around it; no tokens if its rollout is not recorded."""

    distance: float
    key: RolloutKey
    row: int
    position: int
    place: Place
    old: float
    rollout: float
    before: tuple[int, ...] = field(compare=False, default=())
    token: int | None = field(compare=False, default=None)
    after: tuple[int, ...] = field(compare=False, default=())


@dataclass
class Mismatch:
    """The mismatch of one training. ``problems`` are steps that cannot be read, ``notes`` what limits the result."""

    training: str
    steps: list[StepMismatch] = field(default_factory=list)
    positions: list[Group] = field(default_factory=list)
    turns: list[Group] = field(default_factory=list)
    tokens: list[Group] = field(default_factory=list)
    worst: list[WorstToken] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)
    problems: list[tuple[RolloutKey, str]] = field(default_factory=list)

    def mean_effect(self, rule: Rule) -> dict[str, float | None]:
        """The effect of a rule over all steps: means, weighted by tokens; the largest weight of all."""
        found = [(step.effects[rule], step.figures.tokens) for step in self.steps if step.figures is not None]
        total = sum(tokens for _, tokens in found)

        def mean(name: str) -> float | None:
            values = [(getattr(effect, name), tokens) for effect, tokens in found]
            if not total or any(value is None for value, _ in values):
                return None
            return float(sum(value * tokens for value, tokens in values) / total)

        weights = [effect.max_weight for effect, _ in found if effect.max_weight is not None]
        means = {name: mean(name) for name in ("tokens", "sequences", "mean_weight", "effective")}
        return {**means, "max_weight": max(weights, default=None)}


def find_training(variant: str, given: str | None = None) -> str:
    """The training whose columns to read: the given one, or the oldest. Raises if there are no columns."""
    trainings = trainings_with_columns(variant)
    if not trainings:
        raise StoreError(f"{variant} has no training columns, so there are no log-probs to compare. {HOW_TO_RECORD}")
    if given is not None and given not in trainings:
        raise StoreError(f"{variant} has no columns of a training {given!r}. It has those of: {', '.join(trainings)}.")
    return given or trainings[0]


def measure_mismatch(
    variant: str,
    training: str,
    *,
    wanted: Callable[[RolloutKey], bool] = lambda key: True,
    rules: Sequence[Rule] = (*TRUNCATIONS, *REJECTIONS),
    worst: int = 10,
    manifest: Manifest | None = None,
    progress: Progress = iter,
) -> Mismatch:
    """Compare the log-probs of trainer and rollout in the wanted updates of a training.

    One step is in memory at a time. A step that cannot be read is a problem; other steps are not affected.
    """
    entries, rollouts = columns_of(variant, training), StoreReader.at(variant)
    keys = [key for key in actor_updates(entries) if wanted(key)]
    if not keys:
        present = sorted({key.step for key in entries})
        raise EntryNotFoundError(
            f"{columns_folder(variant, training)} contains none of the selected steps; it contains steps {present}."
        )
    result = Mismatch(training, notes=_notes(manifest))
    positions, turns, tokens = Sums(), Sums(), Sums()
    for key in progress(keys):
        try:
            update = read_update(entries, key)
            recorded = RecordedRows(rollouts, key.step)
            found = _log_probs(update, recorded)
        except (RolloutSkipError, OSError) as error:
            result.problems.append((key, str(error)))
            continue
        result.steps.append(StepMismatch(key, figures_of(found), _effects(rules, found)))
        if found.nonfinite:
            result.notes.append(f"step {key.step}: {found.nonfinite} tokens have a log-prob that is not finite")
        if not found.tokens:
            continue
        positions.add(found.position, found)
        turns.add(found.turn, found)
        tokens.add(_token_ids(update, recorded, found), found)
        result.worst = _worst(worst, result.worst, key, update, recorded, found)
    if result.problems and not result.steps:
        raise StoreError(result.problems[0][1])
    result.positions, result.turns = positions.doubling(), turns.groups()
    result.tokens = [group for group in tokens.largest(worst + 1) if group.first != _UNKNOWN][:worst]
    return result


def _log_probs(update: Update, recorded: RecordedRows) -> LogProbs:
    old, rollout, mask = (update.rows(name) for name in (OLD, ROLLOUT, MASK))
    where = f"The columns of step {update.key.step}"
    if old is None or mask is None:
        missing = OLD if old is None else MASK
        raise StoreError(f"{where} have no {missing}: the update did not receive them. {HOW_TO_RECORD}")
    if rollout is None:  # the trainer does not pass them on, but they are recorded
        found = [recorded.tokens(ROLLOUT, place) for place in update.places]
        rollout = [
            np.zeros(len(row), np.float32) if log_probs is None else log_probs
            for row, log_probs in zip(old, found, strict=True)
        ]
        if any(log_probs is None and chosen.any() for log_probs, chosen in zip(found, mask, strict=True)):
            raise StoreError(f"{where} have no {ROLLOUT}, and neither has the recorded rollout. {HOW_TO_RECORD}")
    return LogProbs.of(old, rollout, mask, where)


def _effects(rules: Sequence[Rule], found: LogProbs) -> dict[Rule, Effect]:
    return {rule: apply(rule, found) for rule in rules} if found.tokens else {}


def _response(update: Update, recorded: RecordedRows, row: int) -> np.ndarray | None:
    own = update.rows("responses")
    return recorded.tokens("responses", update.places[row]) if own is None else own[row]


def _token_ids(update: Update, recorded: RecordedRows, found: LogProbs) -> np.ndarray:
    """The token at each position, -1 if its rollout is not recorded."""
    ids = np.full(found.tokens, _UNKNOWN, np.int64)
    ends = np.cumsum(found.lengths)
    for row, (start, end) in enumerate(zip((ends - found.lengths).tolist(), ends.tolist(), strict=True)):
        response = _response(update, recorded, row) if start < end else None
        if response is not None:
            positions = found.position[start:end].astype(np.int64)
            known = positions < len(response)
            ids[start:end][known] = response[positions[known]]
    return ids


def _worst(
    count: int, before: list[WorstToken], key: RolloutKey, update: Update, recorded: RecordedRows, found: LogProbs
) -> list[WorstToken]:
    distance = np.abs(found.log_ratio)
    new = []
    for index in np.argsort(-distance, kind="stable")[:count].tolist():
        if distance[index] == 0.0 or (len(before) == count and distance[index] <= before[-1].distance):
            break
        row, position = int(found.row[index]), int(found.position[index])
        response = _response(update, recorded, row)
        around: dict[str, Any] = {}
        if response is not None and position < len(response):
            start = max(position - _BEFORE, 0)
            around = {
                "before": tuple(response[start:position].tolist()),
                "token": int(response[position]),
                "after": tuple(response[position + 1 : position + 1 + _AFTER].tolist()),
            }
        values = float(found.old[index]), float(found.rollout[index])
        new.append(WorstToken(float(distance[index]), key, row, position, update.places[row], *values, **around))
    return heapq.nlargest(count, [*before, *new], key=lambda token: token.distance)


def _notes(manifest: Manifest | None) -> list[str]:
    """What the settings of the recording say about the result."""
    algorithm: Any = {} if manifest is None else manifest.config.get("algorithm") or {}
    correction: Any = algorithm.get("rollout_correction") or {} if isinstance(algorithm, dict) else {}
    notes = []
    if correction.get("bypass_mode"):
        notes.append(
            "algorithm.rollout_correction.bypass_mode is on: the trainer uses the rollout's log-probs as its own, "
            "so they are equal. Turn it off to see the mismatch."
        )
    if correction.get("rollout_rs"):
        notes.append(
            "algorithm.rollout_correction.rollout_rs is on: what the training itself rejected is not in these figures."
        )
    return notes
