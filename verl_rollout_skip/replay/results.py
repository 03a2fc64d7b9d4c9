"""The objects passed along the flow in ``rollout.py``: a loaded rollout, a miss, and a generated rollout."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from verl_rollout_skip.errors import RolloutSkipError
from verl_rollout_skip.key import RolloutKey


@dataclass(frozen=True)
class Rollout:
    """The result of a rollout step: the batch to train on, its input, and metrics for the step's log.

    ``inputs`` is the current input, or the recorded one if the recorded batch replaces the current one. ``generate_s``
    is how long a hit waited for the engine, which only mode shadow does.
    """

    batch: Any
    inputs: Any
    hit: bool
    metrics: dict[str, float]
    generate_s: float = 0.0


def replace_timings(batch: Any, timings: Mapping[str, float]) -> None:
    """Replace the timings of the recorded run, which verl would log as if they were measured now."""
    meta = getattr(batch, "meta_info", None)
    if meta is not None:
        meta["timing"] = dict(timings)


@dataclass(frozen=True)
class Miss:
    """A rollout step to generate. ``is_covered``: the settings select it. ``dumps``: it will be dumped."""

    key: RolloutKey
    is_covered: bool
    dumps: bool


@dataclass(frozen=True)
class Generated:
    """A generated rollout with its input and generation time.

    ``failure`` says why it cannot be dumped. ``batch`` is None if it could not even be read, or if only its ``digest``
    is known.
    """

    batch: Any
    inputs: Any
    seconds: float
    failure: RolloutSkipError | None = None
    digest: str | None = None
