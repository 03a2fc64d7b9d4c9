"""Compares the current input of a rollout step with a recorded one, and says what differs.

Uids are never compared, because verl generates new ones in each run. They only group rows, so a recorded batch gets the
current ones.
"""

from __future__ import annotations

import copy
import json
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from tensordict import TensorDict

from verl_rollout_skip.store import codec
from verl_rollout_skip.store.codec.batch import Batch, BatchKind, flatten
from verl_rollout_skip.store.codec.columns import prompt_digests
from verl_rollout_skip.store.loaded import Entry

UID = "uid"
SAMPLING = "sampling"
"""The key of a rollout step's sampling settings in the ``info`` of an entry's record."""

_SHOWN_CHARS = 300
_SHOWN_KEYS = 4
# Keys of meta_info that do not affect sampling. Anything else counts: REMAX, for example, requests its greedy baseline
# with do_sample=False.
_NOT_SAMPLING = {"global_steps", "validate", "timing"}


class InputMismatch(Exception):
    """The current input of a rollout step differs from that of an entry; says how."""


@dataclass(frozen=True)
class RepeatedInput:
    """The input of a rollout step whose rows repeat prompts: the prompts, and for each row the number of its prompt."""

    prompts: Any
    rows: Sequence[int]

    def __len__(self) -> int:
        return len(self.rows)


def meta_of(inputs: Any) -> dict[str, Any]:
    """The values that apply to a whole input: ``meta_info`` of a DataProto, non-batched values of a TensorDict."""
    if isinstance(inputs, TensorDict | codec.BatchSnapshot):
        meta = inputs.batch.meta if isinstance(inputs, codec.BatchSnapshot) else flatten(inputs).meta
        return {".".join(key) if isinstance(key, tuple) else key: value for key, value in meta.items()}
    return dict(getattr(inputs, "meta_info", None) or {})


def sampling_of(inputs: Any) -> dict[str, str]:
    """The sampling settings of an input as strings that can be stored and compared."""
    return {str(key): repr(value) for key, value in sorted(meta_of(inputs).items()) if key not in _NOT_SAMPLING}


def shallow_copy(inputs: Any) -> Any:
    """A copy of an input with its own containers, because generating may add and remove columns."""
    if isinstance(inputs, TensorDict):
        return inputs.clone(recurse=False)
    kept = copy.copy(inputs)
    kept.batch = None if inputs.batch is None else inputs.batch.clone(recurse=False)
    kept.non_tensor_batch = dict(inputs.non_tensor_batch)
    kept.meta_info = dict(inputs.meta_info)
    return kept


def explain_mismatch(entry: Entry, inputs: Any) -> str | None:
    """How the current input of a rollout step differs from the recorded one, row by row; None if it does not.

    The whole input counts: all columns (prompts, answers, data source, etc.) and the sampling settings.
    """
    if entry.input_kind not in (None, _kind(inputs)):
        return _other_trainer(entry)
    recorded, current = entry.prompt_digests(), _digests(inputs)
    if recorded is None or current is None:
        which = "recorded" if recorded is None else "current"
        return f"the {which} rollout step has no prompts to compare."
    if len(recorded) != len(current):
        return (
            f"{len(recorded)} rows are recorded, but the current batch has {len(current)}: data.train_batch_size, "
            "data.gen_batch_size or actor_rollout_ref.rollout.n has changed."
        )
    if recorded == current:
        return _sampling_difference(entry, inputs)
    rows = [row for row, (old, new) in enumerate(zip(recorded, current, strict=True)) if old != new]
    text = f"{len(rows)} of {len(current)} rows differ"
    if Counter(recorded) == Counter(current):
        text += "; they are the same prompts in a different order (did data.seed, the sampler or data.shuffle change?)"
    return f"{text}. The first is row {rows[0]}:\n{row_difference(entry, rows[0], inputs, rows[0])}"


def explain_unfit_replacement(entry: Entry, recorded: Any, inputs: Any) -> str | None:
    """Why the recorded input cannot replace the current one; None if it can."""
    if recorded is None:
        return "it was recorded without its input."
    if entry.input_kind is not _kind(inputs):
        return _other_trainer(entry)
    if len(recorded) != len(inputs):
        return (
            f"{len(recorded)} rows are recorded, but the current batch has {len(inputs)}. Use the recording's "
            "data.train_batch_size, data.gen_batch_size and actor_rollout_ref.rollout.n."
        )
    missing = sorted(set(_keys(inputs)) - set(_keys(recorded)) - {UID})
    if missing:
        return f"the current batch has columns that are not recorded: {', '.join(missing)}."
    if _groups(recorded) not in (None, _groups(inputs)):
        return "its rows are grouped into prompts differently (did rollout.n change?), so the current uids do not fit."
    return _sampling_difference(entry, inputs)


