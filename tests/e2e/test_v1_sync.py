"""verl's default trainer with recorded rollouts, in real trainings started by verl's own entry point."""

from __future__ import annotations

import json
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest

from recipes.cpu.environment import cpu_environment
from tests.e2e.training import ROOT, Finished, assert_same_results, assert_same_weights, variant_in
from tests.e2e.v1 import OWN_BUFFER, V1Trainings, skip
from verl_rollout_skip import RolloutKey, RolloutStore

STEPS = 3
ROWS = 8 * 4
GRPO = (f"trainer.total_training_steps={STEPS}", f"trainer.save_freq={STEPS}")
WATCHED = (*GRPO, OWN_BUFFER, "ray_kwargs.ray_init.include_dashboard=True")
OTHER_REWARD = """
def compute_score(data_source, solution_str, ground_truth, extra_info=None, **_):
    return {"score": float(len(solution_str)) / 8, "acc": 0.0, "letters": len(solution_str)}
"""


@pytest.fixture(scope="module")
def trainings(tmp_path_factory: pytest.TempPathFactory, assets: Path) -> V1Trainings:
    return V1Trainings(tmp_path_factory.mktemp("trainings"), assets)


@pytest.fixture(scope="module")
def dumps(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("dumps")


class Watched:
    """A training whose trainer writes down what it sees."""

    def __init__(self, trainings: V1Trainings, name: str, *overrides: str) -> None:
        file = trainings.folder / f"{name}.json"
        started = time.time()
        self.training = trainings.run(name, *WATCHED, *overrides, env={"WATCHED": str(file)})
        seen: dict[str, Any] = json.loads(file.read_text())
        self.seconds_to_start = seen["ready_at"] - started
        self.actors = {name.split(".")[-1] for name in seen["actors"]}

    @property
    def seconds_to_sample(self) -> float:
        """In the steps after the first one, in which everything is slow."""
        timings = self.training.timing("gen")
        return sum(timings[step] for step in range(2, STEPS + 1))


@pytest.fixture(scope="module")
def recording(trainings: V1Trainings, dumps: Path) -> Watched:
    return Watched(trainings, "record", *skip("record", dumps, "watched_sync"))


@pytest.fixture(scope="module")
def recorded(recording: Watched) -> Finished:
    return recording.training


@pytest.fixture(scope="module")
def unskipped(trainings: V1Trainings) -> Finished:
    return trainings.run("off", *GRPO)


def test_the_same_training_again_generates_nothing_and_is_the_same_to_the_last_bit(
    trainings: V1Trainings, recorded: Finished, dumps: Path
) -> None:
    assert RolloutStore(variant_in(dumps)).keys() == [RolloutKey(step) for step in range(1, STEPS + 1)]
    again = Watched(trainings, "cache", *skip("cache", dumps, "watched_sync")).training
    assert again.trace("generate") == []
    assert again.trace("sync") == [], "weights were sent to an engine that nobody asked"
    assert again.hits() == [1, 2, 3]
    assert_same_results(recorded, again)
    assert_same_weights(recorded, again, STEPS)
    assert f"{STEPS} loaded" in again.summary
    assert f"0 weight syncs, {STEPS + 1} spared" in again.summary


def test_a_replay_starts_no_engine_and_repeats_the_training(
    trainings: V1Trainings, recording: Watched, dumps: Path
) -> None:
    replay = Watched(trainings, "replay", *skip("replay", dumps, "watched_sync"))
    assert_same_results(recording.training, replay.training)
    assert_same_weights(recording.training, replay.training, STEPS)
    engine = {"CPUServer", "AgentLoopWorkerTQ"}
    assert engine <= recording.actors, "the names of what is not to be there"
    assert not engine & replay.actors
    assert replay.training.trace("sync") == []
    sampling = replay.seconds_to_sample / recording.seconds_to_sample
    starting = replay.seconds_to_start / recording.seconds_to_start
    print(f"replay / recording: {starting:.2f} of the time to start, {sampling:.2f} of the time to sample")


def test_validation_is_generated_with_its_own_weights_while_the_steps_are_loaded(
    trainings: V1Trainings, recorded: Finished, dumps: Path
) -> None:
    validated = trainings.run(
        "validated",
        "trainer.total_training_steps=2",
        OWN_BUFFER,
        *skip("cache", dumps, "watched_sync"),
        "trainer.val_before_train=True",
        "trainer.test_freq=2",
    )
    assert validated.hits() == [1, 2]
    assert validated.trace("sync") == [0, 2]
    assert set(validated.trace("generate")) == {0, 2}
    for step in (1, 2):
        results = validated.results()[step]
        trained = {name: value for name, value in results.items() if not name.startswith("val-")}
        assert trained == recorded.results()[step]
        assert any(name.startswith("val-") for name in results) is (step == 2)


def test_a_killed_training_goes_on_from_its_dumps_and_ends_like_one_that_was_not_killed(
    trainings: V1Trainings, unskipped: Finished, tmp_path: Path
) -> None:
    settings = (*GRPO, *skip("cache", tmp_path))
    trainings.run_until("killed", lambda _: any(tmp_path.glob("*/*/step_000001/*.parquet")), *settings)
    left = [key.step for key in RolloutStore(variant_in(tmp_path))]
    assert 1 <= len(left) < STEPS
    again = trainings.run("killed-again", *settings)
    assert again.hits() == left
    assert again.trace("generate") == [version for version in range(len(left), STEPS) for _ in range(ROWS)]
    assert_same_results(unskipped, again)
    assert_same_weights(unskipped, again, STEPS)


def test_recorded_responses_are_scored_anew_as_generated_ones_would_be(
    trainings: V1Trainings, unskipped: Finished, tmp_path: Path
) -> None:
    dumps, reward = tmp_path / "dumps", tmp_path / "reward.py"
    reward.write_text(OTHER_REWARD)
    one_step = ("trainer.total_training_steps=1", "trainer.save_freq=1")
    other = (*one_step, f"reward.custom_reward_function.path={reward}")
    trainings.run("record-reward", *one_step, *skip("record", dumps))
    generated = trainings.run("other-reward", *other)
    scored = trainings.run("recompute", *other, *skip("cache", dumps), "+rollout_skip.reward=recompute")
    assert scored.hits() == [1]
    assert scored.trace("generate") == []
    assert_same_results(generated, scored, steps=[1])
    assert_same_weights(generated, scored, 1)
    assert generated.results()[1]["critic/score/mean"] != unskipped.results()[1]["critic/score/mean"]


def test_forgetting_the_trainer_mode_is_an_error_and_not_a_training_that_skips_nothing(
    trainings: V1Trainings, tmp_path: Path
) -> None:
    failed = trainings.run("forgotten", *GRPO, *skip("cache", tmp_path, trainer="sync"), fails=True)
    assert "rollout_skip.mode is 'cache', and PPOTrainerSync knows nothing of recorded rollouts" in failed.log
    assert "Set trainer.v1.trainer_mode=skip_sync." in failed.log
    assert failed.metrics() == {}
    assert not any(tmp_path.iterdir())


def test_the_fully_asynchronous_trainer_refuses_before_ray_starts(assets: Path, tmp_path: Path) -> None:
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
    assert "fully_async_policy knows nothing of recorded rollouts" in done.stderr
    assert "Started a local Ray instance" not in done.stderr
