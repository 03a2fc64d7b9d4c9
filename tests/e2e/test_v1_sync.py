"""verl's default trainer with recorded rollouts, in real trainings started by verl's own entry point."""

from __future__ import annotations

import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from recipes.cpu.environment import cpu_environment
from tests.e2e.training import (
    ROOT,
    VERL_V1,
    Finished,
    Trainings,
    assert_proved,
    assert_same_results,
    assert_same_weights,
    skip_v1,
    variant_in,
)
from verl_rollout_skip import RolloutKey, RolloutStore

STEPS = 3
ROWS = 8 * 4
GRPO = (f"trainer.total_training_steps={STEPS}", f"trainer.save_freq={STEPS}")
ENGINE = {"CPUServer", "AgentLoopWorkerTQ"}
OTHER_REWARD = """
def compute_score(data_source, solution_str, ground_truth, extra_info=None, **_):
    return {"score": float(len(solution_str)) / 8, "acc": 0.0, "letters": len(solution_str)}
"""


@pytest.fixture(scope="module")
def recorded(trainings: Trainings, dumps: Path) -> Finished:
    return trainings.run(VERL_V1, "record", *GRPO, *skip_v1("record", dumps))


def test_a_replay_starts_no_engine_and_is_the_recorded_training_to_the_last_bit(
    trainings: Trainings, recorded: Finished, dumps: Path
) -> None:
    assert RolloutStore(variant_in(dumps)).keys() == [RolloutKey(step) for step in range(1, STEPS + 1)]
    replayed = trainings.run(VERL_V1, "replay", *GRPO, *skip_v1("replay", dumps))
    assert recorded.actors >= ENGINE, "the engine's actors have other names now"
    assert not ENGINE & replayed.actors
    assert replayed.hits() == [1, 2, 3]
    assert_proved(replayed, STEPS)
    assert_same_results(recorded, replayed)
    assert_same_weights(recorded, replayed, STEPS)


@pytest.mark.slow
def test_tasks_record_and_replay_it_in_many_parts_to_the_last_bit(
    trainings: Trainings, recorded: Finished, tmp_path: Path
) -> None:
    tasks = ("+rollout_skip.tasks=on", "+rollout_skip.part_bytes=4000")
    by_tasks = trainings.run(VERL_V1, "record-by-tasks", *GRPO, *skip_v1("record", tmp_path), *tasks)
    store = RolloutStore(variant_in(tmp_path))
    assert all(len(store.verify(RolloutKey(step)).parts) > 3 for step in range(1, STEPS + 1))
    replayed = trainings.run(VERL_V1, "replay-by-tasks", *GRPO, *skip_v1("replay", tmp_path), *tasks)
    assert replayed.hits() == [1, 2, 3]
    for training in (by_tasks, replayed):
        assert_same_results(recorded, training)
        assert_same_weights(recorded, training, STEPS)


@pytest.mark.slow
def test_validation_is_generated_with_its_own_weights_while_the_steps_are_loaded(
    trainings: Trainings, recorded: Finished, dumps: Path
) -> None:
    validated = trainings.run(
        VERL_V1, "validated", *GRPO, *skip_v1("cache", dumps), "trainer.val_before_train=True", "trainer.test_freq=2"
    )
    assert validated.hits() == [1, 2, 3]
    assert f"{STEPS} loaded" in validated.summary
    assert validated.trace("sync") == [0, 2, 3]
    assert set(validated.trace("generate")) == {0, 2, 3}
    assert_same_weights(recorded, validated, STEPS)
    for step in (1, 2, 3):
        results = validated.results()[step]
        trained = {name: value for name, value in results.items() if not name.startswith("val-")}
        assert trained == recorded.results()[step]
        assert any(name.startswith("val-") for name in results) is (step > 1)


@pytest.mark.slow
def test_a_killed_training_continues_from_its_dumps_and_ends_as_if_it_had_not_been_killed(
    trainings: Trainings, recorded: Finished, tmp_path: Path
) -> None:
    settings = (*GRPO, *skip_v1("cache", tmp_path))
    first_step = "*/*/step_000001/*.parquet"
    trainings.run_until(VERL_V1, "killed", lambda _: any(tmp_path.glob(first_step)), *settings)
    left = [key.step for key in RolloutStore(variant_in(tmp_path))]
    assert 1 <= len(left) < STEPS
    again = trainings.run(VERL_V1, "killed-again", *settings)
    assert again.hits() == left
    assert again.trace("generate") == [version for version in range(len(left), STEPS) for _ in range(ROWS)]
    assert_same_results(recorded, again)
    assert_same_weights(recorded, again, STEPS)


@pytest.mark.slow
def test_recorded_responses_are_scored_again_as_generated_ones_would_be(
    trainings: Trainings, recorded: Finished, dumps: Path, tmp_path: Path
) -> None:
    own, reward = shutil.copytree(dumps, tmp_path / "dumps"), tmp_path / "reward.py"
    reward.write_text(OTHER_REWARD)
    other = (
        "trainer.total_training_steps=1",
        "trainer.save_freq=1",
        f"reward.custom_reward_function.path={reward}",
    )
    generated = trainings.run(VERL_V1, "other-reward", *other)
    scored = trainings.run(VERL_V1, "recompute", *other, *skip_v1("cache", own), "+rollout_skip.reward=recompute")
    assert scored.hits() == [1]
    assert scored.trace("generate") == []
    assert_same_results(generated, scored, steps=[1])
    assert_same_weights(generated, scored, 1)
    assert generated.results()[1]["critic/score/mean"] != recorded.results()[1]["critic/score/mean"]


@pytest.mark.slow
def test_forgetting_the_trainer_mode_is_an_error_and_not_a_training_that_records_nothing(
    trainings: Trainings, tmp_path: Path
) -> None:
    failed = trainings.run(VERL_V1, "forgotten", *GRPO, *skip_v1("cache", tmp_path, "sync"), fails=True)
    assert "rollout_skip.mode is 'cache', but PPOTrainerSync does not support recorded rollouts" in failed.log
    assert "Set trainer.v1.trainer_mode=skip_sync." in failed.log
    assert failed.metrics() == {}
    assert not any(tmp_path.iterdir())


@pytest.mark.slow
def test_the_fully_asynchronous_trainer_is_rejected_before_ray_starts(assets: Path, tmp_path: Path) -> None:
    command = [
        sys.executable,
        "-m",
        "verl.experimental.fully_async_policy.fully_async_main",
        f"hydra.run.dir={tmp_path}/hydra",
        "+rollout_skip.mode=record",
        f"+rollout_skip.dump_dir={tmp_path}/dumps",
    ]
    environment = {**cpu_environment(assets), "PATH": "/usr/bin:/bin"}
    done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=280)
    assert done.returncode != 0
    assert "fully_async_policy does not support recorded rollouts" in done.stderr
    assert "Started a local Ray instance" not in done.stderr
