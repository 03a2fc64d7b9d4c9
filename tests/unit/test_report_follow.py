"""A live view's follower, look by look: what is new, replaced, removed, broken and repaired, and what is let go."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import pytest

from tests.batches import rollout_input, rollout_output
from tests.entry_files import part_file
from verl_rollout_skip import RolloutKey, RolloutStore
from verl_rollout_skip.report import follow
from verl_rollout_skip.report.collect import OpenVariant
from verl_rollout_skip.report.follow import Follower
from verl_rollout_skip.report.sampling import Sampling


def put(folder: Path, step: int, gen_batch: int = 0, seed: int = 0) -> None:
    batch, inputs = rollout_output(8, seed=seed), rollout_input(8, seed=seed)
    RolloutStore(folder, background=False).put(RolloutKey(step, gen_batch), batch, inputs=inputs, replace=True)


def follower(folder: Path, **sampling: Any) -> Follower:
    return Follower(OpenVariant.open(str(folder)), Sampling(**sampling))


def news(found: Follower, after: int = 0) -> dict[str, Any]:
    told: dict[str, Any] = json.loads(found.news(after))
    return told


def steps(told: dict[str, Any]) -> list[int]:
    return sorted(entry["step"] for entry in told["entries"])


def test_each_look_tells_only_what_is_new(tmp_path: Path) -> None:
    found = follower(tmp_path)
    found.look()
    assert news(found)["entries"] == []
    put(tmp_path, 1)
    put(tmp_path, 2)
    found.look()
    first = news(found)
    assert steps(first) == [1, 2]
    assert first["entries"][0]["groups"]
    assert news(found, first["revision"])["entries"] == []
    put(tmp_path, 3)
    found.look()
    assert steps(news(found, first["revision"])) == [3]
    assert steps(news(found)) == [1, 2, 3]


def test_a_replaced_entry_is_told_again_and_a_removed_one_is_taken_away(tmp_path: Path) -> None:
    put(tmp_path, 1, seed=1)
    put(tmp_path, 2)
    found = follower(tmp_path)
    found.look()
    before = news(found)
    put(tmp_path, 1, seed=2)
    RolloutStore(tmp_path).delete(RolloutKey(2))
    found.look()
    after = news(found, before["revision"])
    assert (steps(after), after["removed"]) == ([1], ["2.0"])
    assert steps(news(found)) == [1]
    put(tmp_path, 2)
    found.look()
    again = news(found, after["revision"])
    assert (steps(again), again["removed"]) == ([2], [])


def test_a_broken_entry_is_told_as_broken_and_again_when_it_is_repaired(tmp_path: Path) -> None:
    put(tmp_path, 1)
    file = part_file(tmp_path)
    whole, times = file.read_bytes(), (file.stat().st_atime, file.stat().st_mtime)
    file.write_bytes(whole[:-1] + bytes([whole[-1] ^ 1]))
    os.utime(file, times)
    found = follower(tmp_path)
    found.look()
    [entry] = news(found)["entries"]
    assert "damaged" in entry["broken"]
    revision = news(found)["revision"]
    for _ in range(12):
        found.look()
    assert news(found, revision)["entries"] == [], "it is still the same"
    file.write_bytes(whole)
    os.utime(file, times)
    for _ in range(6):
        found.look()
    [entry] = news(found, revision)["entries"]
    assert entry["broken"] is None


def test_only_the_wanted_steps_are_followed(tmp_path: Path) -> None:
    put(tmp_path, 1)
    put(tmp_path, 2, gen_batch=1)
    found = Follower(OpenVariant.open(str(tmp_path)), Sampling(), wanted=lambda key: key.step == 2)
    found.look()
    assert [(entry["step"], entry["gen_batch"]) for entry in news(found)["entries"]] == [(2, 1)]


def test_a_large_answer_comes_in_pieces_and_nothing_is_missed(tmp_path: Path, monkeypatch: Any) -> None:
    for step in range(1, 8):
        put(tmp_path, step)
    found = follower(tmp_path)
    found.look()
    RolloutStore(tmp_path).delete(RolloutKey(4))
    found.look()
    monkeypatch.setattr(follow, "_ANSWER_BYTES", 1)
    seen: list[int] = []
    removed: list[str] = []
    after, more = 0, True
    while more:
        told = news(found, after)
        assert len(told["entries"]) == 1
        seen += steps(told)
        removed += told["removed"]
        after, more = told["revision"], told["more"]
    assert sorted(seen) == [1, 2, 3, 5, 6, 7]
    assert news(found, after)["entries"] == []
    assert removed + news(found, after)["removed"] == ["4.0"]


def test_the_text_of_the_oldest_steps_is_let_go_first(tmp_path: Path, monkeypatch: Any) -> None:
    put(tmp_path, 1)
    found = follower(tmp_path)
    found.look()
    size = len(found.news(0))
    before = news(found)["revision"]
    monkeypatch.setattr(follow, "_HELD_BYTES", int(2.5 * size))
    for step in (2, 3, 4, 5):
        put(tmp_path, step)
        found.look()
    told = news(found, before)
    with_text = {entry["step"]: bool(entry["groups"]) for entry in told["entries"]}
    assert with_text == {1: False, 2: False, 3: False, 4: True, 5: True}
    assert all(entry["statistics"]["rows"] == 8 for entry in told["entries"])
    assert "The text of the oldest 3 rollout steps was let go" in " ".join(told["left_out"])


def test_a_folder_that_cannot_be_listed_is_told_and_followed_again(tmp_path: Path, monkeypatch: Any) -> None:
    put(tmp_path, 1)
    found = follower(tmp_path)
    found.look()

    def fails() -> Any:
        raise OSError("out of reach")

    with monkeypatch.context() as broken:
        broken.setattr(found.variant.entries.storage, "folders", fails)
        found.look()
        told = news(found)
    assert "out of reach" in told["problems"][0]
    assert steps(told) == [1], "what was read stays"
    found.look()
    assert news(found)["problems"] == []


def test_it_follows_by_itself_until_it_is_stopped(tmp_path: Path) -> None:
    put(tmp_path, 1)
    found = Follower(OpenVariant.open(str(tmp_path)), Sampling(), every_s=0.01)
    found.start()
    try:
        _wait(lambda: steps(news(found)) == [1])
        put(tmp_path, 2)
        _wait(lambda: steps(news(found)) == [1, 2])
    finally:
        found.stop()
    put(tmp_path, 3)
    assert steps(news(found)) == [1, 2]


def _wait(happened: Any) -> None:
    import time

    deadline = time.monotonic() + 30
    while not happened():
        assert time.monotonic() < deadline
        time.sleep(0.01)


@pytest.mark.parametrize("groups", [0, 1, 3])
def test_so_many_groups_are_held_as_were_asked_for(tmp_path: Path, groups: int) -> None:
    put(tmp_path, 1)
    found = follower(tmp_path, groups=groups)
    found.look()
    assert len(news(found)["entries"][0]["groups"]) == groups
