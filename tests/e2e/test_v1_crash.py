"""A real training that is killed in the middle of a rollout step, and continued."""

from __future__ import annotations

import json
import re
from dataclasses import replace
from pathlib import Path

import pytest

from tests.e2e.training import (
    ROOT,
    VERL_V1,
    Trainings,
    assert_same_results,
    assert_same_weights,
    skip_v1,
    variant_in,
)
from verl_rollout_skip import RolloutKey, RolloutStore
from verl_rollout_skip.errors import StoreError
from verl_rollout_skip.runs.paths import PARTIAL
from verl_rollout_skip.trainers.v1.transfer.partial import _GROUPS

pytestmark = pytest.mark.slow

STEPS, PROMPTS, SAMPLES = 2, 8, 4
FIRST = RolloutKey(1)


def finished_prompts(dumps: Path) -> int:
    """The number of prompts of the first step that are recorded while it generates."""
    for folder in dumps.glob(f"*/*/{PARTIAL}"):
        try:
            return len(RolloutStore(folder).record(FIRST).info[_GROUPS]["prompts"])
        except StoreError:
            return 0  # not yet
    return 0


def test_a_killed_training_continues_its_step_with_the_prompts_that_were_not_finished(
    trainings: Trainings, tmp_path: Path
) -> None:
    """Tasks write what the killed training generates, and the driver reads it in the next one."""
    waiting = tmp_path / "waiting"
    waiting.touch()
    dumps = tmp_path / "dumps"
    settings = (
        f"trainer.total_training_steps={STEPS}",
        f"trainer.save_freq={STEPS}",
        f"reward.custom_reward_function.path={ROOT}/tests/e2e/slow_reward.py",
        "+rollout_skip.partial_every=0.5",
    )
    by_tasks, by_driver = ["+rollout_skip.tasks=on"], ["+rollout_skip.tasks=off"]
    slow = replace(VERL_V1, env={"SLOW_REWARD": str(waiting)})
    crashed = trainings.run_until(
        slow, "crashed", lambda _: finished_prompts(dumps) >= 3, *settings, *by_tasks, *skip_v1("cache", dumps)
    )
    finished = finished_prompts(dumps)
    assert 3 <= finished < PROMPTS
    assert RolloutStore(variant_in(dumps)).keys() == []
    assert len(crashed.trace("generate")) == PROMPTS * SAMPLES

    waiting.unlink()
    continued = trainings.run(slow, "continued", *settings, *by_driver, *skip_v1("cache", dumps))
    assert continued.trace("generate").count(0) == (PROMPTS - finished) * SAMPLES
    assert any(f"{finished} of {PROMPTS} prompts were generated before" in message for message in continued.messages)
    assert continued.hits() == []
    assert not list((variant_in(dumps) / PARTIAL).rglob("*.parquet"))
    rows = continued.rollout_data()["1"]
    assert len(rows) == PROMPTS * SAMPLES
    assert all(right_pair(row) for row in rows)

    replayed = trainings.run(slow, "replayed", *settings, *by_tasks, *skip_v1("replay", dumps))
    assert replayed.hits() == [1, 2]
    assert_same_results(continued, replayed)
    assert_same_weights(continued, replayed, STEPS)


def right_pair(row: str) -> bool:
    """Whether a row that verl wrote has the answer to its own prompt."""
    written = json.loads(row)
    terms = re.search(r"(\d+)\+(\d+)=", written["input"])
    return terms is not None and int(terms[1]) + int(terms[2]) == int(written["gts"])
