"""``RolloutStore`` from the user's side, on a local folder."""

from __future__ import annotations

import errno
import io
import os
import pickle
import subprocess
import sys
import threading
import time
from pathlib import Path
from typing import Any

import cloudpickle
import numpy as np
import pytest
import torch
from tensordict import TensorDict
from verl import DataProto

from tests.batches import assert_same_batch, rollout_input, rollout_output
from tests.entry_files import part_file, record_file
from tests.loaded_ahead import wait_for_prefetch
from verl_rollout_skip import RolloutKey, RolloutStore
from verl_rollout_skip.errors import (
    CorruptEntryError,
    DiskLimitError,
    DumpError,
    EntryExistsError,
    EntryNotFoundError,
    EntryTooLargeError,
    RolloutSkipError,
    StoreError,
    UnsupportedBatchError,
)
from verl_rollout_skip.store.codec.decoder import Reader
from verl_rollout_skip.store.storage.local import LocalStorage

K = RolloutKey(1)


@pytest.fixture
def store(tmp_path: Path) -> RolloutStore:
    return RolloutStore(tmp_path / "run", background=False)


def damage(store: RolloutStore, key: RolloutKey = K) -> Path:
    path = part_file(store.path, key.step, key.gen_batch)
    path.write_bytes(path.read_bytes()[:-9] + b"x" * 9)
    return path


def test_a_store_that_was_never_written_to_is_empty_and_makes_no_folder(tmp_path: Path) -> None:
    store = RolloutStore(tmp_path / "run")
    assert store.keys() == []
    assert len(store) == 0
    assert K not in store
    assert store.prune() == []
    store.flush()
    store.close()
    assert not (tmp_path / "run").exists()


def test_keys_come_in_the_order_of_training(store: RolloutStore) -> None:
    keys = [RolloutKey(10), RolloutKey(2, 1), RolloutKey(2), RolloutKey(1_234_567), RolloutKey(0, 1000)]
    for key in keys:
        store.put(key, rollout_output(2))
    assert store.keys() == list(store) == sorted(keys)
    assert len(store) == 5
    assert all(key in store for key in keys)
    assert RolloutKey(2, 2) not in store


@pytest.mark.parametrize("key", [1, "1", (1, 0), None, "step_000001"])
def test_only_a_rollout_key_is_a_key(store: RolloutStore, key: Any) -> None:
    store.put(K, rollout_output(2))
    assert key not in store
    with pytest.raises(TypeError, match=r"RolloutKey\(step, gen_batch\)"):
        store.put(key, rollout_output(2))


def test_a_missing_key_is_named_with_its_place_in_every_call(store: RolloutStore) -> None:
    store.put(RolloutKey(2), rollout_output(2))
    for call in (store.get, store.inputs, store.record, store.verify, store.delete, store.set_aside):
        with pytest.raises(EntryNotFoundError) as caught:
            call(K)
        assert str(caught.value) == f"step 1, generation batch 0 is not recorded in {store.path}."
        assert isinstance(caught.value, LookupError)
        assert isinstance(caught.value, StoreError)
        assert isinstance(caught.value, RolloutSkipError)


def test_the_same_rollout_again_is_not_an_error_and_another_one_is(store: RolloutStore) -> None:
    store.put(K, rollout_output(4, seed=1), info={"n": 1})
    created = store.record(K)
    store.put(K, rollout_output(4, seed=1), info={"n": 2})
    assert store.record(K) == created, "the entry that is there stays as it is"
    with pytest.raises(
        EntryExistsError, match=r"step 1, generation batch 0 is already recorded .*mode refresh"
    ) as caught:
        store.put(K, rollout_output(4, seed=2))
    assert str(record_file(store.path)) in str(caught.value)
    assert_same_batch(rollout_output(4, seed=1), store.get(K))


