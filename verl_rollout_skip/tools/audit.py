"""Audits: compares what two trainings computed, step by step, according to their ledgers.

A figure is a metric, a tensor that an update received, or the weights of a checkpoint. Figures are in the order of the
data flow, so the first one that differs points at the cause.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from enum import Enum
from fnmatch import fnmatchcase

from verl_rollout_skip.fingerprint.fingerprint import difference
from verl_rollout_skip.replay.ledger.comparable import COMPARED, comparable_stages, is_comparable, learning_changes
from verl_rollout_skip.replay.ledger.compare import (
    EXACT,
    Difference,
    Tolerance,
    compare_steps,
    layout_changes,
    settings_changes,
)
from verl_rollout_skip.replay.ledger.figures import TensorFigures
from verl_rollout_skip.replay.ledger.line import LedgerHeader, LedgerStep
from verl_rollout_skip.replay.ledger.stages import Stage, stage_of_metric, stage_of_tensor
from verl_rollout_skip.tools.ledgers import Computed, Side, name_steps

_CRITICS = "critic's "
_MAX_TEXT = 1000
_STAGES = list(Stage)
# Figures that describe how a batch is split over devices, not what is computed from it.
_OF_THE_LAYOUT = ("global_seqlen/*",)


class Kind(str, Enum):
    """What a figure is a number of, in the order in which they are listed."""

    TENSOR = "tensor"
    METRIC = "metric"
    WEIGHTS = "weights"


class Verdict(str, Enum):
    """The result of an audit."""

    IDENTICAL = "identical"
    WITHIN_TOLERANCE = "within tolerance"
    DIFFERENT = "different"
    NOT_COMPARED = "not compared"


@dataclass(frozen=True)
class Rules:
    """How to compare: ``ignore`` has names and patterns of figures to leave out. ``all_steps`` also compares steps that
    cannot be equal, because the weights differ."""

    tolerance: Tolerance = EXACT
    ignore: tuple[str, ...] = ()
    all_steps: bool = False


@dataclass(frozen=True)
class Name:
    """A figure's name, its stage and its kind."""

    stage: Stage
    kind: Kind
    text: str

    @property
    def order(self) -> tuple[int, int, str]:
        return _STAGES.index(self.stage), list(Kind).index(self.kind), self.text


@dataclass
class Figure:
    """How a figure differs: in how many of the compared steps at all, and in how many beyond the tolerance.

    ``first_step`` is the first step that differs beyond the tolerance, or the first that differs. The sizes are None if
    only digests differ, or if a training lacks the figure.
    """

    name: Name
    compared: int = 0
    differing: int = 0
    beyond: int = 0
    first_step: int | None = None
    max_absolute: float | None = None
    max_relative: float | None = None


@dataclass(frozen=True)
class Uncompared:
    """Steps that are not compared, or not in full, and why."""

    steps: tuple[int, ...]
    reason: str


@dataclass(frozen=True)
class Audit:
    """The comparison of two sides. ``steps`` are those that were compared, ``first`` is the earliest difference."""

    a: Side
    b: Side
    steps: tuple[int, ...]
    only_a: tuple[int, ...]
    only_b: tuple[int, ...]
    uncompared: tuple[Uncompared, ...]
    figures: tuple[Figure, ...]
    first: Difference | None
    verdict: Verdict
    layout: tuple[str, ...]
    settings: tuple[str, ...]
    versions: tuple[str, ...]
    other_fingerprint: bool
    """Whether the settings that rollouts depend on differ. ``compare_settings`` in ``diff.py`` lists them."""

    @property
    def differing(self) -> list[Figure]:
        """The figures that differ at all."""
        return [figure for figure in self.figures if figure.differing]

    @property
    def beyond(self) -> list[Figure]:
        """The figures that differ beyond the tolerance."""
        return [figure for figure in self.figures if figure.beyond]


def audit(a: Side, b: Side, rules: Rules | None = None) -> Audit:
    """Compare the steps that both sides have."""
    steps_a, steps_b = set(a.steps), set(b.steps)
    found = _Comparison(rules or Rules())
    pairs: dict[tuple[str, str], tuple[LedgerHeader, LedgerHeader]] = {}
    for step in sorted(steps_a & steps_b):
        before, after = a.at(step), b.at(step)
        pairs[before.header.training, after.header.training] = before.header, after.header
        found.add(before, after)
    return Audit(
        a,
        b,
        tuple(found.steps),
        tuple(sorted(steps_a - steps_b)),
        tuple(sorted(steps_b - steps_a)),
        tuple(Uncompared(tuple(steps), reason) for reason, steps in found.uncompared.items()),
        tuple(sorted(found.figures.values(), key=lambda figure: figure.name.order)),
        found.first,
        found.verdict(),
        _merge(layout_changes(*pair) for pair in pairs.values()),
        _merge(settings_changes(*pair) for pair in pairs.values()),
        _merge(difference(dict(one.versions), dict(other.versions)) for one, other in pairs.values()),
        any(one.config_hash != other.config_hash for one, other in pairs.values()),
    )


