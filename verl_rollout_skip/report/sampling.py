"""Selects the groups, responses and tokens to show when there are too many, reproducibly for a seed.

Groups are selected by a digest of their prompt and the seed, so a prompt that is shown in one step is also shown in the
other steps that contain it, if the number of groups allows.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import xxhash

from verl_rollout_skip.store.reader import EntryRecord

TOKEN_BUDGET = 1_500_000
_MAX_GROUPS = 4000
_UNKNOWN_LENGTH = 1024


@dataclass(frozen=True)
class Sampling:
    """How much is shown.

    ``groups`` per rollout step (None: as many as fit into ``TOKEN_BUDGET`` tokens in total), ``responses`` per group,
    from the best to the worst, and ``tokens`` per prompt or response, from its beginning and its end.
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
                raise ValueError(f"{name} is {value}, but must be at least {smallest}.")
        if not 0 <= self.seed < 2**64:
            raise ValueError(f"seed is {self.seed}, but must be between 0 and 2^64 - 1.")

    def groups_of_each(self, records: Sequence[EntryRecord]) -> list[int]:
        """How many groups of each step to show, so that the total stays within the budget."""
        if self.groups is not None:
            return [self.groups] * len(records)
        weights = [self._group_tokens(record) for record in records]
        total = min(TOKEN_BUDGET / max(sum(weights) / max(len(weights), 1), 1), _MAX_GROUPS)
        each = int(total // max(len(records), 1))
        if each >= 1:
            return [each] * len(records)
        # More steps than groups: one group of every stride-th step, starting with the first.
        stride = math.ceil(len(records) / max(total, 1))
        return [int(index % stride == 0) for index in range(len(records))]

    def order_of_groups(self, digests: Sequence[str]) -> list[int]:
        """The indices of the groups in the order in which they are selected."""
        hashes = [xxhash.xxh3_64_intdigest(digest.encode(), seed=self.seed) for digest in digests]
        return sorted(range(len(digests)), key=lambda index: (hashes[index], index))

    def rows_of_group(self, ranked: Sequence[int]) -> list[int]:
        """Select rows from a list sorted from best to worst: the first, the last, and others evenly spaced between."""
        if len(ranked) <= self.responses:
            return list(ranked)
        if self.responses == 1:
            return [ranked[0]]
        ranks = np.linspace(0, len(ranked) - 1, self.responses).round().astype(int)
        return [ranked[rank] for rank in ranks]

    def shown_tokens(self, length: int) -> tuple[int, int]:
        """How many tokens to show from the beginning and from the end of a text of this length."""
        if length <= self.tokens:
            return length, 0
        end = self.tokens // 4
        return self.tokens - end, end

    def _group_tokens(self, record: EntryRecord) -> float:
        prompt = record.mean_prompt_length if record.mean_prompt_length is not None else _UNKNOWN_LENGTH
        response = record.mean_response_length if record.mean_response_length is not None else _UNKNOWN_LENGTH
        return min(prompt, self.tokens) + self.responses * min(response, self.tokens) + 1


def ranked_rows(rows: np.ndarray, scores: np.ndarray | None, lengths: np.ndarray | None) -> list[int]:
    """Sort rows from best to worst. Equal scores are sorted by response length; NaN comes last."""

    def sort_key(row: int) -> tuple[bool, float, int, int]:
        score = 0.0 if scores is None else float(scores[row])
        unknown = math.isnan(score)
        return unknown, 0.0 if unknown else -score, 0 if lengths is None else int(lengths[row]), int(row)

    return sorted((int(row) for row in rows), key=sort_key)
