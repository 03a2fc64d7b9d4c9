"""``TaskPool``: runs the functions of ``tasks.py`` as Ray tasks, a few at a time, on the nodes that reach a folder.

A task whose process dies is run again, and one that fails is tried on every other node.
"""

from __future__ import annotations

import functools
import logging
import secrets
from collections.abc import Callable, Collection, Mapping, Sequence
from concurrent.futures import Future
from functools import partial
from itertools import cycle
from typing import Any

import ray
from ray.exceptions import RayError, RayTaskError
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

from verl_rollout_skip.config.modes import Tasks
from verl_rollout_skip.config.skip_config import BLOCK
from verl_rollout_skip.errors import RolloutSkipError, TaskError
from verl_rollout_skip.key import RolloutKey
from verl_rollout_skip.replay.ledger.figures import FiguresOfRows
from verl_rollout_skip.replay.lineage import join_row_digests
from verl_rollout_skip.runs.paths import MANIFEST
from verl_rollout_skip.store import committed
from verl_rollout_skip.store.record import MAX_RECORD_BYTES, RecordedPart
from verl_rollout_skip.store.sizes import format_size
from verl_rollout_skip.store.storage import HERE
from verl_rollout_skip.store.storage.contract import digest_of
from verl_rollout_skip.store.storage.locations import open_storage
from verl_rollout_skip.store.threads import start_thread
from verl_rollout_skip.trainers.v1.in_flight import PromptRows
from verl_rollout_skip.trainers.v1.transfer import tasks
from verl_rollout_skip.trainers.v1.transfer.tasks import EncodedSlice, PutSlice, SliceRequest

logger = logging.getLogger(__name__)

# Tasks wait for TransferQueue and the store about as long as they compute.
_PER_NODE = 2
_RETRIES = 3
TASK_BYTES = 64 << 20
"""From this size on, tasks move a rollout faster than the driver (benchmarks/scale.py)."""

Call = Callable[[str | None], Any]
"""Starts a task on a node, or on any node for None, and returns a reference to its result."""


