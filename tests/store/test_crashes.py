"""Kills writers at any moment, and ends processes without ``close``.

Every test asserts that committed rollouts are still there bit for bit, that no partial entry is visible, that the next
writer can continue, and that ``prune`` removes the leftover files and nothing else.
"""

from __future__ import annotations

import itertools
import os
import random
import shutil
import signal
import subprocess
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
from verl import DataProto

from tests.batches import assert_same_batch, rollout_output
from tests.disks import Disk
from tests.entry_files import part_file, part_files
from tests.environment import Forked, Report, leftovers
from verl_rollout_skip import RolloutKey, RolloutStore
from verl_rollout_skip.errors import CorruptEntryError, EntryExistsError, EntryNotFoundError
from verl_rollout_skip.store.storage.local import LocalStorage

# The calls that change names or make bytes durable. Between two of them, nothing changes for a reader.
SYSTEM_CALLS = ("mkdir", "fsync", "link", "rename", "unlink")


def rollout(seed: int) -> DataProto:
    batch = rollout_output(rows=4, seed=seed)
    batch.meta_info["seed"] = seed
    return batch


def seed_of(store: RolloutStore, key: RolloutKey) -> int:
    """The seed of the rollout under a key. Asserts that the rollout is bit-identical."""
    found = store.get(key)
    assert_same_batch(rollout(found.meta_info["seed"]), found)
    return found.meta_info["seed"]


class Expectation:
    """Tracks which rollouts may be found under each key, based on the reports of a killed writer."""

    def __init__(self) -> None:
        self._possible: dict[RolloutKey, set[int]] = {}
        self._certain: set[RolloutKey] = set()
        self._unflushed: dict[RolloutKey, int] = {}

    def hear(self, line: str) -> None:
        event, *numbers = line.split()
        if event == "flushed":
            for key, seed in self._unflushed.items():
                self._settle(key, seed)
            self._unflushed = {}
            return
        if event == "ready":
            return
        step, gen_batch, seed, replace = map(int, numbers)
        key = RolloutKey(step, gen_batch)
        if event == "begin" and (replace or key not in self._certain):
            self._possible.setdefault(key, set()).add(seed)
            self._unflushed[key] = seed
        elif event == "done":
            self._settle(key, seed)
        elif event == "refused":
            self._possible.get(key, set()).discard(seed)

    def check(self, store: RolloutStore) -> None:
        keys = store.keys()
        assert keys == sorted(set(keys))
        assert self._certain <= set(keys), "a committed rollout was lost"
        for key in set(self._possible) | set(keys):
            assert (key in store) == (key in keys)
            if key not in keys:
                with pytest.raises(EntryNotFoundError):
                    store.get(key)
                continue
            seed = seed_of(store, key)
            assert seed in self._possible[key], f"{key} has rollout {seed}, which was not written last"
            assert store.record(key).info == {"seed": seed}
            self._settle(key, seed)

    def forget_unfinished(self) -> None:
        self._unflushed = {}

    def _settle(self, key: RolloutKey, seed: int) -> None:
        self._possible[key] = {seed}
        self._certain.add(key)


def keep_writing(report: Report, folder: Path, first_seed: int, background: bool) -> None:
    """Keep recording rollouts under a few keys until killed."""
    store = RolloutStore(folder, background=background)
    choice = random.Random(first_seed)
    report("ready")
    for seed in range(first_seed, first_seed + 10_000):
        key = RolloutKey(choice.randrange(2), choice.randrange(2))
        replace = background or choice.random() < 0.6
        what = f"{key.step} {key.gen_batch} {seed} {int(replace)}"
        report(f"begin {what}")
        try:
            store.put(key, rollout(seed), info={"seed": seed}, replace=replace)
        except EntryExistsError:
            report(f"refused {what}")
            continue
        if not background:
            report(f"done {what}")
        elif seed % 4 == 0:
            store.flush()
            report("flushed")