def test_the_same_rollout_with_other_timings_uids_and_order_of_columns_is_the_same_rollout(store: RolloutStore) -> None:
    batch, again = rollout_output(4), rollout_output(4)
    given, given_again = rollout_input(4), rollout_input(4)
    again.meta_info["timing"] = {"agent_loop/generate_sequences/mean": 99.0}
    given_again.non_tensor_batch["uid"][:] = "another"
    given_again.non_tensor_batch = dict(reversed(given_again.non_tensor_batch.items()))
    store.put(K, batch, inputs=given)
    store.put(K, again, inputs=given_again)
    with pytest.raises(EntryExistsError):
        store.put(K, batch, inputs=rollout_input(4, seed=5))


def test_replace_replaces_and_record_follows(store: RolloutStore) -> None:
    store.put(K, rollout_output(4, seed=1), info={"seed": 1})
    store.put(K, rollout_output(6, seed=2), info={"seed": 2}, replace=True)
    assert_same_batch(rollout_output(6, seed=2), store.get(K))
    assert store.record(K).info == {"seed": 2}
    assert store.record(K).rows == 6
    assert store.keys() == [K]
    store.put(RolloutKey(2), rollout_output(4), replace=True)
    assert RolloutKey(2) in store, "replacing what is not there is an ordinary put"


def test_delete_frees_the_key(store: RolloutStore) -> None:
    store.put(K, rollout_output(4, seed=1))
    store.put(RolloutKey(1, 1), rollout_output(4, seed=2))
    store.delete(K)
    assert K not in store
    assert_same_batch(rollout_output(4, seed=2), store.get(RolloutKey(1, 1)))
    store.put(K, rollout_output(4, seed=3))
    assert_same_batch(rollout_output(4, seed=3), store.get(K))
    expected = [find(store.path, 1, gen_batch) for gen_batch in (0, 1) for find in (record_file, part_file)]
    assert sorted(Path(store.path).glob("*/*")) == sorted(expected)


def test_replace_and_delete_leave_nothing_behind(store: RolloutStore) -> None:
    for seed in range(3):
        store.put(K, rollout_output(4, seed=seed), replace=True)
        assert len(os.listdir(Path(store.path) / "step_000001")) == 2
    store.delete(K)
    assert os.listdir(Path(store.path) / "step_000001") == []


def test_an_unreadable_entry_is_set_aside_and_its_bytes_are_kept(store: RolloutStore) -> None:
    store.put(K, rollout_output(4, seed=1))
    places = []
    for seed in (2, 3):
        broken = damage(store)
        contents = {broken.name: broken.read_bytes(), "gen_000.json": record_file(store.path).read_bytes()}
        place = Path(store.set_aside(K))
        places.append(place)
        assert place.parent == broken.parent
        token = place.name.removeprefix("gen_000.json.")
        assert token.endswith(".corrupt")
        for name, content in contents.items():
            assert (place.parent / f"{name}.{token}").read_bytes() == content
        assert store.keys() == []
        store.put(K, rollout_output(4, seed=seed))
        assert_same_batch(rollout_output(4, seed=seed), store.get(K))
    assert places[0] != places[1], "the second does not overwrite the first"


def test_a_good_entry_is_not_set_aside(store: RolloutStore) -> None:
    """Another process may have recorded it again since we found it damaged."""
    store.put(K, rollout_output(4))
    with pytest.raises(StoreError, match="complete and readable"):
        store.set_aside(K)
    assert_same_batch(rollout_output(4), store.get(K))


def test_info_is_kept_and_later_changes_do_not_reach_it(store: RolloutStore) -> None:
    info: dict[str, Any] = {"generated_s": 12.5, "hosts": ["a", "b"], "nested": {"none": None, "ü": True}}
    store.put(K, rollout_output(4), info=info)
    info["hosts"].append("c")
    assert store.record(K).info == {"generated_s": 12.5, "hosts": ["a", "b"], "nested": {"none": None, "ü": True}}
    store.put(RolloutKey(2), rollout_output(4))
    assert store.record(RolloutKey(2)).info == {}


