"""Which groups, responses and tokens are shown when there are too many: the same ones for the same seed.

Groups are chosen by a digest of their prompt and the seed, so a prompt that is shown in one step is shown in every step
that has it, as far as the number allows.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import xxhash

from verl_rollout_skip.store.reader import EntryRecord

TOKEN_BUDGET = 1_500_000
_MOST_GROUPS = 4000
_UNKNOWN_LENGTH = 1024


@dataclass(frozen=True)
class Sampling:
    """How much is shown.

    ``groups`` of a rollout step (None: as many as ``TOKEN_BUDGET`` tokens in all allow), ``responses`` of a group from
    the best to the worst, and ``tokens`` of a prompt or a response, the beginning and the end of it.
    """

    seed: int = 0
    groups: int | None = None
    responses: int = 2
    tokens: int = 2000

    def __post_init__(self) -> None:
        least = {"groups": 0, "responses": 1, "tokens": 1}
        for name, smallest in least.items():
            value = getattr(self, name)
            if value is not None and value < smallest:
                raise ValueError(f"{name} is {value}; it must be {smallest} or more.")
        if not 0 <= self.seed < 2**64:
            raise ValueError(f"seed is {self.seed}; it must be between 0 and 2^64 - 1.")

    def groups_of_each(self, records: Sequence[EntryRecord]) -> list[int]:
        """How many groups of each step to show, so that all together stay within the budget."""
        if self.groups is not None:
            return [self.groups] * len(records)
        weights = [self._group_tokens(record) for record in records]
        total = min(TOKEN_BUDGET / max(sum(weights) / max(len(weights), 1), 1), _MOST_GROUPS)
        each = int(total // max(len(records), 1))
        if each >= 1:
            return [each] * len(records)
        # More steps than groups: one group of every so many steps, the first among them.
        stride = math.ceil(len(records) / max(total, 1))
        return [int(place % stride == 0) for place in range(len(records))]

    def order_of_groups(self, digests: Sequence[str]) -> list[int]:
        """The places of the prompts in the order in which they are taken."""
        marks = [xxhash.xxh3_64_intdigest(digest.encode(), seed=self.seed) for digest in digests]
        return sorted(range(len(digests)), key=lambda place: (marks[place], place))

    def rows_of_group(self, ranked: Sequence[int]) -> list[int]:
        """Of rows from best to worst, those to show: the first and the last, others evenly between them."""
        if len(ranked) <= self.responses:
            return list(ranked)
        if self.responses == 1:
            return [ranked[0]]
        places = np.linspace(0, len(ranked) - 1, self.responses).round().astype(int)
        return [ranked[place] for place in places]

    def shown_tokens(self, length: int) -> tuple[int, int]:
        """How many tokens to show from the beginning and from the end of so many."""
        if length <= self.tokens:
            return length, 0
        end = self.tokens // 4
        return self.tokens - end, end

    def _group_tokens(self, record: EntryRecord) -> float:
        prompt = record.mean_prompt_length if record.mean_prompt_length is not None else _UNKNOWN_LENGTH
        response = record.mean_response_length if record.mean_response_length is not None else _UNKNOWN_LENGTH
        return min(prompt, self.tokens) + self.responses * min(response, self.tokens) + 1


def ranked_rows(rows: np.ndarray, scores: np.ndarray | None, lengths: np.ndarray | None) -> list[int]:
    """Rows from best to worst; of equal scores the shorter response first. A score that is no number comes last."""

    def place(row: int) -> tuple[bool, float, int, int]:
        score = 0.0 if scores is None else float(scores[row])
        unknown = math.isnan(score)
        return unknown, 0.0 if unknown else -score, 0 if lengths is None else int(lengths[row]), int(row)

    return sorted((int(row) for row in rows), key=place)