@pytest.mark.parametrize("kills", [10, pytest.param(200, marks=pytest.mark.slow)])
def test_a_writer_killed_at_a_random_moment_loses_nothing_that_was_committed(
    tmp_path: Path, fork: Callable[..., Forked], kills: int
) -> None:
    """Many kills of one run folder, with ordinary puts, replacing puts and background puts."""
    store = RolloutStore(tmp_path, background=False)
    expected = Expectation()
    moment = random.Random(1)
    interrupted = 0
    for number in range(kills):
        child = fork(keep_writing, tmp_path, number * 10_000, number % 2 == 1)
        child.wait_for("ready")
        time.sleep(moment.uniform(0.0, 0.06))
        for line in child.kill():
            expected.hear(line)
        expected.forget_unfinished()
        assert child.exit_code == -signal.SIGKILL
        interrupted += bool(leftovers(tmp_path))
        expected.check(store)
        if number % 5 == 4:
            store.prune(older_than_s=0)
            expected.check(store)
    assert interrupted >= kills // 6, "too few kills interrupted a commit, so the test proves little"

    store.prune(older_than_s=0)
    expected.check(store)
    for key in store:
        store.put(key, rollout(7), replace=True)
        assert seed_of(store, key) == 7
    store.prune(older_than_s=0)
    assert leftovers(tmp_path) == []


K = RolloutKey(1)
NEIGHBOUR = RolloutKey(1, 1)
NEXT_STEP = RolloutKey(2)
OLD, NEW, NEXT, DAMAGED = 100, 200, 300, -1


def put_first(store: RolloutStore) -> None:
    store.put(K, rollout(NEW))
    store.flush()


def replace_old(store: RolloutStore) -> None:
    store.put(K, rollout(NEW), replace=True)
    store.flush()


def record_into_a_new_folder(store: RolloutStore) -> None:
    store.put(NEXT_STEP, rollout(NEW))


def set_aside(store: RolloutStore) -> None:
    store.set_aside(K)


def delete(store: RolloutStore) -> None:
    store.delete(K)


def prune(store: RolloutStore) -> None:
    store.prune(older_than_s=0)


@dataclass(frozen=True)
class Story:
    """An action, the rollout under the key before it, and the rollouts allowed under the key afterwards."""

    act: Callable[[RolloutStore], None]
    before: int | None
    allowed: frozenset[int | None]
    background: bool = False
    part_bytes: int = 1 << 30


STORIES = {
    "first put": Story(put_first, None, frozenset({None, NEW})),
    "first put in the background": Story(put_first, None, frozenset({None, NEW}), background=True),
    "replace": Story(replace_old, OLD, frozenset({OLD, NEW})),
    "replace in the background": Story(replace_old, OLD, frozenset({OLD, NEW}), background=True),
    "first put of several parts": Story(put_first, None, frozenset({None, NEW}), part_bytes=700),
    "replace several parts": Story(replace_old, OLD, frozenset({OLD, NEW}), part_bytes=700),
    "replace a damaged entry": Story(replace_old, DAMAGED, frozenset({DAMAGED, NEW})),
    "new step": Story(record_into_a_new_folder, OLD, frozenset({OLD})),
    "delete": Story(delete, OLD, frozenset({OLD, None})),
    "delete several parts": Story(delete, OLD, frozenset({OLD, None}), part_bytes=700),
    "set aside": Story(set_aside, DAMAGED, frozenset({DAMAGED, None})),
    "prune": Story(prune, OLD, frozenset({OLD})),
}


def die_at(number: int) -> None:
    """Kill this process just before its n-th call that changes the file system."""
    calls = itertools.count(1)

    def deadly(real: Callable[..., Any]) -> Callable[..., Any]:
        def call(*arguments: Any, **options: Any) -> Any:
            if next(calls) == number:
                os.kill(os.getpid(), signal.SIGKILL)
            return real(*arguments, **options)

        return call

    for name in SYSTEM_CALLS:
        setattr(os, name, deadly(getattr(os, name)))


@pytest.mark.parametrize("name", STORIES)
def test_a_process_killed_at_any_stage_leaves_the_old_entry_or_the_new_one(
    small_disk: Callable[..., Disk], fork: Callable[..., Forked], name: str
) -> None:
    """Kills the process before each of its file system calls in turn."""
    story = STORIES[name]
    # In memory, because there are hundreds of commits and nothing here depends on a real disk.
    disk = small_disk(64 << 20).path
    original = disk / "original"
    with RolloutStore(original, part_bytes=story.part_bytes) as store:
        store.put(NEIGHBOUR, rollout(1))
        if story.before is not None:
            store.put(K, rollout(OLD))
    if story.before == DAMAGED:
        part_file(original).write_bytes(b"damaged")
    if story.act is prune:
        make_leftovers(original, fork)

    def work(report: Report, folder: Path, number: int) -> None:
        store = RolloutStore(folder, background=story.background, part_bytes=story.part_bytes)
        die_at(number)
        story.act(store)

    seen: set[int | None] = set()
    for number in range(1, 200):
        folder = disk / str(number)
        shutil.copytree(original, folder)
        exit_code = fork(work, folder, number).exit_code
        seen.add(check_after_a_crash(folder, story.allowed))
        if exit_code == 0:
            break
        assert exit_code == -signal.SIGKILL
    assert exit_code == 0, "the action never completed"
    assert number > 3, "the process was killed too rarely to prove anything"
    assert seen == story.allowed, f"not every outcome occurred: {seen}"