class TaskPool:
    """Starts tasks. They reserve no CPUs, so they never wait for those that verl has reserved."""

    def __init__(self, setting: Tasks) -> None:
        self._setting = setting
        self._nodes: dict[str, Future[list[str]]] = {}
        self._reported: set[bool] = set()

    def takes(self, size: int, what: str) -> bool:
        """Whether tasks move a rollout of this size. Logs each decision once; ``what`` is the start of that message."""
        moved = self._setting is Tasks.ON or (self._setting is Tasks.AUTO and size >= TASK_BYTES)
        if moved not in self._reported:
            self._reported.add(moved)
            reason = f"{BLOCK}.tasks is {self._setting.value!r}"
            if self._setting is Tasks.AUTO:
                reason = f"it takes about {format_size(size)}, and tasks are used from {format_size(TASK_BYTES)}"
            logger.info("%s by %s, because %s", what, "Ray tasks" if moved else "the driver", reason)
        return moved

    def find_nodes(self, folder: str, writes: bool) -> None:
        """Start to find the nodes that can read what is below a folder, and write there if ``writes``."""
        if folder not in self._nodes:
            self._nodes[folder] = start_thread(partial(_find_nodes, folder, writes), "rollout-skip-nodes")

    def nodes(self, folder: str) -> list[str]:
        """The nodes that reach a folder and have not died since. If there are none, only the driver reaches it."""
        above = (known for known in self._nodes if folder == known or folder.startswith(f"{known.rstrip('/')}/"))
        known = next(above, folder)
        self.find_nodes(known, writes=False)
        alive = set(_alive_nodes())
        return [node for node in self._nodes[known].result() if node in alive]

    def encode(
        self,
        requests: Sequence[SliceRequest],
        prompts: PromptRows,
        whole: dict[str, Any],
        as_objects: Collection[str] = (),
    ) -> list[tuple[EncodedSlice, Any]]:
        """Read slices from TransferQueue. Returns each with a reference to its encoded part, which stays in Ray.

        Ray must not run these tasks again by itself: if it lost an encoded part later, the training might have changed
        the rows by then.
        """
        encode, shared = _task(tasks.encode, results=2, retries=0), ray.put(whole)
        calls = [
            partial(encode.remote, request, prompts.select(request.positions), shared, as_objects)
            for request in requests
        ]
        done: list[tuple[EncodedSlice, Any]] = []
        for call, (encoded, data) in zip(calls, _start(calls), strict=True):
            for attempt in range(_RETRIES + 1):
                try:
                    done.append((_get(encoded), data))
                    break
                except TaskError as error:
                    logger.warning("a slice could not be read, attempt %d of %d: %s", attempt + 1, _RETRIES + 1, error)
                    if attempt == _RETRIES:
                        raise
                    encoded, data = call()
        return done

    def digest(self, requests: Sequence[SliceRequest]) -> str:
        """The digest of a sample that is only in TransferQueue."""
        calls = [
            lambda _, request=request: _task(tasks.digest).remote(request.keys, request.fields) for request in requests
        ]
        found = _run(calls, [None], "a slice could not be read")
        for result in found:
            if isinstance(result, Exception):
                raise result
        return join_row_digests(found)

    def figures(self, slices: Sequence[list[str]], partition: str) -> list[dict[str, FiguresOfRows]]:
        """The figures of the rows that an update receives, for each slice of their keys."""
        calls = [lambda _, keys=keys: _task(tasks.figures).remote(keys, partition) for keys in slices]
        found = _run(calls, [None], "a slice of an update could not be read")
        for result in found:
            if isinstance(result, Exception):
                raise result
        return found

    def write(self, folder: str, key: RolloutKey, parts: Sequence[tuple[int, Any]]) -> list[RecordedPart]:
        """Write encoded parts, given as numbers of rows and references. The driver writes what no node can write."""
        nodes = self.nodes(folder)
        # A node that does not share the folder would write to its own local folder, so no other node may take over.
        calls = [
            lambda node, part=part: _task(tasks.write, node, soft=False).remote(folder, key, *part) for part in parts
        ]
        found = _run(calls, nodes, f"{key}: a part could not be written") if nodes else [None] * len(parts)
        written = []
        for (rows, data), part in zip(parts, found, strict=True):
            if isinstance(part, Exception):
                logger.warning("%s: no node could write a part, so the driver writes it: %s", key, part)
            is_written = isinstance(part, RecordedPart)
            written.append(part if is_written else tasks.write(folder, key, rows, _get(data)))
        return written

    def put(
        self,
        folder: str,
        key: RolloutKey,
        parts: Sequence[tuple[RecordedPart, int]],
        uids: Mapping[int, str] | str,
        limit: int,
    ) -> list[PutSlice]:
        """Put the rows of parts, given with their first rows, into TransferQueue under these uids (see ``tasks.put``).

        If only the driver reaches the folder, it reads the parts, which are much smaller than the rows.
        """
        nodes = self.nodes(folder)
        calls: list[Call] = []
        for part, start in parts:
            given: list[Any] = [folder, key, part, start, uids, limit]
            if not nodes:
                given.append(ray.put(committed.read_part(open_storage(folder), key, part)))
            calls.append(partial(_start_put, given))
        found = _run(calls, nodes or [None], f"{key}: a part could not be loaded")
        for result in found:
            if isinstance(result, Exception):
                raise result
        return found


class LocalPool:
    """Calls the functions in this process instead, for small rollouts."""

    def encode(
        self,
        requests: Sequence[SliceRequest],
        prompts: PromptRows,
        whole: dict[str, Any],
        as_objects: Collection[str] = (),
    ) -> list[tuple[EncodedSlice, Any]]:
        return [tasks.encode(request, prompts, whole, as_objects) for request in requests]

    def write(self, folder: str, key: RolloutKey, parts: Sequence[tuple[int, Any]]) -> list[RecordedPart]:
        return [tasks.write(folder, key, rows, data) for rows, data in parts]

    def put(
        self,
        folder: str,
        key: RolloutKey,
        parts: Sequence[tuple[RecordedPart, int]],
        uids: Mapping[int, str] | str,
        limit: int,
    ) -> list[PutSlice]:
        return [tasks.put(folder, key, part, start, uids, limit) for part, start in parts]


def _start_put(arguments: Sequence[Any], node: str | None) -> Any:
    return _task(tasks.put, node, soft=node is None).remote(*arguments)


