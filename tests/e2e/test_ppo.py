"""``SkipPPOTrainer`` in real GRPO trainings: recorded once, then trained again from the dumps."""

from __future__ import annotations

import importlib.util
import re
import shutil
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path

import pytest

from recipes.cpu.assets import make_assets
from recipes.cpu.environment import cpu_environment
from tests.disks import Disk, mount
from tests.e2e.training import (
    PPO,
    ROOT,
    TWO_AGENT_LOOPS,
    VERL_V0,
    Finished,
    Trainings,
    assert_proved,
    assert_same_results,
    assert_same_weights,
    resume,
    skip,
    variant_in,
)
from tests.verl_configs import compose_ppo
from verl_rollout_skip import RolloutKey, RolloutSkip, RolloutStore

STEPS = 4
ROWS = 8 * 4
GRPO = (f"trainer.total_training_steps={STEPS}", "trainer.save_freq=2")
ENGINE = {"CPUServer", "AgentLoopWorker"}


@pytest.fixture(scope="module")
def recorded(trainings: Trainings, dumps: Path) -> Finished:
    return trainings.run(PPO, "record", *GRPO, *skip("record", dumps))


@pytest.fixture
def own_dumps(recorded: Finished, dumps: Path, tmp_path: Path) -> Path:
    """A copy of the dumps for a test that changes them."""
    return shutil.copytree(dumps, tmp_path / "dumps")


def test_the_same_training_again_generates_nothing_and_is_the_same_to_the_last_bit(
    trainings: Trainings, recorded: Finished, dumps: Path
) -> None:
    assert RolloutStore(variant_in(dumps)).keys() == [RolloutKey(step) for step in range(1, STEPS + 1)]
    assert f"{STEPS} dumped" in recorded.summary
    old_keys = ("skip_rollout=True", f"skip_dump_dir={dumps}")
    again = trainings.run(PPO, "cache", *GRPO, *(f"actor_rollout_ref.rollout.{key}" for key in old_keys))
    assert again.trace("generate") == []
    assert again.trace("sync") == [], "weights were sent to an idle engine"
    assert again.hits() == [1, 2, 3, 4]
    assert_same_results(recorded, again)
    assert_same_weights(recorded, again, STEPS)
    assert_proved(again, STEPS)
    assert f"{STEPS} loaded" in again.summary
    assert f"0 weight syncs, {STEPS + 1} skipped" in again.summary


def test_a_replay_starts_no_engine_and_is_the_recorded_training_to_the_last_bit(
    trainings: Trainings, recorded: Finished, dumps: Path
) -> None:
    replayed = trainings.run(PPO, "replay", *GRPO, *skip("replay", dumps))
    assert recorded.actors >= ENGINE, "the engine's actors have other names now"
    assert "WorkerDict" in replayed.actors
    assert not ENGINE & replayed.actors
    assert replayed.hits() == [1, 2, 3, 4]
    assert_proved(replayed, STEPS)
    assert_same_results(recorded, replayed)
    assert_same_weights(recorded, replayed, STEPS)


def test_the_printed_command_continues_an_unfinished_recording_that_was_moved(
    trainings: Trainings, recorded: Finished, dumps: Path, own_dumps: Path, tmp_path: Path
) -> None:
    """The dumps, the model and the data were moved, and the last two steps were never recorded."""
    store = RolloutStore(variant_in(own_dumps))
    for step in (3, 4):
        store.delete(RolloutKey(step))
    (printed,) = [re.search(r"rollout-skip resume (\S+)", text) for text in recorded.messages if "resume" in text]
    assert printed is not None
    assert printed[1] == f"{variant_in(dumps)}/manifest.json"

    folder = tmp_path / "resumed"
    manifest = printed[1].replace(str(dumps), str(own_dumps))
    resumed = resume([manifest, *moved_inputs(trainings, tmp_path), *outputs_in(folder)], folder, trainings.assets)
    assert resumed.exit_code == 0, resumed.log[-5000:]
    assert resumed.hits() == [1, 2]
    assert {version + 1 for version in resumed.trace("generate")} == {3, 4}
    assert_same_results(recorded, resumed)
    assert_same_weights(recorded, resumed, STEPS)
    assert not any("off-policy" in text for text in resumed.messages)
    assert len(store.keys()) == STEPS


