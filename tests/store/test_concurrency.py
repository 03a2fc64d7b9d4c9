"""Many processes and threads use one run folder at the same time: every entry is complete, and one writer wins."""

from __future__ import annotations

import json
import random
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from tensordict import TensorDict
from verl import DataProto

from tests.batches import assert_same_batch, rollout_output
from tests.disks import Disk
from tests.entry_files import part_files
from tests.environment import Forked, Report, leftovers
from verl_rollout_skip import RolloutKey, RolloutStore
from verl_rollout_skip.errors import EntryExistsError, EntryNotFoundError, StoreError
from verl_rollout_skip.store import codec, commit, committed
from verl_rollout_skip.store.reader import StoreReader
from verl_rollout_skip.store.storage import FileInfo
from verl_rollout_skip.store.storage.local import LocalStorage

PROCESSES = 8
K = RolloutKey(1)


def rollout(seed: int) -> DataProto:
    batch = rollout_output(rows=4, seed=seed)
    batch.meta_info["seed"] = seed
    return batch


def check(batch: DataProto) -> int:
    """The seed of a rollout. Asserts that the rollout is bit-identical."""
    seed = batch.meta_info["seed"]
    assert_same_batch(rollout(seed), batch)
    return seed


def all_at_once(
    fork: Callable[..., Forked], folder: Path, work: Callable[[RolloutStore, int], Any], processes: int = PROCESSES
) -> list[Any]:
    """Run ``work(store, number)`` in several processes that start at the same moment, and return their results."""
    begin = time.time() + 0.5

    def child(report: Report, number: int) -> None:
        store = RolloutStore(folder, background=number % 2 == 1)
        time.sleep(max(begin - time.time(), 0))
        result = work(store, number)
        store.close()
        report(json.dumps(result))

    children = [fork(child, number) for number in range(processes)]
    results = []
    for one in children:
        lines = one.lines()
        assert one.exit_code == 0
        results.append(json.loads(lines[-1]))
    return results


def check_everything(folder: Path) -> RolloutStore:
    """Assert that every entry is valid, and that pruning leaves no leftover files."""
    store = RolloutStore(folder, background=False)
    for key in store:
        assert store.verify(key).key == key
        assert store.record(key).info == {"seed": check(store.get(key))}
    assert not list(folder.rglob(".tmp-*")), "a writer that ended normally left temporary files"
    store.prune(older_than_s=0)
    assert leftovers(folder) == []
    for key in store:
        assert store.record(key).info == {"seed": check(store.get(key))}
    return store


def put_and_wait(store: RolloutStore, key: RolloutKey, seed: int, replace: bool = False) -> bool:
    """Put a rollout, and return whether it was accepted. In the background, ``flush`` raises the refusal."""
    try:
        store.put(key, rollout(seed), info={"seed": seed}, replace=replace)
        store.flush()
    except EntryExistsError:
        return False
    except Exception as error:
        failures = getattr(error, "failures", ())
        if not failures or not all(isinstance(failure, EntryExistsError) for _, failure in failures):
            raise
        return False
    return True


def test_eight_processes_record_the_same_rollouts_without_errors(tmp_path: Path, fork: Callable[..., Forked]) -> None:
    """For example, a driver that was started twice."""

    def work(store: RolloutStore, number: int) -> list[bool]:
        return [put_and_wait(store, RolloutKey(step), seed=step) for step in range(6)]

    assert all_at_once(fork, tmp_path, work) == [[True] * 6] * PROCESSES
    store = check_everything(tmp_path)
    assert store.keys() == [RolloutKey(step) for step in range(6)]


def test_eight_processes_record_different_rollouts_and_exactly_one_wins_each_key(
    tmp_path: Path, fork: Callable[..., Forked]
) -> None:
    def work(store: RolloutStore, number: int) -> list[bool]:
        return [put_and_wait(store, RolloutKey(step), seed=100 * step + number) for step in range(6)]

    results = all_at_once(fork, tmp_path, work)
    store = check_everything(tmp_path)
    for step in range(6):
        winners = [number for number in range(PROCESSES) if results[number][step]]
        assert len(winners) == 1, f"step {step} was won by {winners}"
        assert check(store.get(RolloutKey(step))) == 100 * step + winners[0]


def test_eight_processes_record_different_keys(tmp_path: Path, fork: Callable[..., Forked]) -> None:
    def work(store: RolloutStore, number: int) -> None:
        for step in range(5):
            assert put_and_wait(store, RolloutKey(step, number), seed=10 * step + number)
            assert RolloutKey(step, number) in store

    all_at_once(fork, tmp_path, work)
    store = check_everything(tmp_path)
    assert len(store) == 5 * PROCESSES


