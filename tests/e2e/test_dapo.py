"""``SkipDAPOTrainer`` in real trainings whose steps need several generation batches."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest

from tests.e2e import parity_reward
from tests.e2e.training import (
    DAPO,
    Finished,
    Trainings,
    assert_proved,
    assert_same_results,
    assert_same_weights,
    skip,
    variant_in,
)
from verl_rollout_skip import RolloutKey, RolloutStore

STEPS = 3
SETTINGS = (
    f"trainer.total_training_steps={STEPS}",
    "trainer.save_freq=1",
    "data.train_batch_size=4",
    "data.gen_batch_size=4",
    "actor_rollout_ref.actor.ppo_mini_batch_size=4",
)
RECOMPUTE = "rollout_skip.reward=recompute"


@pytest.fixture(scope="module")
def recorded(trainings: Trainings, dumps: Path) -> Finished:
    return trainings.run(DAPO, "record", *SETTINGS, *skip("record", dumps))


def gen_batches(training: Finished) -> dict[int, int]:
    return {step: int(values["train/num_gen_batches"]) for step, values in training.metrics().items()}


def rows(training: Finished) -> list[dict]:
    return [json.loads(line) for lines in training.rollout_data().values() for line in lines]


def test_a_replay_of_every_generation_batch_is_the_recorded_training_to_the_last_bit(
    trainings: Trainings, recorded: Finished, dumps: Path
) -> None:
    counts = gen_batches(recorded)
    assert max(counts.values()) >= 2, "no step took several generation batches"
    expected = [RolloutKey(step, number) for step, count in counts.items() for number in range(count)]
    assert RolloutStore(variant_in(dumps)).keys() == expected
    replayed = trainings.run(DAPO, "replay", *SETTINGS, *skip("replay", dumps))
    assert "CPUServer" in recorded.actors
    assert "CPUServer" not in replayed.actors
    assert replayed.timing("rollout_skip/hit") == {1: 1.0, 2: 1.0, 3: 1.0}
    assert_proved(replayed, STEPS)
    assert_same_results(recorded, replayed)
    assert_same_weights(recorded, replayed, STEPS)


@pytest.mark.slow
def test_a_training_killed_during_a_step_continues_and_ends_as_if_it_had_not_been_killed(
    trainings: Trainings, recorded: Finished, tmp_path: Path
) -> None:
    several = next(step for step, count in gen_batches(recorded).items() if count >= 2)
    settings = (*SETTINGS, *skip("cache", tmp_path))
    first_batch = f"*/*/step_{several:06}/gen_000.json"
    trainings.run_until(DAPO, "killed", lambda _: any(tmp_path.glob(first_batch)), *settings)
    store = RolloutStore(variant_in(tmp_path))
    for key in store.keys():  # noqa: SIM118
        if (key.step, key.gen_batch) > (several, 0):  # it was killed a moment too late
            store.delete(key)
    again = trainings.run(DAPO, "killed-again", *settings)
    assert_same_results(recorded, again)
    assert_same_weights(recorded, again, STEPS)
    assert 0 < again.timing("rollout_skip/hit")[several] < 1


@pytest.mark.slow
def test_a_training_resumed_from_a_checkpoint_finds_the_generation_batches_of_its_steps(
    trainings: Trainings, recorded: Finished, dumps: Path
) -> None:
    resumed = trainings.run(
        DAPO,
        "resumed",
        *SETTINGS,
        *skip("cache", dumps),
        "trainer.resume_mode=resume_path",
        f"trainer.resume_from_path={recorded.folder}/checkpoints/global_step_1",
    )
    assert resumed.trace("generate") == []
    assert sorted(resumed.metrics()) == [2, 3]
    assert_same_results(recorded, resumed, steps=[2, 3])
    assert_same_weights(recorded, resumed, STEPS)


@pytest.mark.slow
def test_the_same_reward_function_computes_the_recorded_rewards_again(
    trainings: Trainings, recorded: Finished, dumps: Path
) -> None:
    again = trainings.run(DAPO, "same-reward", *SETTINGS, *skip("replay", dumps), RECOMPUTE)
    assert_same_results(recorded, again)
    assert_same_weights(recorded, again, STEPS)


@pytest.mark.slow
def test_another_reward_function_scores_the_recorded_responses_and_filters_by_them(
    trainings: Trainings, recorded: Finished, dumps: Path, tmp_path: Path
) -> None:
    own = shutil.copytree(dumps, tmp_path / "dumps")
    parity = f"reward.custom_reward_function.path={parity_reward.__file__}"
    other = trainings.run(DAPO, "other-reward", *SETTINGS, *skip("cache", own), RECOMPUTE, parity)
    assert any("are scored again with a different reward" in text for text in other.messages)
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