def check_after_a_crash(folder: Path, allowed: frozenset[int | None]) -> int | None:
    """Assert that the entry is allowed, that ``prune`` does not change it, and that recording can continue."""
    store = RolloutStore(folder, background=False)

    def found() -> int | None:
        assert seed_of(store, NEIGHBOUR) == 1
        if NEXT_STEP in store:
            assert seed_of(store, NEXT_STEP) == NEW
        try:
            return seed_of(store, K)
        except EntryNotFoundError:
            assert K not in store
            return None
        except CorruptEntryError:
            return DAMAGED

    before, keys = found(), store.keys()
    assert before in allowed
    store.prune(older_than_s=0)
    assert found() == before, "prune changed an entry"
    assert store.keys() == keys
    assert leftovers(folder) == []

    for key in keys:
        store.put(key, rollout(NEXT), replace=True)
        assert seed_of(store, key) == NEXT
    store.prune(older_than_s=0)
    assert leftovers(folder) == []
    return before


def make_leftovers(folder: Path, fork: Callable[..., Forked]) -> None:
    """Leave a temporary file and a part of a killed process in a folder."""

    def work(report: Report) -> None:
        die_at(5)
        RolloutStore(folder, background=False).put(K, rollout(NEW), replace=True)

    assert fork(work).exit_code == -signal.SIGKILL
    assert {path.name[:5] for path in leftovers(folder)} == {".tmp-", "gen_0"}


