"""``SkipDAPOTrainer`` in real trainings whose steps take several generation batches."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest

from tests.e2e.training import Finished, Trainings, assert_same_results, assert_same_weights, variant_in
from verl_rollout_skip import RolloutKey, RolloutStore

STEPS = 3
SETTINGS = (
    f"trainer.total_training_steps={STEPS}",
    "trainer.save_freq=1",
    "data.train_batch_size=4",
    "data.gen_batch_size=4",
    "actor_rollout_ref.actor.ppo_mini_batch_size=4",
)


@pytest.fixture(scope="module")
def dapo(tmp_path_factory: pytest.TempPathFactory, assets: Path) -> Trainings:
    return Trainings(tmp_path_factory.mktemp("dapo"), assets, module="recipes.dapo.main_dapo", config="dapo_cpu")


@pytest.fixture(scope="module")
def dumps(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("dumps")


@pytest.fixture(scope="module")
def recorded(dapo: Trainings, dumps: Path) -> Finished:
    return dapo.run("record", *SETTINGS, "rollout_skip.mode=record", f"rollout_skip.dump_dir={dumps}")


def gen_batches(training: Finished) -> dict[int, int]:
    return {step: int(values["train/num_gen_batches"]) for step, values in training.metrics().items()}


def test_every_generation_batch_of_a_step_is_recorded_under_its_own_key(recorded: Finished, dumps: Path) -> None:
    counts = gen_batches(recorded)
    assert max(counts.values()) >= 2, "the test is about steps that take several"
    expected = [RolloutKey(step, number) for step, count in counts.items() for number in range(count)]
    assert RolloutStore(variant_in(dumps)).keys() == expected


@pytest.mark.parametrize("mode", ["cache", "replay"])
def test_from_its_dumps_the_training_repeats_to_the_last_bit(
    dapo: Trainings, recorded: Finished, dumps: Path, mode: str
) -> None:
    again = dapo.run(mode, *SETTINGS, f"rollout_skip.mode={mode}", f"rollout_skip.dump_dir={dumps}")
    assert again.trace("generate") == []
    assert_same_results(recorded, again)
    assert_same_weights(recorded, again, STEPS)
    assert again.timing("rollout_skip/hit") == {1: 1.0, 2: 1.0, 3: 1.0}


def test_killed_within_a_step_it_goes_on_and_ends_as_if_it_had_not_been(
    dapo: Trainings, recorded: Finished, dumps: Path, tmp_path: Path
) -> None:
    several = next(step for step, count in gen_batches(recorded).items() if count >= 2)
    settings = (*SETTINGS, "rollout_skip.mode=cache", f"rollout_skip.dump_dir={tmp_path}")
    dapo.run_until("killed", lambda _: any(tmp_path.glob(f"*/*/step_{several:06}/gen_000.parquet")), *settings)
    left = RolloutStore(variant_in(tmp_path)).keys()
    store = RolloutStore(variant_in(tmp_path))
    if RolloutKey(several, 1) in store:  # it was killed a moment too late
        for key in left:
            if (key.step, key.gen_batch) > (several, 0):
                store.delete(key)
    again = dapo.run("killed-again", *settings)
    assert_same_results(recorded, again)
    assert_same_weights(recorded, again, STEPS)
    assert 0 < again.timing("rollout_skip/hit")[several] < 1


def test_resumed_from_a_checkpoint_it_finds_the_generation_batches_of_its_steps(
    dapo: Trainings, recorded: Finished, dumps: Path
) -> None:
    resumed = dapo.run(
        "resumed",
        *SETTINGS,
        "rollout_skip.mode=cache",
        f"rollout_skip.dump_dir={dumps}",
        "trainer.resume_mode=resume_path",
        f"trainer.resume_from_path={recorded.folder}/checkpoints/global_step_1",
    )
    assert resumed.trace("generate") == []
    assert sorted(resumed.metrics()) == [2, 3]
    assert_same_results(recorded, resumed, steps=[2, 3])
    assert_same_weights(recorded, resumed, STEPS)


def test_too_many_generation_batches_end_a_replay_with_the_error_that_dapo_users_know(
    dapo: Trainings, recorded: Finished, dumps: Path, tmp_path: Path
) -> None:
    failed = dapo.run(
        "limited",
        *SETTINGS,
        "algorithm.filter_groups.max_num_gen_batches=1",
        "rollout_skip.mode=replay",
        "rollout_skip.on_mismatch=reuse",
        f"rollout_skip.dump_dir={shutil.copytree(dumps, tmp_path / 'dumps')}",
        fails=True,
    )
    assert "num_gen_batches=1 >= max_num_gen_batches=1. Generated too many." in failed.log
    assert failed.trace("generate") == []
