"""The prompts that a training has drawn from its dataloader and not sampled yet, in the order in which it drew them.

Their uids are new in every run, so a recording names a prompt by its place among them. In a synchronous training they
are the prompts of the step; an asynchronous one keeps prompts in flight from step to step.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import torch
import xxhash
from tensordict import NonTensorData, NonTensorStack, TensorDict

from verl_rollout_skip.errors import InertError
from verl_rollout_skip.prompts import UID
from verl_rollout_skip.store.codec import cells
from verl_rollout_skip.store.codec.blobs import blob_view

# It says when a prompt was sent off, not what it is.
_NOT_OF_THE_PROMPT = "global_steps"


@dataclass(frozen=True)
class Prompt:
    """One row of the dataloader."""

    uid: str
    row: dict[str, Any]

    @cached_property
    def digest(self) -> str:
        """Of everything but the uid. Made only where it is needed: a row may hold something that cannot be stored."""
        digest = xxhash.xxh3_128()
        for name in sorted(self.row):
            if name == UID:
                continue
            blobs: list[Any] = []
            digest.update(f"{name}={cells.encode(self.row[name], blobs, name)};".encode("utf-8", "surrogatepass"))
            for blob in blobs:
                digest.update(blob_view(blob))
        return digest.hexdigest()


class InFlight:
    """Keeps the prompts between ``_submit_batch_to_rollout`` and ``replay_buffer.sample``."""

    def __init__(self) -> None:
        self._prompts: list[Prompt] = []
        self._old = 0

    def __len__(self) -> int:
        return len(self._prompts)

    @property
    def drawn(self) -> list[Prompt]:
        """Those that were drawn since the last sample."""
        return self._prompts[self._old :]

    def add(self, batch: TensorDict) -> None:
        """Prompts that were just drawn, as the dataloader gives them, with their uids."""
        self._prompts += [Prompt(str(row[UID]), row) for row in _rows(batch)]

    def restore(self, batch: TensorDict | None) -> None:
        """Prompts that an earlier run of this training drew and left in flight."""
        if batch is not None:
            self.add(batch)
        self._old = len(self._prompts)

    def take_back(self, count: int) -> None:
        """Forget the prompts that were added last."""
        del self._prompts[len(self._prompts) - count :]

    def places(self, uids: Iterable[str]) -> list[int]:
        """Where the prompts with these uids are."""
        place_of = {prompt.uid: place for place, prompt in enumerate(self._prompts)}
        try:
            return [place_of[uid] for uid in uids]
        except KeyError as error:
            raise InertError(
                f"A trajectory was sampled whose prompt {error} did not pass through _submit_batch_to_rollout of this "
                "trainer: it generates in another way, so what is recorded could not be replayed."
            ) from None

    def gone(self, sampled: Iterable[str], waiting: Iterable[str]) -> list[int]:
        """The places of prompts that were sampled, or that are nowhere any more: filtered, stale, failed or surplus."""
        sampled, waiting = set(sampled), set(waiting)
        return [
            place for place, prompt in enumerate(self._prompts) if prompt.uid in sampled or prompt.uid not in waiting
        ]

    def uids(self, places: Iterable[int]) -> list[str]:
        return [self._prompts[place].uid for place in places]

    def rows(self, places: Iterable[int]) -> TensorDict:
        """The prompts at these places, uids included, with a row for each place."""
        chosen = [self._prompts[place].row for place in places]
        columns = {name: _column([row[name] for row in chosen]) for name in chosen[0]}
        return TensorDict(columns, batch_size=[len(chosen)])

    def settle(self, gone: Iterable[int]) -> None:
        """A sample was taken: forget the prompts that are gone. Those that stay are not newly drawn any more."""
        leaving = set(gone)
        self._prompts = [prompt for place, prompt in enumerate(self._prompts) if place not in leaving]
        self._old = len(self._prompts)


def _rows(batch: TensorDict) -> list[dict[str, Any]]:
    columns: dict[str, list[Any]] = {}
    for name in batch.keys():  # noqa: SIM118 - iterating a TensorDict walks its rows
        column = batch.get(name)
        if name == _NOT_OF_THE_PROMPT:
            continue
        if isinstance(column, NonTensorData):
            columns[name] = [column.data] * len(batch)
        else:
            columns[name] = list(column.unbind(0)) if isinstance(column, torch.Tensor) else column.tolist()
    return [dict(zip(columns, row, strict=True)) for row in zip(*columns.values(), strict=True)]


def _column(found: list[Any]) -> Any:
    if all(isinstance(cell, torch.Tensor) for cell in found):
        return torch.stack(found)
    # Wrapping a cell takes tensordict longer than all the rest, and the rows of a prompt have the same ones.
    wrapped = {id(cell): NonTensorData(cell) for cell in found}
    return NonTensorStack.from_list([wrapped[id(cell)] for cell in found])
