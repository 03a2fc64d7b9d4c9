"""Sampling: reproducible for a seed, and within the budget."""

from __future__ import annotations

import numpy as np
import pytest

from verl_rollout_skip.key import RolloutKey
from verl_rollout_skip.report.sampling import TOKEN_BUDGET, Sampling, ranked_rows
from verl_rollout_skip.store.record import EntryRecord

DIGESTS = [f"{number:032x}" for number in range(256)]


def record(step: int, prompt: float | None = 200.0, response: float | None = 2500.0) -> EntryRecord:
    numbers = {"prompt_tokens": None, "response_tokens": None, "mean_score": 0.5}
    return EntryRecord(
        key=RolloutKey(step),
        rows=2048,
        mean_prompt_length=prompt,
        mean_response_length=response,
        parts=(),
        content="",
        encode_s=0.0,
        created_at="",
        written_by="",
        **numbers,
    )


def test_the_seed_determines_the_groups() -> None:
    first = Sampling(seed=1).order_of_groups(DIGESTS)[:8]
    assert first == Sampling(seed=1).order_of_groups(DIGESTS)[:8]
    assert first != Sampling(seed=2).order_of_groups(DIGESTS)[:8]
    assert sorted(Sampling(seed=1).order_of_groups(DIGESTS)) == list(range(256))


def test_a_prompt_shown_in_one_step_is_shown_in_the_others() -> None:
    sampling = Sampling(seed=3)
    shown = {DIGESTS[position] for position in sampling.order_of_groups(DIGESTS)[:16]}
    half = DIGESTS[128:][::-1]
    again = {half[position] for position in sampling.order_of_groups(half)[:16]}
    assert shown & set(half) <= again


def test_a_larger_sample_includes_the_smaller_one() -> None:
    order = Sampling().order_of_groups(DIGESTS)
    assert set(order[:4]) <= set(order[:8])


def test_a_long_recording_stays_within_the_token_budget() -> None:
    sampling = Sampling()
    shares = sampling.groups_of_each([record(step) for step in range(1, 101)])
    tokens = sum(shares) * (200 + 2 * 2000 + 1)
    assert len(set(shares)) == 1
    assert 0.5 * TOKEN_BUDGET < tokens <= TOKEN_BUDGET


def test_short_responses_leave_room_for_more_groups() -> None:
    few = Sampling().groups_of_each([record(step) for step in range(1, 101)])[0]
    many = Sampling().groups_of_each([record(step, 50.0, 100.0) for step in range(1, 101)])[0]
    assert many > 5 * few


def test_with_more_steps_than_groups_some_steps_are_shown_including_the_first() -> None:
    shares = Sampling().groups_of_each([record(step) for step in range(1, 3001)])
    assert shares[0] == 1
    assert set(shares) == {0, 1}
    assert 100 < sum(shares) < 400
    positions = np.flatnonzero(shares)
    assert len(set(np.diff(positions))) == 1, "they are spread evenly"


def test_a_requested_number_of_groups_is_used() -> None:
    assert Sampling(groups=77).groups_of_each([record(1), record(2)]) == [77, 77]
    assert Sampling().groups_of_each([]) == []


def test_records_without_lengths_are_accepted() -> None:
    assert Sampling().groups_of_each([record(1, None, None)])[0] > 1


@pytest.mark.parametrize(
    ("responses", "shown"),
    [(1, [10]), (2, [10, 17]), (3, [10, 14, 17]), (8, list(range(10, 18))), (100, list(range(10, 18)))],
)
def test_the_best_and_worst_response_are_selected_first(responses: int, shown: list[int]) -> None:
    assert Sampling(responses=responses).rows_of_group(range(10, 18)) == shown


@pytest.mark.parametrize(
    ("length", "limit", "shown"),
    [(5, 10, (5, 0)), (10, 10, (10, 0)), (11, 10, (8, 2)), (0, 10, (0, 0)), (9, 1, (1, 0))],
)
def test_a_long_text_is_shown_with_its_beginning_and_its_end(length: int, limit: int, shown: tuple[int, int]) -> None:
    assert Sampling(tokens=limit).shown_tokens(length) == shown


def test_rows_are_ranked_by_score_then_length_with_nan_last() -> None:
    scores = np.array([0.0, 1.0, np.nan, 1.0, -np.inf, np.inf])
    lengths = np.array([5, 9, 1, 3, 1, 1])
    assert ranked_rows(np.arange(6), scores, lengths) == [5, 3, 1, 0, 4, 2]
    assert ranked_rows(np.arange(6), None, lengths) == [2, 4, 5, 3, 0, 1]
    assert ranked_rows(np.array([2, 0]), None, None) == [0, 2]


@pytest.mark.parametrize(
    "wrong", [{"groups": -1}, {"responses": 0}, {"tokens": 0}, {"seed": -1}, {"seed": 2**64}], ids=str
)
def test_an_invalid_number_is_an_error_that_names_it(wrong: dict[str, int]) -> None:
    [(name, value)] = wrong.items()
    with pytest.raises(ValueError, match=f"{name} is {value}"):
        Sampling(**wrong)
