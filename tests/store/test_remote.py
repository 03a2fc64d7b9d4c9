"""The same scenarios on a local disk, in memory and on an S3 server: a run folder behaves the same everywhere."""

from __future__ import annotations

import json
import pickle
import re
import threading
import time
import uuid
from collections import Counter
from collections.abc import Callable, Iterator
from datetime import datetime, timezone
from pathlib import Path
from typing import Any

import fsspec
import pyarrow.parquet as pq
import pytest
import torch
from s3fs import S3FileSystem
from tensordict import TensorDict
from verl import DataProto

from tests.batches import assert_same_batch, rollout_input, rollout_output
from tests.environment import Forked, Report
from verl_rollout_skip import RolloutKey, RolloutStore
from verl_rollout_skip.errors import (
    CorruptEntryError,
    DiskLimitError,
    DumpError,
    EntryExistsError,
    EntryNotFoundError,
    EntryTooLargeError,
    StoreError,
)
from verl_rollout_skip.store import codec, commit, committed, names
from verl_rollout_skip.store.storage import remote

K = RolloutKey(1)
ONE_ENTRY = ["step_000001/gen_000.json", "step_000001/gen_000.parquet"]


def rollout(seed: int) -> DataProto:
    batch = rollout_output(rows=4, seed=seed)
    batch.meta_info["seed"] = seed
    return batch


class Place:
    """A run folder somewhere, and how to open it and to look at its files without our package."""

    def __init__(self, url: str, options: dict[str, Any]) -> None:
        self.url = url
        self.options = options
        plain = f"file://{url}" if "://" not in url else url
        self.files, self.root = fsspec.core.url_to_fs(plain, use_listings_cache=False, **options)

    def store(self, **options: Any) -> RolloutStore:
        return RolloutStore(self.url, storage_options=self.options, **{"background": False, **options})

    def path(self, name: str) -> str:
        return f"{self.root}/step_000001/{name}"

    def part(self) -> str:
        """The path of the only part of the only entry."""
        (found,) = [name for name in self.paths() if name.endswith(".parquet")]
        return f"{self.root}/{found}"

    def paths(self) -> list[str]:
        """All files, relative to the run folder."""
        found = self.files.find(self.root)
        return sorted(name.removeprefix(self.root.rstrip("/") + "/") for name in found)

    def names(self) -> list[str]:
        """All files, relative to the run folder, without the digests in the names of parts."""
        return sorted(re.sub(r"\.[0-9a-f]{32}\.", ".", name) for name in self.paths())


@pytest.fixture(params=["local", "memory", "s3"])
def place(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Place]:
    name = f"run-{uuid.uuid4().hex[:8]}"
    if request.param == "local":
        yield Place(str(tmp_path / name), {})
    elif request.param == "memory":
        place = Place(f"memory://{name}/deeper", {})
        yield place
        for path in [path for path in place.files.store if path.startswith(f"/{name}/")]:
            del place.files.store[path]
    else:
        yield s3_place(request.getfixturevalue("s3_options"), name)


def s3_place(options: dict[str, Any], name: str) -> Place:
    place = Place(f"s3://rollouts/{name}", options)
    if not place.files.exists("rollouts"):
        place.files.mkdir("rollouts")
    return place


@pytest.fixture
def s3(s3_options: dict[str, Any]) -> Place:
    return s3_place(s3_options, f"run-{uuid.uuid4().hex[:8]}")


def test_files_of_unknown_age_are_not_leftovers() -> None:
    """Azure's file system uses different names for the modification time, and some have none."""
    now = time.time()
    assert remote._file_info({"name": "b/x", "size": 1}).changed >= now
    changed = datetime.fromtimestamp(now - 60, timezone.utc)
    assert remote._file_info({"name": "b/x", "size": 1, "last_modified": changed}).changed < now - 59


def test_what_is_put_comes_back_with_its_input_and_its_record(place: Place) -> None:
    store = place.store()
    assert len(store) == 0
    assert K not in store
    given = rollout_input(4, seed=1)
    store.put(K, rollout(1), inputs=given, info={"seed": 1})
    for reader in (store, place.store(), pickle.loads(pickle.dumps(store))):
        assert K in reader
        assert reader.keys() == [K]
        assert_same_batch(rollout(1), reader.get(K))
        assert_same_batch(given, reader.inputs(K))
        assert reader.record(K).info == {"seed": 1}
        assert reader.verify(K).rows == 4
    assert place.names() == ONE_ENTRY


