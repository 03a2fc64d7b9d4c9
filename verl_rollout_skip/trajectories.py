"""Single trajectories of a loaded entry as people think of them: prompt, response, score, answer."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import torch

    from verl_rollout_skip.store.codec.batch import Batch
    from verl_rollout_skip.store.loaded import LoadedEntry

    Rows = Sequence[torch.Tensor] | torch.Tensor

_EXTRA_KEYS = "reward_extra_keys"
_REQUEST = "request_id"
_TENSORS = ("prompts", "responses", "rm_scores", "attention_mask")


@dataclass(frozen=True)
class Trajectory:
    """One row of an entry without padding. None: not recorded."""

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
        """As verl takes it for its dumps of generations."""
        return self.reward_model.get("ground_truth") if isinstance(self.reward_model, dict) else None


def read_trajectories(entry: LoadedEntry, rows: Iterable[int] | None = None) -> Iterator[Trajectory]:
    """The trajectories of these rows, or of all."""
    from verl_rollout_skip.store.codec.batch import BatchKind, flatten

    wanted = range(entry.record.rows) if rows is None else list(rows)
    if not wanted:
        return
    batch = entry.decode()
    given = entry.inputs(BatchKind.TENSORDICT)
    inputs = None if given is None else flatten(given)
    extras = [key for key in (batch.meta.get(_EXTRA_KEYS) or []) if _has_rows(batch, key)]
    if _has_rows(batch, _REQUEST):
        extras.append(_REQUEST)
    prompts, responses, scores, mask = (_rows(batch, name) for name in _TENSORS)
    for row in wanted:
        yield Trajectory(
            row=row,
            prompt=None if prompts is None else row_tokens(prompts, mask, row, is_prompt=True),
            response=None if responses is None else row_tokens(responses, mask, row, is_prompt=False),
            score=None if scores is None else float(scores[row].double().sum()),
            messages=_cell((inputs, batch), "raw_prompt", row),
            reward_model=_cell((inputs, batch), "reward_model", row),
            data_source=_cell((inputs, batch), "data_source", row),
            reward_extra={key: _plain(batch.arrays[(key,)][row]) for key in dict.fromkeys(extras)},
        )


def conversation(messages: Any) -> str:
    """The messages of a prompt as text, for those who have no tokenizer."""
    try:
        return "\n".join(f"{message['role']}: {message['content']}" for message in messages)
    except (TypeError, KeyError):
        return str(messages)


def _has_rows(batch: Batch, key: Any) -> bool:
    return isinstance(key, str) and (key,) in batch.arrays


def rows_of(tensor: torch.Tensor) -> Rows:
    """The rows of a padded tensor, or of a jagged one."""
    return tensor.unbind() if tensor.is_nested else tensor


def row_tokens(tokens: Rows, mask: Rows | None, row: int, is_prompt: bool) -> list[int]:
    """The tokens of one row without padding, if the attention mask tells; those of the prompt come first in it."""
    ids = tokens[row]
    if mask is not None and not isinstance(tokens, Sequence) and not isinstance(mask, Sequence):
        valid = mask[row][: len(ids)] if is_prompt else mask[row][len(mask[row]) - len(ids) :]
        ids = ids[valid.bool()]
    return [int(token) for token in ids.tolist()]


def _rows(batch: Batch, name: str) -> Rows | None:
    tensor = batch.tensors.get((name,))
    return None if tensor is None else rows_of(tensor)


def _cell(batches: Iterable[Batch | None], name: str, row: int) -> Any:
    for batch in batches:
        array = None if batch is None else batch.arrays.get((name,))
        if array is not None:
            return array[row]
    return None


def _plain(value: Any) -> Any:
    return value.tolist() if hasattr(value, "tolist") else value
