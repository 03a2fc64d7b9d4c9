"""The background writer: in order, bounded, no job is lost and no failure is swallowed."""

from __future__ import annotations

import gc
import logging
import threading
import time
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image

from tests.batches import assert_same_batch, data_proto, rollout_output
from verl_rollout_skip import RolloutKey, RolloutStore
from verl_rollout_skip.errors import DumpError, EntryExistsError
from verl_rollout_skip.store import commit
from verl_rollout_skip.store.threads import map_in_threads
from verl_rollout_skip.store.writer import BackgroundWriter, Job

K = RolloutKey(1)


def job(step: int, run: Callable[[], Any], size: int = 1) -> Job:
    return Job(RolloutKey(step), size, run)


def failing(message: str) -> Callable[[], None]:
    def run() -> None:
        raise OSError(message)

    return run


def break_the_disk(monkeypatch: pytest.MonkeyPatch) -> None:
    def sync(fd: int) -> None:
        raise OSError("the disk is gone")

    monkeypatch.setattr("os.fsync", sync)


def writer_threads() -> list[threading.Thread]:
    return [thread for thread in threading.enumerate() if thread.name.startswith("rollout-skip-writer")]


def test_jobs_are_done_in_the_order_in_which_they_came() -> None:
    done: list[int] = []
    writer = BackgroundWriter(1000)
    for step in range(50):
        writer.submit(job(step, lambda step=step: done.append(step)))
    writer.close()
    assert done == list(range(50))


def test_jobs_are_done_on_one_other_thread() -> None:
    threads: set[int] = set()
    writer = BackgroundWriter(1000)
    for step in range(5):
        writer.submit(job(step, lambda: threads.add(threading.get_ident())))
    writer.close()
    assert len(threads) == 1
    assert threading.get_ident() not in threads


def test_a_failure_is_raised_by_the_next_submit_and_that_job_still_runs() -> None:
    done: list[int] = []
    writer = BackgroundWriter(1000)
    writer.submit(job(1, failing("the disk is gone")))
    writer.wait(RolloutKey(1))
    with pytest.raises(DumpError, match="step 1, generation batch 0: the disk is gone") as caught:
        writer.submit(job(2, lambda: done.append(2)))
    assert isinstance(caught.value.__cause__, OSError)
    assert [(key, str(error)) for key, error in caught.value.failures] == [(RolloutKey(1), "the disk is gone")]
    writer.submit(job(3, lambda: done.append(3)))
    writer.close()
    assert done == [2, 3]


@pytest.mark.parametrize("call", ["flush", "close"])
def test_all_failures_are_raised_together_and_once(call: str) -> None:
    gate = threading.Event()
    writer = BackgroundWriter(1000)
    writer.submit(job(0, gate.wait))
    for step in (1, 2, 3):
        writer.submit(job(step, failing(f"no {step}")))
    gate.set()
    with pytest.raises(DumpError, match=r"3 rollout\(s\) were not written") as caught:
        getattr(writer, call)()
    assert [key.step for key, _ in caught.value.failures] == [1, 2, 3]
    writer.flush()
    writer.close()


def test_a_failure_does_not_stop_what_comes_after_it(caplog: pytest.LogCaptureFixture) -> None:
    done: list[int] = []
    gate = threading.Event()
    writer = BackgroundWriter(1000)
    with caplog.at_level(logging.ERROR):
        writer.submit(job(0, gate.wait))
        writer.submit(job(1, failing("no")))
        writer.submit(job(2, lambda: done.append(2)))
        gate.set()
        with pytest.raises(DumpError):
            writer.close()
    assert done == [2]
    assert "step 1, generation batch 0" in caplog.text, "a failure is logged when it happens"


def test_a_submit_does_not_raise_the_failure_of_its_own_job() -> None:
    """Otherwise a caller could not tell whether what it just handed over was accepted."""
    for _ in range(200):
        writer = BackgroundWriter(1000)
        writer.submit(job(1, failing("no")))
        with pytest.raises(DumpError):
            writer.close()


@pytest.mark.parametrize("error", [SystemExit(3), KeyboardInterrupt(), MemoryError("no memory")])
def test_even_a_base_exception_does_not_end_the_thread(error: BaseException) -> None:
    def run() -> None:
        raise error

    done: list[int] = []
    writer = BackgroundWriter(1000)
    writer.submit(job(1, run))
    writer.wait(RolloutKey(1))
    with pytest.raises(DumpError) as caught:
        writer.submit(job(2, lambda: done.append(2)))
    assert caught.value.failures[0][1] is error
    writer.close()
    assert done == [2]