@pytest.mark.parametrize(
    "value",
    [object(), float("nan"), float("inf"), b"bytes", np.float32(1), {1, 2}],
    ids=["object", "nan", "inf", "bytes", "float32", "set"],
)
def test_info_that_is_not_json_is_refused_by_put(tmp_path: Path, value: Any) -> None:
    for background in (False, True):
        with RolloutStore(tmp_path / str(background), background=background) as store:
            with pytest.raises(TypeError, match="info must be JSON"):
                store.put(K, rollout_output(4), info={"value": value})
            assert store.keys() == []


def test_info_that_is_too_large_for_a_record_is_refused_by_put(tmp_path: Path) -> None:
    """A record is read completely before it is checked, so its size has a limit, which must hold for writers too."""
    for background in (False, True):
        with RolloutStore(tmp_path / str(background), background=background) as store:
            with pytest.raises((TypeError, ValueError, StoreError), match="info"):
                store.put(K, rollout_output(4), info={"log": "x" * 20_000_000})
            assert store.keys() == []
            store.put(K, rollout_output(4), info={"log": "x" * 1_000_000})
            assert len(store.record(K).info["log"]) == 1_000_000


def test_a_meta_info_of_more_than_a_hundred_megabytes_comes_back_or_is_refused(store: RolloutStore) -> None:
    """Parquet readers limit the size of metadata, and an unreadable dump is worse than none."""
    batch = rollout_output(4)
    batch.meta_info["log"] = "x" * 105_000_000
    try:
        store.put(K, batch)
    except UnsupportedBatchError:
        assert K not in store
    else:
        assert store.get(K).meta_info["log"] == batch.meta_info["log"]


def test_a_batch_that_cannot_be_stored_is_refused_by_put_and_leaves_nothing(tmp_path: Path) -> None:
    batch = rollout_output(4)
    batch.non_tensor_batch["handle"] = np.array([object()] * 4, dtype=object)
    for background in (False, True):
        with RolloutStore(tmp_path / str(background), background=background) as store:
            for wrong in (batch, {"responses": 1}, None, 3):
                with pytest.raises(UnsupportedBatchError):
                    store.put(K, wrong)
        assert not (tmp_path / str(background)).exists()


@pytest.mark.parametrize("background", [False, True])
def test_after_close_reading_works_and_putting_does_not(tmp_path: Path, background: bool) -> None:
    store = RolloutStore(tmp_path, background=background)
    store.put(K, rollout_output(4))
    store.close()
    with pytest.raises(DumpError, match="closed"):
        store.put(RolloutKey(2), rollout_output(4))
    assert_same_batch(rollout_output(4), store.get(K))
    assert store.record(K).rows == 4
    assert store.keys() == [K]
    store.prefetch(K)
    assert_same_batch(rollout_output(4), store.get(K))
    store.flush()
    store.close()


def test_kind_asks_for_a_tensordict(store: RolloutStore) -> None:
    batch = rollout_output(4)
    store.put(K, batch, inputs=rollout_input(4))
    assert isinstance(store.get(K), DataProto)
    found = store.get(K, kind="TensorDict")
    assert isinstance(found, TensorDict)
    assert torch.equal(found["responses"], batch.batch["responses"])
    assert list(found["acc"]) == batch.non_tensor_batch["acc"].tolist()
    assert found["reward_extra_keys"] == ["acc"]
    assert isinstance(store.inputs(K, kind="TensorDict"), TensorDict)
    assert isinstance(store.get(K, kind="DataProto"), DataProto)


def test_kind_that_is_none_or_cannot_be_given_is_refused(store: RolloutStore) -> None:
    store.put(K, TensorDict({"x": torch.arange(4)}, batch_size=[4]))
    with pytest.raises(ValueError, match="pickle"):
        store.get(K, kind="pickle")
    with pytest.raises(UnsupportedBatchError, match="recorded as a TensorDict"):
        store.get(K, kind="DataProto")
    assert isinstance(store.get(K), TensorDict)


def test_inputs_are_none_if_none_were_put(store: RolloutStore) -> None:
    store.put(K, rollout_output(4))
    assert store.inputs(K) is None


