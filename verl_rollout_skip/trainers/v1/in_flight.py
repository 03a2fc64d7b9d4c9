"""``InFlight``: the prompts that a training has drawn from its dataloader but not sampled yet, in drawing order.

Uids are new in every run, so a recording identifies a prompt by its position in this list. In a synchronous training,
these are the prompts of the step; an asynchronous training keeps prompts in flight across steps.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import torch
import xxhash
from tensordict import NonTensorData, NonTensorStack, TensorDict

from verl_rollout_skip.errors import InertError
from verl_rollout_skip.replay.prompts import UID
from verl_rollout_skip.store.codec import cells

# The step in which a prompt was submitted; not part of the prompt itself.
_SUBMITTED_AT = "global_steps"


@dataclass(frozen=True)
class Prompt:
    """One row of the dataloader."""

    uid: str
    row: dict[str, Any]

    @cached_property
    def digest(self) -> str:
        """A digest of everything but the uid. Computed on demand, because a row may contain values that cannot be
        stored."""
        digest = xxhash.xxh3_128()
        for name in sorted(self.row):
            if name == UID:
                continue
            blobs: list[Any] = []
            digest.update(f"{name}={cells.encode(self.row[name], blobs, name)};".encode("utf-8", "surrogatepass"))
            for blob in blobs:
                digest.update(cells.blob_view(blob))
        return digest.hexdigest()


@dataclass(frozen=True)
class PromptRows:
    """Prompts by position, and the names of their columns in order. Other processes turn them into rows."""

    prompts: dict[int, dict[str, Any]]
    names: list[str]

    def select(self, positions: Iterable[int]) -> PromptRows:
        """Only the prompts at these positions, with copied tensors: sending a view would send its whole storage."""
        return PromptRows({position: _own(self.prompts[position]) for position in set(positions)}, self.names)

    def rows(self, positions: Iterable[int]) -> TensorDict:
        """The prompts at these positions, one row per position, including uids."""
        chosen = [self.prompts[position] for position in positions]
        columns = {name: column_of([row[name] for row in chosen]) for name in self.names}
        return TensorDict(columns, batch_size=[len(chosen)])


class InFlight:
    """The prompts between ``_submit_batch_to_rollout`` and ``replay_buffer.sample``."""

    def __init__(self) -> None:
        self._prompts: list[Prompt] = []
        self._old = 0

    def __len__(self) -> int:
        return len(self._prompts)

    @property
    def drawn(self) -> list[Prompt]:
        """The prompts drawn since the last sample."""
        return self._prompts[self._old :]

    def add(self, batch: TensorDict) -> None:
        """Add prompts that were just drawn, as the dataloader returns them, with their uids."""
        self._prompts += [Prompt(str(row[UID]), row) for row in rows_of(batch)]

    def restore(self, batch: TensorDict | None) -> None:
        """Add prompts that were in flight when the checkpoint of this training was saved."""
        if batch is not None:
            self.add(batch)
        self._old = len(self._prompts)

    def remove_last(self, count: int) -> None:
        """Remove the ``count`` prompts that were added last."""
        del self._prompts[len(self._prompts) - count :]

    def positions(self, uids: Iterable[str]) -> list[int]:
        """The positions of the prompts with these uids."""
        position_of = {prompt.uid: position for position, prompt in enumerate(self._prompts)}
        try:
            return [position_of[uid] for uid in uids]
        except KeyError as error:
            raise InertError(
                f"A trajectory was sampled, but its prompt {error} did not pass through _submit_batch_to_rollout of "
                "this trainer. The trainer generates some other way, so a recording could not be replayed."
            ) from None

    def known(self, uids: Collection[str]) -> list[tuple[str, int]]:
        """The given uids that belong to prompts in flight, with the positions of the prompts."""
        return [(prompt.uid, position) for position, prompt in enumerate(self._prompts) if prompt.uid in uids]

    def digests(self, positions: Iterable[int]) -> list[str]:
        return [self._prompts[position].digest for position in positions]

    def gone(self, sampled: Iterable[str], waiting: Iterable[str]) -> list[int]:
        """The positions of prompts that were sampled, or dropped: filtered, stale, failed or surplus."""
        sampled, waiting = set(sampled), set(waiting)
        return [
            position
            for position, prompt in enumerate(self._prompts)
            if prompt.uid in sampled or prompt.uid not in waiting
        ]

    def uids(self, positions: Iterable[int]) -> list[str]:
        return [self._prompts[position].uid for position in positions]

    def prompt_rows(self, positions: Sequence[int]) -> PromptRows:
        """The prompts at these positions."""
        first = next(iter(positions))
        prompts = {position: self._prompts[position].row for position in set(positions)}
        return PromptRows(prompts, list(self._prompts[first].row))

    def rows(self, positions: Sequence[int]) -> TensorDict:
        """The prompts at these positions, one row per position, including uids."""
        return self.prompt_rows(positions).rows(positions)

    def settle(self, gone: Iterable[int]) -> None:
        """Remove the prompts that a sample took or dropped. The others no longer count as newly drawn."""
        leaving = set(gone)
        self._prompts = [prompt for position, prompt in enumerate(self._prompts) if position not in leaving]
        self._old = len(self._prompts)


def _own(row: dict[str, Any]) -> dict[str, Any]:
    return {name: cell.clone() if isinstance(cell, torch.Tensor) else cell for name, cell in row.items()}


def rows_of(batch: TensorDict) -> list[dict[str, Any]]:
    """The rows of a batch of prompts, including uids."""
    columns: dict[str, list[Any]] = {}
    for name in batch.keys():  # noqa: SIM118 - iterating over a TensorDict yields its rows
        column = batch.get(name)
        if name == _SUBMITTED_AT:
            continue
        if isinstance(column, NonTensorData):
            columns[name] = [column.data] * len(batch)
        else:
            columns[name] = list(column.unbind(0)) if isinstance(column, torch.Tensor) else column.tolist()
    return [dict(zip(columns, row, strict=True)) for row in zip(*columns.values(), strict=True)]


def column_of(found: list[Any]) -> Any:
    """A column of a batch with these cells."""
    if all(isinstance(cell, torch.Tensor) for cell in found):
        return torch.stack(found)
    # tensordict spends most of its time wrapping cells, and rows of the same prompt share cells.
    wrapped = {id(cell): NonTensorData(cell) for cell in found}
    return NonTensorStack.from_list([wrapped[id(cell)] for cell in found])