def test_after_close_nothing_is_accepted_and_closing_again_does_nothing() -> None:
    writer = BackgroundWriter(1000)
    writer.submit(job(1, lambda: None))
    writer.close()
    writer.close()
    with pytest.raises(DumpError, match="closed"):
        writer.submit(job(2, lambda: None))
    writer.flush()
    writer.wait(K)


def test_a_writer_that_was_never_used_starts_no_thread() -> None:
    before = len(writer_threads())
    writer = BackgroundWriter(1000)
    writer.flush()
    writer.wait(K)
    writer.close()
    assert len(writer_threads()) == before


def test_close_ends_the_thread() -> None:
    writer = BackgroundWriter(1000)
    writer.submit(job(1, lambda: None))
    before = len(writer_threads())
    writer.close()
    assert len(writer_threads()) == before - 1


def test_a_store_that_is_dropped_without_close_writes_everything_and_ends_its_thread(tmp_path: Path) -> None:
    before = set(writer_threads())
    store = RolloutStore(tmp_path, background=True)
    store.put(K, rollout_output(4))
    (thread,) = set(writer_threads()) - before
    del store
    deadline = time.monotonic() + 20
    while thread.is_alive() and time.monotonic() < deadline:
        gc.collect()
        thread.join(0.05)
    assert not thread.is_alive()
    assert_same_batch(rollout_output(4), RolloutStore(tmp_path).get(K))


def test_submit_waits_while_too_much_is_waiting_and_continues_when_there_is_room() -> None:
    gates = [threading.Event() for _ in range(3)]
    writer = BackgroundWriter(100)
    writer.submit(job(0, gates[0].wait, size=60))
    writer.submit(job(1, gates[1].wait, size=40))
    third = threading.Thread(target=writer.submit, args=(job(2, gates[2].wait, size=50),))
    third.start()
    third.join(0.2)
    assert third.is_alive(), "60 + 40 + 50 are more than 100"
    gates[0].set()
    third.join(10)
    assert not third.is_alive(), "40 + 50 are not"
    for gate in gates:
        gate.set()
    writer.close()


BULK: dict[str, Callable[[], Any]] = {
    "tensor": lambda: torch.zeros(100_000),
    "array": lambda: np.zeros(100_000),
    "bytes": lambda: bytes(100_000),
    "image": lambda: Image.new("RGB", (200, 200)),
    "palette image": lambda: Image.new("P", (300, 300)),
    "bit image": lambda: Image.new("1", (1000, 1000)),
    "text": lambda: "x" * 100_000,
}


@pytest.mark.parametrize("bulk", BULK.values(), ids=BULK)
def test_bulk_data_in_cells_counts_as_waiting(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, bulk: Callable[[], Any]
) -> None:
    """The images of a vision model are most of its rollouts."""
    gate = threading.Event()
    write = commit.commit
    monkeypatch.setattr(commit, "commit", lambda *arguments: (gate.wait(60), write(*arguments))[1])
    store = RolloutStore(tmp_path, max_pending_bytes=1_000_000)
    batches = [data_proto(x=[{"images": [bulk()]} for _ in range(8)]) for _ in range(2)]
    store.put(RolloutKey(1), batches[0])
    second = threading.Thread(target=store.put, args=(RolloutKey(2), batches[1]))
    second.start()
    second.join(0.2)
    assert second.is_alive(), "twice eight of them are more than a megabyte"
    gate.set()
    second.join(20)
    store.close()
    assert len(store) == 2


def test_a_job_that_is_submitted_while_another_thread_closes_is_done_or_refused() -> None:
    """An accepted job is never lost: it waits for room while ``close`` stops the thread."""
    for _ in range(30):
        done: list[int] = []
        refused: list[int] = []
        gate = threading.Event()
        writer = BackgroundWriter(10)
        writer.submit(job(0, gate.wait, size=10))

        def submit(writer: BackgroundWriter = writer, done: list[int] = done, refused: list[int] = refused) -> None:
            try:
                writer.submit(job(1, lambda: done.append(1), size=10))
            except DumpError:
                refused.append(1)

        submitting = threading.Thread(target=submit)
        submitting.start()
        time.sleep(0.005)
        closing = threading.Thread(target=writer.close)
        closing.start()
        time.sleep(0.005)
        gate.set()
        closing.join(10)
        submitting.join(10)
        assert not closing.is_alive()
        assert not submitting.is_alive()
        assert done or refused, "a job was accepted and never done"


