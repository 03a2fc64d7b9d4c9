"""The individual measurements, each run in its own process.

``python -m benchmarks.probes NAME '{"folder": …}'`` runs one and prints its result as JSON on the last line. "ours" is
``RolloutStore`` and ``RolloutSkip``, "upstream" is ``DataProto.save_to_disk`` and ``load_from_disk``. A dump is timed
after a tiny one, so imports, thread pools and codecs are warm. Loads are timed from the first call in the process on.
Memory is not touched beforehand, because in a virtual machine that can be most of the cost of a load.
"""

from __future__ import annotations

import gc
import json
import os
import shutil
import statistics
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import torch
from verl import DataProto

from benchmarks.batches import BatchSize, load_raw, make_batch
from verl_rollout_skip import RolloutKey, RolloutSkip, RolloutStore

TINY = BatchSize("tiny", 8, 16, 32)
KEY = RolloutKey(2)
HITS = (RolloutKey(2), RolloutKey(3), RolloutKey(4))
SAMPLES = 30
LOADS = 9


def ours_dump(folder: str, raw: str) -> dict[str, Any]:
    """A dump, including inputs, that is durable when it returns."""
    store = _warm_store(folder, background=False)
    _free_key(store)
    output, inputs = load_raw(Path(raw))
    with _Usage() as usage:
        store.put(KEY, output, inputs=inputs)
    return {"seconds": usage.seconds, "extra_bytes": usage.extra_bytes, "bytes": _folder_bytes(_entry(folder))}


def upstream_dump(folder: str, raw: str) -> dict[str, Any]:
    """A dump without inputs, followed by an fsync, which upstream does not do."""
    _warm_upstream(folder)
    output, _ = load_raw(Path(raw))
    path = Path(folder) / "batch.pkl"
    path.unlink(missing_ok=True)
    with _Usage() as usage:
        started = time.perf_counter()
        output.save_to_disk(path)
        unsynced = time.perf_counter() - started
        with open(path, "rb+") as file:
            os.fsync(file.fileno())
    return {
        "seconds": usage.seconds,
        "unsynced_seconds": unsynced,
        "extra_bytes": usage.extra_bytes,
        "bytes": path.stat().st_size,
    }


def ours_load(folder: str, raw: str, compare: bool) -> dict[str, Any]:
    """Loads with digest check, from files in the page cache."""
    store = RolloutStore(Path(folder) / "store", background=False)
    for file in _entry(folder).iterdir():
        _read_through(file)
    result = _time_loads(lambda: store.get(KEY))
    if compare:
        expected, expected_inputs = load_raw(Path(raw))
        _require_same(store.get(KEY), expected)
        _require_same(store.inputs(KEY), expected_inputs)
    return result


def upstream_load(folder: str, raw: str, compare: bool) -> dict[str, Any]:
    """Loads from a file in the page cache."""
    path = Path(folder) / "batch.pkl"
    _read_through(path)
    result = _time_loads(lambda: DataProto.load_from_disk(path))
    if compare:
        _require_same(DataProto.load_from_disk(path), load_raw(Path(raw))[0])
    return result


def ours_miss(folder: str, raw: str) -> dict[str, Any]:
    """How long a generated and dumped rollout step blocks the training thread, without the generation itself."""
    shutil.rmtree(Path(folder) / "training", ignore_errors=True)
    output, inputs = load_raw(Path(raw))
    samples = []
    with RolloutSkip.open(_training(folder, "record")) as skip:
        for key in (RolloutKey(1), *HITS):
            generated, given = (output, inputs) if key in HITS else make_batch(TINY)
            gc.collect()
            samples.append(_seconds(lambda key=key, given=given, out=generated: skip.step(key, given, lambda _: out)))
            while key not in skip.written_keys():
                time.sleep(0.01)
    return {"seconds": min(samples[1:]), "first_seconds": samples[0], "samples": samples}


def ours_hits(folder: str, raw: str) -> dict[str, Any]:
    """How long prefetched rollout steps block the training thread: the first one of a training, which is loaded while
    workers start, and the next one."""
    inputs = load_raw(Path(raw))[1]
    with RolloutSkip.open(_training(folder, "replay")) as skip:
        skip.prefetch_first(HITS[0].step)
        samples = []
        for key in HITS:
            _wait_for_prefetch()
            gc.collect()
            started = time.perf_counter()
            rollout = skip.step(key, inputs, lambda _: None)
            samples.append(time.perf_counter() - started)
            assert rollout.hit
            del rollout  # outside the measurement, because freeing takes longer than loading
    # After the last one, there is nothing to prefetch.
    return {"first_seconds": samples[0], "seconds": min(samples[1:-1]), "samples": samples}