def _run(calls: Sequence[Call], nodes: Sequence[str | None], failed: str) -> list[Any]:
    """The results of tasks that are spread over nodes. A task that fails is tried on every other node; if it fails on
    all of them, the last error is its result."""
    chosen = [node for node, _ in zip(cycle(nodes), calls, strict=False)]
    started = _start([partial(call, node) for call, node in zip(calls, chosen, strict=True)])
    if started:  # after a failure, others may still be running
        ray.wait(started, num_returns=len(started), fetch_local=False)
    return [
        _result(call, reference, [node for node in nodes if node != first], failed)
        for call, reference, first in zip(calls, started, chosen, strict=True)
    ]


def _result(call: Call, reference: Any, others: Sequence[str | None], failed: str) -> Any:
    try:
        return _get(reference)
    except (RolloutSkipError, OSError) as error:
        if not others or not isinstance(error, TaskError | OSError):
            return error
        logger.warning("%s; trying another node: %s", failed, error)
        return _result(call, call(others[0]), others[1:], failed)


_remote = functools.cache(ray.remote)  # Ray registers a function once for each call


def _task(
    function: Callable[..., Any], node: str | None = None, soft: bool = True, results: int = 1, retries: int = _RETRIES
) -> Any:
    """A function as a Ray task."""
    strategy = "SPREAD" if node is None else NodeAffinitySchedulingStrategy(node, soft=soft)
    options = {"num_cpus": 0, "max_retries": retries, "num_returns": results, "scheduling_strategy": strategy}
    return _remote(function).options(**options)


def _start(calls: Sequence[Callable[[], Any]]) -> list[Any]:
    """Start tasks, waiting so that only a few run at once. Returns their references."""
    window = _PER_NODE * max(1, len(_alive_nodes()))
    started: list[Any] = []
    running: list[Any] = []
    for call in calls:
        if len(running) >= window:
            _, running = ray.wait(running, fetch_local=False)
        started.append(call())
        running.append(started[-1][0] if isinstance(started[-1], list) else started[-1])
    return started


def _get(reference: Any) -> Any:
    """The result of a task, or the error that it raised."""
    try:
        return ray.get(reference)
    except RayTaskError as error:
        if isinstance(error.cause, RolloutSkipError | OSError):
            raise error.cause from None
        raise TaskError(f"A Ray task failed: {error}") from error
    except RayError as error:
        raise TaskError(f"A Ray task failed: {type(error).__name__}: {error}") from error


def _alive_nodes() -> list[str]:
    return [node["NodeID"] for node in ray.nodes() if node["Alive"]]


def _find_nodes(folder: str, writes: bool) -> list[str]:
    """Ask every node whether it reaches a folder, and log the answers."""
    alive = _alive_nodes()
    if len(alive) == 1:
        return alive  # the driver's own
    try:
        reasons = _ask(alive, folder, writes)
    except (OSError, RolloutSkipError) as error:
        reasons = dict.fromkeys(alive, f"even the driver cannot: {error}")
    reaching = [node for node in alive if reasons[node] is None]
    refused = [f"node {node[:8]}: {reason}" for node, reason in reasons.items() if reason is not None]
    access = "read and write" if writes else "read"
    if not refused:
        logger.info("all %d nodes can %s %s", len(alive), access, folder)
    elif reaching:
        logger.warning("only %d of %d nodes can %s %s. %s", len(reaching), len(alive), access, folder, refused[0])
    else:
        logger.warning("only the driver can %s %s. %s", access, folder, refused[0])
    return reaching


def _ask(nodes: Sequence[str], folder: str, writes: bool) -> dict[str, str | None]:
    """For each node, why it does not reach a folder; None if it does."""
    storage, name = open_storage(folder), MANIFEST
    if writes:
        name = f".probe-{secrets.token_hex(8)}"
        with storage.stage(HERE) as staged:
            staged.write(name.encode())
            storage.publish(staged, name)
    try:
        digest = digest_of(storage.read(HERE, name, MAX_RECORD_BYTES))
        asked = {node: _task(tasks.reaches, node, soft=False).remote(folder, name, digest, writes) for node in nodes}
        reasons: dict[str, str | None] = {}
        for node, reference in asked.items():
            try:
                reasons[node] = _get(reference)
            except TaskError as error:
                reasons[node] = str(error)
        return reasons
    finally:
        if writes:
            storage.delete(HERE, name)
