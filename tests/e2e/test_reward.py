"""``reward: recompute``: the recorded responses with another reward function."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from tests.e2e import parity_reward
from tests.e2e.training import Finished, Trainings, assert_same_results

DAPO = (
    "trainer.total_training_steps=2",
    "data.train_batch_size=4",
    "data.gen_batch_size=4",
    "actor_rollout_ref.actor.ppo_mini_batch_size=4",
)
PARITY = f"reward.custom_reward_function.path={parity_reward.__file__}"
RECOMPUTE = "rollout_skip.reward=recompute"


@pytest.fixture(scope="module")
def dapo(tmp_path_factory: pytest.TempPathFactory, assets: Path) -> Trainings:
    return Trainings(tmp_path_factory.mktemp("rewards"), assets, module="recipes.dapo.main_dapo", config="dapo_cpu")


@pytest.fixture(scope="module")
def dumps(tmp_path_factory: pytest.TempPathFactory) -> str:
    return f"rollout_skip.dump_dir={tmp_path_factory.mktemp('dumps')}"


@pytest.fixture(scope="module")
def recorded(dapo: Trainings, dumps: str) -> Finished:
    return dapo.run("record", *DAPO, dumps, "rollout_skip.mode=record")


def rows(training: Finished) -> list[dict]:
    return [json.loads(line) for lines in training.rollout_data().values() for line in lines]


def test_the_same_reward_function_gives_the_same_training(dapo: Trainings, recorded: Finished, dumps: str) -> None:
    again = dapo.run("same", *DAPO, dumps, "rollout_skip.mode=replay", RECOMPUTE)
    assert_same_results(recorded, again)


def test_another_reward_function_scores_the_recorded_responses_and_filters_by_them(
    dapo: Trainings, recorded: Finished, dumps: str
) -> None:
    other = dapo.run("other", *DAPO, dumps, "rollout_skip.mode=cache", RECOMPUTE, PARITY)
    assert any("the reward is another one than it was recorded with" in text for text in other.messages)
    assert other.timing("rollout_skip/hit")[1] > 0
    for row in rows(other):
        expected = parity_reward.compute_score("", row["output"], row["gts"])
        assert row["acc"] == expected["acc"]
        assert row["length"] == expected["length"]
    scores: dict[str, set[float]] = {}
    for row in rows(other):
        scores.setdefault(f"{row['step']} {row['input']}", set()).add(row["acc"])
    assert all(len(values) == 2 for values in scores.values()), "a group without variance was kept"
    assert rows(other) != rows(recorded)
