"""The objects passed along the flow in ``rollout.py``: a loaded rollout, a miss, and a generated rollout."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from verl_rollout_skip.errors import RolloutSkipError
from verl_rollout_skip.key import RolloutKey


@dataclass(frozen=True)
class Rollout:
    """The result of a rollout step: the batch to train on, its input, and metrics for the step's log.

    ``inputs`` is the current input, or the recorded one if the recorded batch replaces the current one.
    """

    batch: Any
    inputs: Any
    hit: bool
    metrics: dict[str, float]


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