def explain(found: Audit) -> list[str]:
    """What people need to interpret an audit, one sentence per line: the first difference and likely reasons."""
    lines = describe_first(found)
    lines += [f"{name_steps(item.steps)}: {item.reason}" for item in found.uncompared]
    for title, changes in (
        ("layout, which may change last bits", found.layout),
        ("settings", found.settings),
        ("versions", found.versions),
    ):
        lines += [f"{title}: {_shorten('; '.join(changes))}"] if changes else []
    if found.other_fingerprint:
        lines.append("the settings that rollouts depend on differ: rollout-skip diff lists them")
    digests = [figure.name.text for figure in found.differing if not figure.beyond and figure.max_absolute is None]
    if digests:
        lines.append(f"only the digests differ, which no tolerance can judge: {_shorten(', '.join(digests))}")
    for side, steps in (("a", found.only_a), ("b", found.only_b)):
        lines += [f"only in {side}: {name_steps(steps)}"] if steps else []
    return [*lines, *found.a.notes, *found.b.notes]


def describe_first(found: Audit) -> list[str]:
    """Where the two trainings part, one sentence per line."""
    return [] if found.first is None else [f"first difference: {found.first.describe()}"]


def summarize(found: Audit) -> str:
    """The result in one line."""
    steps = f"{len(found.steps)} steps" if len(found.steps) != 1 else "1 step"
    total, differing, beyond = len(found.figures), len(found.differing), len(found.beyond)
    if found.verdict is Verdict.NOT_COMPARED:
        return "not compared"
    if found.verdict is Verdict.IDENTICAL:
        return f"identical in all {steps}, {total} figures" if len(found.steps) != 1 else f"identical, {total} figures"
    if found.verdict is Verdict.WITHIN_TOLERANCE:
        return f"within tolerance in {steps}: {differing} of {total} figures differ"
    first = f"from step {found.first.step} on" if found.first is not None else f"in {steps}"
    return f"different {first}: {beyond} of {total} figures"


def values_of(step: LedgerStep) -> dict[Name, float]:
    """The figures of a step that are numbers; that of a tensor is its mean."""
    values = {_name_of(label): figures.mean for label, figures in _tensors(step)}
    return values | {Name(stage_of_metric(name), Kind.METRIC, name): value for name, value in step.metrics.items()}