def moved_inputs(trainings: Trainings, tmp_path: Path) -> list[str]:
    """Settings that name a copy of the model and the data."""
    assets = shutil.copytree(trainings.assets, tmp_path / "assets")
    paths = {
        "actor_rollout_ref.model.path": "model",
        "data.train_files": "train.parquet",
        "data.val_files": "val.parquet",
    }
    return [f"{key}={assets}/{name}" for key, name in paths.items()]


def outputs_in(folder: Path) -> list[str]:
    return [f"trainer.default_local_dir={folder}/checkpoints", f"trainer.rollout_data_dir={folder}/rollout_data"]


@pytest.mark.slow
def test_a_manifest_continues_from_a_checkpoint_and_refuses_another_model(
    trainings: Trainings, recorded: Finished, own_dumps: Path, tmp_path: Path
) -> None:
    manifest = f"{variant_in(own_dumps)}/manifest.json"
    moved = moved_inputs(trainings, tmp_path)
    plan = resume([manifest, *moved, "--dry-run"], tmp_path / "plan", trainings.assets)
    assert plan.exit_code == 0, plan.log
    assert "recorded steps 1-4" in plan.log
    assert "critic.model.path is now" in plan.log

    folder = tmp_path / "from-checkpoint"
    start = (
        "trainer.resume_mode=resume_path",
        f"trainer.resume_from_path={recorded.folder}/checkpoints/global_step_2",
    )
    resumed = resume([manifest, *moved, *start, *outputs_in(folder)], folder, trainings.assets)
    assert resumed.exit_code == 0, resumed.log[-5000:]
    assert resumed.hits() == [3, 4]
    assert resumed.trace("generate") == []
    assert_same_results(recorded, resumed, steps=[3, 4])
    assert_same_weights(recorded, resumed, STEPS)

    other = make_assets(tmp_path / "other-model", seed=5).folder
    refused = resume([manifest, f"actor_rollout_ref.model.path={other}/model"], tmp_path / "refused", other)
    assert refused.exit_code == 2
    assert "recorded with different settings" in refused.log
    assert "actor_rollout_ref.model.path" in refused.log


@pytest.mark.slow
def test_recording_changes_nothing(trainings: Trainings, recorded: Finished) -> None:
    """verl's own trainer computes the same results, even if responses finish in a different order."""
    plain = trainings.run(VERL_V0, "verl", *GRPO, TWO_AGENT_LOOPS)
    assert recorded.hits() == []
    assert plain.trace("generate") == recorded.trace("generate")
    assert plain.rollout_data() == recorded.rollout_data()
    assert [len(rows) for rows in plain.rollout_data().values()] == [ROWS] * STEPS
    assert_same_results(plain, recorded)
    assert_same_weights(plain, recorded, STEPS)


@pytest.mark.slow
def test_two_workers_and_another_learning_rate_train_on_the_same_rows_and_the_log_says_what_differs(
    trainings: Trainings, recorded: Finished, dumps: Path
) -> None:
    other = trainings.run(
        PPO,
        "two-workers",
        *GRPO,
        *skip("cache", dumps),
        "trainer.n_gpus_per_node=2",
        "actor_rollout_ref.actor.optim.lr=5e-4",
        "trainer.logger=[file]",
    )
    assert other.hits() == [1, 2, 3, 4]
    assert other.trace("generate") == []
    assert other.rollout_data() == recorded.rollout_data()
    (layout,) = [text for text in other.messages if "a different layout" in text]
    assert "world_size: 1 → 2" in layout
    (training,) = [text for text in other.messages if "off-policy from the second step on" in text]
    assert "actor_rollout_ref.actor.optim.lr: 0.001 → 0.0005" in training
    assert other.timing("rollout_skip/off_policy") == {1: 0.0, 2: 1.0, 3: 1.0, 4: 1.0}


