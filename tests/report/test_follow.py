"""``Follower``, one poll at a time: new, replaced, removed, broken and repaired entries, and bounded memory."""

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


def news(view: Follower, after: int = 0) -> dict[str, Any]:
    changes: dict[str, Any] = json.loads(view.changes(after))
    return changes


def steps(changes: dict[str, Any]) -> list[int]:
    return sorted(entry["step"] for entry in changes["entries"])


def test_each_poll_reports_only_changes(tmp_path: Path) -> None:
    view = follower(tmp_path)
    view.poll()
    assert news(view)["entries"] == []
    put(tmp_path, 1)
    put(tmp_path, 2)
    view.poll()
    first = news(view)
    assert steps(first) == [1, 2]
    assert first["entries"][0]["groups"]
    assert news(view, first["revision"])["entries"] == []
    put(tmp_path, 3)
    view.poll()
    assert steps(news(view, first["revision"])) == [3]
    assert steps(news(view)) == [1, 2, 3]


def test_replaced_and_removed_entries_are_reported(tmp_path: Path) -> None:
    put(tmp_path, 1, seed=1)
    put(tmp_path, 2)
    view = follower(tmp_path)
    view.poll()
    before = news(view)
    put(tmp_path, 1, seed=2)
    RolloutStore(tmp_path).delete(RolloutKey(2))
    view.poll()
    after = news(view, before["revision"])
    assert (steps(after), after["removed"]) == ([1], ["2.0"])
    assert steps(news(view)) == [1]
    put(tmp_path, 2)
    view.poll()
    again = news(view, after["revision"])
    assert (steps(again), again["removed"]) == ([2], [])


def test_a_broken_entry_is_reported_and_again_after_repair(tmp_path: Path) -> None:
    put(tmp_path, 1)
    file = part_file(tmp_path)
    whole, times = file.read_bytes(), (file.stat().st_atime, file.stat().st_mtime)
    file.write_bytes(whole[:-1] + bytes([whole[-1] ^ 1]))
    os.utime(file, times)
    view = follower(tmp_path)
    view.poll()
    [entry] = news(view)["entries"]
    assert "damaged" in entry["broken"]
    revision = news(view)["revision"]
    for _ in range(12):
        view.poll()
    assert news(view, revision)["entries"] == [], "it is unchanged"
    file.write_bytes(whole)
    os.utime(file, times)
    for _ in range(6):
        view.poll()
    [entry] = news(view, revision)["entries"]
    assert entry["broken"] is None


def test_only_the_selected_steps_are_read(tmp_path: Path) -> None:
    put(tmp_path, 1)
    put(tmp_path, 2, gen_batch=1)
    view = Follower(OpenVariant.open(str(tmp_path)), Sampling(), wanted=lambda key: key.step == 2)
    view.poll()
    assert [(entry["step"], entry["gen_batch"]) for entry in news(view)["entries"]] == [(2, 1)]


def test_large_responses_are_split_without_losing_changes(tmp_path: Path, monkeypatch: Any) -> None:
    for step in range(1, 8):
        put(tmp_path, step)
    view = follower(tmp_path)
    view.poll()
    RolloutStore(tmp_path).delete(RolloutKey(4))
    view.poll()
    monkeypatch.setattr(follow, "_MAX_RESPONSE_BYTES", 1)
    seen: list[int] = []
    removed: list[str] = []
    after, more = 0, True
    while more:
        changes = news(view, after)
        assert len(changes["entries"]) == 1
        seen += steps(changes)
        removed += changes["removed"]
        after, more = changes["revision"], changes["more"]
    assert sorted(seen) == [1, 2, 3, 5, 6, 7]
    assert news(view, after)["entries"] == []
    assert removed + news(view, after)["removed"] == ["4.0"]


def test_the_text_of_the_oldest_steps_is_dropped_first(tmp_path: Path, monkeypatch: Any) -> None:
    put(tmp_path, 1)
    view = follower(tmp_path)
    view.poll()
    size = len(view.changes(0))
    before = news(view)["revision"]
    monkeypatch.setattr(follow, "_MAX_HELD_BYTES", int(2.5 * size))
    for step in (2, 3, 4, 5):
        put(tmp_path, step)
        view.poll()
    changes = news(view, before)
    with_text = {entry["step"]: bool(entry["groups"]) for entry in changes["entries"]}
    assert with_text == {1: False, 2: False, 3: False, 4: True, 5: True}
    assert all(entry["statistics"]["rows"] == 8 for entry in changes["entries"])
    assert "The text of the oldest 3 rollout steps is no longer in memory" in " ".join(changes["left_out"])


def test_a_folder_that_cannot_be_listed_is_reported_and_retried(tmp_path: Path, monkeypatch: Any) -> None:
    put(tmp_path, 1)
    view = follower(tmp_path)
    view.poll()

    def fails() -> Any:
        raise OSError("out of reach")

    with monkeypatch.context() as broken:
        broken.setattr(view.variant.entries.storage, "folders", fails)
        view.poll()
        changes = news(view)
    assert "out of reach" in changes["problems"][0]
    assert steps(changes) == [1], "entries that were read are kept"
    view.poll()
    assert news(view)["problems"] == []


def test_the_thread_polls_until_it_is_stopped(tmp_path: Path) -> None:
    put(tmp_path, 1)
    view = Follower(OpenVariant.open(str(tmp_path)), Sampling(), interval_s=0.01)
    view.start()
    try:
        _wait(lambda: steps(news(view)) == [1])
        put(tmp_path, 2)
        _wait(lambda: steps(news(view)) == [1, 2])
    finally:
        view.stop()
    put(tmp_path, 3)
    assert steps(news(view)) == [1, 2]


def _wait(happened: Any) -> None:
    import time

    deadline = time.monotonic() + 30
    while not happened():
        assert time.monotonic() < deadline
        time.sleep(0.01)


@pytest.mark.parametrize("groups", [0, 1, 3])
def test_the_requested_number_of_groups_is_read(tmp_path: Path, groups: int) -> None:
    put(tmp_path, 1)
    view = follower(tmp_path, groups=groups)
    view.poll()
    assert len(news(view)["entries"][0]["groups"]) == groups