def test_anyone_can_read_the_parquet_file_with_pyarrow_alone(place: Place) -> None:
    place.store().put(K, rollout(1))
    with place.files.open(place.part()) as file:
        assert pq.read_table(file).num_rows == 4


def test_a_rollout_in_the_background_is_there_after_flush(place: Place) -> None:
    with place.store(background=True) as store:
        for step in range(4):
            store.put(RolloutKey(step), rollout(step))
        store.flush()
        assert store.keys() == [RolloutKey(step) for step in range(4)]
        store.prefetch(RolloutKey(2))
        assert_same_batch(rollout(2), store.get(RolloutKey(2)))


def test_the_first_writer_wins_and_the_same_rollout_is_not_an_error(place: Place) -> None:
    one, other = place.store(), place.store()
    one.put(K, rollout(1))
    other.put(K, rollout(1))
    with pytest.raises(EntryExistsError, match="already recorded with a different rollout"):
        other.put(K, rollout(2))
    assert_same_batch(rollout(1), other.get(K))
    assert place.names() == ONE_ENTRY


def test_exactly_one_of_eight_simultaneous_writers_wins(place: Place) -> None:
    won: list[int] = []
    refused: list[int] = []
    barrier = threading.Barrier(8)

    def work(number: int) -> None:
        store = place.store()
        barrier.wait()
        try:
            store.put(K, rollout(number))
            won.append(number)
        except EntryExistsError:
            refused.append(number)

    threads = [threading.Thread(target=work, args=(number,)) for number in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert (len(won), len(refused)) == (1, 7)
    assert_same_batch(rollout(won[0]), place.store().get(K))
    store = place.store()
    store.prune(older_than_s=-1)
    assert place.names() == ONE_ENTRY


def test_replace_replaces_whole(place: Place) -> None:
    store = place.store()
    store.put(K, rollout(1), info={"seed": 1})
    for seed in (2, 3):
        place.store().put(K, rollout(seed), info={"seed": seed}, replace=True)
        assert_same_batch(rollout(seed), store.get(K))
        assert store.record(K).info == {"seed": seed}
    store.prune(older_than_s=-1)
    assert_same_batch(rollout(3), store.get(K))
    assert place.names() == ONE_ENTRY


class Crash(BaseException):
    """The process ends here."""


def crash_at(storage: Any, number: int) -> tuple[Any, Counter[str]]:
    """Fail at the n-th call that changes the storage, as if the process were killed."""
    calls: Counter[str] = Counter()

    def watched(name: str) -> Callable[..., Any]:
        real = getattr(storage, name)

        def call(*arguments: Any, **options: Any) -> Any:
            calls["all"] += 1
            if calls["all"] == number:
                calls["crashed"] += 1
            if calls["crashed"]:
                raise Crash
            return real(*arguments, **options)

        return call

    for name in ("publish", "rename", "delete"):
        setattr(storage, name, watched(name))
    return storage, calls


@pytest.mark.parametrize("taken", [False, True], ids=["first put", "replace"])
def test_a_writer_that_dies_between_any_two_calls_leaves_the_old_entry_or_the_new(place: Place, taken: bool) -> None:
    """Parts that no record lists yet are invisible, and the record changes atomically."""
    outcomes = set()
    for number in range(1, 20):
        key = RolloutKey(number)
        reader = place.store()
        if taken:
            reader.put(key, rollout(1), info={"seed": 1})
        storage, calls = crash_at(place.store()._storage, number)
        try:
            commit.commit(storage, key, codec.prepare(rollout(2)), {"seed": 2}, replace=taken)
        except Crash:
            pass
        for _ in range(2):
            if key in reader:
                seed = reader.get(key).meta_info["seed"]
                assert_same_batch(rollout(seed), reader.get(key))
                assert reader.record(key).info == {"seed": seed}
                outcomes.add(seed)
            else:
                assert not taken
                outcomes.add(0)
            reader.prune(older_than_s=-1)
        if not calls["crashed"]:
            break
        reader.put(key, rollout(3), replace=True)
        assert_same_batch(rollout(3), reader.get(key))
    assert not calls["crashed"]
    assert outcomes == ({1, 2} if taken else {0, 2})
    assert set(place.store().keys()) == {RolloutKey(step) for step in range(1, number + 1)}


def test_a_put_that_was_sent_twice_because_the_answer_was_lost_is_not_an_error(place: Place) -> None:
    """The client retries a request, and the server reports that the file already exists."""
    storage: Any = place.store()._storage
    publish = storage.publish

    def twice(staged: Any, name: str, replace: bool = False) -> None:
        publish(staged, name, replace)
        if name.endswith(".json"):
            raise FileExistsError(name)

    storage.publish = twice
    commit.commit(storage, K, codec.prepare(rollout(1)), {"seed": 1})
    store = place.store()
    assert_same_batch(rollout(1), store.get(K))
    assert store.record(K).info == {"seed": 1}
    store.put(K, rollout(1))


@pytest.mark.parametrize("kind", ["part", "record"])
def test_changed_bytes_are_noticed_and_the_entry_can_be_set_aside(place: Place, kind: str) -> None:
    store = place.store()
    store.put(K, rollout(1))
    path = place.part() if kind == "part" else place.path("gen_000.json")
    data = bytearray(place.files.cat_file(path))
    data[len(data) // 2] ^= 1
    place.files.pipe_file(path, bytes(data))
    for load in (store.get, store.verify):
        with pytest.raises(CorruptEntryError):
            load(K)
    aside = store.set_aside(K)
    assert aside.endswith(".corrupt")
    assert K not in store
    # An object store does not show active writers: a part that no readable record lists stays there for a day.
    both = kind == "part" or place.url.startswith("/")
    assert sum(found.endswith(".corrupt") for found in place.names()) == 1 + both
    store.put(K, rollout(2))
    assert_same_batch(rollout(2), store.get(K))


def test_an_entry_that_is_refreshed_while_it_is_set_aside_stays(place: Place) -> None:
    """Another process refreshes a damaged entry before each request except the delete itself."""
    if place.url.startswith("/"):
        return  # test_concurrency.py does the same with local files
    outcomes = set()
    for number in range(1, 40):
        key = RolloutKey(number)
        store = place.store()
        store.put(key, rollout(1))
        (part,) = [name for name in place.paths() if name.startswith(names.folder_name(key)) and "parquet" in name]
        place.files.pipe_file(f"{place.root}/{part}", b"damaged")
        storage: Any = store._storage
        ask, requests = storage._ask, 0

        def refresh(
            method: str, *arguments: Any, ask: Any = ask, key: Any = key, number: int = number, **more: Any
        ) -> Any:
            nonlocal requests
            requests += method != "rm_file"
            if requests == number and method != "rm_file":
                place.store().put(key, rollout(2), replace=True)
            return ask(method, *arguments, **more)

        storage._ask = refresh
        try:
            store.set_aside(key)
            outcomes.add("set aside")
        except StoreError:
            outcomes.add("left alone")
        if requests < number:
            assert key not in place.store()
            break
        assert_same_batch(rollout(2), place.store().get(key))
    assert requests < number
    assert outcomes == {"set aside", "left alone"}


def interrupt_call(storage: Any, number: int, action: Callable[[], Any]) -> Counter[str]:
    """Let another process act just before the n-th call of a storage, and count the calls."""
    calls: Counter[str] = Counter()

    def watched(name: str) -> Callable[..., Any]:
        real = getattr(storage, name)

        def call(*arguments: Any, **options: Any) -> Any:
            calls["all"] += 1
            if calls["all"] == number:
                action()
            return real(*arguments, **options)

        return call

    for name in ("stage", "publish", "read", "info", "rename", "delete", "files"):
        setattr(storage, name, watched(name))
    return calls


@pytest.mark.parametrize("interrupted", ["copy", "prune"])
def test_a_copy_keeps_its_parts_while_leftovers_of_an_earlier_copy_are_pruned(place: Place, interrupted: str) -> None:
    """An interrupted copy has left a part. The new copy gives its part the same name."""
    if place.url.startswith("s3"):
        return  # its timestamps have a resolution of one second, and leftovers must be a day old
    source = place.store()
    source.put(RolloutKey(0), rollout(1))
    found = committed.load(source._storage, RolloutKey(0), 1 << 40)
    (part,) = found.record.parts
    for number in range(1, 60):
        there = Place(f"{place.url}/copy{number}", place.options)
        path = f"{there.root}/step_000000/{part.file}"
        there.files.makedirs(path.rpartition("/")[0], exist_ok=True)
        there.files.pipe_file(path, bytes(found.parts[0]))
        store = there.store()

        def copy(there: Place = there) -> None:
            commit.commit_copy(there.store()._storage, RolloutKey(0), found.record_data, found.parts)

        if interrupted == "prune":
            calls = interrupt_call(store._storage, number, copy)
            store.prune(older_than_s=-1)
        else:
            storage = store._storage
            calls = interrupt_call(storage, number, lambda there=there: there.store().prune(older_than_s=-1))
            commit.commit_copy(storage, RolloutKey(0), found.record_data, found.parts)
        if calls["all"] < number:
            break
        assert_same_batch(rollout(1), there.store().get(RolloutKey(0)))
    assert 5 < number < 59


def test_a_truncated_and_a_missing_file_are_noticed(place: Place) -> None:
    store = place.store()
    store.put(K, rollout(1))
    part = place.part()
    data = place.files.cat_file(part)
    place.files.pipe_file(part, data[:-1])
    with pytest.raises(CorruptEntryError):
        store.get(K)
    place.files.pipe_file(part, b"")
    with pytest.raises(CorruptEntryError):
        store.get(K)
    place.files.rm_file(part)
    with pytest.raises(CorruptEntryError, match=r"step 1, generation batch 0 is damaged: .*\.parquet is missing"):
        store.get(K)
    place.files.pipe_file(part, data)
    place.files.rm_file(place.path("gen_000.json"))
    with pytest.raises(EntryNotFoundError):
        store.get(K)


def test_an_entry_larger_than_allowed_is_not_read(place: Place) -> None:
    place.store().put(K, rollout(1))
    with pytest.raises(EntryTooLargeError):
        place.store(max_load_bytes=100).get(K)


def test_keys_in_len_and_delete(place: Place) -> None:
    store = place.store()
    keys = [RolloutKey(12), RolloutKey(2, 10), RolloutKey(2, 9), RolloutKey(1_000_000), RolloutKey(0)]
    for key in keys:
        store.put(key, rollout(key.step))
    assert store.keys() == list(store) == sorted(keys)
    assert len(store) == 5
    store.delete(RolloutKey(2, 9))
    assert RolloutKey(2, 9) not in store
    assert RolloutKey(2, 10) in store
    assert len(store) == 4
    for call in (store.delete, store.get, store.record, store.verify, store.inputs, store.set_aside):
        with pytest.raises(EntryNotFoundError, match="step 2, generation batch 9 is not recorded in"):
            call(RolloutKey(2, 9))
    assert len(place.names()) == 8


def test_prune_removes_parts_that_no_record_lists_and_no_entry(place: Place) -> None:
    store = place.store()
    store.put(K, rollout(1))
    unlisted = f"gen_001.{'0' * 32}.parquet"
    place.files.pipe_file(place.path(unlisted), b"PAR1")
    if not place.url.startswith("/"):
        assert store.prune() == [], "it may belong to an active writer"
    (removed,) = store.prune(older_than_s=-1)
    assert removed.endswith(unlisted)
    assert_same_batch(rollout(1), store.get(K))
    assert place.names() == ONE_ENTRY


def test_a_run_folder_does_not_grow_past_max_disk(place: Place) -> None:
    place.store().put(K, rollout(1))
    used = sum(place.files.size(f"{place.root}/{name}") for name in place.paths())
    store = place.store(max_disk=used + 1000)
    with pytest.raises(DiskLimitError, match="max_disk"):
        store.put(RolloutKey(2), rollout(2))
    assert store.keys() == [K]
    assert not any(name.startswith("step_000002") for name in place.names())


@pytest.mark.parametrize("chain", ["simplecache", "filecache", "blockcache", "simplecache::dir"])
def test_a_url_with_a_local_cache_is_refused(chain: str) -> None:
    """The cache would return records that have been replaced since."""
    url = f"{chain}::memory://cached/run"
    with pytest.raises(OSError, match=f"{chain.partition(':')[0]}.*memory://cached/run") as caught:
        RolloutStore(url)
    assert "\n" not in str(caught.value)


def test_a_location_that_cannot_be_written_is_a_dump_error(s3_options: dict[str, Any]) -> None:
    store = RolloutStore("s3://no-such-bucket/run", background=False, storage_options=s3_options)
    with pytest.raises(DumpError, match="step 1, generation batch 0 was not written to s3://no-such-bucket/run"):
        store.put(K, rollout(1))
    with RolloutStore("s3://no-such-bucket/run", storage_options=s3_options) as background:
        background.put(K, rollout(1))
        with pytest.raises(DumpError, match="no-such-bucket"):
            background.flush()


def test_a_server_that_is_gone_is_a_dump_error_and_not_an_empty_run(s3_options: dict[str, Any]) -> None:
    """An unreachable store must not look like a store without rollouts: they would be generated again."""
    gone = {
        **s3_options,
        "endpoint_url": "http://127.0.0.1:9",
        "config_kwargs": {"connect_timeout": 1, "retries": {"max_attempts": 0}},
    }
    store = RolloutStore("s3://rollouts/run", background=False, storage_options=gone)
    store._storage._fs.retries = 1  # type: ignore[attr-defined]
    with pytest.raises(DumpError):
        store.put(K, rollout(1))
    for ask in (store.keys, lambda: K in store, lambda: store.get(K)):
        with pytest.raises(Exception, match=r"(?i)connect") as caught:
            ask()
        assert not isinstance(caught.value, LookupError)


def test_a_large_rollout_is_uploaded_in_parts_and_still_one_writer_wins(
    s3: Place, monkeypatch: pytest.MonkeyPatch
) -> None:
    """s3fs uploads more than a hundred megabytes in parts; here it does so from ten on, to save time."""
    whole = S3FileSystem._pipe_file

    async def in_parts(self: Any, path: str, data: bytes, **options: Any) -> Any:
        return await whole(self, path, data, **{**options, "chunksize": 5 << 20})

    monkeypatch.setattr(S3FileSystem, "_pipe_file", in_parts)
    s3 = Place(s3.url, {**s3.options, "skip_instance_cache": True})
    requests: Counter[str] = Counter()
    undo = count_requests(s3.files, requests)

    def noise(seed: int) -> Any:
        generator = torch.Generator().manual_seed(seed)
        values = torch.randint(0, 256, (4, 3 << 20), dtype=torch.uint8, generator=generator)
        return TensorDict({"noise": values}, batch_size=[4])

    store = s3.store()
    store.put(K, noise(1))
    assert requests["upload_part"] >= 3
    undo()
    assert_same_batch(noise(1), store.get(K))
    with pytest.raises(EntryExistsError):
        s3.store().put(K, noise(2))
    assert_same_batch(noise(1), store.get(K))
    assert s3.names() == ONE_ENTRY


def test_a_server_without_conditional_puts_keeps_the_first_rollout_too(
    s3: Place, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Not every S3-compatible server supports If-None-Match; some accept the request and ignore the header."""
    real = S3FileSystem._call_s3

    async def ignore_the_condition(self: Any, method: str, *arguments: Any, **options: Any) -> Any:
        options.pop("IfNoneMatch", None)
        return await real(self, method, *arguments, **options)

    monkeypatch.setattr(S3FileSystem, "_call_s3", ignore_the_condition)
    s3.store().put(K, rollout(1))
    s3.store().put(K, rollout(1))
    with pytest.raises(EntryExistsError):
        s3.store().put(K, rollout(2))
    assert_same_batch(rollout(1), s3.store().get(K))


def test_two_processes_record_into_one_bucket(s3: Place, fork: Callable[..., Forked]) -> None:
    def work(report: Report, number: int) -> None:
        won = []
        for background in (False, True):
            store = s3.store(background=background)
            for step in range(4):
                try:
                    store.put(RolloutKey(step, int(background)), rollout(number))
                    store.flush()
                    won.append((step, int(background)))
                except (EntryExistsError, DumpError):
                    pass
            store.put(RolloutKey(100 + number, int(background)), rollout(number))
            store.close()
        report(json.dumps(won))

    children = [fork(work, number) for number in range(2)]
    won = [{tuple(pair) for pair in json.loads(child.lines()[-1])} for child in children]
    contested = {(step, gen_batch) for step in range(4) for gen_batch in range(2)}
    assert won[0] | won[1] == contested
    assert not won[0] & won[1]
    store = s3.store()
    assert len(store) == len(contested) + 4
    for number in range(2):
        for pair in [*won[number], (100 + number, 0), (100 + number, 1)]:
            assert_same_batch(rollout(number), store.get(RolloutKey(*pair)))


def test_a_forked_child_can_go_on_with_the_store_it_inherited(place: Place, fork: Callable[..., Forked]) -> None:
    """A DataLoader's worker that reads recorded rollouts."""
    if place.url.startswith("memory"):
        return  # memory is copied, not shared
    store = place.store(background=True)
    store.put(K, rollout(1))
    store.flush()

    def work(report: Report) -> None:
        assert_same_batch(rollout(1), store.get(K))
        store.put(RolloutKey(2), rollout(2))
        store.close()
        report("done")

    child = fork(work)
    assert child.lines() == ["done"]
    assert_same_batch(rollout(2), store.get(RolloutKey(2)))
    store.close()


@pytest.mark.slow
def test_listings_of_many_entries_are_complete(s3: Place) -> None:
    """S3 lists a thousand names per page; this folder has more."""
    batches = {s3.path(f"gen_{gen_batch:03d}.json"): b"x" for gen_batch in range(1010)}
    s3.files.pipe({**batches, f"{s3.root}/step_000002/gen_000.json": b"x"})
    store = s3.store()
    assert store.keys() == [*(RolloutKey(1, gen_batch) for gen_batch in range(1010)), RolloutKey(2)]
    assert len(store) == 1011


class Counting:
    """A storage that counts its calls."""

    def __init__(self, storage: Any) -> None:
        self._storage = storage
        self.calls: Counter[str] = Counter()

    def __getattr__(self, name: str) -> Any:
        found = getattr(self._storage, name)
        if not callable(found) or name == "where":
            return found

        def call(*arguments: Any, **options: Any) -> Any:
            self.calls[name] += 1
            return found(*arguments, **options)

        return call


def cost_of_everything(place: Place, step: int) -> dict[str, Any]:
    """The storage calls of each operation and, for S3, its number of requests."""
    store = place.store()
    counting = Counting(store._storage)
    store._storage = counting  # type: ignore[assignment]
    requests: Counter[str] = Counter()
    undo = count_requests(place.files, requests)
    key, missing = RolloutKey(step), RolloutKey(step + 1)
    costs = {}

    def measure(name: str, call: Callable[[], Any]) -> None:
        counting.calls.clear()
        requests.clear()
        call()
        costs[name] = {**counting.calls, **{f"S3 {operation}": number for operation, number in requests.items()}}

    measure("put", lambda: store.put(key, rollout(1)))
    measure("put again", lambda: store.put(key, rollout(1)))
    measure("replace", lambda: store.put(key, rollout(2), replace=True))
    measure("in", lambda: key in store)
    measure("not in", lambda: missing in store)
    measure("get", lambda: store.get(key))
    measure("record", lambda: store.record(key))
    measure("delete", lambda: store.delete(key))
    undo()
    return costs


def count_requests(files: Any, requests: Counter[str]) -> Callable[[], None]:
    """Count the requests that s3fs sends; nothing to count elsewhere."""
    if not hasattr(files, "_call_s3"):
        return lambda: None
    real = type(files)._call_s3

    async def call(self: Any, method: str, *arguments: Any, **options: Any) -> Any:
        requests[method] += 1
        return await real(self, method, *arguments, **options)

    type(files)._call_s3 = call

    def undo() -> None:
        type(files)._call_s3 = real

    return undo


def test_put_get_and_in_cost_the_same_however_many_entries_there_are(place: Place) -> None:
    """A training of a hundred thousand steps is as fast at the end as at the beginning."""
    few, many = 10, 200 if place.url.startswith("s3") else 1000
    store = place.store()
    store.put(RolloutKey(0), rollout(0))
    original = {name: place.files.cat_file(f"{place.root}/{name}") for name in place.paths()}

    def fill(steps: range) -> None:
        copies = {}
        for step in steps:
            folder = names.folder_name(RolloutKey(step))
            for name, data in original.items():
                copies[f"{place.root}/{folder}/{name.rsplit('/', 1)[-1]}"] = data
            if not place.url.startswith("s3"):
                place.files.makedirs(f"{place.root}/{folder}", exist_ok=True)
        place.files.pipe(copies)

    fill(range(1, few))
    assert len(store) == few
    costs = cost_of_everything(place, 5000)
    fill(range(few, many))
    assert len(store) == many
    assert cost_of_everything(place, 6000) == costs
    assert costs["in"].get("files", 0) == costs["in"].get("folders", 0) == 0, "a question about one key lists others"
    assert costs["get"].get("folders", 0) == costs["put"].get("folders", 0) == 0