def test_readers_see_complete_entries_while_others_write_and_replace(
    tmp_path: Path, fork: Callable[..., Forked]
) -> None:
    """Two processes write new keys, three keep replacing the same keys, and three keep reading."""
    shared = [RolloutKey(0, gen_batch) for gen_batch in range(3)]
    with RolloutStore(tmp_path) as store:
        for key in shared:
            store.put(key, rollout(0), info={"seed": 0})

    def work(store: RolloutStore, number: int) -> int:
        end = time.time() + 4
        chance = random.Random(number)
        done = 0
        while time.time() < end or done < 5:  # at least five times, even on a busy machine
            done += 1
            if number < 2:
                assert put_and_wait(store, RolloutKey(done, number), seed=done % 5)
            elif number < 5:
                assert put_and_wait(store, chance.choice(shared), seed=10 * number + done % 5, replace=True)
            else:
                for key in [*shared, *store.keys()[-4:]]:
                    assert key in store, "an entry disappeared while it was being replaced"
                    check(store.get(key))
                    assert store.record(key).rows == 4
        return done

    counts = all_at_once(fork, tmp_path, work)
    assert min(counts) >= 5, counts
    store = check_everything(tmp_path)
    assert set(shared) <= set(store)
    assert len(store) == 3 + sum(counts[:2])


def test_eight_processes_replace_one_entry(tmp_path: Path, fork: Callable[..., Forked]) -> None:
    with RolloutStore(tmp_path) as store:
        store.put(K, rollout(99), info={"seed": 99})

    def work(store: RolloutStore, number: int) -> None:
        for turn in range(10):
            assert put_and_wait(store, K, seed=10 * number + turn, replace=True)
            check(store.get(K))

    all_at_once(fork, tmp_path, work)
    store = check_everything(tmp_path)
    assert check(store.get(K)) in range(10 * PROCESSES)


def test_processes_that_delete_and_record_the_same_key_never_break_it(
    tmp_path: Path, fork: Callable[..., Forked]
) -> None:
    """In any order, the key is free or has a complete rollout."""

    def work(store: RolloutStore, number: int) -> None:
        for turn in range(25):
            if number % 4 == 0:
                try:
                    store.delete(K)
                except EntryNotFoundError:
                    pass
            else:
                put_and_wait(store, K, seed=10 * number + turn % 10)
            try:
                check(store.get(K))
            except EntryNotFoundError:
                pass

    all_at_once(fork, tmp_path, work)
    check_everything(tmp_path)


def numbered(number: int) -> TensorDict:
    """A rollout of a few kilobytes with its number in every row."""
    values = {"number": torch.full((6, 8), number), "noise": torch.rand(6, 40)}
    return TensorDict({**values, "again": torch.full((6,), float(number))}, batch_size=[6])


def test_a_reader_that_races_with_replace_never_sees_a_missing_or_mixed_entry(
    small_disk: Callable[..., Disk], fork: Callable[..., Forked]
) -> None:
    """Another process replaces an entry of three parts a thousand times while this one keeps reading it."""
    folder = small_disk(16 << 20).path / "run"
    part_bytes = 600
    with RolloutStore(folder, part_bytes=part_bytes) as store:
        store.put(K, numbered(0), info={"number": 0})
    assert len(store.record(K).parts) == 3

    def work(report: Report) -> None:
        writer = RolloutStore(folder, background=False, part_bytes=part_bytes)
        for number in range(1, 1001):
            writer.put(K, numbered(number), info={"number": number}, replace=True)
        (folder / "done").touch()

    child = fork(work)
    seen = [0]
    reader = StoreReader.at(str(folder))
    while not (folder / "done").exists():
        assert K in store
        entry = store.load(K)
        numbers = {*entry.batch()["number"].unique().tolist(), *map(int, entry.batch()["again"].tolist())}
        assert numbers == {entry.record.info["number"]}, "rows of several rollouts"
        columns = reader.entry(K)
        again = columns.numbers("again")
        assert again is not None
        assert {*again} == {columns.record.info["number"]}
        seen.append(entry.record.info["number"])
    assert child.exit_code == 0
    assert seen == sorted(seen)
    assert len(set(seen)) > 20, "the reader saw too few rollouts to prove anything"
    assert store.record(K).info == {"number": 1000}
    assert leftovers(folder) == []


