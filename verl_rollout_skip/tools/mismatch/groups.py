"""Sums over the tokens of all steps: by position in the response, by turn, and by token.

Their memory does not depend on the number of steps.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from verl_rollout_skip.tools.mismatch.log_probs import LogProbs


@dataclass(frozen=True)
class Group:
    """Some tokens of all steps: positions ``first`` to ``last``, a turn, or a token id."""

    first: int
    last: int
    tokens: int
    k1: float
    k3: float
    mean_abs: float
    max_abs: float


class Sums:
    """Sums of the figures of tokens, by a number of each token."""

    def __init__(self) -> None:
        self._numbers = np.empty(0, np.int64)
        self._sums = np.empty((0, 4))
        self._largest = np.empty(0)

    def add(self, numbers: np.ndarray, found: LogProbs) -> None:
        """Add the tokens of an update."""
        every, which = np.unique(np.concatenate([self._numbers, numbers.astype(np.int64)]), return_inverse=True)
        old, new = which[: len(self._numbers)], which[len(self._numbers) :]
        distance = np.abs(found.log_ratio)
        sums, largest = np.zeros((len(every), 4)), np.zeros(len(every))
        sums[old], largest[old] = self._sums, self._largest
        for column, values in enumerate((np.ones(found.tokens), -found.log_ratio, found.k3, distance)):
            sums[:, column] += np.bincount(new, values, minlength=len(every))
        np.maximum.at(largest, new, distance)
        self._numbers, self._sums, self._largest = every, sums, largest

    def groups(self) -> list[Group]:
        """One group for each number."""
        return [self._group(slice(row, row + 1)) for row in range(len(self._numbers))]

    def doubling(self) -> list[Group]:
        """Groups that double in length: 0, 1, 2–3, 4–7 and so on."""
        if not len(self._numbers):
            return []
        edges = [0, *(1 << power for power in range(int(self._numbers[-1]).bit_length() + 1))]
        cuts = np.searchsorted(self._numbers, edges)
        pairs = zip(cuts[:-1].tolist(), cuts[1:].tolist(), strict=True)
        return [self._group(slice(first, last)) for first, last in pairs if first < last]

    def largest(self, count: int) -> list[Group]:
        """The numbers that contribute most to k3, in this order."""
        order = np.argsort(-np.nan_to_num(self._sums[:, 2]), kind="stable")[:count]
        return [self._group(slice(row, row + 1)) for row in order.tolist() if self._largest[row] > 0]

    def _group(self, rows: slice) -> Group:
        count, k1, k3, distance = self._sums[rows].sum(axis=0).tolist()
        return Group(
            first=int(self._numbers[rows.start]),
            last=int(self._numbers[rows.stop - 1]),
            tokens=int(count),
            k1=k1 / count,
            k3=k3 / count,
            mean_abs=distance / count,
            max_abs=float(self._largest[rows].max()),
        )
