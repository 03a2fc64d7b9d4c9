"""Disks that are full, slow, failing or read-only: a named error, no lost entries, no leftover files."""

from __future__ import annotations

import errno
import itertools
import os
import resource
import threading
import time
import weakref
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from tensordict import TensorDict

from tests.batches import assert_same_batch, rollout_output
from tests.disks import Disk
from tests.environment import Forked, Report, leftovers
from tests.trainings import Engine, Training, inputs_of
from verl_rollout_skip import RolloutKey, RolloutStore
from verl_rollout_skip.errors import DumpError, EntryExistsError
from verl_rollout_skip.store import codec, commit
from verl_rollout_skip.store.storage import FileInfo
from verl_rollout_skip.store.storage.local import LocalStorage

K = RolloutKey(1)
PAGE = 4096


def noise(size: int, seed: int = 0) -> TensorDict:
    """A rollout that takes about this many bytes on disk, because it cannot be compressed."""
    generator = torch.Generator().manual_seed(seed)
    values = torch.randint(0, 256, (4, size // 4), dtype=torch.uint8, generator=generator)
    return TensorDict({"noise": values}, batch_size=[4])


def record_without_end(store: RolloutStore, size: int) -> None:
    for step in itertools.count():
        store.put(RolloutKey(step), noise(size, seed=step))


def test_a_full_disk_is_named_with_what_is_free_and_recording_continues_when_there_is_room(
    small_disk: Callable[..., Disk],
) -> None:
    disk = small_disk(2 << 20)
    store = RolloutStore(disk.path / "run", background=False)
    with pytest.raises(DumpError) as caught:
        record_without_end(store, 300_000)
    committed = store.keys()
    assert 2 <= len(committed) <= 7
    message = str(caught.value)
    assert f"step {len(committed)}, generation batch 0 was not written" in message
    assert str(disk.path) in message
    assert "No space left on device" in message
    assert "The disk has" in message

    assert committed == [RolloutKey(step) for step in range(len(committed))]
    for key in committed:
        assert_same_batch(noise(300_000, seed=key.step), store.get(key))
    assert leftovers(disk.path) == [], "the failed dump still takes the space that is missing"

    store.delete(committed[0])
    store.put(RolloutKey(50), noise(300_000, seed=50))
    assert_same_batch(noise(300_000, seed=50), store.get(RolloutKey(50)))


def test_replacing_on_a_full_disk_keeps_the_old_rollout(small_disk: Callable[..., Disk]) -> None:
    disk = small_disk(2 << 20)
    store = RolloutStore(disk.path / "run", background=False)
    store.put(K, noise(300_000, seed=1))
    disk.leave_free(100_000)
    with pytest.raises(DumpError):
        store.put(K, noise(300_000, seed=2), replace=True)
    assert_same_batch(noise(300_000, seed=1), store.get(K))
    assert leftovers(disk.path) == []


def test_however_little_is_free_a_put_that_returns_has_written_everything(small_disk: Callable[..., Disk]) -> None:
    """From no free page to enough: at some point only the end of a file, its record or its folder does not fit."""
    disk = small_disk(2 << 20)
    written = 0
    for pages in itertools.count():
        store = RolloutStore(disk.path / f"run{pages}", background=False)
        disk.leave_free(pages * PAGE)
        try:
            store.put(K, noise(5 * PAGE, seed=pages))
        except DumpError:
            assert K not in store
            assert leftovers(disk.path) == []
        else:
            assert_same_batch(noise(5 * PAGE, seed=pages), store.get(K))
            written += 1
            if written == 3:
                break
    assert pages > 4


def test_a_file_that_may_not_grow_is_never_committed_in_part(tmp_path: Path, fork: Callable[..., Forked]) -> None:
    """At a quota or size limit, the kernel writes part of the bytes and reports how many; the rest must not be lost."""
    with RolloutStore(tmp_path / "whole") as store:
        store.put(K, noise(20_000))
    size = store.record(K).bytes

    def work(report: Report, folder: Path, limit: int) -> None:
        resource.setrlimit(resource.RLIMIT_FSIZE, (limit, resource.RLIM_INFINITY))
        try:
            RolloutStore(folder, background=False).put(K, noise(20_000))
        except DumpError as error:
            report(f"refused: {error}")
        else:
            report("written")

    for limit in (0, 500, 3_000, size // 2, size - 1_000, size - 1, size, size + 1):
        folder = tmp_path / str(limit)
        child = fork(work, folder, limit)
        (line,) = child.lines()
        store = RolloutStore(folder)
        assert line.startswith("written" if limit >= size else "refused"), (limit, line)
        if limit >= size:
            assert_same_batch(noise(20_000), store.get(K))
        else:
            assert K not in store
            assert "File too large" in line
        assert leftovers(folder) == []


def test_no_inode_left_is_a_dump_error_too(small_disk: Callable[..., Disk]) -> None:
    disk = small_disk(2 << 20, ",nr_inodes=12")
    if not disk.mounted:
        pytest.skip("inodes cannot be limited without mounting")
    store = RolloutStore(disk.path / "run", background=False)
    with pytest.raises(DumpError, match="No space left"):
        record_without_end(store, 100)
    assert len(store) >= 2
    for key in store:
        assert_same_batch(noise(100, seed=key.step), store.get(key))
    assert leftovers(disk.path) == []


def test_in_the_background_a_full_disk_is_raised_by_the_next_put_once_and_that_put_is_accepted(
    small_disk: Callable[..., Disk],
) -> None:
    disk = small_disk(2 << 20)
    with RolloutStore(disk.path / "run", background=True) as store:
        store.put(RolloutKey(1), noise(200_000, seed=1))
        store.flush()
        disk.leave_free(50_000)
        store.put(RolloutKey(2), noise(200_000, seed=2))
        wait_until_done(store, RolloutKey(2))
        disk.make_room()
        with pytest.raises(DumpError, match="No space left") as caught:
            store.put(RolloutKey(3), noise(200_000, seed=3))
        assert [key for key, _ in caught.value.failures] == [RolloutKey(2)]
        assert "step 2, generation batch 0" in str(caught.value)
        assert "The disk has" in str(caught.value)
        store.put(RolloutKey(4), noise(200_000, seed=4))
        store.flush()
    assert store.keys() == [RolloutKey(1), RolloutKey(3), RolloutKey(4)]
    for key in store:
        assert_same_batch(noise(200_000, seed=key.step), store.get(key))
    assert leftovers(disk.path) == []


@pytest.mark.parametrize("call", ["flush", "close"])
def test_in_the_background_a_full_disk_is_raised_by_flush_or_close_once(
    small_disk: Callable[..., Disk], call: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    disk = small_disk(1 << 20)
    both_are_put, write = threading.Event(), RolloutStore._write
    monkeypatch.setattr(RolloutStore, "_write", lambda *arguments: (both_are_put.wait(), write(*arguments)))
    store = RolloutStore(disk.path / "run", background=True)
    disk.leave_free(50_000)
    store.put(RolloutKey(1), noise(200_000, seed=1))
    store.put(RolloutKey(2), noise(300_000, seed=2))
    both_are_put.set()
    with pytest.raises(DumpError) as caught:
        getattr(store, call)()
    assert [key for key, _ in caught.value.failures] == [RolloutKey(1), RolloutKey(2)]
    assert "2 rollout(s) were not written" in str(caught.value)
    store.flush()
    store.close()
    store.close()
    assert store.keys() == []
    assert leftovers(disk.path) == []


def wait_until_done(store: RolloutStore, key: RolloutKey) -> None:
    """Reading a key waits for its dump, even if it failed."""
    try:
        store.record(key)
    except LookupError:
        pass


def failing(monkeypatch: pytest.MonkeyPatch, number: int, error: BaseException) -> Iterator[int]:
    """Make the n-th call that changes the disk fail, and count the calls."""
    calls = 0

    def breakable(real: Callable[..., Any]) -> Callable[..., Any]:
        def call(*arguments: Any, **options: Any) -> Any:
            nonlocal calls
            calls += 1
            if calls == number:
                raise error
            return real(*arguments, **options)

        return call

    with monkeypatch.context() as patch:
        for name in ("mkdir", "fsync", "link", "rename"):
            patch.setattr(os, name, breakable(getattr(os, name)))
        yield 0
    yield calls


@pytest.mark.parametrize("taken", [False, True], ids=["first put", "replace"])
@pytest.mark.parametrize("broken", [OSError(errno.EIO, "Input/output error"), KeyboardInterrupt()], ids=["EIO", "^C"])
def test_a_disk_that_fails_at_any_call_is_reported_and_leaves_a_whole_entry_or_none(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, taken: bool, broken: BaseException
) -> None:
    """Each call fails once; put never returns without reporting it."""
    old, new = rollout_output(4, seed=1), rollout_output(4, seed=2)
    for number in range(1, 100):
        folder = tmp_path / str(number)
        store = RolloutStore(folder, background=False)
        if taken:
            store.put(K, old)
        failure = failing(monkeypatch, number, broken)
        next(failure)
        try:
            store.put(K, new, replace=taken)
            raised: BaseException | None = None
        except (DumpError, KeyboardInterrupt) as error:
            raised = error
        calls = next(failure)

        if K in store:
            found = store.get(K)
            is_new = torch.equal(found.batch["responses"], new.batch["responses"])
            assert_same_batch(new if is_new else old, found)
            assert is_new or taken
        else:
            assert not taken, "the old rollout was lost"
            is_new = False
        if calls < number:
            assert raised is None
            assert is_new
            break
        if raised is None:
            # Committed and durable; only what it replaced could not be removed.
            assert is_new, f"put returned although call {number} failed, and the rollout is not there"
            assert isinstance(broken, OSError), "the interrupt was swallowed"
        store.prune(older_than_s=0)
        assert (K in store) == (is_new or taken)
        store.put(K, new, replace=True)
        assert_same_batch(new, store.get(K))
        store.prune(older_than_s=0)
        assert leftovers(folder) == []
    assert number > 4


def test_a_failed_sync_of_the_folder_is_not_reported_as_written(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Until the folder is synced, the new name can be lost in a machine crash, so this is not a success."""
    store = RolloutStore(tmp_path, background=False)
    store.put(RolloutKey(1, 1), rollout_output(4))
    fsync = os.fsync
    linked = False

    def sync(fd: int) -> None:
        if linked and os.path.isdir(f"/proc/self/fd/{fd}"):
            raise OSError(errno.EIO, "Input/output error")
        fsync(fd)

    link = os.link

    def note_link(source: str, name: str, **options: Any) -> None:
        nonlocal linked
        link(source, name, **options)
        linked = linked or name.endswith(".json")

    monkeypatch.setattr(os, "fsync", sync)
    monkeypatch.setattr(os, "link", note_link)
    with pytest.raises(DumpError, match="Input/output error"):
        store.put(K, rollout_output(4))
    monkeypatch.undo()
    assert_same_batch(rollout_output(4), store.get(K))


@pytest.mark.parametrize("number", [errno.EPERM, errno.ENOTSUP, errno.ENOSYS, errno.EMLINK], ids=errno.errorcode.get)
def test_on_a_file_system_without_hard_links_the_first_writer_wins_too(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, number: int
) -> None:
    """FAT, some network and some user-space file systems do not support hard links."""

    def refuse(*arguments: Any, **options: Any) -> None:
        raise OSError(number, os.strerror(number))

    monkeypatch.setattr(os, "link", refuse)
    store = RolloutStore(tmp_path, background=False)
    store.put(K, rollout_output(4, seed=1))
    store.put(K, rollout_output(4, seed=1))
    with pytest.raises(EntryExistsError):
        store.put(K, rollout_output(4, seed=2))
    assert_same_batch(rollout_output(4, seed=1), store.get(K))
    store.put(K, rollout_output(4, seed=3), replace=True)
    assert_same_batch(rollout_output(4, seed=3), store.get(K))
    assert store.verify(K).rows == 4
    store.delete(K)
    assert leftovers(tmp_path) == []


@pytest.mark.parametrize("what", ["record", "part"])
def test_a_file_that_nfs_replaced_while_it_was_read_is_read_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, what: str
) -> None:
    """NFS fails with ESTALE if another machine replaces a file that is open here."""
    store = RolloutStore(tmp_path, background=False)
    store.put(K, rollout_output(4, seed=1))
    fstat, ending, stale = os.fstat, ".json" if what == "record" else ".parquet", []

    def replaced(fd: int) -> Any:
        if os.readlink(f"/proc/self/fd/{fd}").endswith(ending) and not stale:
            stale.append(fd)
            RolloutStore(tmp_path, background=False).put(K, rollout_output(4, seed=2), replace=True)
            raise OSError(errno.ESTALE, os.strerror(errno.ESTALE))
        return fstat(fd)

    with monkeypatch.context() as nfs:
        nfs.setattr(os, "fstat", replaced)
        found = store.get(K)
    assert_same_batch(rollout_output(4, seed=2), found)
    assert stale


def test_a_folder_that_nfs_replaced_while_it_was_looked_at_is_looked_at_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    store = RolloutStore(tmp_path, background=False)
    store.put(K, rollout_output(4))
    stale: list[Any] = []

    def once(function: Callable[..., Any]) -> Callable[..., Any]:
        def call(path: Any, *arguments: Any, **options: Any) -> Any:
            if (isinstance(path, int) or options.get("dir_fd") is not None) and not stale:
                stale.append(path)
                raise OSError(errno.ESTALE, os.strerror(errno.ESTALE))
            return function(path, *arguments, **options)

        return call

    looks: list[tuple[Callable[[], Any], Any]] = [(lambda: K in store, True), (store.keys, [K]), (store.prune, [])]
    for look, found in looks:
        for name in ("stat", "scandir"):
            stale.clear()
            with monkeypatch.context() as nfs:
                nfs.setattr(os, name, once(getattr(os, name)))
                assert look() == found


def test_a_server_that_only_answers_with_stale_handles_is_not_an_empty_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    store = RolloutStore(tmp_path, background=False)
    store.put(K, rollout_output(4))

    def stale(fd: int) -> Any:
        raise OSError(errno.ESTALE, os.strerror(errno.ESTALE))

    with monkeypatch.context() as nfs:
        nfs.setattr(os, "fstat", stale)
        with pytest.raises(OSError, match="Stale file handle"):
            store.get(K)


def test_a_store_that_goes_away_during_the_commit_is_an_error(tmp_path: Path) -> None:
    """The outcome is unknown, so the commit must not report success."""

    class GoesAway(LocalStorage):
        gone = False

        def publish(self, staged: Any, name: str, replace: bool = False) -> None:
            if name.endswith(".parquet"):
                self.gone = True
            self._check()
            super().publish(staged, name, replace)

        def read(self, folder: str, name: str, limit: int) -> bytes:
            self._check()
            return super().read(folder, name, limit)

        def rename(self, folder: str, seen: FileInfo, new: str) -> bool:
            self._check()
            return super().rename(folder, seen, new)

        def _check(self) -> None:
            if self.gone:
                raise ConnectionError("the store went away")

    with pytest.raises(ConnectionError):
        commit.commit(GoesAway(tmp_path), K, codec.prepare(rollout_output(4)), {})
    assert K not in RolloutStore(tmp_path)


class SlowDisk:
    """Every sync waits until the disk is released."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self._gate = threading.Event()
        fsync = os.fsync
        monkeypatch.setattr(os, "fsync", lambda fd: (self._gate.wait(60), fsync(fd))[1])

    def let_go(self) -> None:
        self._gate.set()


@pytest.fixture
def slow_disk(monkeypatch: pytest.MonkeyPatch) -> Iterator[SlowDisk]:
    disk = SlowDisk(monkeypatch)
    yield disk
    disk.let_go()


def test_with_a_slow_disk_put_returns_immediately(tmp_path: Path, slow_disk: SlowDisk) -> None:
    with RolloutStore(tmp_path, background=True) as store:
        started = time.perf_counter()
        for step in range(5):
            store.put(RolloutKey(step), rollout_output(4, seed=step))
        assert time.perf_counter() - started < 5, "put waited for the disk, which does not answer at all"
        assert len(store) == 0
        slow_disk.let_go()
        store.flush()
        assert len(store) == 5
        for key in store:
            assert_same_batch(rollout_output(4, seed=key.step), store.get(key))


def test_with_a_slow_disk_put_waits_when_too_much_is_waiting(tmp_path: Path, slow_disk: SlowDisk) -> None:
    """Memory is bounded: a put that does not fit in the queue blocks until there is room."""
    with RolloutStore(tmp_path, background=True, max_pending_bytes="1MB") as store:
        store.put(RolloutKey(0), noise(400_000))
        store.put(RolloutKey(1), noise(400_000))
        third = threading.Thread(target=store.put, args=(RolloutKey(2), noise(400_000)))
        third.start()
        third.join(0.5)
        assert third.is_alive(), "the third rollout was accepted beyond the bound"
        slow_disk.let_go()
        third.join(30)
        assert not third.is_alive()
        store.flush()
        assert len(store) == 3


def test_a_rollout_larger_than_the_bound_is_accepted_when_nothing_waits(tmp_path: Path, slow_disk: SlowDisk) -> None:
    with RolloutStore(tmp_path, background=True, max_pending_bytes=1000) as store:
        store.put(RolloutKey(0), noise(400_000))
        second = threading.Thread(target=store.put, args=(RolloutKey(1), noise(10)))
        second.start()
        second.join(0.3)
        assert second.is_alive()
        slow_disk.let_go()
        second.join(30)
        store.flush()
        assert len(store) == 2


def test_a_rollout_that_was_written_is_released_from_memory(tmp_path: Path) -> None:
    """Otherwise each step of a training would keep its batch in memory."""
    store = RolloutStore(tmp_path, background=True)
    batch = noise(100_000)
    tensor = weakref.ref(batch.get("noise"))
    store.put(K, batch)
    del batch
    store.flush()
    deadline = time.monotonic() + 10
    while tensor() is not None and time.monotonic() < deadline:
        time.sleep(0.01)
    assert tensor() is None
    store.close()


def test_a_read_only_run_folder_can_be_read_and_refuses_to_be_written(
    tmp_path: Path, read_only: Callable[[Path], bool], fork: Callable[..., Forked]
) -> None:
    folder = tmp_path / "run"
    batch = rollout_output(4, seed=1)
    with RolloutStore(folder) as store:
        store.put(K, batch)
    mounted = read_only(folder)

    def work(report: Report) -> None:
        if not mounted:
            # Mounting is not possible here, so run as a user without write permission; root can always write.
            folder.chmod(0o555)
            (folder / "step_000001").chmod(0o555)
            for parent in [tmp_path, *tmp_path.parents][:3]:
                parent.chmod(0o755)
            if os.geteuid() == 0:
                os.setuid(65534)
        store = RolloutStore(folder, background=False)
        assert store.keys() == [K]
        assert_same_batch(batch, store.get(K))
        assert store.verify(K).rows == 4
        for key, replace in ((RolloutKey(1, 1), False), (RolloutKey(2), False), (K, True)):
            with pytest.raises(DumpError, match=r"Read-only file system|Permission denied"):
                store.put(key, rollout_output(4, seed=2), replace=replace)
        with RolloutStore(folder, background=True) as background:
            background.put(RolloutKey(3), rollout_output(4, seed=2))
            with pytest.raises(DumpError, match="step 3"):
                background.flush()
        assert store.keys() == [K]
        assert_same_batch(batch, store.get(K))
        report("done")

    child = fork(work)
    assert child.lines() == ["done"]


def test_a_training_records_what_fits_and_tells_what_does_not(
    small_disk: Callable[..., Disk], tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """An existing manifest needs no space, and the rollout is kept even if its training cannot be listed."""
    disk = small_disk(2 << 20)
    training = Training(tmp_path / "training")
    where = {"dump_dir": str(disk.path / "dumps")}
    large = {"trainer__notes": "n" * 300_000}
    training.record(K, skip=where, **large)
    disk.leave_free(150_000)
    caplog.clear()
    with training.open("cache", where, **large) as skip:
        assert skip.step(K, inputs_of(K), Engine()).hit
        assert not skip.step(RolloutKey(2), inputs_of(RolloutKey(2)), Engine()).hit
    assert (skip.statistics.dumped, skip.statistics.dump_failures) == (1, 0)

    disk.leave_free(0)
    with training.open("cache", where, **large) as skip:
        assert skip.step(RolloutKey(2), inputs_of(RolloutKey(2)), Engine()).hit
        assert not skip.step(RolloutKey(3), inputs_of(RolloutKey(3)), Engine()).hit
    assert (skip.statistics.dumped, skip.statistics.dump_failures) == (0, 1)
    assert "step 3, generation batch 0 was not written to" in caplog.text
    assert "the list of steps that this training recorded could not be written" in caplog.text
    assert "The rollouts do not depend on it." in caplog.text


def test_without_room_for_the_manifest_nothing_is_recorded_and_the_error_says_so(
    small_disk: Callable[..., Disk], tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    disk = small_disk(2 << 20)
    disk.leave_free(100_000)
    training = Training(tmp_path / "training")
    with training.open("cache", {"dump_dir": str(disk.path / "dumps")}, trainer__notes="n" * 300_000) as skip:
        assert not skip.step(K, inputs_of(K), Engine()).hit
    assert (skip.statistics.dumped, skip.statistics.dump_failures) == (0, 1)
    assert "manifest.json cannot be written, and nothing is recorded without it" in caplog.text
    assert "No space left on device" in caplog.text
    assert "choose another rollout_skip.dump_dir" in caplog.text