@pytest.mark.parametrize("same", [False, True], ids=["another rollout", "the same rollout"])
@pytest.mark.parametrize("taken", [False, True], ids=["first put", "replace"])
def test_parts_of_an_active_writer_are_not_removed_by_others(
    tmp_path: Path, fork: Callable[..., Forked], same: bool, taken: bool
) -> None:
    """Another process waits between its parts and its record while this one commits, deletes and prunes."""
    resume = tmp_path / "resume"
    folder = tmp_path / "run"
    store = RolloutStore(folder, background=False)
    if taken:
        store.put(K, rollout(1 if same else 2), info={"seed": 1 if same else 2})

    def work(report: Report) -> None:
        def wait(call: str, name: str) -> None:
            if call == "publish" and name.endswith(".json"):
                report("written")
                while not resume.exists():
                    time.sleep(0.01)

        storage = InterferingStorage(folder, wait)
        commit.commit(storage, K, codec.prepare(rollout(1)), {"seed": 1}, replace=True)

    before = set(part_files(folder))
    child = fork(work)
    child.wait_for("written")
    (part,) = set(part_files(folder)) - before
    seed = 1 if same else 3
    store.put(K, rollout(seed), info={"seed": seed}, replace=True)
    assert part.exists()
    store.prune()
    assert part.exists()
    store.delete(K)
    store.put(K, rollout(seed), info={"seed": seed})
    with pytest.raises(EntryExistsError):
        store.put(K, rollout(4))
    assert part.exists()
    assert check(store.get(K)) == seed
    resume.touch()
    assert child.exit_code == 0
    assert store.record(K).info == {"seed": 1}
    assert part_files(folder) == [part]
    assert check(store.get(K)) == 1
    assert leftovers(folder) == []


def test_no_two_commits_write_the_same_part(tmp_path: Path) -> None:
    """Otherwise one could remove a part as a leftover that the other is about to list."""
    store = RolloutStore(tmp_path, background=False)
    names = set()
    for _ in range(5):
        store.put(K, rollout(1), replace=True)
        names.add(store.record(K).parts[0].file)
    assert len(names) == 5


class InterferingStorage(LocalStorage):
    """A storage that calls a function before each of its methods, e.g. to act as another process."""

    def __init__(self, folder: Path, before: Callable[[str, str], None]) -> None:
        super().__init__(folder)
        self._before = before

    def publish(self, staged: Any, name: str, replace: bool = False) -> None:
        self._before("publish", name)
        super().publish(staged, name, replace)

    def rename(self, folder: str, seen: FileInfo, new: str) -> bool:
        self._before("rename", new)
        return super().rename(folder, seen, new)

    def delete(self, folder: str, file: str | FileInfo) -> bool:
        self._before("delete", file if isinstance(file, str) else file.name)
        return super().delete(folder, file)

    def read(self, folder: str, name: str, limit: int) -> bytes:
        self._before("read", name)
        return super().read(folder, name, limit)

    def stage(self, folder: str) -> Any:
        self._before("stage", "")
        return super().stage(folder)

    def info(self, folder: str, name: str) -> Any:
        self._before("info", name)
        return super().info(folder, name)

    def files(self, folder: str) -> Any:
        self._before("files", "")
        return super().files(folder)


def put_through(storage: Any, seed: int, replace: bool) -> None:
    try:
        commit.commit(storage, K, codec.prepare(rollout(seed)), {"seed": seed}, replace)
    except EntryExistsError:
        assert not replace


def delete_through(storage: Any) -> None:
    try:
        commit.delete(storage, K)
    except EntryNotFoundError:
        pass


def replace_twice(storage: Any) -> None:
    put_through(storage, 5, replace=True)
    put_through(storage, 6, replace=True)


def delete_and_put(storage: Any) -> None:
    delete_through(storage)
    put_through(storage, 7, replace=False)


ACTIONS: dict[str, Callable[[Any], Any]] = {
    "first put": lambda storage: put_through(storage, 1, replace=False),
    "put on a taken key": lambda storage: put_through(storage, 1, replace=False),
    "replace": lambda storage: put_through(storage, 2, replace=True),
    "delete": delete_through,
    "get": lambda storage: committed.load(storage, K, 1 << 40),
}
INTERFERENCE: dict[str, Callable[[Any], Any]] = {
    "same": lambda storage: put_through(storage, 1, replace=False),
    "other": lambda storage: put_through(storage, 3, replace=False),
    "replace": lambda storage: put_through(storage, 4, replace=True),
    "replace twice": replace_twice,
    "delete": delete_through,
    "delete and put": delete_and_put,
    "prune": lambda storage: RolloutStore(storage.root).prune(),
}


