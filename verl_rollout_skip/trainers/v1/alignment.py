"""``Alignment``: the prompts of the current step in the row order of a recorded one.

A DAPO step draws refills: more prompts than it trains on. To compare such a step with a recorded one, its refills have
to be drawn from the dataloader before it is known whether the step can be loaded. If it cannot, they are put back.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

from tensordict import TensorDict

from verl_rollout_skip.replay.prompts import InputMismatch, RepeatedInput, row_difference
from verl_rollout_skip.store.loaded import Entry
from verl_rollout_skip.trainers.v1.dataloader import PushBack
from verl_rollout_skip.trainers.v1.in_flight import InFlight
from verl_rollout_skip.trainers.v1.transfer.rows import sample_of


class Alignment:
    """Draws as many prompts as a recorded step drew, and returns those that the step trained on.

    ``fetch`` draws a chunk of prompts from the dataloader, and ``state`` returns the state of the dataloader.
    With ``compares``, the prompts must be the recorded ones.
    """

    def __init__(
        self,
        in_flight: InFlight,
        push_back: PushBack,
        fetch: Callable[[], TensorDict],
        state: Callable[[], dict[str, Any]],
        compares: bool,
    ) -> None:
        self._in_flight = in_flight
        self._push_back = push_back
        self._fetch = fetch
        self._state = state
        self._compares = compares
        self._can_put_back = False

    def next_chunk(self) -> TensorDict:
        """The next chunk of prompts for the trainer: one that was put back, or one from the dataloader."""
        if self._can_put_back:
            return self._push_back.draw(self._fetch, self._state)
        chunk = self._push_back.next()
        return self._fetch() if chunk is None else chunk

    def align(self, entry: Entry) -> RepeatedInput:
        """The current prompts in the row order of an entry. Raises ``InputMismatch`` if they cannot match it.

        Refills that were drawn for another entry are put back first.
        """
        self.undo()
        positions, sample = sample_of(entry)
        self._draw(entry, positions, sample.drawn)
        if max(positions) >= len(self._in_flight):
            raise InputMismatch("it was sampled from prompts of earlier steps that the current training did not draw.")
        distinct = sorted(set(positions))
        number_of = {position: number for number, position in enumerate(distinct)}
        return RepeatedInput(self._in_flight.rows(distinct), [number_of[position] for position in positions])

    def rows(self, entry: Entry) -> TensorDict:
        """The same prompts, one row for each row of the entry."""
        return self._in_flight.rows(sample_of(entry)[0])

    def undo(self) -> None:
        """Put back the refills that were drawn."""
        self._in_flight.remove_last(self._push_back.put_back())

    @contextmanager
    def redrawn(self) -> Iterator[None]:
        """Put back the refills of a recorded step while the engine generates, because it may draw more or fewer of them
        than the recorded one. Draw those of the recorded step again at the end."""
        wanted = len(self._in_flight.drawn)
        self.undo()
        self._can_put_back = True
        try:
            yield
        finally:
            self._can_put_back = False
        self.undo()
        while len(self._in_flight.drawn) < wanted:
            self._in_flight.add(self._push_back.draw(self._fetch, self._state))

    def _draw(self, entry: Entry, positions: list[int], recorded: list[str]) -> None:
        """Draw as many prompts as the recorded step. Each chunk is compared before the next one is drawn, so that as
        little as possible has to be put back."""
        compared = 0
        while True:
            drawn = len(self._in_flight.drawn)
            if self._compares:
                self._compare(entry, positions, recorded, compared)
            if drawn >= len(recorded):
                break
            compared = drawn
            self._in_flight.add(self._push_back.draw(self._fetch, self._state))
        if drawn != len(recorded):
            raise InputMismatch(
                f"its step drew {len(recorded)} prompts from the data, and the current one draws {drawn}."
            )

    def _compare(self, entry: Entry, positions: list[int], recorded: list[str], start: int) -> None:
        """Raise if a prompt drawn at ``start`` or later has changed, unless a later comparison of the rows finds it.

        It will not find a prompt that was not trained on. It also needs all prompts of the step to be drawn.
        """
        drawn = self._in_flight.drawn
        pairs = list(zip(drawn, recorded, strict=False))[start:]
        changed = [number for number, (prompt, digest) in enumerate(pairs, start) if prompt.digest != digest]
        first = len(self._in_flight) - len(drawn)
        trained = [number for number in changed if first + number in positions]
        if not changed or (trained and len(drawn) >= len(recorded)):
            return
        text = f"prompt {(trained or changed)[0]} of the {len(recorded)} that its step drew from the data"
        if not trained:
            raise InputMismatch(f"{text}, which it did not train on, has changed.")
        position = first + trained[0]
        difference = row_difference(entry, positions.index(position), self._in_flight.rows([position]), 0)
        raise InputMismatch(f"{text} has changed:\n{difference}")
