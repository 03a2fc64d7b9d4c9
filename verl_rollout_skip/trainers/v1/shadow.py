"""``ShadowSteps``: generates a recorded V1 step too, in mode ``shadow``, and compares both.

Trajectories finish in any order, so rows are paired by prompt, session and output, not by their position. The generated
rows are removed from TransferQueue, and the recorded ones take their place.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import transfer_queue as tq
from omegaconf import DictConfig, OmegaConf
from tensordict import TensorDict
from transfer_queue import KVBatchMeta

from verl_rollout_skip.key import RolloutKey
from verl_rollout_skip.replay.divergence import COMPARED, responses_of
from verl_rollout_skip.replay.prompts import UID
from verl_rollout_skip.replay.results import Rollout
from verl_rollout_skip.replay.shadow import Shadow
from verl_rollout_skip.trainers.v1.compat import PARTITION
from verl_rollout_skip.trainers.v1.in_flight import InFlight, column_of, rows_of
from verl_rollout_skip.trainers.v1.transfer import rows as queue
from verl_rollout_skip.trainers.v1.transfer.rows import INDEX, SESSION, Trajectory


class ShadowSteps:
    """The generated steps of a training in mode shadow; without ``shadow``, it changes nothing.

    A replay buffer that filters groups keeps those that finish first, which varies from run to run. Only the prompts
    that both rollouts kept are compared then.
    """

    def __init__(self, shadow: Shadow | None, config: DictConfig, in_flight: InFlight) -> None:
        self._shadow, self._in_flight = shadow, in_flight
        self._filters = bool(OmegaConf.select(config, "algorithm.filter_groups.enable"))
        self._recorded: dict[str, dict[str, object]] = {}

    @contextmanager
    def step(self, rollout: Rollout) -> Iterator[None]:
        """Generate from the prompts of this recorded rollout, and remove everything that was generated at the end."""
        self._recorded = {str(row[UID]): row for row in rows_of(rollout.inputs)}
        try:
            yield
        finally:
            self._recorded = {}
            self._remove_generated()

    def prompts(self, batch: TensorDict) -> TensorDict:
        """Prompts to submit: the recorded ones, which may differ from the current ones (``prompts: recorded``)."""
        if not self._recorded:
            return batch
        rows = [{**row, **self._recorded.get(str(row[UID]), {})} for row in rows_of(batch)]
        changed = batch.clone(recurse=False)
        for name in rows[0]:
            changed.set(name, column_of([row[name] for row in rows]))
        return changed

    def compare(self, key: RolloutKey, rollout: Rollout, batch: KVBatchMeta, seconds: float) -> Rollout:
        """Compare a sample in TransferQueue with the recorded rows. Returns the recorded rollout with metrics."""
        assert self._shadow is not None
        uids, sessions, indexes = (
            rollout.inputs.get(UID).tolist(),
            rollout.batch[SESSION].tolist(),
            rollout.batch[INDEX].tolist(),
        )
        names = [Trajectory(str(uid), *others) for uid, *others in zip(uids, sessions, indexes, strict=True)]
        recorded = responses_of(rollout.batch, names)
        found, _ = queue.fetch(batch, COMPARED)
        generated = responses_of(found, map(Trajectory.parse, batch.keys))
        if self._filters:
            common = {name.uid for name in recorded} & {name.uid for name in generated}
            recorded = {name: response for name, response in recorded.items() if name.uid in common}
            generated = {name: response for name, response in generated.items() if name.uid in common}
        return self._shadow.compare(key, rollout, recorded, generated, seconds)

    def _remove_generated(self) -> None:
        listed = (tq.kv_list(PARTITION) or {}).get(PARTITION, {})
        uids = set(self._in_flight.uids(range(len(self._in_flight))))
        uid_of = {key: key if tag.get("is_prompt") else Trajectory.parse(key).uid for key, tag in listed.items()}
        keys = [key for key, uid in uid_of.items() if uid in uids]
        if keys:
            tq.kv_clear(keys=keys, partition_id=PARTITION)