def test_files_are_synced_before_they_are_named_and_folders_before_put_returns(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A test cannot crash the machine, but it can check the order of the calls that decide what survives."""
    log: list[tuple[str, str]] = []

    def full_path(name: Any, options: dict[str, Any], folder: str) -> str:
        base = options.get(folder)
        return os.path.join(os.readlink(f"/proc/self/fd/{base}") if base is not None else os.getcwd(), name)

    def watch(name: str, describe: Callable[..., list[tuple[str, str]]]) -> None:
        real = getattr(os, name)

        def call(*arguments: Any, **options: Any) -> Any:
            events = describe(arguments, options)
            result = real(*arguments, **options)
            log.extend(events)
            return result

        monkeypatch.setattr(os, name, call)

    def renamed(arguments: Any, options: dict[str, Any]) -> list[tuple[str, str]]:
        return [
            ("from", full_path(arguments[0], options, "src_dir_fd")),
            ("named", full_path(arguments[1], options, "dst_dir_fd")),
        ]

    watch("fsync", lambda arguments, _: [("synced", os.readlink(f"/proc/self/fd/{arguments[0]}"))])
    watch("mkdir", lambda arguments, options: [("named", full_path(arguments[0], options, "dir_fd"))])
    watch("link", renamed)
    watch("rename", renamed)

    store = RolloutStore(tmp_path / "runs" / "mine", background=False)
    for replace in (False, True):
        log.clear()
        store.put(K, rollout(NEW + replace), replace=replace)
        named = [index for index, (event, _) in enumerate(log) if event == "named"]
        assert any(path.endswith(".parquet") for _, path in log)
        for index in named:
            folder = os.path.dirname(log[index][1])
            assert ("synced", folder) in log[index:], f"the folder of {log[index][1]} was not synced"
        for index, (event, path) in enumerate(log):
            if event == "from" and os.path.basename(path).startswith(".tmp-"):
                assert ("synced", path) in log[:index], f"{path} was renamed before it was synced"


@pytest.mark.parametrize("taken", [False, True], ids=["first put", "replace"])
def test_a_crash_between_the_parts_and_the_record_shows_nothing_and_the_next_commit_cleans_up(
    tmp_path: Path, fork: Callable[..., Forked], taken: bool
) -> None:
    store = RolloutStore(tmp_path, background=False, part_bytes=300)
    if taken:
        store.put(K, rollout(OLD))
    before = set(part_files(tmp_path))

    def work(report: Report) -> None:
        publish = LocalStorage.publish

        def die(storage: LocalStorage, staged: Any, name: str, replace: bool = False) -> None:
            if name.endswith(".json"):
                os.kill(os.getpid(), signal.SIGKILL)
            publish(storage, staged, name, replace)

        LocalStorage.publish = die  # type: ignore[method-assign]
        RolloutStore(tmp_path, background=False, part_bytes=300).put(K, rollout(NEW), replace=taken)

    assert fork(work).exit_code == -signal.SIGKILL
    left = set(part_files(tmp_path)) - before
    assert len(left) > 1, "the rollout should have several parts"
    assert left <= set(leftovers(tmp_path))
    assert store.keys() == ([K] if taken else [])
    assert (K in store) == taken
    if taken:
        assert seed_of(store, K) == OLD
    store.put(K, rollout(NEXT), replace=taken)
    assert not left & set(part_files(tmp_path)), "the parts of the dead writer are still there"
    assert seed_of(store, K) == NEXT
    store.prune()
    assert leftovers(tmp_path) == []


ENDINGS = {"none": 0, "exception": 1, "dropped": 0, "fork": 0, "failing": 0}

# Each ending is a separate process whose interpreter shuts down normally. All are forked from one process that has
# imported torch, because the import takes longer than everything else.
WRITES_AND_ENDS = """
import os, sys, time
import torch
from tensordict import TensorDict
from verl_rollout_skip import RolloutKey, RolloutStore

folder, *endings = sys.argv[1:]
children = {}
for ending in endings:
    pid = os.fork()
    if pid == 0:
        break
    children[pid] = ending
else:
    while children:
        pid, status = os.wait()
        print(children.pop(pid), os.waitstatus_to_exitcode(status), sep="=", flush=True)
    sys.exit()

os.dup2(os.open(f"{folder}/{ending}.log", os.O_WRONLY | os.O_CREAT), 2)
fsync = os.fsync
os.fsync = lambda fd: (time.sleep(0.05), fsync(fd))[1]  # still busy when the script ends
store = RolloutStore(f"{folder}/{ending}", background=True)
for step in range(3):
    store.put(RolloutKey(step), TensorDict({"x": torch.full((3,), step)}, batch_size=[3]))
assert len(store) < 3
if ending == "exception":
    raise RuntimeError("the training broke")
if ending == "dropped":
    del store
if ending == "fork":
    pid = os.fork()
    if pid == 0:
        sys.exit(7)  # the exit handlers run in the child too
    assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 7
if ending == "failing":
    os.fsync = None
"""


def test_queued_dumps_are_written_when_the_interpreter_exits_without_close(
    tmp_path: Path, python: Callable[..., subprocess.Popen[str]]
) -> None:
    output, errors = python(WRITES_AND_ENDS, tmp_path, *ENDINGS).communicate(timeout=60)
    assert sorted(output.split("\n")) == sorted(["", *(f"{ending}={code}" for ending, code in ENDINGS.items())]), errors
    for ending in ENDINGS:
        log = (tmp_path / f"{ending}.log").read_text()
        store = RolloutStore(tmp_path / ending)
        if ending == "failing":
            assert "was not written" in log, "a dump that failed at exit was not logged"
            continue
        assert store.keys() == [RolloutKey(step) for step in range(3)], f"{ending}: {log}"
        for key in store:
            assert store.get(key)["x"].tolist() == [key.step] * 3
        assert leftovers(tmp_path / ending) == []
        assert ("the training broke" in log) == (ending == "exception")
        assert "was not written" not in log


def test_a_forked_child_neither_hangs_nor_writes_the_queue_of_its_parent(
    tmp_path: Path, fork: Callable[..., Forked], monkeypatch: pytest.MonkeyPatch
) -> None:
    """A DataLoader forks its workers while a rollout is being written."""
    gate = threading.Event()
    fsync = os.fsync
    monkeypatch.setattr(os, "fsync", lambda fd: (gate.wait(30), fsync(fd))[1])
    store = RolloutStore(tmp_path, background=True)
    store.put(K, rollout(OLD))

    def child(report: Report) -> None:
        monkeypatch.setattr(os, "fsync", fsync)
        with pytest.raises(EntryNotFoundError):
            store.get(K)
        store.flush()
        store.put(RolloutKey(2), rollout(NEW))
        store.flush()
        assert seed_of(store, RolloutKey(2)) == NEW
        store.close()
        report("closed")

    children = [fork(child) for _ in range(3)]
    for one in children:
        one.wait_for("closed")
        assert one.exit_code == 0
    assert K not in store
    gate.set()
    store.close()
    assert seed_of(store, K) == OLD
    assert store.keys() == [K, RolloutKey(2)]