@pytest.mark.slow
def test_recorded_prompts_replace_those_of_a_custom_sampler(
    trainings: Trainings, recorded: Finished, dumps: Path
) -> None:
    other_order = replace(PPO, module="tests.e2e.main_with_sampler")
    other = trainings.run(other_order, "sampler", *GRPO, *skip("cache", dumps), "rollout_skip.prompts=recorded")
    assert other.hits() == [1, 2, 3, 4]
    assert other.rollout_data() == recorded.rollout_data(), "prompts, answers, responses and scores"
    assert_same_results(recorded, other)


@pytest.mark.slow
def test_a_broken_entry_and_a_full_disk_are_reported_and_the_training_continues(
    trainings: Trainings, recorded: Finished, dumps: Path, tmp_path: Path
) -> None:
    with mounted("-t", "tmpfs", "-o", "size=4m", "tmpfs", tmp_path):
        shutil.copytree(dumps, tmp_path / "dumps")
        variant = variant_in(tmp_path / "dumps")
        (broken,) = variant.glob("step_000002/gen_000.*.parquet")
        content = bytearray(broken.read_bytes())
        content[len(content) // 2] ^= 1
        broken.write_bytes(content)
        RolloutStore(variant).delete(RolloutKey(4))
        Disk(tmp_path, 4 << 20, mounted=True).leave_free(2 * len(content))  # for one dump and its record, not for two
        no_ledger = "rollout_skip.audit=off"  # it would take the space of the dump
        faulty = trainings.run(PPO, "faulty", *GRPO, *skip("cache", tmp_path / "dumps"), no_ledger)
        set_aside = [file for file in variant.glob("step_000002/*") if file.name.endswith(".corrupt")]
    assert faulty.hits() == [1, 3]
    assert faulty.trace("sync") == [1, 3], "missing steps are generated with the weights of that step"
    assert faulty.trace("generate") == [1] * ROWS + [3] * ROWS
    assert faulty.timing("rollout_skip/off_policy") == {1: 0.0, 2: None, 3: 0.0, 4: None}
    assert_same_results(recorded, faulty)
    assert_same_weights(recorded, faulty, STEPS)
    assert any("step 2, generation batch 0 is generated again" in text for text in faulty.messages)
    assert set_aside
    (failed,) = [text for text in faulty.messages if "ERROR: dump failed: step" in text]
    assert "step 4, generation batch 0 was not written" in failed
    assert "No space left on device" in failed
    assert "1 dumps failed" in faulty.summary
    assert "step 2, generation batch 0 was unreadable" in faulty.summary


@contextmanager
def mounted(*arguments: object) -> Iterator[None]:
    *_, folder = arguments
    if not mount(*map(str, arguments)):
        pytest.skip("file systems cannot be mounted here: only root can, and not in every container")
    try:
        yield
    finally:
        subprocess.run(["umount", "-l", str(folder)], check=True)


@pytest.mark.slow
def test_a_recording_made_with_vllm_replays_where_vllm_is_not_installed(
    trainings: Trainings, recorded: Finished, dumps: Path, tmp_path: Path
) -> None:
    """The CPU engine generated the rollouts, but the recording says that vLLM did."""
    assert importlib.util.find_spec("vllm") is None
    as_vllm = ("actor_rollout_ref.rollout.name=vllm", *GRPO)
    variables = cpu_environment(trainings.assets)
    with pytest.MonkeyPatch.context() as patch:
        for name in ("CPU_ASSETS", "CPU_RECIPE"):
            patch.setenv(name, variables[name])
        settings = (*PPO.settings, *as_vllm, *skip("record", tmp_path))
        config = compose_ppo(*settings, folder=ROOT / "recipes" / "ppo" / "config", name=PPO.config)
        with RolloutSkip.open(config) as record:
            store = RolloutStore(variant_in(dumps))
            for key in store:
                record.step(key, store.inputs(key), lambda _, key=key: store.get(key))
    replayed = trainings.run(PPO, "vllm", *as_vllm, *skip("replay", tmp_path))
    assert replayed.hits() == [1, 2, 3, 4]
    assert_same_results(recorded, replayed)
