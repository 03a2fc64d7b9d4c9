"""``SkipPPOTrainer`` in real GRPO trainings: recorded, then trained again from the dumps in all the ways users do."""

from __future__ import annotations

import shutil
import subprocess
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from tests.disks import Disk, mount
from tests.e2e.training import (
    TIMEOUT,
    Finished,
    Trainings,
    assert_same_results,
    assert_same_weights,
    end,
    variant_in,
)
from verl_rollout_skip import RolloutKey, RolloutStore

STEPS = 4
ROWS = 8 * 4
GRPO = (f"trainer.total_training_steps={STEPS}", "trainer.save_freq=2")
CACHE = "rollout_skip.mode=cache"


@pytest.fixture(scope="module")
def dumps(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("dumps")


@pytest.fixture(scope="module")
def unskipped(trainings: Trainings) -> Finished:
    return trainings.run("off", *GRPO)


@pytest.fixture(scope="module")
def recorded(trainings: Trainings, dumps: Path) -> Finished:
    return trainings.run("record", *GRPO, "rollout_skip.mode=record", f"rollout_skip.dump_dir={dumps}")


@pytest.fixture
def own_dumps(recorded: Finished, dumps: Path, tmp_path: Path) -> Path:
    """A copy of the dumps for a test that changes them."""
    return shutil.copytree(dumps, tmp_path / "dumps")


def test_recording_changes_nothing(unskipped: Finished, recorded: Finished, dumps: Path) -> None:
    assert_same_results(unskipped, recorded)
    assert_same_weights(unskipped, recorded, STEPS)
    assert recorded.hits() == []
    assert RolloutStore(variant_in(dumps)).keys() == [RolloutKey(step) for step in range(1, STEPS + 1)]
    assert f"{STEPS} dumped" in recorded.summary


def test_the_same_training_again_generates_nothing_and_is_the_same_to_the_last_bit(
    trainings: Trainings, recorded: Finished, dumps: Path
) -> None:
    old_keys = ("skip_rollout=True", f"skip_dump_dir={dumps}")
    again = trainings.run("cache", *GRPO, *(f"actor_rollout_ref.rollout.{key}" for key in old_keys))
    assert again.trace("generate") == []
    assert again.trace("sync") == [], "weights were sent to an engine that nobody asked"
    assert again.hits() == [1, 2, 3, 4]
    assert_same_results(recorded, again)
    assert_same_weights(recorded, again, STEPS)
    assert f"{STEPS} loaded" in again.summary
    assert f"0 weight syncs, {STEPS + 1} spared" in again.summary


def test_two_workers_and_another_learning_rate_train_on_the_same_rows_and_the_difference_is_told(
    trainings: Trainings, recorded: Finished, dumps: Path
) -> None:
    other = trainings.run(
        "two-workers",
        *GRPO,
        CACHE,
        f"rollout_skip.dump_dir={dumps}",
        "trainer.n_gpus_per_node=2",
        "actor_rollout_ref.actor.optim.lr=5e-4",
        "trainer.logger=[file]",
    )
    assert other.hits() == [1, 2, 3, 4]
    assert other.trace("generate") == []
    assert other.rollout_data() == recorded.rollout_data()
    assert len(other.rollout_data()) == STEPS
    assert all(len(rows) == ROWS for rows in other.rollout_data().values())
    (layout,) = [text for text in other.messages if "another layout" in text]
    assert "world_size: 1 → 2" in layout
    (training,) = [text for text in other.messages if "off-policy from the second step on" in text]
    assert "actor_rollout_ref.actor.optim.lr: 0.001 → 0.0005" in training
    assert other.timing("rollout_skip/off_policy") == {1: 0.0, 2: 1.0, 3: 1.0, 4: 1.0}


def test_missing_steps_are_generated_with_the_weights_of_their_time(
    trainings: Trainings, unskipped: Finished, own_dumps: Path
) -> None:
    store = RolloutStore(variant_in(own_dumps))
    for step in (2, 4):
        store.delete(RolloutKey(step))
    partial = trainings.run("partial", *GRPO, CACHE, f"rollout_skip.dump_dir={own_dumps}")
    assert partial.hits() == [1, 3]
    assert partial.timing("rollout_skip/off_policy") == {1: 0.0, 2: None, 3: 0.0, 4: None}
    assert partial.trace("sync") == [1, 3]
    assert partial.trace("generate") == [1] * ROWS + [3] * ROWS
    assert_same_results(unskipped, partial)
    assert_same_weights(unskipped, partial, STEPS)
    assert len(store.keys()) == STEPS


def test_a_killed_training_goes_on_from_its_dumps_and_ends_like_one_that_was_not_killed(
    trainings: Trainings, unskipped: Finished, tmp_path: Path
) -> None:
    settings = (*GRPO, CACHE, f"rollout_skip.dump_dir={tmp_path}")
    trainings.run_until("killed", lambda _: any(tmp_path.glob("*/*/step_000002/*.parquet")), *settings)
    left = [key.step for key in RolloutStore(variant_in(tmp_path))]
    assert left[:2] == [1, 2]
    assert len(left) < STEPS
    again = trainings.run("killed-again", *settings)
    assert again.hits() == left
    assert {version + 1 for version in again.trace("generate")} == set(range(len(left) + 1, STEPS + 1))
    assert_same_results(unskipped, again)
    assert_same_weights(unskipped, again, STEPS)


def test_a_training_that_resumes_from_a_checkpoint_finds_the_rollouts_of_its_steps(
    trainings: Trainings, recorded: Finished, dumps: Path
) -> None:
    resumed = trainings.run(
        "resumed",
        *GRPO,
        CACHE,
        f"rollout_skip.dump_dir={dumps}",
        "trainer.resume_mode=resume_path",
        f"trainer.resume_from_path={recorded.folder}/checkpoints/global_step_2",
    )
    assert resumed.hits() == [3, 4]
    assert resumed.trace("generate") == []
    assert_same_results(recorded, resumed, steps=[3, 4])
    assert_same_weights(recorded, resumed, STEPS)


def test_another_temperature_is_never_a_hit_and_the_log_says_what_differs(
    trainings: Trainings, recorded: Finished, own_dumps: Path
) -> None:
    other = trainings.run(
        "warmer",
        "trainer.total_training_steps=1",
        CACHE,
        f"rollout_skip.dump_dir={own_dumps}",
        "actor_rollout_ref.rollout.temperature=0.7",
    )
    assert other.hits() == []
    assert other.trace("generate") == [0] * ROWS
    (text,) = [text for text in other.messages if "a new variant begins" in text]
    assert "actor_rollout_ref.rollout.temperature: 1.0 → 0.7" in text
    assert len(list(own_dumps.glob("*/*/manifest.json"))) == 2


def test_validation_is_generated_while_the_steps_are_loaded(
    trainings: Trainings, recorded: Finished, dumps: Path
) -> None:
    validated = trainings.run(
        "validated",
        "trainer.total_training_steps=2",
        CACHE,
        f"rollout_skip.dump_dir={dumps}",
        "trainer.val_before_train=True",
        "trainer.test_freq=2",
    )
    assert validated.hits() == [1, 2]
    assert validated.trace("sync") == [0, 2]
    rows_validated = len(validated.trace("generate")) // 2
    assert validated.trace("generate") == [0] * rows_validated + [2] * rows_validated
    assert [step for step, values in validated.metrics().items() if any(key.startswith("val-") for key in values)] == [
        0,
        2,
    ]
    training_only = {
        step: {key: value for key, value in values.items() if not key.startswith("val-")}
        for step, values in validated.results().items()
    }
    for step in (1, 2):
        assert training_only[step] == recorded.results()[step]


def test_a_broken_entry_and_a_full_disk_are_told_and_the_training_goes_on(
    trainings: Trainings, unskipped: Finished, recorded: Finished, dumps: Path, tmp_path: Path
) -> None:
    with mounted("-t", "tmpfs", "-o", "size=4m", "tmpfs", tmp_path):
        shutil.copytree(dumps, tmp_path / "dumps")
        variant = variant_in(tmp_path / "dumps")
        (broken,) = variant.glob("step_000002/gen_000.parquet")
        content = bytearray(broken.read_bytes())
        content[len(content) // 2] ^= 1
        broken.write_bytes(content)
        RolloutStore(variant).delete(RolloutKey(4))
        Disk(tmp_path, 4 << 20, mounted=True).leave_free(2 * len(content))  # for one dump and its record, not for two
        faulty = trainings.run("faulty", *GRPO, CACHE, f"rollout_skip.dump_dir={tmp_path}/dumps")
        set_aside = [file for file in variant.glob("step_000002/*") if file.name.endswith(".corrupt")]
    assert faulty.hits() == [1, 3]
    assert_same_results(unskipped, faulty)
    assert any("step 2, generation batch 0 is generated again" in text for text in faulty.messages)
    assert set_aside
    (failed,) = [text for text in faulty.messages if "ERROR: dump failed: step" in text]
    assert "step 4, generation batch 0 was not written" in failed
    assert "No space left on device" in failed
    assert "1 dumps failed" in faulty.summary
    assert "step 2, generation batch 0 was unreadable" in faulty.summary


def test_a_folder_that_becomes_read_only_is_told_and_the_training_goes_on(
    trainings: Trainings, unskipped: Finished, tmp_path: Path
) -> None:
    with mounted("--bind", tmp_path, tmp_path):
        folder, process = trainings.start("read-only", *GRPO, CACHE, f"rollout_skip.dump_dir={tmp_path}")
        try:
            while process.poll() is None and not any(tmp_path.glob("*/*/step_000001/*.json")):
                time.sleep(0.02)
            while process.poll() is None and not mount("-o", "remount,ro,bind", str(tmp_path)):
                time.sleep(0.02)  # something is being written
            finished = Finished(folder, process.wait(TIMEOUT))
        finally:
            end(process)
    assert finished.exit_code == 0, finished.log[-8000:]
    assert_same_results(unskipped, finished)
    failed = [text for text in finished.messages if "ERROR: dump failed: step" in text]
    assert failed
    assert all("Read-only file system" in text for text in failed)
    assert any("who recorded which steps could not be written down" in text for text in finished.messages)
    assert f"{len(failed)} dumps failed" in finished.summary


@contextmanager
def mounted(*arguments: object) -> Iterator[None]:
    *_, place = arguments
    if not mount(*map(str, arguments)):
        pytest.skip("file systems cannot be mounted here: only root can, and not in every container")
    try:
        yield
    finally:
        subprocess.run(["umount", "-l", str(place)], check=True)