def ours_parts(folder: str, raw: str, parts: int) -> dict[str, Any]:
    """A dump with this many parts, including fsync, and a load of it."""
    raw_bytes = sum(file.stat().st_size for file in Path(raw).glob("*.npy"))
    store = _warm_store(folder, background=False, part_bytes=raw_bytes // parts + (1 << 20))
    _free_key(store)
    output, inputs = load_raw(Path(raw))
    with _Usage() as dump:
        store.put(KEY, output, inputs=inputs)
    files = len(list(_entry(folder).glob("*.parquet")))
    del output, inputs
    store.get(KEY)
    with _Usage() as load:
        store.get(KEY)
    return {
        "files": files,
        "bytes": _folder_bytes(_entry(folder)),
        "seconds": dump.seconds,
        "extra_bytes": dump.extra_bytes,
        "load_seconds": load.seconds,
    }


def interpreter_lock(folder: str, raw: str, busy: bool) -> dict[str, Any]:
    """How long a dump and a prefetch take in the background while the main thread sleeps or runs Python.

    ``pace`` is the speed of the main thread's Python loop, relative to running alone. ``stall_seconds`` is its longest
    stall.
    """
    store = _warm_store(folder, background=True)
    _free_key(store)
    output, inputs = load_raw(Path(raw))
    alone = _Loop()
    if busy:
        alone.run(lambda: time.perf_counter() - alone.started > 1.0)
    result = {}
    for name, begin, end in (
        ("dump", lambda: store.put(KEY, output, inputs=inputs), store.flush),
        ("load", lambda: None, lambda: _prefetch(store)),
    ):
        gc.collect()
        started = time.perf_counter()
        begin()
        done = threading.Event()
        waiter = threading.Thread(target=lambda end=end, done=done: (end(), done.set()))
        waiter.start()
        loop = _Loop()
        if busy:
            loop.run(done.is_set)
        waiter.join()
        result[name] = {"seconds": time.perf_counter() - started}
        if busy:
            result[name] |= {"pace": loop.pace / alone.pace, "stall_seconds": loop.stall}
        store.get(KEY)
    return result


def growth(folder: str, entries: int) -> dict[str, Any]:
    """The median cost of listing, lookup and commit with this many entries."""
    store = _warm_store(folder, background=False)
    root = Path(store.path)
    files = list((root / "step_000001").iterdir())
    # Hard links to the files of one entry. Their records have the key of the first, so they could not be loaded, but
    # listing, lookup and commit do not open them and cost the same as with real entries.
    for step in range(2, entries + 1):
        copy = root / f"step_{step:06d}"
        copy.mkdir()
        for file in files:
            os.link(file, copy / file.name)
    assert len(store.keys()) == entries
    batch = make_batch(TINY)[0]
    steps = iter(range(entries + 1, entries + 1000))
    limited = RolloutStore(root, background=False, max_disk="1TB")
    return {
        "keys_seconds": _median(lambda: store.keys()),
        "contains_seconds": _median(lambda: RolloutKey(entries // 2 + 1) in store),
        "commit_seconds": _median(lambda: store.put(RolloutKey(next(steps)), batch)),
        # With max_disk, the first commit, and then one per minute, counts the bytes of the whole folder.
        "counting_commit_seconds": _seconds(lambda: limited.put(RolloutKey(next(steps)), batch)),
    }


class _Usage:
    """Wall time of a block, and the increase of resident memory from its start to its peak."""

    def __enter__(self) -> _Usage:
        gc.collect()
        Path("/proc/self/clear_refs").write_text("5")  # resets the peak to the current resident memory
        self._resident = _status("VmRSS")
        self._started = time.perf_counter()
        return self

    def __exit__(self, *_: object) -> None:
        self.seconds = time.perf_counter() - self._started
        self.extra_bytes = max(0, _status("VmHWM") - self._resident)


class _Loop:
    """A Python loop that never releases the interpreter lock voluntarily."""

    def __init__(self) -> None:
        self.started = time.perf_counter()
        self.pace = 0.0
        self.stall = 0.0

    def run(self, finished: Callable[[], bool]) -> None:
        self.started = last = time.perf_counter()
        rounds = 0
        while not finished():
            total = 0
            for number in range(500):
                total += number
            rounds += 1
            now = time.perf_counter()
            self.stall = max(self.stall, now - last)
            last = now
        self.pace = rounds / max(last - self.started, 1e-9)


def _time_loads(load: Callable[[], DataProto]) -> dict[str, Any]:
    """The first load of the process and the median of ``LOADS`` more, each without and with reading every tensor.

    Pages of padding that were never written are allocated only when they are read.
    """
    with _Usage() as usage:
        batch = load()
    fresh = {"seconds": usage.seconds, "read_seconds": usage.seconds + _seconds(lambda: _read_tensors(batch))}
    repeated = []
    for _ in range(LOADS):
        del batch
        started = time.perf_counter()
        batch = load()
        loaded = time.perf_counter()
        _read_tensors(batch)
        repeated.append({"seconds": loaded - started, "read_seconds": time.perf_counter() - started})
    medians = {f"repeated_{name}": statistics.median(sample[name] for sample in repeated) for name in fresh}
    return {**fresh, **medians, "peak_bytes": usage.extra_bytes, "repeated": repeated}


def _read_tensors(batch: DataProto) -> None:
    for tensor in batch.batch.values():
        tensor.sum()


def _read_through(path: Path) -> None:
    """Read a file into the page cache without using much memory."""
    with open(path, "rb") as file:
        while file.read(1 << 20):
            pass


def _status(field: str) -> int:
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith(f"{field}:"):
            return int(line.split()[1]) * 1024
    raise RuntimeError(f"/proc/self/status has no {field}")


def _seconds(call: Callable[[], Any]) -> float:
    started = time.perf_counter()
    call()
    return time.perf_counter() - started


def _median(call: Callable[[], Any]) -> float:
    return statistics.median(_seconds(call) for _ in range(SAMPLES))


def _training(folder: str, mode: str) -> dict[str, Any]:
    """A minimal configuration for ``RolloutSkip`` without a trainer."""
    return {
        "trainer": {"experiment_name": "step", "project_name": "benchmarks"},
        "data": {"train_batch_size": 1},
        "actor_rollout_ref": {"rollout": {"n": 1}},
        "rollout_skip": {"mode": mode, "dump_dir": str(Path(folder) / "training")},
    }


def _warm_store(folder: str, background: bool, **options: Any) -> RolloutStore:
    store = RolloutStore(Path(folder) / "store", background=background, **options)
    output, inputs = make_batch(TINY)
    store.put(RolloutKey(1), output, inputs=inputs)
    store.flush()
    store.get(RolloutKey(1))
    store.inputs(RolloutKey(1))
    return store


def _free_key(store: RolloutStore) -> None:
    if KEY in store:
        store.delete(KEY)


def _warm_upstream(folder: str) -> None:
    path = Path(folder) / "warm.pkl"
    make_batch(TINY)[0].save_to_disk(path)
    DataProto.load_from_disk(path)
    path.unlink()


def _entry(folder: str) -> Path:
    return Path(folder) / "store" / f"step_{KEY.step:06d}"


def _folder_bytes(folder: Path) -> int:
    return sum(file.stat().st_size for file in folder.iterdir())


def _prefetch(store: RolloutStore) -> None:
    store.prefetch(KEY)
    _wait_for_prefetch()


def _wait_for_prefetch() -> None:
    for thread in threading.enumerate():
        if thread.name == "rollout-skip-prefetch":
            thread.join(60.0)


def _require_same(loaded: DataProto, expected: DataProto) -> None:
    """Check every bit of every tensor, every cell, and the order of the keys."""
    for name, left, right in (
        ("tensors", loaded.batch, expected.batch),
        ("arrays", loaded.non_tensor_batch, expected.non_tensor_batch),
    ):
        if (left is None) != (right is None) or (left is not None and list(left.keys()) != list(right.keys())):
            raise AssertionError(f"the loaded {name} have different keys")
    for key, tensor in () if expected.batch is None else expected.batch.items():
        found = loaded.batch[key]
        same = found.dtype == tensor.dtype and found.shape == tensor.shape
        if not same or not np.array_equal(found.numpy().view(np.uint8), tensor.numpy().view(np.uint8)):
            raise AssertionError(f"tensor {key!r} was loaded with different values")
    for key, array in expected.non_tensor_batch.items():
        found = loaded.non_tensor_batch[key]
        cells = [_comparable(cells) for cells in (found.tolist(), array.tolist())]
        if found.dtype != array.dtype or found.shape != array.shape or cells[0] != cells[1]:
            raise AssertionError(f"array {key!r} was loaded with different values")
    if loaded.meta_info != expected.meta_info:
        raise AssertionError(f"meta_info was loaded as {loaded.meta_info}")


def _comparable(value: Any) -> Any:
    """A cell with its tensors as bytes."""
    if isinstance(value, torch.Tensor):
        return str(value.dtype), tuple(value.shape), value.numpy().tobytes()
    if isinstance(value, dict):
        return {key: _comparable(item) for key, item in value.items()}
    return [_comparable(item) for item in value] if isinstance(value, list) else value


PROBES = {
    probe.__name__: probe
    for probe in (
        *(ours_dump, upstream_dump, ours_load, upstream_load, ours_miss, ours_hits, ours_parts),
        *(interpreter_lock, growth),
    )
}


if __name__ == "__main__":
    print(json.dumps(PROBES[sys.argv[1]](**json.loads(sys.argv[2]))))