@pytest.mark.parametrize("interference", INTERFERENCE)
@pytest.mark.parametrize("action", ACTIONS)
def test_an_entry_stays_complete_if_another_process_acts_between_any_two_calls(
    tmp_path: Path, action: str, interference: str
) -> None:
    """Runs another action before each storage call of the first one in turn."""
    number = 0
    while True:
        number += 1
        folder = tmp_path / str(number)
        if action != "first put":
            put_through(LocalStorage(folder), 0, replace=False)
        calls = 0

        def interfere(call: str, name: str, folder: Path = folder, number: int = number) -> None:
            nonlocal calls
            calls += 1
            if calls == number:
                INTERFERENCE[interference](LocalStorage(folder))

        try:
            ACTIONS[action](InterferingStorage(folder, interfere))
        except EntryNotFoundError:
            assert action == "get"
            assert "delete" in interference
        store = RolloutStore(folder, background=False)
        for _ in range(2):
            if K in store:
                assert store.record(K).info == {"seed": check(store.get(K))}
            else:
                assert "delete" in (action, *interference.split()), "the entry was lost"
            store.prune(older_than_s=0)
        assert leftovers(folder) == []
        if calls < number:
            break
    assert number > 2


@pytest.mark.parametrize("interference", ["replace", "replace twice", "delete", "delete and put", "prune"])
def test_setting_aside_never_takes_an_entry_that_was_recorded_again(tmp_path: Path, interference: str) -> None:
    expected = {"replace": 4, "replace twice": 6, "delete and put": 7}.get(interference)
    outcomes = set()
    for number in range(1, 50):
        folder = tmp_path / str(number)
        put_through(LocalStorage(folder), 0, replace=False)
        (part,) = part_files(folder)
        part.write_bytes(b"damaged")
        calls = 0

        def interfere(call: str, name: str, folder: Path = folder, number: int = number) -> None:
            nonlocal calls
            calls += 1
            if calls == number:
                INTERFERENCE[interference](LocalStorage(folder))

        storage = InterferingStorage(folder, interfere)
        try:
            commit.set_aside(storage, K, check=lambda storage=storage: committed.load(storage, K, 1 << 40))
            outcomes.add("set aside")
        except EntryNotFoundError:
            outcomes.add("gone")
        except StoreError:
            outcomes.add("left alone")
        store = RolloutStore(folder, background=False)
        if calls < number:
            assert K not in store
            break
        assert (K in store) == (expected is not None)
        if expected is not None:
            assert store.record(K).info == {"seed": check(store.get(K))} == {"seed": expected}
        store.prune(older_than_s=0)
        assert leftovers(folder) == []
    assert calls < number
    assert outcomes == {"set aside", "left alone"} if expected else {"set aside"} <= outcomes


def test_eight_threads_share_one_store(tmp_path: Path) -> None:
    errors: list[BaseException] = []
    with RolloutStore(tmp_path, background=True) as store:
        barrier = threading.Barrier(8)

        def work(number: int) -> None:
            try:
                barrier.wait()
                for step in range(6):
                    own = RolloutKey(step, number)
                    store.put(own, rollout(number), info={"seed": number})
                    store.put(RolloutKey(step, 100), rollout(step), info={"seed": step})
                    store.prefetch(own)
                    assert check(store.get(own)) == number
                    assert check(store.get(RolloutKey(step, 100))) == step
                    assert store.record(own).info == {"seed": number}
            except BaseException as error:
                errors.append(error)

        threads = [threading.Thread(target=work, args=(number,)) for number in range(8)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    assert errors == []
    assert len(check_everything(tmp_path)) == 6 * 9


def test_eight_threads_with_separate_stores_race_for_one_key(tmp_path: Path) -> None:
    for turn in range(5):
        key = RolloutKey(turn)
        won: list[int] = []
        barrier = threading.Barrier(8)

        def work(number: int, key: RolloutKey = key, won: list[int] = won, barrier: Any = barrier) -> None:
            store = RolloutStore(tmp_path, background=False)
            barrier.wait()
            if put_and_wait(store, key, seed=number):
                won.append(number)

        threads = [threading.Thread(target=work, args=(number,)) for number in range(8)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert len(won) == 1
        assert check(RolloutStore(tmp_path).get(key)) == won[0]
    check_everything(tmp_path)
