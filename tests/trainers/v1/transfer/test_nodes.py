"""Samples that tasks move on a Ray cluster of several nodes, with shared and node-local disks and nodes that die."""

from __future__ import annotations

import os
import signal
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest
import ray

from tests.trainers.v1.training import Trainings, hits, results
from tests.trainers.v1.transfer.cluster import Nodes, cluster, has_own_disks
from verl_rollout_skip import RolloutKey, RolloutStore
from verl_rollout_skip.trainers.v1.transfer import tasks

pytestmark = [pytest.mark.slow, pytest.mark.usefixtures("messages")]

STEPS = [1, 2, 3]
TASKS = ("+rollout_skip.tasks=on", "+rollout_skip.part_bytes=1500")
needs_own_disks = pytest.mark.skipif(not has_own_disks(), reason="mounting a disk needs root")


@pytest.fixture(scope="module")
def nodes() -> Iterator[Nodes]:
    with cluster() as found:
        yield found


def noting_nodes(folder: Path, function: Callable[..., Any]) -> Callable[..., Any]:
    """Wraps the function of a task to note the node that it runs on."""

    def task(*arguments: Any) -> Any:
        (folder / ray.get_runtime_context().get_node_id()).touch()
        return function(*arguments)

    return task


@pytest.fixture
def used(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> dict[str, Path]:
    """For each function, a folder with the nodes that it ran on."""
    folders = {}
    for name in ("encode", "write", "put"):
        folders[name] = tmp_path / "nodes" / name
        folders[name].mkdir(parents=True)
        monkeypatch.setattr(tasks, name, noting_nodes(folders[name], getattr(tasks, name)))
    return folders


def names(folder: Path) -> set[str]:
    return {path.name for path in folder.iterdir()}


def test_every_node_reads_and_writes_a_shared_folder(
    nodes: Nodes, trainings: Trainings, used: dict[str, Path], caplog: pytest.LogCaptureFixture
) -> None:
    recorded = trainings.train("record", *TASKS)
    again = trainings.train("replay", *TASKS)
    assert again.trained == recorded.trained
    assert results(again) == results(recorded)
    assert again.left_over == []
    all_nodes = {nodes.head, *nodes.others()}
    assert len(all_nodes) > 1
    assert names(used["write"]) == names(used["put"]) == all_nodes
    assert f"all {len(all_nodes)} nodes can read and write {trainings.dumps}" in caplog.text


@needs_own_disks
def test_a_node_with_its_own_disk_neither_reads_nor_writes(
    nodes: Nodes, trainings: Trainings, used: dict[str, Path], caplog: pytest.LogCaptureFixture
) -> None:
    trainings.dumps.mkdir()
    alone = nodes.add(own_disk=trainings.dumps)
    try:
        recorded = trainings.train("record", *TASKS)
        again = trainings.train("replay", *TASKS)
    finally:
        nodes.kill_last()
    assert again.trained == recorded.trained
    assert again.rollout_skip.statistics.dump_failures == 0
    assert alone not in names(used["write"]) | names(used["put"])
    assert f"only 2 of 3 nodes can read and write {trainings.dumps}" in caplog.text
    assert alone[:8] in caplog.text


def refusing(driver: int, function: Callable[..., Any]) -> Callable[..., Any]:
    """Wraps the function of a task to fail as on a node where the folder is not mounted."""

    def task(*arguments: Any) -> Any:
        if os.getpid() != driver:
            raise FileNotFoundError(2, "No such file or directory")
        return function(*arguments)

    return task


def test_if_only_the_driver_reaches_the_folder_tasks_still_encode_and_decode(
    nodes: Nodes,
    trainings: Trainings,
    used: dict[str, Path],
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    monkeypatch.setattr(tasks, "reaches", lambda *_: "FileNotFoundError: No such file or directory")
    monkeypatch.setattr(tasks, "write", refusing(os.getpid(), tasks.write))
    recorded = trainings.train("record", *TASKS)
    again = trainings.train("replay", *TASKS)
    assert again.trained == recorded.trained
    assert f"only the driver can read and write {trainings.dumps}" in caplog.text
    assert names(used["encode"]) | names(used["put"]) == {nodes.head, *nodes.others()}


def killing_its_node(marker: Path, node: str, function: Callable[..., Any]) -> Callable[..., Any]:
    """Wraps the function of a task to kill ``node`` while it runs there, once."""

    def task(*arguments: Any) -> Any:
        if ray.get_runtime_context().get_node_id() == node and not marker.exists():
            marker.touch()
            raylet = psutil.Process(os.getpid())
            while "raylet" not in raylet.name():
                raylet = raylet.parent()
            for process in [raylet, *raylet.children(recursive=True)]:
                os.kill(process.pid, signal.SIGKILL)
        return function(*arguments)

    return task


@pytest.mark.parametrize("name", ["encode", "write", "put"])
def test_a_node_that_dies_while_it_moves_a_sample_costs_at_most_one_dump(
    nodes: Nodes, trainings: Trainings, monkeypatch: pytest.MonkeyPatch, tmp_path: Path, name: str
) -> None:
    dying, marker = nodes.add(), tmp_path / "killed"
    with monkeypatch.context() as patched:
        patched.setattr(tasks, name, killing_its_node(marker, dying, getattr(tasks, name)))
        recorded = trainings.train("cache", *TASKS)
        again = trainings.train("cache", *TASKS)
    assert marker.exists()
    assert recorded.rollout_skip.statistics.dump_failures <= 1
    store = RolloutStore(trainings.variant())
    for key in store:
        store.verify(key)
    assert store.keys() == [RolloutKey(step) for step in STEPS]  # the second training recorded what was missing
    loaded = hits(again)
    assert len(loaded) >= len(STEPS) - 1
    assert all(again.trained[step - 1] == recorded.trained[step - 1] for step in loaded)
    assert again.left_over == recorded.left_over == []
