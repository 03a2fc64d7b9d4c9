"""The CPU default of recipes/cpu with verl's own entry point: real trainings that repeat to the last bit."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from tests.e2e.training import Finished, Trainings, assert_same_results, assert_same_weights

TWO_LOOPS = "actor_rollout_ref.rollout.agent.num_workers=2"


@pytest.fixture(scope="module")
def trainings(tmp_path_factory: pytest.TempPathFactory, assets: Path) -> Trainings:
    """Nothing of this project's own trainers takes part."""
    return Trainings(
        tmp_path_factory.mktemp("verl"),
        assets,
        module="verl.trainer.main_ppo",
        config="cpu_trainer",
        options=("--config-dir=recipes/cpu/config",),
    )


def rows(run: Finished, step: int) -> list[tuple[str, str, float]]:
    lines = (run.folder / "rollout_data" / f"{step}.jsonl").read_text().splitlines()
    return [(row["input"], row["output"], row["score"]) for row in map(json.loads, lines)]


def test_a_training_repeats_to_the_last_bit_whatever_the_number_of_agent_loop_workers(trainings: Trainings) -> None:
    """And so do its rollouts, its validation and the weights that it ends with; two servers sample what one samples."""
    options = ["trainer.val_before_train=True", "trainer.test_freq=2", "trainer.save_freq=3"]
    first = trainings.run("first", *options)
    again = trainings.run("again", *options, TWO_LOOPS)

    assert_same_results(first, again, [1, 2, 3])
    assert_same_weights(first, again, 3)
    assert first.results()[0] == again.results()[0]
    assert "val-core/addition/acc/mean@1" in first.results()[0]
    assert first.rollout_data() == again.rollout_data()
    assert len(first.rollout_data()) == 3
    assert len(first.rollout_data()["1"]) == 32

    # Validations of 11 rows before the training and after steps 2 and 3, and 32 rows to train on in each step.
    assert first.trace("sync") == [0, 1, 2, 3]
    assert [first.trace("generate").count(version) for version in range(4)] == [11 + 32, 32, 11 + 32, 11]

    two_workers = trainings.run("two_workers", "trainer.n_gpus_per_node=2", "trainer.total_training_steps=1")
    assert len(list((two_workers.folder / "trace").iterdir())) == 2
    assert two_workers.rollout_data()["1"] == first.rollout_data()["1"]


def test_dynamic_sampling_of_verls_v1_trainer_repeats_to_the_last_bit(trainings: Trainings) -> None:
    """Although verl draws more prompts for those that it drops, and takes trajectories as they finish."""
    options = ["trainer.use_v1=True", "algorithm.filter_groups.enable=True", "algorithm.filter_groups.metric=acc"]
    first = trainings.run("filtered", *options, "trainer.total_training_steps=2")
    again = trainings.run("filtered_again", *options, "trainer.total_training_steps=2", TWO_LOOPS)

    assert_same_results(first, again, [1, 2])
    # verl writes them in the order of their uids, which are random.
    for step in (1, 2):
        assert sorted(rows(first, step)) == sorted(rows(again, step))
        assert len(rows(first, step)) == 32
    # Of the 8 prompts of the first step some were dropped, so more than 8 times 4 responses were generated.
    assert first.trace("generate").count(0) > 32
    assert first.results()[1]["training/filter_groups/evicted_samples"] > 0
