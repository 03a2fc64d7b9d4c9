"""The lines of a ledger: one JSON object each. Parsing is strict, and never believes what it has not checked.

Numbers are written exactly, NaN and the infinities as the strings "nan", "inf" and "-inf". A field that this version
does not know is ignored, so that later versions can add some.
"""

from __future__ import annotations

import json
import math
import re
import reprlib
import sys
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, TypeVar

from verl_rollout_skip.replay.ledger.figures import TensorFigures

LEDGER_VERSION = 1
MAX_LINE = 4 << 20
"""The largest line in bytes that is written or read."""

Value = TypeVar("Value")

_STRINGS = {"nan": math.nan, "inf": math.inf, "-inf": -math.inf}
_MAX_NAME = 1000
_MAX_DIMENSIONS = 16
_MAX_DEPTH = 20
_DIGEST = re.compile(r"[0-9a-f]{16,128}")


class LineError(ValueError):
    """What is wrong with a line. The reader adds the file and the number of the line."""


class NewerLedgerError(LineError):
    """The ledger was written by a later version of this package."""


@dataclass(frozen=True)
class LedgerHeader:
    """The first line: which training wrote the ledger, and with which settings. ``gpu_layout`` includes those settings
    that change how a batch is split, under "settings"."""

    training: str
    started_at: str
    mode: str
    trainer: str
    config_hash: str
    training_hash: str
    training_settings: Mapping[str, Any] = field(default_factory=dict)
    gpu_layout: Mapping[str, Any] = field(default_factory=dict)
    versions: Mapping[str, str] = field(default_factory=dict)
    host: str = ""
    first_step: int = 1


@dataclass(frozen=True)
class StepRollout:
    """A rollout that a step learned from. ``recorded_by`` is the training whose recording was loaded."""

    gen_batch: int
    digest: str | None
    hit: bool
    recorded_by: str | None = None
    off_policy: bool = False


@dataclass(frozen=True)
class LedgerStep:
    """What a training computed in one step. ``tensors`` are those that the actor's update received, ``critic_tensors``
    those of the critic's. Weights have a digest per role, in steps that saved a checkpoint."""

    step: int
    metrics: Mapping[str, float] = field(default_factory=dict)
    tensors: Mapping[str, TensorFigures] = field(default_factory=dict)
    critic_tensors: Mapping[str, TensorFigures] = field(default_factory=dict)
    weights: Mapping[str, str] = field(default_factory=dict)
    rollouts: tuple[StepRollout, ...] = ()


@dataclass(frozen=True)
class LedgerEnd:
    """The last line of a training that was not killed: "finished" or "failed", and how many steps it has."""

    end: str
    steps: int


Line = LedgerHeader | LedgerStep | LedgerEnd


def render_line(line: Line) -> bytes:
    """A line as it is written, with its line break. Raises ``LineError`` if it is too long."""
    fields: dict[str, Any]
    if isinstance(line, LedgerHeader):
        fields = {"ledger": LEDGER_VERSION, **vars(line)}
    elif isinstance(line, LedgerEnd):
        fields = dict(vars(line))
    else:
        fields = {
            "step": line.step,
            "metrics": {name: _number_as_json(value) for name, value in line.metrics.items()},
            "tensors": {name: _figures_as_json(figures) for name, figures in line.tensors.items()},
            "critic_tensors": {name: _figures_as_json(figures) for name, figures in line.critic_tensors.items()},
            "weights": dict(line.weights),
            "rollouts": [dict(vars(rollout)) for rollout in line.rollouts],
        }
    try:
        data = json.dumps(fields, allow_nan=False, separators=(",", ":")).encode("ascii") + b"\n"
    except (TypeError, ValueError) as error:
        raise LineError(f"it cannot be written as JSON: {error}") from error
    if len(data) > MAX_LINE:
        raise LineError(f"it would have {len(data)} bytes, and at most {MAX_LINE} are written")
    return data


def parse_line(data: bytes) -> Line:
    """The inverse of ``render_line``. Raises ``LineError``."""
    if len(data) > MAX_LINE:
        raise LineError(f"it has more than {MAX_LINE} bytes")
    try:
        fields = json.loads(data.decode("ascii"), parse_constant=_no_constant)
    except (ValueError, RecursionError) as error:
        raise LineError(f"it is not JSON ({error})") from error
    if not isinstance(fields, dict):
        raise LineError(f"it is a JSON {type(fields).__name__}, not an object")
    if "ledger" in fields:
        return _header(fields)
    if "step" in fields:
        return _step(fields)
    if "end" in fields:
        return _end(fields)
    raise LineError("it is neither a header nor a step nor an end")


def _header(fields: dict[str, Any]) -> LedgerHeader:
    version = fields["ledger"]
    if isinstance(version, int) and not isinstance(version, bool) and version > LEDGER_VERSION:
        raise NewerLedgerError(
            f"it has version {version}, but this version of verl_rollout_skip reads up to {LEDGER_VERSION}"
        )
    if version != LEDGER_VERSION or isinstance(version, bool):
        raise LineError(f"its version is {_show(version)}, not {LEDGER_VERSION}")
    return LedgerHeader(
        **{
            name: _get(fields, name, _text)
            for name in ("training", "started_at", "mode", "trainer", "config_hash", "training_hash", "host")
        },
        training_settings=_get(fields, "training_settings", _json_object),
        gpu_layout=_get(fields, "gpu_layout", _json_object),
        versions=_get(fields, "versions", _mapping_of(_text)),
        first_step=_get(fields, "first_step", _count),
    )


