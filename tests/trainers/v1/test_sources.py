"""Recordings of synchronous and asynchronous V1 trainings are not interchangeable, even with ``reuse``."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.trainings import Training
from verl_rollout_skip import RolloutKey
from verl_rollout_skip.errors import MismatchError
from verl_rollout_skip.trainers.v1.asynchronous import check_sources


@pytest.fixture
def training(tmp_path: Path) -> Training:
    return Training(tmp_path)


def check(training: Training, recorded: str, current: str, mode: str) -> None:
    """Record with a trainer mode, and replay with a trainer derived from that of ``mode``."""
    training.record(RolloutKey(1), trainer__use_v1=True, trainer__v1={"trainer_mode": recorded})
    v1 = {"trainer__use_v1": True, "trainer__v1": {"trainer_mode": current}}
    with training.open("replay", {"on_mismatch": "reuse"}, **v1) as replay:
        check_sources(replay, mode)


@pytest.mark.parametrize(
    ("recorded", "current", "mode"),
    [("skip_sync", "skip_colocate_async", "colocate_async"), ("skip_separate_async", "skip_sync", "sync")],
)
def test_recordings_of_the_other_kind_are_rejected_and_the_error_names_the_mode_to_set(
    training: Training, recorded: str, current: str, mode: str
) -> None:
    with pytest.raises(MismatchError, match=rf"Not even rollout_skip\.on_mismatch=reuse.*trainer_mode={recorded}"):
        check(training, recorded, current, mode)


@pytest.mark.parametrize(
    ("recorded", "current", "mode"),
    [
        ("skip_sync", "skip_sync", "sync"),
        ("my_trainer", "my_trainer", "sync"),
        ("my_trainer", "skip_sync", "sync"),
        ("skip_sync", "my_trainer", "sync"),
        ("skip_colocate_async", "skip_separate_async", "separate_async"),
    ],
)
def test_recordings_of_the_same_kind_and_of_custom_trainers_are_accepted(
    training: Training, recorded: str, current: str, mode: str
) -> None:
    check(training, recorded, current, mode)