def test_inputs_with_another_number_of_rows_are_refused(store: RolloutStore) -> None:
    with pytest.raises(StoreError, match="The input has 6 rows, and the output has 4"):
        store.put(K, rollout_output(4), inputs=rollout_input(6))
    assert K not in store


def test_verify_returns_the_record_of_a_good_entry_and_raises_for_a_damaged_one(store: RolloutStore) -> None:
    store.put(K, rollout_output(4), inputs=rollout_input(4))
    assert store.verify(K) == store.record(K)
    damage(store)
    with pytest.raises(CorruptEntryError):
        store.verify(K)


@pytest.mark.parametrize("dump", [pickle.dumps, cloudpickle.dumps], ids=["pickle", "cloudpickle"])
def test_a_store_can_be_pickled_with_all_its_settings(tmp_path: Path, dump: Any) -> None:
    with RolloutStore(tmp_path, background=True, max_disk="1GB", max_load_bytes="1MB", max_pending_bytes=5) as store:
        store.put(K, rollout_output(4))
        store.flush()
        store.prefetch(K)
        again = pickle.loads(dump(store))
        assert repr(again) == repr(store)
        assert again._arguments == store._arguments
        assert_same_batch(rollout_output(4), again.get(K))
        again.put(RolloutKey(2), rollout_output(4))
        again.close()
        assert store.keys() == [K, RolloutKey(2)]


