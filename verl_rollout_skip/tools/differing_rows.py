"""Compares the training columns of two trainings: which rows and tokens of a step differ first, and their text."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from verl_rollout_skip.errors import RolloutSkipError
from verl_rollout_skip.key import RolloutKey
from verl_rollout_skip.replay.ledger.stages import Stage, stage_of_tensor
from verl_rollout_skip.runs.columns import ROLE, columns_of
from verl_rollout_skip.runs.manifest import read_manifest
from verl_rollout_skip.store.reader import StoreReader
from verl_rollout_skip.tools.audit import Audit
from verl_rollout_skip.tools.columns import NOWHERE, Place, RecordedRows, Update, read_update
from verl_rollout_skip.tools.decoding import TextDecoder, find_decoder

_BEFORE, _AFTER = 24, 8
_STAGES = list(Stage)


@dataclass(frozen=True)
class DifferingToken:
    """The first token of a tensor that differs between two trainings, and the number of rows that differ.

    ``place`` is the generation batch and the row of its trajectory in the recording, ``position`` the token within its
    response. A value is None if the row of that training is shorter.
    """

    step: int
    role: str
    tensor: str
    rows: int
    place: Place
    position: int
    recorded: float | int | bool | None
    current: float | int | bool | None
    before: tuple[int, ...] = ()
    token: int | None = None
    after: tuple[int, ...] = ()

    def describe(self, decoder: TextDecoder | None = None) -> str:
        """One line: where, both values, and the token with its context."""
        gen_batch, row = self.place
        batch = f"generation batch {gen_batch}, " if gen_batch > 0 else ""
        rows = "1 row differs" if self.rows == 1 else f"{self.rows} rows differ"
        line = (
            f"step {self.step}, {self.tensor}: {rows}, first {batch}row {row}, token {self.position}: "
            f"{_shown(self.recorded)} -> {_shown(self.current)}"
        )
        if self.token is None:
            return line
        if decoder is None:
            return f"{line}, at token id {self.token}"
        parts = (decoder.text(tokens).replace("\n", "\\n") for tokens in (self.before, (self.token,), self.after))
        return f"{line}, at {'⟦'.join([next(parts), next(parts)])}⟧{next(parts)}"


def describe_rows(found: Audit) -> list[str]:
    """The rows and tokens that differ in the first differing step of an audit, one line per tensor.

    Empty if nothing differs, or if one of the trainings has no columns of that step.
    """
    if found.first is None:
        return []
    step = found.first.step
    sides = [(side.storage.where().rstrip("/"), side.trainings[step]) for side in (found.a, found.b)]
    try:
        tokens = differing_tokens(*sides[0], *sides[1], step)
        decoder, _ = find_decoder(sides[0][0], read_manifest(found.a.storage)) if tokens else (None, "")
    except (RolloutSkipError, OSError) as error:
        return [f"the training columns of step {step} cannot be compared: {error}"]
    return [token.describe(decoder) for token in tokens]


def differing_tokens(
    variant_a: str, training_a: str, variant_b: str, training_b: str, step: int, role: str = "actor"
) -> list[DifferingToken]:
    """The first differing token of each tensor in the columns of a step, in data-flow order. Bits are compared.

    Rows are paired by their trajectories, so the order of the rows does not matter. Empty if nothing differs, or if one
    of the trainings has no columns of the step.
    """
    entries_a, entries_b = columns_of(variant_a, training_a), columns_of(variant_b, training_b)
    rollouts = RecordedRows(StoreReader.at(variant_a), step)
    keys_a, keys_b = _updates(entries_a, step, role), _updates(entries_b, step, role)
    found: list[DifferingToken] = []
    for key_a, key_b in zip(keys_a, keys_b, strict=False):
        a, b = read_update(entries_a, key_a), read_update(entries_b, key_b)
        for name in (name for name in a.names if name in b.names):
            different = _first_difference(a, b, name, role, rollouts)
            if different is not None:
                found.append(different)
    return sorted(found, key=lambda token: _STAGES.index(stage_of_tensor(token.tensor)))


def _updates(entries: StoreReader, step: int, role: str) -> list[RolloutKey]:
    keys = [key for key in entries if key.step == step]
    return [key for key in keys if entries.record(key).info.get(ROLE, "actor") == role]


def _first_difference(a: Update, b: Update, name: str, role: str, rollouts: RecordedRows) -> DifferingToken | None:
    rows_a, rows_b = a.rows(name), b.rows(name)
    assert rows_a is not None
    assert rows_b is not None
    row_of = {place: row for row, place in enumerate(b.places) if place != NOWHERE}
    pairs = [(place, row, row_of[place]) for row, place in enumerate(a.places) if place in row_of]
    different = [
        (place, row, position, left, right)
        for place, row, other in sorted(pairs)
        if (position := _first_position(left := rows_a[row], right := rows_b[other])) is not None
    ]
    if not different:
        return None
    place, row, position, left, right = different[0]
    own = a.rows("responses")
    response = rollouts.tokens("responses", place) if own is None else own[row]
    has_token = response is not None and position < len(response)
    return DifferingToken(
        a.key.step,
        role,
        name,
        len(different),
        place,
        position,
        left[position].item() if position < len(left) else None,
        right[position].item() if position < len(right) else None,
        tuple(response[max(position - _BEFORE, 0) : position].tolist()) if response is not None and has_token else (),
        int(response[position]) if response is not None and has_token else None,
        tuple(response[position + 1 : position + 1 + _AFTER].tolist()) if response is not None and has_token else (),
    )


def _first_position(left: np.ndarray, right: np.ndarray) -> int | None:
    """The first position at which two rows differ in their bits; padding with zeros at the end does not count."""
    if left.dtype != right.dtype:
        return 0
    length = min(len(left), len(right))
    kind = np.dtype(f"u{left.dtype.itemsize}")  # NaN equals itself, and -0.0 differs from 0.0
    bits = left.view(kind), right.view(kind)
    different = np.flatnonzero(bits[0][:length] != bits[1][:length])
    if len(different):
        return int(different[0])
    rest = np.flatnonzero(np.concatenate([bits[0][length:], bits[1][length:]]))
    return length + int(rest[0]) if len(rest) else None


def _shown(value: float | int | bool | None) -> str:
    return "nothing" if value is None else repr(value)
