"""Damaged files: loading an entry with changed bytes raises a named error and never returns other data.

More than a thousand kinds of damage, each to an intact entry: flipped bits, changed, cut, inserted and swapped bytes in
the data pages, in the footer and in the record, and files under the wrong name.
"""

from __future__ import annotations

import os
import random
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.batches import assert_same_batch, rollout_input, rollout_output
from tests.entry_files import part_file, record_file
from tests.environment import leftovers
from verl_rollout_skip import RolloutKey, RolloutStore
from verl_rollout_skip.errors import (
    CorruptEntryError,
    EntryNotFoundError,
    StoreError,
    UnreadableEntryError,
)

K = RolloutKey(1)
OTHER = RolloutKey(1, 1)
DAMAGES_EACH = 50


@pytest.fixture
def store(tmp_path: Path) -> RolloutStore:
    """Two entries of the same shape: a file of one looks valid in place of the other's."""
    store = RolloutStore(tmp_path, background=False)
    for seed, key in enumerate((K, OTHER)):
        store.put(key, rollout_output(8, seed=seed), inputs=rollout_input(8, seed=seed), info={"seed": seed})
    return store


def files_of(store: RolloutStore, key: RolloutKey) -> tuple[Path, Path]:
    return part_file(store.path, key.step, key.gen_batch), record_file(store.path, key.step, key.gen_batch)


def flip_a_bit(data: bytearray, chance: random.Random) -> None:
    data[chance.randrange(len(data))] ^= 1 << chance.randrange(8)


def change_bytes(data: bytearray, chance: random.Random) -> None:
    start = chance.randrange(len(data))
    for index in range(start, min(len(data), start + chance.choice([1, 2, 4, 16, 64]))):
        data[index] = chance.randrange(256)


def zero_a_block(data: bytearray, chance: random.Random) -> None:
    """Like a disk that lost a sector."""
    size = chance.choice([16, 128, 512])
    start = chance.randrange(max(len(data) - size, 1))
    data[start : start + size] = bytes(min(size, len(data) - start))


def cut_the_end(data: bytearray, chance: random.Random) -> None:
    del data[chance.randrange(len(data)) :]


def cut_the_middle(data: bytearray, chance: random.Random) -> None:
    start = chance.randrange(len(data))
    del data[start : start + chance.choice([1, 3, 8, 100])]


def insert_bytes(data: bytearray, chance: random.Random) -> None:
    where = chance.randrange(len(data) + 1)
    data[where:where] = chance.randbytes(chance.choice([1, 4, 50]))


def swap_blocks(data: bytearray, chance: random.Random) -> None:
    size = chance.choice([1, 8, 64, 256])
    left, right = sorted(chance.randrange(max(len(data) - size, 1)) for _ in range(2))
    if right - left >= size:
        data[left : left + size], data[right : right + size] = data[right : right + size], data[left : left + size]


def repeat_a_block(data: bytearray, chance: random.Random) -> None:
    start = chance.randrange(len(data))
    data[start:start] = data[start : start + chance.choice([8, 64])]


DAMAGES: list[Callable[[bytearray, random.Random], None]] = [
    flip_a_bit,
    change_bytes,
    zero_a_block,
    cut_the_end,
    cut_the_middle,
    insert_bytes,
    swap_blocks,
    repeat_a_block,
]
REGIONS = ("pages", "footer", "record")


def region_of(data: bytes, region: str) -> slice:
    """The bytes of a Parquet file that hold data pages or the footer; all bytes of a record."""
    if region == "record":
        return slice(0, len(data))
    footer = len(data) - 8 - int.from_bytes(data[-8:-4], "little")
    return slice(0, footer) if region == "pages" else slice(footer, len(data))


@pytest.mark.parametrize("region", REGIONS)
@pytest.mark.parametrize("damage", DAMAGES, ids=lambda damage: damage.__name__)
def test_a_damaged_entry_is_never_loaded(
    store: RolloutStore, region: str, damage: Callable[[bytearray, random.Random], None]
) -> None:
    data_file, record_file = files_of(store, K)
    file = record_file if region == "record" else data_file
    whole = file.read_bytes()
    where = region_of(whole, region)
    chance = random.Random(f"{damage.__name__} {region}")
    done = 0
    while done < DAMAGES_EACH:
        part = bytearray(whole[where])
        damage(part, chance)
        damaged = whole[: where.start] + bytes(part) + whole[where.stop :]
        if damaged == whole:
            continue
        done += 1
        file.write_bytes(damaged)
        for load in (store.get, store.inputs, store.verify)[: 1 if done % 4 else 3]:
            with pytest.raises(UnreadableEntryError) as caught:
                load(K)
            assert str(file.parent) in str(caught.value), "the message does not say which file"
    file.write_bytes(whole)
    assert_same_batch(rollout_output(8, seed=0), store.get(K))