def test_a_store_is_pickled_in_the_middle_of_a_dump(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    gate = threading.Event()
    fsync = os.fsync
    monkeypatch.setattr(os, "fsync", lambda fd: (gate.wait(20), fsync(fd))[1])
    store = RolloutStore(tmp_path, background=True)
    store.put(K, rollout_output(4))
    again = pickle.loads(pickle.dumps(store))
    assert K not in again
    again.flush()
    gate.set()
    store.close()
    assert K in again


def test_a_pickled_store_with_a_relative_path_is_the_same_folder_in_another_place(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Ray starts its workers in another folder."""
    monkeypatch.chdir(tmp_path)
    store = RolloutStore("run", background=False)
    store.put(K, rollout_output(4))
    dumped = pickle.dumps(store)
    (tmp_path / "elsewhere").mkdir()
    monkeypatch.chdir(tmp_path / "elsewhere")
    assert pickle.loads(dumped).keys() == [K]
    assert store.keys() == [K]


@pytest.mark.parametrize("form", ["{}", "file://{}", "{}/", "{}/../run"])
def test_a_local_folder_may_be_given_in_several_ways(tmp_path: Path, form: str) -> None:
    RolloutStore(tmp_path / "run", background=False).put(K, rollout_output(4))
    assert RolloutStore(form.format(tmp_path / "run")).keys() == [K]


def test_a_home_folder_is_expanded(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOME", str(tmp_path))
    RolloutStore("~/run", background=False).put(K, rollout_output(4))
    assert part_file(tmp_path / "run").exists()


def test_a_prefetched_entry_is_what_get_would_have_returned(store: RolloutStore) -> None:
    store.put(K, rollout_output(4, seed=1), inputs=rollout_input(4))
    store.prefetch(K)
    store.prefetch(K)
    assert_same_batch(rollout_output(4, seed=1), store.get(K))
    assert_same_batch(rollout_output(4, seed=1), store.get(K))
    store.prefetch(K)
    assert_same_batch(rollout_input(4), store.inputs(K))


def test_a_prefetched_entry_is_handed_out_once(store: RolloutStore) -> None:
    """A training modifies the batch it gets; the next load must not return those changes."""
    store.put(K, rollout_output(4, seed=1))
    store.prefetch(K)
    first = store.get(K)
    first.batch["responses"].zero_()
    first.meta_info.clear()
    assert_same_batch(rollout_output(4, seed=1), store.get(K))


def test_a_prefetched_entry_comes_from_memory(store: RolloutStore) -> None:
    store.put(K, rollout_output(4, seed=1))
    store.prefetch(K)
    wait_for_prefetch()
    damage(store)
    assert_same_batch(rollout_output(4, seed=1), store.get(K))
    with pytest.raises(CorruptEntryError):
        store.get(K)


def test_prefetch_decodes_everything_that_is_requested_later(
    store: RolloutStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    store.put(K, rollout_output(4, seed=1), inputs=rollout_input(4))
    expected = store.load(K).prompt_digests()
    store.prefetch(K, inputs=True)
    wait_for_prefetch()
    for method in ("output", "input", "prompt_digests"):
        monkeypatch.delattr(Reader, method)
    entry = store.load(K)
    assert_same_batch(rollout_output(4, seed=1), entry.batch())
    assert_same_batch(rollout_input(4), entry.inputs())
    assert entry.prompt_digests() == expected


def test_each_batch_of_an_entry_can_be_changed_without_the_others(store: RolloutStore) -> None:
    """This includes a prefetched batch: its columns may be added and removed."""
    store.put(K, rollout_output(4), inputs=rollout_input(4))
    store.prefetch(K, inputs=True)
    entry = store.load(K)
    for present in (entry.batch, entry.inputs):
        first = present()
        first.non_tensor_batch.clear()
        first.meta_info.clear()
    assert_same_batch(rollout_output(4), entry.batch())
    assert_same_batch(rollout_input(4), entry.inputs())


def test_a_process_that_ends_waits_for_what_is_loaded_ahead() -> None:
    """Python ends a thread that comes back from Arrow during shutdown, which may abort the process."""
    program = """
import sys, time
from verl_rollout_skip.key import RolloutKey
from verl_rollout_skip.store.prefetch import Prefetcher
Prefetcher().start(RolloutKey(1), lambda: (time.sleep(0.5), print("loaded")))
sys.exit(3)
"""
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True)
    assert (done.returncode, done.stdout, done.stderr) == (3, "loaded\n", "")


def test_prefetching_a_missing_or_damaged_entry_raises_at_get(store: RolloutStore) -> None:
    store.prefetch(K)
    with pytest.raises(EntryNotFoundError):
        store.get(K)
    store.put(K, rollout_output(4))
    damage(store)
    store.prefetch(K)
    with pytest.raises(CorruptEntryError):
        store.get(K)


def test_an_entry_that_came_after_its_prefetch_failed_is_found(store: RolloutStore) -> None:
    store.prefetch(K)
    RolloutStore(store.path, background=False).put(K, rollout_output(4))
    assert_same_batch(rollout_output(4), store.get(K))


def test_a_prefetched_entry_that_is_replaced_deleted_or_set_aside_is_not_handed_out(tmp_path: Path) -> None:
    for background in (False, True):
        store = RolloutStore(tmp_path / str(background), background=background)
        store.put(K, rollout_output(4, seed=1))
        store.prefetch(K)
        store.put(K, rollout_output(4, seed=2), replace=True)
        assert_same_batch(rollout_output(4, seed=2), store.get(K))
        store.prefetch(K)
        store.delete(K)
        with pytest.raises(EntryNotFoundError):
            store.get(K)
        store.put(K, rollout_output(4, seed=3))
        store.flush()
        store.prefetch(K)
        wait_for_prefetch()
        damage(store)
        store.set_aside(K)
        with pytest.raises(EntryNotFoundError):
            store.get(K)
        store.close()


def test_one_entry_is_held_ahead_at_most(store: RolloutStore) -> None:
    for step in range(4):
        store.put(RolloutKey(step), rollout_output(4, seed=step))
    for step in range(4):
        store.prefetch(RolloutKey(step))
    for step in (3, 0, 1, 2):
        assert_same_batch(rollout_output(4, seed=step), store.get(RolloutKey(step)))


def test_prefetch_waits_for_the_dump_of_its_key(tmp_path: Path) -> None:
    with RolloutStore(tmp_path, background=True) as store:
        store.put(K, rollout_output(4, seed=1))
        store.prefetch(K)
        assert_same_batch(rollout_output(4, seed=1), store.get(K))


def test_a_run_folder_does_not_grow_past_max_disk(tmp_path: Path) -> None:
    store = RolloutStore(tmp_path, background=False, max_disk=20_000)
    with pytest.raises(DiskLimitError, match=r"max_disk of 20\.0 KB") as caught:
        put_without_end(store)
    assert isinstance(caught.value, DumpError)
    assert str(tmp_path) in str(caught.value)
    size = sum(path.stat().st_size for path in tmp_path.rglob("*") if path.is_file())
    assert 10_000 < size <= 20_000
    assert not list(tmp_path.rglob(".*")), "the refused rollout left something behind"
    written = store.keys()
    store.delete(written[0])
    store.put(written[0], rollout_output(4, seed=written[0].step))
    for key in store:
        store.verify(key)


def put_without_end(store: RolloutStore) -> None:
    for step in range(100):
        store.put(RolloutKey(step), rollout_output(4, seed=step))


def test_max_disk_counts_what_others_have_written(tmp_path: Path) -> None:
    other = RolloutStore(tmp_path, background=False)
    store = RolloutStore(tmp_path, background=False, max_disk="30KB")
    store.put(RolloutKey(1000), rollout_output(4))
    for step in range(8):
        other.put(RolloutKey(step), rollout_output(4, seed=step))
    with pytest.raises(DiskLimitError):
        put_without_end(RolloutStore(tmp_path, background=False, max_disk="30KB"))


def test_max_disk_in_the_background_is_raised_by_a_later_call(tmp_path: Path) -> None:
    with RolloutStore(tmp_path, background=True, max_disk=1000) as store:
        store.put(K, rollout_output(4))
        with pytest.raises(DumpError, match="max_disk") as caught:
            store.flush()
        assert isinstance(caught.value.failures[0][1], DiskLimitError)
    assert store.keys() == []


def test_the_same_rollout_again_is_not_an_error_when_the_disk_limit_is_reached(tmp_path: Path) -> None:
    """A run that is resumed with a full folder continues, because nothing new is written."""
    RolloutStore(tmp_path, background=False).put(K, rollout_output(4))
    store = RolloutStore(tmp_path, background=False, max_disk=100)
    store.put(K, rollout_output(4))


@pytest.mark.parametrize("value", ["lots", "-1", "1 PiBs", True, "", "GB"])
@pytest.mark.parametrize("name", ["max_disk", "max_load_bytes", "max_pending_bytes"])
def test_a_size_that_is_none_is_refused_with_the_name_of_its_setting(tmp_path: Path, name: str, value: Any) -> None:
    with pytest.raises(ValueError, match=f"{name} is .*200GB"):
        RolloutStore(tmp_path, **{name: value})


def test_an_entry_larger_than_allowed_is_not_loaded(tmp_path: Path) -> None:
    with RolloutStore(tmp_path) as store:
        store.put(K, TensorDict({"zeros": torch.zeros(100, 100_000)}, batch_size=[100]))
    small = RolloutStore(tmp_path, max_load_bytes="1MB")
    with pytest.raises(EntryTooLargeError, match=r"\d+\.\d MB of memory and 1\.0 MB are allowed.*max_load_bytes"):
        small.get(K)
    assert small.record(K).rows == 100
    assert RolloutStore(tmp_path).get(K)["zeros"].shape == (100, 100_000)


def test_a_file_is_read_whole_even_if_the_system_hands_it_over_in_pieces(
    store: RolloutStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One call reads two gigabytes at most, and less from some network file systems; here it is a thousand bytes."""

    class InPieces(io.FileIO):
        def read(self, size: int = -1) -> bytes:
            return super().read(min(size, 1000) if size >= 0 else 1000)

        def readinto(self, buffer: Any) -> int:
            return super().readinto(memoryview(buffer)[:1000])

    store.put(K, rollout_output(64))
    assert store.record(K).bytes > 5000
    monkeypatch.setattr(io, "FileIO", InPieces)
    assert_same_batch(rollout_output(64), store.get(K))


def test_prune_keeps_what_may_still_be_needed_and_says_what_it_removed(store: RolloutStore) -> None:
    store.put(K, rollout_output(4))
    folder = Path(store.path) / "step_000001"
    part = folder / f"gen_007.{'0' * 32}.parquet"
    elsewhere = folder / ".tmp-another-machine-1-abcdef"
    for path in (part, elsewhere):
        path.write_bytes(b"{}")
    assert store.prune() == [], "both may belong to an active writer"
    yesterday = time.time() - 2 * 86400
    for path in (part, elsewhere):
        os.utime(path, (yesterday, yesterday))
    assert sorted(store.prune()) == sorted([str(part), str(elsewhere)])
    assert store.prune() == []
    assert_same_batch(rollout_output(4), store.get(K))


def test_prune_keeps_a_commit_that_takes_longer_than_the_given_age(store: RolloutStore) -> None:
    store.put(K, rollout_output(4))
    folder = Path(store.path) / "step_000001"
    part = folder / f"gen_000.{'0' * 32}.parquet"
    with store._storage.stage("step_000001"):  # open for the whole commit
        part.write_bytes(b"{}")
        for path in folder.iterdir():
            os.utime(path, (time.time() - 300,) * 2)
        assert store.prune(older_than_s=600) == []
    assert store.prune(older_than_s=60) == [str(part)]


def test_a_rollout_that_was_replaced_after_it_was_prefetched_is_loaded_again(store: RolloutStore) -> None:
    store.put(K, rollout_output(4, seed=1))
    store.prefetch(K)
    wait_for_prefetch()
    RolloutStore(store.path, background=False).put(K, rollout_output(4, seed=2), replace=True)
    assert_same_batch(rollout_output(4, seed=2), store.get(K))
    store.prefetch(K)
    wait_for_prefetch()
    RolloutStore(store.path).delete(K)
    with pytest.raises(EntryNotFoundError):
        store.get(K)


def test_a_machine_without_memory_does_not_make_an_entry_corrupt(
    store: RolloutStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    store.put(K, rollout_output(4))

    def no_memory(*arguments: Any) -> Any:
        raise OSError(errno.ENOMEM, os.strerror(errno.ENOMEM))

    with monkeypatch.context() as short:
        short.setattr("verl_rollout_skip.store.codec.part.read_columns", no_memory)
        with pytest.raises(EntryTooLargeError, match=r"Cannot allocate memory.*not damaged"):
            store.get(K)
        with pytest.raises(EntryTooLargeError):
            store.set_aside(K)
    assert_same_batch(rollout_output(4), store.get(K))


def test_prune_removes_an_old_temporary_file_even_if_its_process_id_is_in_use_again(store: RolloutStore) -> None:
    """Process IDs are reused, and no dump takes two days."""
    store.put(K, rollout_output(4))
    folder = Path(store.path) / "step_000001"
    staged = LocalStorage(store.path).stage("step_000001")
    (name,) = [name for name in os.listdir(folder) if name.startswith(".tmp-")]
    assert store.prune() == []
    yesterday = time.time() - 2 * 86400
    os.utime(folder / name, (yesterday, yesterday))
    assert store.prune() == [str(folder / name)]
    staged.discard()


def test_importing_the_package_loads_neither_torch_nor_verl() -> None:
    script = "import sys, verl_rollout_skip; print(sorted({'torch', 'verl', 'ray', 'pyarrow'} & set(sys.modules)))"
    found = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True)
    assert found.stdout.strip() == "[]"


def test_the_first_load_of_a_process_imports_nothing(store: RolloutStore) -> None:
    """pyarrow imports pandas for some conversions: a quarter of a second in the first load."""
    store.put(K, rollout_output(4), inputs=rollout_input(4))
    script = f"""
import sys
from verl import DataProto
from verl_rollout_skip import RolloutKey, RolloutStore
store = RolloutStore({store.path!r}, background=False)
before = set(sys.modules)
entry = store.load(RolloutKey(1))
entry.batch(), entry.inputs()
print(sorted(set(sys.modules) - before))
"""
    found = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True)
    assert found.stdout.splitlines()[-1] == "[]"
