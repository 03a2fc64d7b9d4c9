"""One training that records, continues, replays and repeats, with real DataProtos and a real store."""

from __future__ import annotations

import errno
import gc
import logging
import os
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from tests.batches import assert_same_batch, data_proto, rollout_output
from tests.loaded_ahead import damage, wait_for_prefetch
from tests.trainings import Engine, Training, contents, inputs_of, never, without_timings
from verl_rollout_skip import RolloutKey, RolloutStore
from verl_rollout_skip.errors import (
    CorruptEntryError,
    DiskLimitError,
    DumpError,
    EntryExistsError,
    EntryNotFoundError,
    MismatchError,
    QueueError,
)
from verl_rollout_skip.replay.results import Generated, Miss
from verl_rollout_skip.replay.rollout import RolloutSkip
from verl_rollout_skip.runs.manifest import Manifest
from verl_rollout_skip.store.loaded import LoadedEntry
from verl_rollout_skip.store.storage.local import LocalStorage

K1, K2, K3, K4 = (RolloutKey(step) for step in range(1, 5))


@pytest.fixture
def training(tmp_path: Path) -> Training:
    return Training(tmp_path)


def store_of(training: Training) -> RolloutStore:
    [variant] = training.variants()
    return RolloutStore(variant)


def test_a_second_run_loads_what_the_first_one_generated(training: Training) -> None:
    engine = Engine()
    with training.open("cache") as first:
        generated = [first.step(key, inputs_of(key, uids="first"), engine) for key in (K1, K2)]
    with training.open("cache") as second:
        inputs = inputs_of(K1, uids="second")
        loaded = [second.step(K1, inputs, never), second.step(K2, inputs_of(K2, uids="second"), never)]
    assert engine.calls == 2
    assert [rollout.hit for rollout in (*generated, *loaded)] == [False, False, True, True]
    for was, is_now in zip(generated, loaded, strict=True):
        assert_same_batch(without_timings(was.batch), without_timings(is_now.batch))
    assert loaded[0].inputs is inputs, "with checked prompts the current input stays, uids and all"


def test_uids_that_the_output_echoes_come_back_as_the_current_ones(training: Training) -> None:
    """A colocated reward model makes verl echo all inputs; the recorded uids would make its union fail."""

    def echo(inputs: Any) -> Any:
        batch = rollout_output(len(inputs))
        batch.non_tensor_batch.update(inputs.non_tensor_batch)
        return batch

    with training.open("record") as recording:
        recording.step(K1, inputs_of(K1, uids="recorded"), echo)
    with training.open("replay") as replay:
        inputs = inputs_of(K1, uids="today")
        rollout = replay.step(K1, inputs, never)
    assert rollout.batch.non_tensor_batch["uid"].tolist() == inputs.non_tensor_batch["uid"].tolist()
    driver = data_proto({"row": torch.arange(len(inputs))}, **inputs.non_tensor_batch)
    driver.union(rollout.batch)


def test_recorded_timings_are_not_logged_again(training: Training) -> None:
    training.record(K1)
    with training.open("replay") as replay:
        rollout = replay.step(K1, inputs_of(K1), never)
    timing = rollout.batch.meta_info["timing"]
    assert timing == rollout.metrics
    assert set(timing) == {
        f"rollout_skip/{name}" for name in ("hit", "load_s", "saved_s", "dump_failures", "off_policy")
    }
    assert rollout.batch.meta_info["reward_extra_keys"] == ["acc"]


def test_the_timings_of_a_generated_step_are_kept_and_ours_are_added(training: Training) -> None:
    with training.open("cache") as skip:
        timing = skip.step(K1, inputs_of(K1), Engine()).batch.meta_info["timing"]
    assert timing["agent_loop/generate_sequences/mean"] == 0.25
    assert timing["rollout_skip/hit"] == 0.0
    assert "rollout_skip/hit" not in store_of(training).get(K1).meta_info["timing"]


def test_recorded_prompts_replace_the_current_ones_and_only_the_uids_stay(training: Training) -> None:
    training.record(K1)
    with training.open("replay", {"prompts": "recorded"}) as replay:
        current = inputs_of(RolloutKey(9), uids="today")
        rollout = replay.step(K1, current, never)
    expected = inputs_of(K1).non_tensor_batch
    for key in ("raw_prompt", "reward_model", "data_source", "extra_info", "index"):
        assert rollout.inputs.non_tensor_batch[key].tolist() == expected[key].tolist()
    assert rollout.inputs.non_tensor_batch["uid"].tolist() == current.non_tensor_batch["uid"].tolist()