def adopt_uids(batch: Any, inputs: Any, add: bool = False) -> None:
    """Put the current uids into a recorded batch if it has uids, or always if ``add``."""
    current = _uids(inputs)
    if current is None or not (add or _uids(batch) is not None):
        return
    if isinstance(batch, TensorDict):
        batch.set(UID, current)
    else:
        batch.non_tensor_batch[UID] = current


def _digests(inputs: Any) -> list[str] | None:
    if not isinstance(inputs, RepeatedInput):
        return prompt_digests(inputs)
    digests = prompt_digests(inputs.prompts)
    return None if digests is None else [digests[row] for row in inputs.rows]


def _kind(batch: Any) -> BatchKind:
    if isinstance(batch, RepeatedInput):
        return _kind(batch.prompts)
    return BatchKind.TENSORDICT if isinstance(batch, TensorDict) else BatchKind.DATAPROTO


def _other_trainer(entry: Entry) -> str:
    which = {BatchKind.DATAPROTO: ("V0", "V1"), BatchKind.TENSORDICT: ("V1", "V0")}
    recorded, current = which[entry.input_kind or BatchKind.DATAPROTO]
    return (
        f"it was recorded by one of verl's {recorded} trainers, whose rollouts have a different format than those of "
        f"the {current} trainers. Set trainer.use_v1={recorded == 'V1'}, or record again."
    )


def _uids(batch: Any) -> Any:
    if isinstance(batch, TensorDict):
        return batch.get(UID, None)
    return getattr(batch, "non_tensor_batch", {}).get(UID)


def _groups(batch: Any) -> list[int] | None:
    """For each row, the first row with the same uid; None without uids."""
    uids = _uids(batch)
    if uids is None:
        return None
    first: dict[str, int] = {}
    return [first.setdefault(str(uid), row) for row, uid in enumerate(uids.tolist())]


def _keys(batch: Any) -> list[str]:
    flat = flatten(batch)
    return [".".join(path) for path in (*flat.arrays, *flat.tensors)]


def _sampling_difference(entry: Entry, inputs: Any) -> str | None:
    recorded = entry.record.info.get(SAMPLING)
    if not isinstance(recorded, Mapping):
        recorded = sampling_of(entry.inputs())
    current = sampling_of(inputs.prompts if isinstance(inputs, RepeatedInput) else inputs)
    lines = [
        f"  meta_info[{key!r}]: recorded {recorded.get(key, 'missing')}, current {current.get(key, 'missing')}"
        for key in sorted({*recorded, *current})
        if recorded.get(key) != current.get(key)
    ]
    return "the prompts are the same, but the sampling settings differ:\n" + "\n".join(lines) if lines else None


def row_difference(entry: Entry, recorded_row: int, inputs: Any, current_row: int) -> str:
    """How a row of the current input differs from a row of the recorded input, as text."""
    if isinstance(inputs, RepeatedInput):
        inputs, current_row = inputs.prompts, inputs.rows[current_row]
    recorded, current = _row(flatten(entry.inputs()), recorded_row), _row(flatten(inputs), current_row)
    lines = []
    for key in sorted({*recorded, *current} - {UID}, key=lambda key: (key != "raw_prompt", key)):
        old, new = recorded.get(key, "missing"), current.get(key, "missing")
        if old != new:
            old, new = _around_difference(old, new)
            lines.append(f"  {key}: recorded {old}\n  {' ' * len(key)}  current  {new}")
    return "\n".join(lines[:_SHOWN_KEYS]) or "  (in a value that cannot be shown as text)"


def _row(batch: Batch, row: int) -> dict[str, str]:
    """The values of one row by key, as readable text."""
    shown = {".".join(path): _text(array[row]) for path, array in batch.arrays.items()}
    return shown | {".".join(path): _text(tensor[row].tolist()) for path, tensor in batch.tensors.items()}


def _text(value: Any) -> str:
    return json.dumps(value, ensure_ascii=False, default=_describe, skipkeys=True)


def _describe(value: Any) -> Any:
    return value.tolist() if hasattr(value, "tolist") else f"<{type(value).__name__}>"


def _around_difference(old: str, new: str) -> tuple[str, str]:
    """Both texts, cut to a readable length around the first difference."""
    first = next((index for index, (one, other) in enumerate(zip(old, new, strict=False)) if one != other), 0)
    start = max(first - _SHOWN_CHARS // 2, 0) if first >= _SHOWN_CHARS else 0

    def cut(text: str) -> str:
        end = start + _SHOWN_CHARS
        return f"{'…' if start else ''}{text[start:end]}{'…' if len(text) > end else ''}"

    return cut(old), cut(new)
