"""Which prompts a loaded rollout belongs to, with a sampler that gives others in the second run."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.e2e.training import Finished, Trainings, assert_same_results

SETTINGS = ("trainer.total_training_steps=2",)


@pytest.fixture(scope="module")
def sampled(tmp_path_factory: pytest.TempPathFactory, assets: Path) -> Trainings:
    return Trainings(tmp_path_factory.mktemp("sampled"), assets, module="tests.e2e.main_with_sampler")


@pytest.fixture(scope="module")
def dumps(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("dumps")


@pytest.fixture(scope="module")
def recorded(sampled: Trainings, dumps: Path) -> Finished:
    return sampled.run(
        "record",
        *SETTINGS,
        "rollout_skip.mode=record",
        f"rollout_skip.dump_dir={dumps}",
        env={"SAMPLER_ORDER": "forward"},
    )


def test_the_recorded_batch_replaces_the_current_one_with_its_prompts_and_answers(
    sampled: Trainings, recorded: Finished, dumps: Path
) -> None:
    other = sampled.run(
        "recorded",
        *SETTINGS,
        "rollout_skip.mode=cache",
        "rollout_skip.prompts=recorded",
        f"rollout_skip.dump_dir={dumps}",
        env={"SAMPLER_ORDER": "backward"},
    )
    assert other.hits() == [1, 2]
    assert other.trace("generate") == []
    assert other.rollout_data() == recorded.rollout_data(), "prompts, answers, responses and scores"
    assert_same_results(recorded, other)


def test_other_prompts_are_a_miss_that_shows_them(sampled: Trainings, recorded: Finished, dumps: Path) -> None:
    other = sampled.run(
        "checked",
        *SETTINGS,
        "rollout_skip.mode=cache",
        "rollout_skip.prompts=check",
        f"rollout_skip.dump_dir={dumps}",
        env={"SAMPLER_ORDER": "backward"},
    )
    assert other.hits() == []
    assert other.rollout_data() != recorded.rollout_data()
    misses = [text for text in other.messages if "a miss: step 1" in text]
    assert len(misses) == 1
    assert "raw_prompt: recorded [{" in misses[0]
    assert "2 not dumped: another rollout has their key (mode refresh replaces it)" in other.summary
