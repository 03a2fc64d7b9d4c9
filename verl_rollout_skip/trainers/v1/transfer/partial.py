"""Records finished prompt groups while a step generates, so that a crash does not lose them.

The groups of a step are an entry in the folder ``partial`` of the variant, which grows by some parts every few seconds.
The next training puts them back into TransferQueue and generates only the other prompts. The complete entry of the step
replaces the partial one.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Collection, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from typing import Any

import transfer_queue as tq
import xxhash
from tensordict import TensorDict
from transfer_queue import KVBatchMeta

from verl_rollout_skip.config.modes import Mode
from verl_rollout_skip.errors import CorruptEntryError, RolloutSkipError
from verl_rollout_skip.key import RolloutKey
from verl_rollout_skip.replay.lineage import LINEAGE, UNKNOWN
from verl_rollout_skip.replay.results import Miss
from verl_rollout_skip.replay.rollout import RolloutSkip
from verl_rollout_skip.runs.paths import PARTIAL
from verl_rollout_skip.store.codec import Summary
from verl_rollout_skip.store.record import RecordedPart
from verl_rollout_skip.store.store import RolloutStore
from verl_rollout_skip.trainers.v1.compat import PARTITION
from verl_rollout_skip.trainers.v1.in_flight import InFlight
from verl_rollout_skip.trainers.v1.transfer import rows as queue
from verl_rollout_skip.trainers.v1.transfer.loading import clear
from verl_rollout_skip.trainers.v1.transfer.pool import LocalPool, TaskPool
from verl_rollout_skip.trainers.v1.transfer.rows import Trajectory
from verl_rollout_skip.trainers.v1.transfer.slices import SampledSlices, cut, size_of

logger = logging.getLogger(__name__)

_GROUPS = "groups"
"""The key of the description of prompt groups in the ``info`` of a partial record."""


class _Stopped(Exception):
    """The step is complete, so its finished prompts are not recorded any more."""


@dataclass(frozen=True)
class Groups:
    """The recorded prompt groups of a step.

    For each part: the positions of its prompts, and the number of its first row among those written at the same time.
    ``prompts`` are the digests of all prompts by position.
    """

    parts: tuple[RecordedPart, ...] = ()
    positions: tuple[frozenset[int], ...] = ()
    starts: tuple[int, ...] = ()
    prompts: Mapping[int, str] = field(default_factory=dict)

    @classmethod
    def parse(cls, parts: tuple[RecordedPart, ...], described: Any) -> Groups:
        """Check and parse what ``describe`` has returned."""
        try:
            positions = tuple(frozenset(map(int, found)) for found in described["positions"])
            starts = tuple(map(int, described["starts"]))
            prompts = {int(position): str(digest) for position, digest in described["prompts"].items()}
        except (KeyError, TypeError, ValueError, AttributeError) as error:
            raise CorruptEntryError(f"Its prompt groups are damaged ({type(error).__name__}: {error}).") from error
        if not len(parts) == len(positions) == len(starts) or not frozenset().union(*positions) <= prompts.keys():
            raise CorruptEntryError("Its prompt groups do not belong to its parts.")
        return cls(parts, positions, starts, prompts)

    def describe(self) -> dict[str, Any]:
        """Everything but the parts, as JSON."""
        return {
            "positions": [sorted(found) for found in self.positions],
            "starts": list(self.starts),
            "prompts": {str(position): digest for position, digest in self.prompts.items()},
        }

    def parts_of(self, positions: Collection[int]) -> list[tuple[RecordedPart, int]]:
        """The parts that contain these prompts, and their starts."""
        chosen = zip(self.parts, self.starts, self.positions, strict=True)
        return [(part, start) for part, start, found in chosen if not found.isdisjoint(positions)]


class PartialRollouts:
    """Records the finished prompts of the steps that a training generates, and puts back those of a previous one."""

    def __init__(self, skip: RolloutSkip, pool: TaskPool, in_flight: InFlight, is_on: bool) -> None:
        settings, folder = skip.settings, skip.run.write_folder
        self._skip, self._pool, self._in_flight = skip, pool, in_flight
        self._part_bytes, self._every = settings.part_bytes, settings.partial_every or 0.0
        self._store: RolloutStore | None = None
        if is_on and folder is not None and settings.mode.writes and settings.partial_every is not None:
            self._store = RolloutStore(f"{folder}/{PARTIAL}", background=False, max_disk=settings.max_disk)
        self._groups = Groups()
        self._threads: list[threading.Thread] = []
        self._has_failed = False

    def begin(self, miss: Miss) -> None:
        """Find the recorded prompts of a step that is about to be generated."""
        self._groups = Groups()
        store, key = self._store, miss.key
        if store is None or not miss.dumps:
            return
        try:
            self._remove_completed(store)
            if self._skip.settings.mode is not Mode.CACHE or key not in store:
                return
            record = store.record(key)
            reason = self._explain_mismatch(key, record.info)
            if reason is None:
                self._groups = Groups.parse(record.parts, record.info.get(_GROUPS))
                reason = self._explain_other_prompts(self._groups)
        except (RolloutSkipError, OSError) as error:
            reason = f"it cannot be read: {error}"
        if reason is not None:
            self._set_aside(store, key, reason)

    def put_back(self, key: RolloutKey, batch: TensorDict) -> TensorDict | None:
        """Put the recorded prompts of a batch into TransferQueue as finished, and return the others; None if none are
        left."""
        uids = [str(uid) for uid in batch["uid"]]
        positions = self._in_flight.positions(uids)
        known = [row for row, position in enumerate(positions) if self._is_recorded(position)]
        if self._store is None or not known:
            return batch
        wanted = {positions[row]: uids[row] for row in known}
        try:
            parts = self._groups.parts_of(wanted.keys())
            pool = self._pool_for(sum(part.bytes for part, _ in parts), f"{key}: recorded prompts are put back")
            pool.put(self._store.path, key, parts, wanted, self._store.load_limit)
        except (RolloutSkipError, OSError) as error:
            clear(tuple(f"{uid}_" for uid in wanted.values()))
            self._set_aside(self._store, key, f"it cannot be read: {error}")
            return batch
        tags = [{"is_prompt": True, "status": "finished", "global_steps": key.step} for _ in wanted]
        tq.kv_batch_put(keys=list(wanted.values()), partition_id=PARTITION, tags=tags)
        logger.info(
            "%s: %d of %d prompts were generated before the last training ended; they are put back, and the other %d "
            "are generated",
            *(key, len(known), len(uids), len(uids) - len(known)),
        )
        others = [row for row in range(len(uids)) if row not in set(known)]
        return batch[others] if others else None

    @contextmanager
    def recording(self, miss: Miss) -> Iterator[None]:
        """Record finished prompts every few seconds in the background while a step generates."""
        if self._store is None or not miss.dumps:
            yield
            return
        stopped = threading.Event()
        thread = threading.Thread(
            target=self._record_until, args=(self._store, miss.key, stopped), name="rollout-skip-partial", daemon=True
        )
        thread.start()
        self._threads = [*(old for old in self._threads if old.is_alive()), thread]
        try:
            yield
        finally:
            stopped.set()  # whatever it is reading now is discarded

    def close(self) -> None:
        """Remove the partial entries of steps that are complete now."""
        for thread in self._threads:
            thread.join()
        if self._store is not None:
            try:
                self._remove_completed(self._store)
            except (RolloutSkipError, OSError) as error:
                logger.warning(
                    "partial entries of complete steps were not removed from %s: %s", self._store.path, error
                )

    def _explain_mismatch(self, key: RolloutKey, recorded: Mapping[str, Any]) -> str | None:
        """Why prompts that another training generated are not those of the current weights; None if they are."""
        current = self._skip.policy_of(key.step)
        if None in current.values() or recorded.get(LINEAGE) in (None, UNKNOWN):
            return "it is unknown which rollouts one of the two trainings has learned from"
        if recorded.get(LINEAGE) != current[LINEAGE]:
            return "that training had learned from different rollouts"
        if key.step > 1 and any(recorded.get(name) != value for name, value in current.items()):
            return "that training had different settings"
        return None

    def _is_recorded(self, position: int) -> bool:
        recorded = self._groups.prompts.get(position)
        return recorded is not None and self._in_flight.digests([position]) == [recorded]

    def _explain_other_prompts(self, groups: Groups) -> str | None:
        drawn = [position for position in groups.prompts if position < len(self._in_flight)]
        digests = self._in_flight.digests(drawn)
        changed = [
            position for position, digest in zip(drawn, digests, strict=True) if groups.prompts[position] != digest
        ]
        return f"prompt {min(changed)} of the step has changed" if changed else None

    def _set_aside(self, store: RolloutStore, key: RolloutKey, reason: str) -> None:
        self._groups = Groups()
        kept = ""
        try:
            kept = f" They are kept as {store.set_aside(key, readable=True)}."
        except (RolloutSkipError, OSError) as error:
            logger.debug("%s was not set aside: %s", key, error)
        logger.warning(
            "%s is generated as a whole, although some of its prompts were generated before, because %s.%s",
            *(key, reason, kept),
        )

    def _remove_completed(self, store: RolloutStore) -> None:
        complete = set(self._skip.written_keys())
        for key in store.keys():  # noqa: SIM118 - its keys change while they are removed
            if key in complete:
                store.delete(key)

    def _pool_for(self, size: int, what: str) -> TaskPool | LocalPool:
        return self._pool if self._pool.takes(size, what) else LocalPool()

    def _record_until(self, store: RolloutStore, key: RolloutKey, stopped: threading.Event) -> None:
        while not stopped.wait(self._every):
            try:
                self._record_finished(store, key, stopped)
            except _Stopped:
                return
            except Exception as error:  # from Ray, TransferQueue … The complete entry does not depend on this one.
                if stopped.is_set():
                    return
                level = logging.DEBUG if self._has_failed else logging.WARNING
                self._has_failed = True
                logger.log(
                    level,
                    "%s: finished prompts were not recorded, so a crash before the end of the step would lose them: %s",
                    *(key, error),
                )

    def _record_finished(self, store: RolloutStore, key: RolloutKey, stopped: threading.Event) -> None:
        """Add the prompts that have finished since the last time to the partial entry."""
        batch, positions = self._finished()
        if not batch.keys:
            return
        self._skip.prepare_folder()
        before = self._groups
        fields = queue.find_fields(batch)
        requests = cut(batch, positions, fields, self._part_bytes)
        pool = self._pool_for(size_of(batch.tags), f"{key}: finished prompts are recorded")
        slices = SampledSlices(pool, requests, self._in_flight.prompt_rows(positions), {"partial": fields.partial})
        if slices.failure is not None:
            raise slices.failure
        distinct = sorted(set(positions))
        digests = dict(zip(distinct, self._in_flight.digests(distinct), strict=True))
        groups = Groups(
            positions=(*before.positions, *(frozenset(request.positions) for request in requests)),
            starts=(*before.starts, *(request.rows.start for request in requests)),
            prompts={**before.prompts, **digests},
        )
        written: list[RecordedPart] = []

        def write() -> tuple[Summary, list[RecordedPart]]:
            written.extend(slices.write(store.path, key)[1])
            if stopped.is_set():
                raise _Stopped
            parts = [*before.parts, *written]
            content = xxhash.xxh3_128_hexdigest("".join(part.digest for part in parts).encode())
            return Summary(sum(part.rows for part in parts), None, None, None, content), parts

        info = {**self._skip.policy_of(key.step), _GROUPS: groups.describe()}
        store.put_parts(key, write, info=info, replace=True)
        self._groups = replace(groups, parts=(*before.parts, *written))
        logger.debug("%s: %d prompts are recorded", key, len(groups.prompts))

    def _finished(self) -> tuple[KVBatchMeta, list[int]]:
        """The rows of finished prompts that are not recorded yet, and the positions of their prompts."""
        listed = (tq.kv_list(PARTITION) or {}).get(PARTITION, {})
        finished = {key for key, tag in listed.items() if tag.get("is_prompt") and tag.get("status") == "finished"}
        position_of = {
            uid: position for uid, position in self._in_flight.known(finished) if position not in self._groups.prompts
        }
        keys, positions = [], []
        for key, tag in listed.items():
            position = None if tag.get("is_prompt") else position_of.get(Trajectory.parse(key).uid)
            if position is not None:
                keys.append(key)
                positions.append(position)
        return KVBatchMeta(partition_id=PARTITION, keys=keys, tags=[listed[key] for key in keys]), positions