class _Comparison:
    """Collects the differences of consecutive steps."""

    def __init__(self, rules: Rules) -> None:
        self.steps: list[int] = []
        self.figures: dict[Name, Figure] = {}
        self.uncompared: dict[str, list[int]] = {}
        self.first: Difference | None = None
        self._rules = rules
        self._parted = False

    def add(self, a: Computed, b: Computed) -> None:
        step = b.step.step
        stages, limit = (COMPARED, None) if self._rules.all_steps else self._comparable(a, b)
        if limit is not None:
            self.uncompared.setdefault(limit, []).append(step)
        if not stages:
            return
        self.steps.append(step)
        if bool(a.step.tensors) != bool(b.step.tensors):
            self.uncompared.setdefault("tensors are not compared, because one training has none", []).append(step)
        ignored = self._rules.ignore + (_OF_THE_LAYOUT if layout_changes(a.header, b.header) else ())

        def counts(name: Name) -> bool:
            is_ignored = any(fnmatchcase(name.text, pattern) for pattern in ignored)
            return is_comparable(name.stage, name.text, stages) and not is_ignored

        for name in filter(counts, {*_names_in(a.step)} & {*_names_in(b.step)}):
            self.figures.setdefault(name, Figure(name)).compared += 1
        differing = beyond = self._differences(a.step, b.step, EXACT, counts)
        if not self._rules.tolerance.is_exact:
            beyond = self._differences(a.step, b.step, self._rules.tolerance, counts)
        self._count(differing, {name for name, _ in beyond}, step)
        if self.first is None and beyond:
            self.first = beyond[0][1]

    def verdict(self) -> Verdict:
        figures = self.figures.values()
        if not figures:
            return Verdict.NOT_COMPARED
        if any(figure.beyond for figure in figures):
            return Verdict.DIFFERENT
        return Verdict.WITHIN_TOLERANCE if any(figure.differing for figure in figures) else Verdict.IDENTICAL

    def _comparable(self, a: Computed, b: Computed) -> tuple[frozenset[Stage], str | None]:
        """The stages of a step that can be equal, and why not all of them.

        The weights can be equal if both trainings have learned from the same rollouts with the same settings.
        """
        if self._parted:
            return frozenset(), "not compared, because the trainings learned from different rollouts before"
        self._parted = not _same_rollouts(a.step, b.step)
        if self._parted and (_loaded(a.step) or _loaded(b.step)):
            return frozenset(), "not compared, because different rollouts were loaded"
        changes = learning_changes(a.header, b.header)
        if not changes:
            return COMPARED, None
        stages = comparable_stages(changes)
        if stages and _starts_like(b, a):
            return stages, "compared only up to the update, because the settings of the training differ"
        return frozenset(), "not compared, because the settings of the training differ (--all-steps compares them)"

    def _differences(
        self, a: LedgerStep, b: LedgerStep, tolerance: Tolerance, counts: Callable[[Name], bool]
    ) -> list[tuple[Name, Difference]]:
        labels = {label for step in (a, b) for label, _ in _tensors(step)}
        named = [(_figure_of(item, labels), item) for item in compare_steps(a, b, tolerance)]
        return [(name, item) for name, item in named if counts(name)]

    def _count(self, differing: list[tuple[Name, Difference]], beyond: set[Name], step: int) -> None:
        for name in dict.fromkeys(name for name, _ in differing):
            figure = self.figures.setdefault(name, Figure(name))
            figure.differing += 1
            figure.compared = max(figure.compared, figure.differing)  # one of the trainings may lack the figure
            if figure.first_step is None or (name in beyond and not figure.beyond):
                figure.first_step = step
            figure.beyond += name in beyond
        for name, item in differing:
            figure = self.figures[name]
            figure.max_absolute = _larger(figure.max_absolute, item.absolute)
            figure.max_relative = _larger(figure.max_relative, item.relative)


def _starts_like(b: Computed, a: Computed) -> bool:
    """Whether this is the first step of b, and it starts with the weights that a had in this step."""
    if b.step.step != b.header.first_step:
        return False
    loaded = bool(b.step.rollouts) and all(rollout.recorded_by == a.header.training for rollout in b.step.rollouts)
    return loaded or a.step.step == a.header.first_step


def _same_rollouts(a: LedgerStep, b: LedgerStep) -> bool:
    """Whether two steps learned from the same rollouts, as far as their digests are known."""
    known = [{rollout.gen_batch: rollout.digest for rollout in step.rollouts if rollout.digest} for step in (a, b)]
    return len(a.rollouts) == len(b.rollouts) and all(
        known[0][batch] == known[1][batch] for batch in known[0].keys() & known[1].keys()
    )


def _loaded(step: LedgerStep) -> bool:
    return any(rollout.hit for rollout in step.rollouts)


def _names_in(step: LedgerStep) -> Iterator[Name]:
    yield from values_of(step)
    for role in step.weights:
        yield Name(Stage.WEIGHTS, Kind.WEIGHTS, f"weights of the {role}")


def _tensors(step: LedgerStep) -> Iterator[tuple[str, TensorFigures]]:
    """The tensors of both updates. The critic's are listed only where they differ from the actor's."""
    yield from step.tensors.items()
    for name, figures in step.critic_tensors.items():
        if step.tensors.get(name) != figures:
            yield f"{_CRITICS}{name}", figures


def _name_of(label: str) -> Name:
    return Name(stage_of_tensor(label.removeprefix(_CRITICS)), Kind.TENSOR, label)


def _figure_of(item: Difference, labels: set[str]) -> Name:
    """The figure that a difference belongs to: those of a tensor's moments all belong to the tensor."""
    for label in (item.name, item.name.rpartition("/")[0]):
        if label in labels:
            return Name(item.stage, Kind.TENSOR, label)
    return Name(item.stage, Kind.WEIGHTS if item.stage is Stage.WEIGHTS else Kind.METRIC, item.name)


def _shorten(text: str) -> str:
    return text if len(text) <= _MAX_TEXT else f"{text[:_MAX_TEXT]}…"


def _larger(one: float | None, other: float | None) -> float | None:
    """The larger of two sizes. NaN is larger than any number."""
    if one is None or other is None:
        return other if one is None else one
    return one if math.isnan(one) or one >= other else other


def _merge(changes: Iterable[list[str]]) -> tuple[str, ...]:
    return tuple(dict.fromkeys(change for group in changes for change in group))