def _step(fields: dict[str, Any]) -> LedgerStep:
    return LedgerStep(
        step=_get(fields, "step", _count),
        metrics=_get(fields, "metrics", _mapping_of(_number)),
        tensors=_get(fields, "tensors", _mapping_of(_figures)),
        critic_tensors=_get(fields, "critic_tensors", _mapping_of(_figures)),
        weights=_get(fields, "weights", _mapping_of(_digest)),
        rollouts=_get(fields, "rollouts", _rollouts),
    )


def _end(fields: dict[str, Any]) -> LedgerEnd:
    end = _get(fields, "end", _text)
    if end not in ("finished", "failed"):
        raise LineError(f"end is {_show(end)}, not 'finished' or 'failed'")
    return LedgerEnd(end, _get(fields, "steps", _count))


def _get(fields: Mapping[str, Any], name: str, convert: Callable[[Any], Value]) -> Value:
    if name not in fields:
        raise LineError(f"it has no {name}")
    try:
        return convert(fields[name])
    except LineError as error:
        raise LineError(f"{name}: {error}") from error


def _no_constant(name: str) -> float:
    raise ValueError(f"{name} is not JSON")


def _number_as_json(value: float) -> float | str:
    if math.isfinite(value):
        return float(value)
    return "nan" if math.isnan(value) else ("inf" if value > 0 else "-inf")


def _figures_as_json(figures: TensorFigures) -> dict[str, Any]:
    moments = {name: _number_as_json(getattr(figures, name)) for name in ("min", "max", "mean")}
    return {**vars(figures), "shape": list(figures.shape), **moments}


def _number(value: Any) -> float:
    if isinstance(value, str) and value in _STRINGS:
        return _STRINGS[value]
    if isinstance(value, int | float) and not isinstance(value, bool):
        try:
            number = float(value)
        except OverflowError:
            number = math.inf
        if math.isfinite(number):
            return number
    raise LineError(f"{_show(value)} is not a number")


def _count(value: Any) -> int:
    if isinstance(value, int) and not isinstance(value, bool) and 0 <= value < 1 << 62:
        return value
    raise LineError(f"{_show(value)} is not a count")


def _flag(value: Any) -> bool:
    if isinstance(value, bool):
        return value
    raise LineError(f"{_show(value)} is not true or false")


def _text(value: Any) -> str:
    if isinstance(value, str) and len(value) <= _MAX_NAME:
        return value
    raise LineError(f"{_show(value)} is not a short text")


def _digest(value: Any) -> str:
    if isinstance(value, str) and _DIGEST.fullmatch(value):
        return value
    raise LineError(f"{_show(value)} is not a digest")


def _optional(convert: Callable[[Any], Value]) -> Callable[[Any], Value | None]:
    return lambda value: None if value is None else convert(value)


def _object(value: Any) -> dict[str, Any]:
    if isinstance(value, dict):
        return value
    raise LineError(f"{_show(value)} is not an object")


def _mapping_of(convert: Callable[[Any], Value]) -> Callable[[Any], dict[str, Value]]:
    def mapping(value: Any) -> dict[str, Value]:
        # The same names return in every step: keep them once.
        return {sys.intern(_text(name)): _get(value, name, convert) for name in _object(value)}

    return mapping


def _json_object(value: Any, depth: int = 0) -> dict[str, Any]:
    _check_depth(_object(value), depth)
    return _object(value)


def _check_depth(value: Any, depth: int) -> None:
    if depth > _MAX_DEPTH:
        raise LineError(f"it is nested more than {_MAX_DEPTH} levels deep")
    for item in value.values() if isinstance(value, dict) else value if isinstance(value, list) else ():
        _check_depth(item, depth + 1)


def _figures(value: Any) -> TensorFigures:
    fields = _object(value)
    return TensorFigures(
        digest=_get(fields, "digest", _digest),
        dtype=sys.intern(_get(fields, "dtype", _text)),
        shape=_get(fields, "shape", _shape),
        count=_get(fields, "count", _count),
        min=_get(fields, "min", _number),
        max=_get(fields, "max", _number),
        mean=_get(fields, "mean", _number),
    )


def _shape(value: Any) -> tuple[int, ...]:
    if isinstance(value, list) and len(value) <= _MAX_DIMENSIONS:
        return tuple(_count(size) for size in value)
    raise LineError(f"{_show(value)} is not a shape")


def _rollouts(value: Any) -> tuple[StepRollout, ...]:
    if not isinstance(value, list):
        raise LineError(f"{_show(value)} is not a list")
    return tuple(
        StepRollout(
            gen_batch=_get(fields, "gen_batch", _count),
            digest=_get(fields, "digest", _optional(_text)),
            hit=_get(fields, "hit", _flag),
            recorded_by=_get(fields, "recorded_by", _optional(_text)),
            off_policy=_get(fields, "off_policy", _flag),
        )
        for fields in map(_object, value)
    )


def _show(value: Any) -> str:
    return reprlib.repr(value)  # short, however large or deep the value is