def test_that_is_more_than_a_thousand_damages() -> None:
    assert DAMAGES_EACH * len(DAMAGES) * len(REGIONS) > 1000


def test_every_single_cut_of_an_entry_is_noticed(store: RolloutStore) -> None:
    """Truncated at any byte, as by a full disk or an interrupted copy."""
    for file in files_of(store, K):
        whole = file.read_bytes()
        for size in {*range(0, len(whole), 97), 0, 1, 4, 8, 12, len(whole) - 1}:
            file.write_bytes(whole[:size])
            with pytest.raises(UnreadableEntryError):
                store.get(K)
        file.write_bytes(whole)


@pytest.mark.parametrize("what", ["data", "record", "both", "data of another run"])
def test_files_moved_to_another_key_are_not_loaded(store: RolloutStore, tmp_path: Path, what: str) -> None:
    here, there = files_of(store, K), files_of(store, OTHER)
    if what == "data of another run":
        with RolloutStore(tmp_path / "another run") as another:
            another.put(K, rollout_output(8, seed=9))
        shutil.copyfile(files_of(another, K)[0], here[0])
    for one, other in list(zip(here, there, strict=True))[slice(what == "record", 2 - (what == "data"))]:
        if what in ("data", "record", "both"):
            one.rename(one.with_suffix(".swapped"))
            other.rename(one)
            one.with_suffix(".swapped").rename(other)
    for key in (K, OTHER) if what != "data of another run" else (K,):
        with pytest.raises(CorruptEntryError):
            store.get(key)
        with pytest.raises(CorruptEntryError):
            store.verify(key)


def test_an_entry_copied_to_another_step_is_refused(store: RolloutStore) -> None:
    data, _ = files_of(store, K)
    shutil.copytree(data.parent, data.parent.with_name("step_000007"))
    with pytest.raises(CorruptEntryError, match="moved or renamed"):
        store.get(RolloutKey(7))
    assert_same_batch(rollout_output(8, seed=0), store.get(K))


def test_a_missing_part_is_named_and_a_missing_record_means_not_recorded(store: RolloutStore) -> None:
    data, record = files_of(store, K)
    saved = data.read_bytes()
    data.unlink()
    assert K in store
    with pytest.raises(CorruptEntryError, match=rf"step 1, .* is damaged: .*{data.name} is missing"):
        store.get(K)
    data.write_bytes(saved)
    record.unlink()
    assert K not in store
    with pytest.raises(EntryNotFoundError):
        store.get(K)


@pytest.mark.parametrize("content", [b"", b"PAR1", b"PAR1" * 4, b"\x00" * 100, b"{}", b"[" * 100_000, os.urandom(999)])
def test_a_file_that_was_never_an_entry_is_refused(store: RolloutStore, content: bytes) -> None:
    for file in files_of(store, K):
        whole = file.read_bytes()
        file.write_bytes(content)
        with pytest.raises(UnreadableEntryError):
            store.get(K)
        file.write_bytes(whole)


@pytest.mark.parametrize("file", [0, 1], ids=["parquet", "record"])
def test_a_damaged_entry_can_be_set_aside_and_recorded_again(store: RolloutStore, file: int) -> None:
    path = files_of(store, K)[file]
    path.write_bytes(path.read_bytes()[:-20])
    with pytest.raises(StoreError):
        store.put(K, rollout_output(8, seed=0))
    place = Path(store.set_aside(K))
    assert place.exists()
    assert place.name.endswith(".corrupt")
    assert K not in store
    assert store.keys() == [OTHER]
    store.put(K, rollout_output(8, seed=5))
    assert_same_batch(rollout_output(8, seed=5), store.get(K))
    assert place.exists(), "what was set aside is kept"


def test_a_damaged_entry_can_be_replaced(store: RolloutStore) -> None:
    for number in (0, 1):
        files_of(store, K)[number].write_bytes(b"broken")
        store.put(K, rollout_output(8, seed=6), replace=True)
        assert_same_batch(rollout_output(8, seed=6), store.get(K))
    assert leftovers(Path(store.path)) == [], "the broken part is still there"
    store.prune(older_than_s=0)
    assert_same_batch(rollout_output(8, seed=6), store.get(K))


def test_damage_shows_in_a_prefetched_entry_too(store: RolloutStore) -> None:
    data, _ = files_of(store, K)
    data.write_bytes(data.read_bytes()[:-1])
    store.prefetch(K)
    with pytest.raises(CorruptEntryError):
        store.get(K)


def test_damage_of_one_entry_does_not_touch_the_others(store: RolloutStore) -> None:
    data, record = files_of(store, K)
    data.write_bytes(b"")
    record.write_bytes(b"")
    assert_same_batch(rollout_output(8, seed=1), store.get(OTHER))
    assert store.verify(OTHER).info == {"seed": 1}
    store.prune(older_than_s=0)
    assert store.keys() == [K, OTHER]