def test_recorded_prompts_with_different_groups_are_rejected(training: Training) -> None:
    """Eight rows of four prompts cannot get the uids of eight rows of two prompts."""
    training.record(K1)
    current = inputs_of(K1)
    current.non_tensor_batch["uid"] = np.repeat(np.array(["a", "b"], dtype=object), 4)
    with training.open("repeat") as repeat, pytest.raises(MismatchError, match=r"did rollout\.n change"):
        repeat.step(K1, current, never)


@pytest.mark.parametrize("mode", ["replay", "repeat"])
def test_a_column_that_was_not_recorded_is_a_mismatch(training: Training, mode: str) -> None:
    training.record(K1)
    current = inputs_of(K1)
    current.non_tensor_batch["agent_name"] = np.array(["tool_agent"] * len(current), dtype=object)
    with training.open(mode) as skip, pytest.raises(MismatchError, match="agent_name"):
        skip.step(K1, current, never)


def test_greedy_rollouts_are_not_loaded_for_sampled_ones(training: Training) -> None:
    """REMAX requests the same prompts again with do_sample=False (verl 0.6.1, 0.7.1)."""
    training.record(K1)
    greedy = inputs_of(K1)
    greedy.meta_info["do_sample"] = False
    with (
        training.open("replay") as replay,
        pytest.raises(MismatchError, match=r"do_sample'\]: recorded missing, current False"),
    ):
        replay.step(K1, greedy, never)
    with training.open("cache") as cache:
        assert not cache.step(K1, greedy, Engine()).hit
        assert not cache.step(RolloutKey(1, 1), greedy, Engine()).hit
        assert cache.statistics.not_dumped == 1
    with training.open("replay") as replay:
        greedy.meta_info["global_steps"] = 77
        assert replay.step(RolloutKey(1, 1), greedy, never).hit


def test_changes_that_generate_makes_to_its_input_are_not_recorded(training: Training) -> None:
    def careless(inputs: Any) -> Any:
        inputs.non_tensor_batch.pop("raw_prompt")
        inputs.meta_info["temperature"] = 0.0
        return rollout_output(len(inputs))

    with training.open("record") as recording:
        recording.step(K1, inputs_of(K1), careless)
    with training.open("replay") as replay:
        assert replay.step(K1, inputs_of(K1), never).hit


def test_auto_uses_the_recorded_prompts_if_a_sampler_orders_the_data(training: Training, caplog: Any) -> None:
    caplog.set_level(logging.INFO)
    sampler = {"data__sampler__class_path": "pkg://curriculum", "data__sampler__class_name": "Curriculum"}
    training.record(K1, **sampler)
    with training.open("replay", **sampler) as replay:
        assert replay.step(K1, inputs_of(RolloutKey(9)), never).hit
    assert "auto means recorded, because data.sampler.class_path" in caplog.text
    with training.open("replay", {"prompts": "check"}, **sampler) as replay, pytest.raises(MismatchError):
        replay.step(K1, inputs_of(RolloutKey(9)), never)


def loaded_keys(training: Training, mode: str, *keys: RolloutKey) -> list[tuple[int, int]]:
    """The recorded entries that a mode loads for these keys, identified by their prompts."""
    given = []
    recorded = store_of(training)
    prompts = {str(recorded.inputs(key).non_tensor_batch["raw_prompt"].tolist()): key for key in recorded}
    with training.open(mode) as skip:
        for key in keys:
            rollout = skip.step(key, inputs_of(RolloutKey(50 + key.step)), never)
            found = prompts[str(rollout.inputs.non_tensor_batch["raw_prompt"].tolist())]
            assert_same_batch(without_timings(recorded.get(found)), without_timings(rollout.batch))
            given.append((found.step, found.gen_batch))
    return given


def test_repeat_cycles_through_the_recorded_steps(training: Training) -> None:
    training.record(K2, K3, K4)
    keys = [RolloutKey(step) for step in range(2, 10)]
    assert loaded_keys(training, "repeat", *keys) == [(s, 0) for s in (2, 3, 4, 2, 3, 4, 2, 3)]
    assert loaded_keys(training, "repeat_last", *keys) == [(s, 0) for s in (2, 3, 4, 4, 4, 4, 4, 4)]


