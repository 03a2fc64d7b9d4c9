"""Compares a step of two ledgers, in the order in which the data flows through a training."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from fnmatch import fnmatchcase

from verl_rollout_skip.fingerprint.fingerprint import difference
from verl_rollout_skip.fingerprint.layout import layout_difference
from verl_rollout_skip.replay.ledger.figures import TensorFigures
from verl_rollout_skip.replay.ledger.line import LedgerHeader, LedgerStep
from verl_rollout_skip.replay.ledger.stages import Stage, stage_of_metric, stage_of_tensor

_FIGURES = ("count", "min", "max", "mean")


@dataclass(frozen=True)
class Tolerance:
    """How far numbers may differ: by ``atol + rtol * abs(recorded)``. ``overrides`` maps names, or patterns with ``*``,
    to other values for them."""

    rtol: float = 0.0
    atol: float = 0.0
    overrides: Mapping[str, tuple[float, float]] = field(default_factory=dict)

    @property
    def is_exact(self) -> bool:
        return not (self.rtol or self.atol or self.overrides)

    def accepts(self, name: str, recorded: float, current: float) -> bool:
        """Whether two numbers count as equal. NaN equals NaN."""
        if recorded == current or (math.isnan(recorded) and math.isnan(current)):
            return True
        rtol, atol = next(
            (limits for pattern, limits in self.overrides.items() if fnmatchcase(name, pattern)),
            (self.rtol, self.atol),
        )
        return math.isfinite(recorded) and abs(recorded - current) <= atol + rtol * abs(recorded)


EXACT = Tolerance()


@dataclass(frozen=True)
class Difference:
    """A value that differs between two trainings: a number, or the digest of a tensor or of weights.

    A value that only one training has is None in the other.
    """

    step: int
    stage: Stage
    name: str
    recorded: float | str | None
    current: float | str | None
    absolute: float | None = None
    relative: float | None = None

    def describe(self) -> str:
        """One line for people."""
        text = f"step {self.step}, {self.stage.value}: {self.name} is {_show(self.current)}, recorded as "
        text += _show(self.recorded)
        if self.absolute is not None:
            relative = "" if self.relative is None else f", relative {self.relative:.3g}"
            text += f" (difference {self.absolute:.3g}{relative})"
        return text


def compare_steps(recorded: LedgerStep, current: LedgerStep, tolerance: Tolerance = EXACT) -> list[Difference]:
    """What differs between the same step of two trainings, in data-flow order: tensors before metrics in each stage.

    How often a training validates and saves checkpoints changes nothing that it learns, so validation metrics and
    weights that only one of them has are no difference. The same holds for tensors, if one training has none at all.
    """
    found = [
        *_tensors(recorded, current, tolerance),
        *_metrics(recorded, current, tolerance),
        *(_weights(recorded, current) if tolerance.is_exact else ()),
    ]
    order = {stage: index for index, stage in enumerate(Stage)}
    return sorted(found, key=lambda item: order[item.stage])  # stable


def layout_changes(recorded: LedgerHeader, current: LedgerHeader) -> list[str]:
    """Where and how differently two trainings ran, e.g. ``world_size: 1 → 2``. This changes last bits legitimately."""
    lines = layout_difference(recorded.gpu_layout, current.gpu_layout)
    return [line.removeprefix("settings.") for line in lines]


def settings_changes(recorded: LedgerHeader, current: LedgerHeader) -> list[str]:
    """The settings for learning that differ between two trainings."""
    return difference(dict(recorded.training_settings), dict(current.training_settings))


def versions_changes(recorded: LedgerHeader, current: LedgerHeader) -> list[str]:
    """The packages whose versions differ between two trainings."""
    return difference(dict(recorded.versions), dict(current.versions))


def _tensors(recorded: LedgerStep, current: LedgerStep, tolerance: Tolerance) -> Iterator[Difference]:
    yield from _tensors_of("", recorded.tensors, current.tensors, recorded.step, tolerance)
    # The critic's update usually receives the same tensors. Each of them is reported once.
    seen = {
        (name, _digest(recorded.tensors.get(name)), _digest(current.tensors.get(name)))
        for name in {*recorded.tensors, *current.tensors}
    }
    if recorded.critic_tensors and current.critic_tensors:
        pairs = {
            name: (_digest(recorded.critic_tensors.get(name)), _digest(current.critic_tensors.get(name)))
            for name in {*recorded.critic_tensors, *current.critic_tensors}
        }
        new = {name for name, pair in pairs.items() if (name, *pair) not in seen}
        old, now = (
            {name: figures for name, figures in tensors.items() if name in new}
            for tensors in (recorded.critic_tensors, current.critic_tensors)
        )
        yield from _tensors_of("critic's ", old, now, recorded.step, tolerance, may_be_empty=True)


def _tensors_of(
    prefix: str,
    recorded: Mapping[str, TensorFigures],
    current: Mapping[str, TensorFigures],
    step: int,
    tolerance: Tolerance,
    may_be_empty: bool = False,
) -> Iterator[Difference]:
    if not (recorded and current) and not may_be_empty:
        return
    for name in dict.fromkeys([*recorded, *current]):
        stage, label = stage_of_tensor(name), f"{prefix}{name}"
        old, new = recorded.get(name), current.get(name)
        if old is None or new is None:
            yield Difference(step, stage, label, _digest(old), _digest(new))
        elif old.digest != new.digest:
            yield from _figures(label, stage, step, old, new, tolerance)


def _figures(
    label: str, stage: Stage, step: int, old: TensorFigures, new: TensorFigures, tolerance: Tolerance
) -> Iterator[Difference]:
    found = False
    for figure in _FIGURES:
        pair = float(getattr(old, figure)), float(getattr(new, figure))
        if not tolerance.accepts(f"{label}/{figure}", *pair):
            found = True
            yield _numbers(step, stage, f"{label}/{figure}", *pair)
    if tolerance.is_exact and not found:
        yield Difference(step, stage, f"{label}/digest", old.digest, new.digest)


def _metrics(recorded: LedgerStep, current: LedgerStep, tolerance: Tolerance) -> Iterator[Difference]:
    for name in dict.fromkeys([*recorded.metrics, *current.metrics]):
        stage = stage_of_metric(name)
        old, new = recorded.metrics.get(name), current.metrics.get(name)
        if old is None or new is None:
            if stage is not Stage.VALIDATION:
                yield Difference(recorded.step, stage, name, old, new)
        elif not tolerance.accepts(name, old, new):
            yield _numbers(recorded.step, stage, name, old, new)


def _weights(recorded: LedgerStep, current: LedgerStep) -> Iterator[Difference]:
    for role in recorded.weights.keys() & current.weights.keys():
        old, new = recorded.weights[role], current.weights[role]
        if old != new:
            yield Difference(recorded.step, Stage.WEIGHTS, f"weights of the {role}", old, new)


def _numbers(step: int, stage: Stage, name: str, old: float, new: float) -> Difference:
    absolute = abs(new - old)
    relative = absolute / abs(old) if old and math.isfinite(old) else None
    return Difference(step, stage, name, old, new, absolute, relative)


def _digest(figures: TensorFigures | None) -> str | None:
    return None if figures is None else figures.digest


def _show(value: float | str | None) -> str:
    return "missing" if value is None else str(value)
