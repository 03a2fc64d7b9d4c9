"""Replay: no inference engine is started, and the training is the recorded one to the last bit."""

from __future__ import annotations

import importlib.util
import json
from pathlib import Path

import pytest

from recipes.cpu.environment import cpu_environment
from tests.e2e.training import Finished, Trainings, assert_same_results, assert_same_weights, variant_in
from tests.verl_configs import compose_ppo
from verl_rollout_skip import RolloutSkip, RolloutStore

STEPS = 3
RECIPE = Path(__file__).resolve().parents[2] / "recipes" / "ppo" / "config"
SETTINGS = (f"trainer.total_training_steps={STEPS}", f"trainer.save_freq={STEPS}", "trainer.val_before_train=True")
WITH_STATE = "ray_kwargs.ray_init.include_dashboard=True"  # where Ray's state can be asked for


@pytest.fixture(scope="module")
def listing(tmp_path_factory: pytest.TempPathFactory, assets: Path) -> Trainings:
    return Trainings(tmp_path_factory.mktemp("listing"), assets, module="tests.e2e.main_listing_actors")


@pytest.fixture(scope="module")
def dumps(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("dumps")


@pytest.fixture(scope="module")
def recorded(listing: Trainings, dumps: Path) -> Finished:
    return listing.run(
        "record",
        *SETTINGS,
        "rollout_skip.mode=record",
        f"rollout_skip.dump_dir={dumps}",
        WITH_STATE,
        env={"ACTORS_FILE": str(listing.folder / "actors-record.json")},
    )


def actors(file: Path) -> set[str]:
    return {name.split(".")[-1] for name in json.loads(file.read_text())}


def test_a_replay_starts_no_server_and_no_agent_loops_and_repeats_the_training(
    listing: Trainings, recorded: Finished, dumps: Path
) -> None:
    replayed = listing.run(
        "replay",
        *SETTINGS,
        "rollout_skip.mode=replay",
        f"rollout_skip.dump_dir={dumps}",
        WITH_STATE,
        env={"ACTORS_FILE": str(listing.folder / "actors-replay.json")},
    )
    assert replayed.hits() == [1, 2, 3]
    assert_same_results(recorded, replayed, steps=[1, 2, 3])
    assert_same_weights(recorded, replayed, STEPS)
    engine = {"CPUServer", "AgentLoopWorker"}
    assert engine <= actors(listing.folder / "actors-record.json"), "the names of what is not to be there"
    assert not engine & actors(listing.folder / "actors-replay.json")
    assert replayed.trace("sync") == []
    skipped = [text for text in replayed.messages if "validation is skipped" in text]
    assert len(skipped) == 1
    assert 0 in recorded.metrics()
    assert 0 not in replayed.metrics()


def test_a_replay_that_lacks_a_step_says_so_before_it_trains(
    listing: Trainings, recorded: Finished, dumps: Path, tmp_path: Path
) -> None:
    failed = listing.run(
        "too-long",
        f"trainer.total_training_steps={STEPS + 2}",
        "rollout_skip.mode=replay",
        f"rollout_skip.source={variant_in(dumps)}/manifest.json",
        fails=True,
    )
    assert failed.metrics() == {}
    assert "WorkerDict" not in failed.log, "a worker was started"
    assert f"The training would replay steps 1 to {STEPS + 2}, and {STEPS + 1}-{STEPS + 2} are not" in failed.log
    assert "recorded are 1-3" in failed.log
    assert f"trainer.total_training_steps={STEPS}" in failed.log


def test_a_recording_made_with_vllm_replays_where_vllm_is_not_installed(
    trainings: Trainings, recorded: Finished, dumps: Path, tmp_path: Path
) -> None:
    """The rollouts are those of the CPU engine: what is recorded with them says that vLLM made them."""
    assert importlib.util.find_spec("vllm") is None
    as_vllm = (
        "actor_rollout_ref.rollout.name=vllm",
        f"rollout_skip.dump_dir={tmp_path}",
        f"trainer.total_training_steps={STEPS}",
        "trainer.use_v1=False",
    )
    variables = cpu_environment(trainings.assets)
    with pytest.MonkeyPatch.context() as patch:
        for name in ("CPU_ASSETS", "CPU_RECIPE"):
            patch.setenv(name, variables[name])
        config = compose_ppo("rollout_skip.mode=record", *as_vllm, folder=RECIPE, name="ppo_cpu")
        with RolloutSkip.open(config) as record:
            store = RolloutStore(variant_in(dumps))
            for key in store:
                record.step(key, store.inputs(key), lambda _, key=key: store.get(key))
    replayed = trainings.run("vllm", *as_vllm, "rollout_skip.mode=replay")
    assert replayed.hits() == [1, 2, 3]
    assert_same_results(recorded, replayed, steps=[1, 2, 3])