def test_repeat_uses_a_generation_batch_twice_in_a_step_only_if_all_are_used(training: Training) -> None:
    training.record(K1, RolloutKey(1, 1), K2)
    keys = [RolloutKey(3, batch) for batch in range(3)] + [RolloutKey(4, 0)]
    assert loaded_keys(training, "repeat", *keys) == [(1, 0), (1, 1), (2, 0), (2, 0)]
    assert loaded_keys(training, "repeat_last", RolloutKey(3, 0), RolloutKey(3, 1)) == [(2, 0), (2, 0)]


def test_steps_that_are_not_selected_generate_and_are_not_recorded(training: Training) -> None:
    with training.open("cache", {"steps": [1, "3-4"]}) as skip:
        for key in (K1, K2, K3):
            skip.step(key, inputs_of(key), Engine())
    assert store_of(training).keys() == [K1, K3]
    with training.open("cache", {"steps": [3]}) as skip:
        assert [skip.step(key, inputs_of(key), Engine()).hit for key in (K1, K3)] == [False, True]


def test_the_input_of_a_rollout_that_is_not_dumped_is_not_copied(
    training: Training, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With images, a copy takes seconds, in every step after the last one that is dumped."""
    taken: list[Any] = []
    snapshot = RolloutStore.snapshot
    monkeypatch.setattr(RolloutStore, "snapshot", lambda *given: taken.append(given) or snapshot(*given))
    with training.open("cache", {"max_dump_steps": 1}) as skip:
        for key in (K1, K2, K3):
            skip.step(key, inputs_of(key), Engine())
    assert store_of(training).keys() == [K1]
    assert len(taken) == 1


def test_max_dump_steps_counts_steps_not_generation_batches_across_runs(training: Training) -> None:
    keys = [K1, RolloutKey(1, 1), K2, K3, RolloutKey(2, 1)]
    for _ in range(2):
        with training.open("cache", {"max_dump_steps": 2}) as skip:
            for key in keys:
                skip.step(key, inputs_of(key), Engine())
    assert store_of(training).keys() == [K1, RolloutKey(1, 1), K2, RolloutKey(2, 1)]


def test_validation_always_generates_and_is_never_recorded(training: Training) -> None:
    inputs = inputs_of(K1)
    inputs.meta_info["validate"] = True
    engine = Engine()
    training.record(K1)
    before = contents(training.dumps)
    for mode in ("record", "cache", "replay", "repeat", "refresh"):
        with training.open(mode) as skip:
            rollout = skip.step(K1, inputs, engine)
            assert not rollout.hit
            assert not rollout.metrics
    assert engine.calls == 5
    assert contents(training.dumps) == before


def test_mode_off_touches_nothing(training: Training) -> None:
    with training.open("off", trainer__experiment_name="a/b") as skip:
        rollout = skip.step(K1, inputs_of(K1), Engine())
    assert "rollout_skip/hit" not in rollout.batch.meta_info["timing"]
    assert not training.dumps.exists()


def test_a_failed_generation_raises_its_own_error_and_dumps_nothing(training: Training) -> None:
    def broken(inputs: Any) -> Any:
        raise RuntimeError("CUDA out of memory")

    with pytest.raises(RuntimeError, match="CUDA out of memory"), training.open("record") as skip:
        skip.step(K1, inputs_of(K1), broken)
    assert not training.dumps.exists()


@pytest.fixture
def broken_disk(monkeypatch: pytest.MonkeyPatch) -> Any:
    """Entries can no longer be synced. The manifest exists already, so it is not written again."""

    def start() -> None:
        def fail(fd: int) -> None:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

        monkeypatch.setattr(os, "fsync", fail)

    yield start
    monkeypatch.undo()


@pytest.mark.parametrize("background", [True, False])
def test_a_failed_dump_is_logged_and_counted_and_the_training_continues(
    training: Training, broken_disk: Any, caplog: Any, background: bool
) -> None:
    with training.open("cache", {"background": background}) as skip:
        skip.step(K1, inputs_of(K1), Engine())
        skip._recorder.store.flush()
        broken_disk()
        skip.step(K2, inputs_of(K2), Engine())
        rollout = skip.step(K3, inputs_of(K3), Engine())
        skip.step(K1, inputs_of(K1), never)
        skip.close()
    assert skip.statistics.dump_failures >= 2
    assert skip.statistics.dumped == 1
    assert rollout.metrics["rollout_skip/dump_failures"] >= (0 if background else 2)
    assert "No space left on device" in caplog.text
    assert store_of(training).keys() == [K1]


def test_an_input_that_cannot_be_stored_is_a_miss_and_a_failed_dump(training: Training) -> None:
    training.record(K1)
    for key in (K1, K2):
        inputs = inputs_of(key)
        inputs.non_tensor_batch["labels"] = np.array([{1, 2}] * len(inputs), dtype=object)
        with training.open("cache") as skip:
            assert not skip.step(key, inputs, Engine()).hit
            assert skip.statistics.dump_failures == (key != K1), "the first has a dump that is left alone"


def test_a_failed_dump_stops_a_recording_at_the_next_step(training: Training, broken_disk: Any) -> None:
    skip = training.open("record")
    skip.step(K1, inputs_of(K1), Engine())
    skip._recorder.store.flush()
    broken_disk()
    skip.step(K2, inputs_of(K2), Engine())
    skip._recorder.store._writer.wait(K2)
    with pytest.raises(DumpError, match="step 2"):
        skip.step(K3, inputs_of(K3), never)


def test_a_failed_dump_of_the_last_step_is_raised_by_close(training: Training, broken_disk: Any) -> None:
    skip = training.open("cache", {"on_dump_error": "fail"})
    skip.step(K1, inputs_of(K1), Engine())
    skip._recorder.store.flush()
    broken_disk()
    skip.step(K2, inputs_of(K2), Engine())
    with pytest.raises((DumpError, OSError)):
        skip.close()
    skip.close()


def test_a_full_budget_stops_a_recording_and_only_warns_a_cache(training: Training, caplog: Any) -> None:
    with pytest.raises(DumpError, match="max_disk"):
        with training.open("record", {"max_disk": "1KB"}) as skip:
            skip.step(K1, inputs_of(K1), Engine())
    with training.open("cache", {"max_disk": "1KB", "background": False}) as skip:
        skip.step(K1, inputs_of(K1), Engine())
    assert skip.statistics.dump_failures == 1
    assert skip.statistics.dumped == 0
    assert issubclass(DiskLimitError, DumpError)


def test_a_batch_that_cannot_be_stored_is_reported_and_trained_on(training: Training, caplog: Any) -> None:
    def odd(inputs: Any) -> Any:
        batch = rollout_output(len(inputs))
        batch.meta_info["lock"] = object()
        return batch

    with training.open("cache") as skip:
        assert not skip.step(K1, inputs_of(K1), odd).hit
    assert skip.statistics.dump_failures == 1
    assert "a dump failed; the training continues" in caplog.text


def test_a_training_that_fails_raises_its_own_error_even_if_a_dump_failed_too(training: Training, caplog: Any) -> None:
    def interrupted(skip: RolloutSkip) -> None:
        with skip:
            skip.step(K1, inputs_of(K1), Engine())
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        interrupted(training.open("record", {"max_disk": "1KB"}))
    assert "while handling KeyboardInterrupt" in caplog.text


def test_an_interrupt_while_closing_keeps_the_record_of_what_was_written(training: Training, monkeypatch: Any) -> None:
    skip = training.open("record")
    skip.step(K1, inputs_of(K1), Engine())
    skip.step(K2, inputs_of(K2), Engine())
    skip._recorder.store.flush()

    def interrupted() -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(skip._recorder.store, "close", interrupted)
    with pytest.raises(KeyboardInterrupt):
        skip.close()
    [recording] = (training.variants()[0] / "trainings").iterdir()
    assert '"steps": [\n    1,\n    2\n  ]' in recording.read_text()


def test_a_recording_never_overwrites(training: Training) -> None:
    training.record(K1)
    before = contents(training.dumps)
    with training.open("record") as skip, pytest.raises(EntryExistsError, match="never overwrites"):
        skip.step(K1, inputs_of(K1), never)
    assert contents(training.dumps) == before


def test_replay_says_which_generation_batch_is_missing(training: Training) -> None:
    training.record(K1)
    with (
        training.open("replay") as replay,
        pytest.raises(EntryNotFoundError, match="Recorded generation batches of this step: 1;"),
    ):
        replay.step(RolloutKey(1, 1), inputs_of(K1), never)


def test_replay_with_nothing_recorded_is_an_error_before_the_training(training: Training) -> None:
    with pytest.raises(EntryNotFoundError, match=r"nothing is recorded in .*rollout_skip.mode=cache"):
        training.open("replay")


def test_one_summary_line_says_what_happened(training: Training, caplog: Any) -> None:
    training.record(K1)
    caplog.set_level(logging.INFO)
    caplog.clear()
    with training.open("cache") as skip:
        skip.step(K1, inputs_of(K1), never)
        skip.step(K2, inputs_of(K2), Engine())
    skip.close()
    lines = [record.getMessage() for record in caplog.records if "rollout steps" in record.getMessage()]
    assert len(lines) == 1
    assert lines[0].startswith("2 rollout steps: 1 loaded in 0.")
    assert "1 generated in 0.0 s" in lines[0]
    assert "1 dumped" in lines[0]
    assert "0 dumps failed" in lines[0]


def test_a_taken_key_is_reported_in_the_summary(training: Training) -> None:
    training.record(K1)
    with training.open("cache") as skip:
        skip.step(K1, inputs_of(RolloutKey(5)), Engine())
    assert "1 not dumped: their keys are taken (mode refresh replaces what is recorded)" in skip.summary()


def held_entries() -> int:
    """The number of entries in memory."""
    gc.collect()
    return sum(type(held) is LoadedEntry for held in gc.get_objects())


@pytest.mark.parametrize("prompts", ["check", "recorded"])
def test_every_rollout_is_prefetched_including_the_first(training: Training, prompts: str) -> None:
    """The files are damaged before their rollout is requested, so it must come from memory."""
    keys = [K1, RolloutKey(1, 1), K2]
    training.record(*keys)
    with training.open("replay", {"prompts": prompts}) as replay:
        replay.prefetch_first()
        for key in keys:
            wait_for_prefetch()
            damage(training.variants()[0], key.step, key.gen_batch)
            assert replay.step(key, inputs_of(key), never).hit, "loaded before it was asked for"


def test_repeated_steps_are_prefetched(training: Training) -> None:
    training.record(K1, K2)
    with training.open("repeat") as repeat:
        repeat.prefetch_first(3)
        wait_for_prefetch()
        damage(training.variants()[0], 1)
        assert repeat.step(K3, inputs_of(K3), never).hit
        wait_for_prefetch()
        damage(training.variants()[0], 2)
        assert repeat.step(K4, inputs_of(K4), never).hit


def test_a_selected_step_is_prefetched_during_the_step_before_it(training: Training) -> None:
    """Not earlier, because it would occupy memory for nothing."""
    training.record(K1, K2, K3, K4)
    with training.open("cache", {"steps": "2,4"}) as cache:
        cache.prefetch_first()
        assert held_entries() == 0
        assert not cache.step(K1, inputs_of(K1), Engine()).hit
        wait_for_prefetch()
        damage(training.variants()[0], 2)
        assert cache.step(K2, inputs_of(K2), never).hit
        assert held_entries() == 0
        assert not cache.step(K3, inputs_of(K3), Engine()).hit
        wait_for_prefetch()
        damage(training.variants()[0], 4)
        assert cache.step(K4, inputs_of(K4), never).hit


def test_a_prefetched_entry_that_is_not_needed_is_dropped(training: Training) -> None:
    """A loop that starts at another step than it announced, where nothing is recorded."""
    training.record(K1, K3)
    with training.open("cache") as cache:
        assert held_entries() == 0
        cache.prefetch_first()
        wait_for_prefetch()
        assert held_entries() == 1
        assert not cache.step(K4, inputs_of(K4), Engine()).hit
        assert held_entries() == 0
    with training.open("cache") as cache:
        cache.prefetch_first()
        assert cache.step(K1, inputs_of(K1), never).hit
        assert not cache.step(K2, inputs_of(K2), Engine()).hit
        wait_for_prefetch()
        assert held_entries() == 1, "the next one that is recorded"
    assert held_entries() == 0


@pytest.mark.parametrize("mode", ["replay", "cache"])
def test_an_error_while_prefetching_is_raised_when_the_rollout_is_requested(training: Training, mode: str) -> None:
    training.record(K1)
    damage(training.variants()[0], 1)
    engine = Engine()
    with training.open(mode) as skip:
        skip.prefetch_first()
        wait_for_prefetch()
        if mode == "replay":
            with pytest.raises(CorruptEntryError):
                skip.step(K1, inputs_of(K1), never)
        else:
            assert not skip.step(K1, inputs_of(K1), engine).hit
            assert "was unreadable and is kept as" in skip.summary()


def test_another_process_s_commit_after_a_failed_prefetch_is_a_hit(training: Training) -> None:
    training.record(K2)
    with training.open("cache") as cache:
        cache.prefetch_first()
        training.record(K1)
        assert cache.step(K1, inputs_of(K1), never).hit


def test_two_trainings_record_into_one_folder_at_once(training: Training) -> None:
    with training.open("cache") as one, training.open("cache") as other:
        first = one.step(K1, inputs_of(K1), Engine(seed=1))
        one._recorder.store.flush()
        assert_same_batch(without_timings(first.batch), without_timings(other.step(K1, inputs_of(K1), never).batch))
        other.step(K2, inputs_of(K2), Engine(seed=2))
        other._recorder.store.flush()
        assert one.step(K2, inputs_of(K2), never).hit
    assert store_of(training).keys() == [K1, K2]
    assert len(list((training.variants()[0] / "trainings").iterdir())) == 2


@pytest.mark.parametrize("background", [True, False])
def test_the_slower_of_two_trainings_reports_that_its_rollout_was_not_dumped(
    training: Training, background: bool
) -> None:
    with training.open("cache", {"background": background}) as slow:

        def overtaken(inputs: Any) -> Any:
            training.record(K1)
            return rollout_output(len(inputs), seed=77)

        slow.step(K1, inputs_of(K1), overtaken)
    assert slow.statistics.not_dumped == 1
    assert slow.statistics.dump_failures == 0
    assert slow.statistics.dumped == 0


def test_rollouts_recorded_after_the_variant_was_removed_can_be_loaded(training: Training) -> None:
    with training.open("cache") as skip:
        skip.step(K1, inputs_of(K1), Engine())
        skip._recorder.store.flush()
        shutil.rmtree(training.variants()[0])
        skip.step(K2, inputs_of(K2), Engine())
    with training.open("cache") as skip:
        assert skip.step(K2, inputs_of(K2), never).hit
        assert not skip.step(K1, inputs_of(K1), Engine()).hit
    assert store_of(training).keys() == [K1, K2]


@pytest.mark.parametrize("mode", ["cache", "record"])
def test_a_folder_that_becomes_unreadable_stops_a_training_only_if_a_failed_dump_would(
    training: Training, monkeypatch: pytest.MonkeyPatch, caplog: Any, mode: str
) -> None:
    """For example, credentials expire or a file server restarts."""

    def forbidden(self: Any, folder: str, name: str) -> Any:
        raise PermissionError(errno.EACCES, "Forbidden", name)

    with training.open(mode) as skip:
        skip.step(K1, inputs_of(K1), Engine())
        skip._recorder.store.flush()
        with monkeypatch.context() as patch:
            patch.setattr(LocalStorage, "info", forbidden)
            if mode == "record":
                with pytest.raises(PermissionError):
                    skip.step(K2, inputs_of(K2), Engine())
            else:
                assert not skip.step(K2, inputs_of(K2), Engine()).hit
        assert not skip.step(K3, inputs_of(K3), Engine()).hit
    if mode == "cache":
        assert "step 2, generation batch 0 is generated, because" in caplog.text
        assert "Forbidden" in caplog.text
        assert skip.statistics.dump_failures == 1
        assert "could not be looked up" in skip.statistics.summary(0)
    assert store_of(training).keys() == [K1, K3]


def test_repeating_lists_the_recording_once(training: Training, monkeypatch: pytest.MonkeyPatch) -> None:
    training.record(K1, K2)
    listed = []
    keys = RolloutSkip.recorded_keys
    monkeypatch.setattr(RolloutSkip, "recorded_keys", lambda self: listed.append(1) or keys(self))
    with training.open("repeat") as skip:
        for step in range(1, 9):
            assert skip.step(RolloutKey(step), inputs_of(K1), never).hit
        store_of(training).delete(K2)
        for step in range(9, 13):
            assert skip.step(RolloutKey(step), inputs_of(K1), never).hit
    assert len(listed) <= 3


def test_a_loop_without_a_selected_step_says_so_in_the_summary(
    training: Training, caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level(logging.INFO), training.open("cache", {"steps": [50]}) as skip:
        skip.step(K1, inputs_of(K1), Engine())
    assert "0 rollout steps: 0 loaded" in caplog.text
    assert "1 not selected by rollout_skip.steps" in caplog.text


FORGETFUL = """
import sys, time
from pathlib import Path
from tests.loaded_ahead import damage, wait_for_prefetch
from tests.trainings import Engine, Training, inputs_of
from verl_rollout_skip import RolloutKey, RolloutStore

write = RolloutStore._write
RolloutStore._write = lambda *arguments: (time.sleep(0.2), write(*arguments))
skip = Training(Path(sys.argv[1])).open("record")
for step in (1, 2, 3):
    skip.step(RolloutKey(step), inputs_of(RolloutKey(step)), Engine())
"""


def test_a_loop_that_forgets_to_close_its_recording_waits_at_exit_and_says_so(training: Training) -> None:
    ended = subprocess.run([sys.executable, "-c", FORGETFUL, str(training.folder)], capture_output=True, text=True)
    assert ended.returncode == 0, ended.stderr
    assert "RolloutSkip.close was not called: waiting for the dumps" in ended.stderr
    assert store_of(training).keys() == [K1, K2, K3]
    [recording] = Manifest.load(str(training.variants()[0])).trainings
    assert recording["steps"] == [1, 2, 3]


def test_the_time_that_a_trainer_spends_on_a_loaded_rollout_counts_as_waiting(training: Training) -> None:
    training.record(K1)
    with training.open("cache") as run:
        rollout = run.step(K1, inputs_of(K1), never)
        rollout.metrics.update({"rollout_skip/load_s": 1.0, "rollout_skip/saved_s": 9.0})
        before = run.statistics
        metrics = run.count_wait(rollout, seconds=4.0)
    assert (metrics["rollout_skip/load_s"], metrics["rollout_skip/saved_s"]) == (4.0, 6.0)
    counted = run.statistics
    assert counted.load_s - before.load_s == pytest.approx(3.0)
    assert counted.saved_s - before.saved_s == pytest.approx(-3.0)
    assert rollout.batch.meta_info["timing"] == metrics


def test_a_trainer_can_follow_the_flow_itself(training: Training) -> None:
    """As V1 trainers do, which know the input of a step only after they have seen its entry."""
    inputs = inputs_of(K1)
    with training.open("cache") as first:
        before = first.statistics
        assert list(first.candidates(K1)) == []
        miss = first.miss(K1)
        assert miss == Miss(K1, is_covered=True, dumps=True)
        metrics = first.record(miss, Generated(Engine()(inputs), inputs, seconds=2.0))
        assert metrics["rollout_skip/hit"] == 0
        assert (first.statistics.misses, first.statistics.generate_s, first.statistics.dumped) == (1, 2.0, 1)
        assert before.misses == 0, "statistics are a snapshot"
    with training.open("cache") as second:
        [candidate] = second.candidates(K1)
        assert candidate.explain_mismatch(inputs) is None
        assert second.load(K1, candidate, inputs).hit


def test_a_step_that_is_not_selected_only_counts_for_the_lineage(training: Training) -> None:
    with training.open("cache", {"steps": [2]}) as skip:
        assert list(skip.candidates(K1)) == []
        miss = skip.miss(K1)
        assert miss == Miss(K1, is_covered=False, dumps=False)
        assert skip.record(miss, Generated(Engine()(inputs_of(K1)), None, seconds=2.0)) == {}
        assert (skip.statistics.left_out, skip.statistics.misses) == (1, 0)


def test_a_rollout_that_cannot_be_read_is_a_failed_dump(training: Training, caplog: pytest.LogCaptureFixture) -> None:
    unreadable = Generated(None, None, seconds=2.0, failure=QueueError("the queue does not answer"))
    with training.open("cache") as cache:
        metrics = cache.record(cache.miss(K1), unreadable)
        assert metrics["rollout_skip/dump_failures"] == 1
        assert (cache.statistics.dump_failures, cache.statistics.dumped) == (1, 0)
    assert "step 1, generation batch 0: the queue does not answer" in caplog.text
    with training.open("record") as recording, pytest.raises(QueueError, match="the queue does not answer"):
        recording.record(recording.miss(K1), unreadable)
