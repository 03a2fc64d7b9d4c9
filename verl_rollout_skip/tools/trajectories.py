"""Single trajectories of an entry: prompt, response, score and ground truth."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np

from verl_rollout_skip.store.reader import SCORE, EntryReader, Side

_EXTRA_KEYS = "reward_extra_keys"
_REQUEST = "request_id"


@dataclass(frozen=True)
class Trajectory:
    """One row of an entry, without padding. Fields that were not recorded are None."""

    row: int
    prompt: list[int] | None
    response: list[int] | None
    score: float | None
    messages: Any
    reward_model: Any
    data_source: Any
    reward_extra: dict[str, Any]

    @property
    def ground_truth(self) -> Any:
        """The ground truth, from the same field that verl uses for its own generation dumps."""
        return self.reward_model.get("ground_truth") if isinstance(self.reward_model, dict) else None


def read_trajectories(entry: EntryReader, rows: Iterable[int] | None = None) -> Iterator[Trajectory]:
    """The trajectories of the given rows, or of all rows."""
    wanted = list(range(entry.record.rows) if rows is None else rows)
    if not wanted:
        return
    prompts, responses = (_integers(entry, name) for name in ("prompts", "responses"))
    scores = _scores(entry)
    messages, reward_models, sources = (
        _input_cells(entry, name, wanted) for name in ("raw_prompt", "reward_model", "data_source")
    )
    extras = {name: entry.cells(name, wanted) for name in _reward_extras(entry)}
    for index, row in enumerate(wanted):
        yield Trajectory(
            row=row,
            prompt=None if prompts is None else prompts[row].tolist(),
            response=None if responses is None else responses[row].tolist(),
            score=None if scores is None else float(scores[row]),
            messages=messages[index],
            reward_model=reward_models[index],
            data_source=sources[index],
            reward_extra={name: _to_python(found[index]) for name, found in extras.items() if found is not None},
        )


def conversation(messages: Any) -> str:
    """The messages of a prompt as text, for use without a tokenizer."""
    try:
        return "\n".join(f"{message['role']}: {message['content']}" for message in messages)
    except (TypeError, KeyError):
        return str(messages)


def json_value(value: Any, nonfinite: Callable[[float], Any] = lambda value: None) -> Any:
    """Convert a cell to JSON values: numpy values to Python values, keys to strings.

    JSON has no NaN and infinities; ``nonfinite`` converts them, by default to null.
    """
    value = _to_python(value)
    if isinstance(value, float):
        return value if math.isfinite(value) else nonfinite(value)
    if isinstance(value, dict):
        return {str(key): json_value(item, nonfinite) for key, item in value.items()}
    return [json_value(item, nonfinite) for item in value] if isinstance(value, list | tuple) else value


def _integers(entry: EntryReader, name: str) -> list[np.ndarray] | None:
    found = entry.tokens(name)
    return found if found and found[0].dtype.kind in "biu" else None


def _scores(entry: EntryReader) -> np.ndarray | list[float] | None:
    """The total reward of each row. Half-precision rewards have no score column, so they are summed here."""
    scores = entry.numbers(SCORE)
    rewards = entry.tokens("rm_scores") if scores is None else None
    if not rewards or rewards[0].dtype.kind != "f":
        return scores
    return [float(row.sum(dtype=np.float64)) for row in rewards]


def _input_cells(entry: EntryReader, name: str, rows: list[int]) -> list[Any]:
    """The cells of a column of the input, or of the output if the input does not have it."""
    for side in (Side.INPUT, Side.OUTPUT):
        found = entry.cells(name, rows, side)
        if found is not None:
            return found
    return [None] * len(rows)


def _reward_extras(entry: EntryReader) -> list[str]:
    names = entry.meta().get(_EXTRA_KEYS)
    listed = names if isinstance(names, list | tuple) else []
    return list(dict.fromkeys(name for name in [*listed, _REQUEST] if isinstance(name, str)))


def _to_python(value: Any) -> Any:
    return value.tolist() if isinstance(value, np.ndarray | np.generic) else value
