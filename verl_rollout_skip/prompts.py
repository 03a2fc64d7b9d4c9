"""Whether a recorded rollout belongs to the current prompts, and if not, what differs."""

from __future__ import annotations

import json
from collections import Counter
from dataclasses import dataclass
from typing import Any

from verl_rollout_skip.store import codec
from verl_rollout_skip.store.batch import Batch, take_apart
from verl_rollout_skip.store.store import LoadedEntry

UID = "uid"
_SHOWN_LETTERS = 300


@dataclass(frozen=True)
class PromptMismatch:
    """How the current prompts differ from the recorded ones, for people."""

    text: str

    def __str__(self) -> str:
        return self.text


def compare_prompts(entry: LoadedEntry, inputs: Any) -> PromptMismatch | None:
    """Compare the current input of a rollout step with the recorded one, row by row; None if they are the same.

    Everything that was put into the step counts (prompts, answers, data source …), the uids do not.
    """
    recorded, current = entry.prompt_digests(), codec.prompt_digests(inputs)
    if recorded is None or current is None:
        which = "recorded" if recorded is None else "current"
        return PromptMismatch(f"the {which} rollout has no prompts to compare")
    if recorded == current:
        return None
    if len(recorded) != len(current):
        return PromptMismatch(f"{len(recorded)} rows are recorded and the current batch has {len(current)}")
    rows = [row for row, (old, new) in enumerate(zip(recorded, current, strict=True)) if old != new]
    text = f"{len(rows)} of {len(current)} rows differ"
    if Counter(recorded) == Counter(current):
        text += "; they are the same prompts in another order (another data.seed, sampler or shuffle?)"
    return PromptMismatch(f"{text}. The first is row {rows[0]}:\n{_row_difference(entry, inputs, rows[0])}")


def adopt_uids(batch: Any, inputs: Any) -> None:
    """Put the current uids into a recorded batch that has uids: they are made anew in each run and group the rows."""
    recorded, current = getattr(batch, "non_tensor_batch", None), getattr(inputs, "non_tensor_batch", None)
    if recorded is not None and current is not None and UID in current and UID in recorded:
        recorded[UID] = current[UID]


def _row_difference(entry: LoadedEntry, inputs: Any, row: int) -> str:
    recorded, current = _row(take_apart(entry.inputs()), row), _row(take_apart(inputs), row)
    lines = []
    for key in sorted({*recorded, *current} - {UID}, key=lambda key: (key != "raw_prompt", key)):
        old, new = recorded.get(key, "not there"), current.get(key, "not there")
        if old != new:
            lines.append(f"  {key}: recorded {old}\n  {' ' * len(key)}  current  {new}")
    return "\n".join(lines[:4])


def _row(batch: Batch, row: int) -> dict[str, str]:
    """One row as readable text by key."""
    shown = {}
    for path, array in batch.arrays.items():
        shown[".".join(path)] = _text(array[row])
    for path, tensor in batch.tensors.items():
        shown[".".join(path)] = _text(tensor[row].tolist())
    return shown


def _text(value: Any) -> str:
    text = json.dumps(value, ensure_ascii=False, default=repr)
    return text if len(text) <= _SHOWN_LETTERS else f"{text[:_SHOWN_LETTERS]}…"