def test_wait_returns_when_the_key_is_done_while_others_wait() -> None:
    gate = threading.Event()
    done: list[int] = []
    writer = BackgroundWriter(1000)
    writer.submit(job(1, lambda: done.append(1)))
    writer.submit(job(2, gate.wait))
    writer.wait(RolloutKey(1))
    assert done == [1]
    writer.wait(RolloutKey(9))
    gate.set()
    writer.close()


def test_rollouts_of_one_key_are_committed_in_the_order_of_their_puts(tmp_path: Path) -> None:
    with RolloutStore(tmp_path, background=True) as store:
        for seed in range(10):
            store.put(K, rollout_output(4, seed=seed), replace=True)
        assert_same_batch(rollout_output(4, seed=9), store.get(K))


def test_a_rollout_can_be_read_right_after_put(tmp_path: Path) -> None:
    """``get``, ``record``, ``inputs`` and ``verify`` wait for the dump of their key."""
    with RolloutStore(tmp_path, background=True) as store:
        for step in range(6):
            store.put(RolloutKey(step), rollout_output(4, seed=step), info={"step": step})
        assert_same_batch(rollout_output(4, seed=5), store.get(RolloutKey(5)))
        assert store.record(RolloutKey(4)).info == {"step": 4}
        assert store.inputs(RolloutKey(3)) is None
        assert store.verify(RolloutKey(2)).rows == 4


def test_containers_may_be_changed_as_soon_as_put_has_returned(tmp_path: Path) -> None:
    """As verl does with a batch after the rollout: pop, union and rename."""
    batch, given = rollout_output(4, seed=1), rollout_output(4, seed=2)
    info = {"list": [1]}
    with RolloutStore(tmp_path, background=True) as store:
        store.put(K, batch, inputs=given, info=info)
        batch.batch.pop("responses")
        batch.batch["new"] = batch.batch["prompts"]
        batch.non_tensor_batch.clear()
        batch.meta_info["timing"].clear()
        batch.meta_info.clear()
        given.non_tensor_batch["multi_modal_inputs"][0]["changed"] = True
        given.pop(batch_keys=["prompts"])
        info["list"].append(2)
        store.flush()
    assert_same_batch(rollout_output(4, seed=1), store.get(K))
    assert_same_batch(rollout_output(4, seed=2), store.inputs(K))
    assert store.record(K).info == {"list": [1]}


def test_another_rollout_under_a_taken_key_is_reported_by_a_later_call(tmp_path: Path) -> None:
    with RolloutStore(tmp_path, background=True) as store:
        store.put(K, rollout_output(4, seed=1))
        store.put(K, rollout_output(4, seed=1))
        store.put(K, rollout_output(4, seed=2))
        with pytest.raises(DumpError, match="already recorded with a different rollout") as caught:
            store.flush()
        ((key, error),) = caught.value.failures
        assert key == K
        assert isinstance(error, EntryExistsError)
    assert_same_batch(rollout_output(4, seed=1), store.get(K))


def test_leaving_the_with_block_raises_what_failed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    break_the_disk(monkeypatch)
    with pytest.raises(DumpError, match="step 1, generation batch 0"):
        with RolloutStore(tmp_path, background=True) as store:
            store.put(K, rollout_output(4))
    monkeypatch.undo()
    assert store.keys() == []


def test_an_error_of_the_training_is_not_hidden_by_one_of_the_dumps(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The user must see what broke the training."""
    break_the_disk(monkeypatch)
    with pytest.raises((ZeroDivisionError, DumpError)) as caught:  # noqa: PT012 - it is raised at the end
        with RolloutStore(tmp_path, background=True) as store:
            store.put(K, rollout_output(4))
            raise ZeroDivisionError("the training broke")
    assert "the training broke" in "".join(traceback.format_exception(caught.value))


def test_work_in_threads_is_done_exactly_once_even_if_threads_run_out(monkeypatch: pytest.MonkeyPatch) -> None:
    """A container limits threads, or the interpreter shuts down: the second thread cannot start."""
    real = threading.Thread.start
    started: list[threading.Thread] = []

    def start(self: threading.Thread) -> None:
        if started:
            raise RuntimeError("can't start new thread")
        started.append(self)
        real(self)

    monkeypatch.setattr(threading.Thread, "start", start)
    monkeypatch.setattr("verl_rollout_skip.store.threads.worker_count", lambda: 4)
    done: list[int] = []

    def work(number: int) -> int:
        done.append(number)
        return number * 10

    assert map_in_threads(work, [1, 2, 3]) == [10, 20, 30]
    assert sorted(done) == [1, 2, 3]
