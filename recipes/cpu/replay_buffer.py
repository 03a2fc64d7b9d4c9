"""The replay buffer of verl's synchronous V1 trainer, with an order that does not depend on timing.

verl samples trajectories in the order in which they finished, and selects surplus groups by their random ids. This
buffer samples them in the order of submission, once no generation is in flight. It also polls more often than every two
seconds.
"""

from __future__ import annotations

import time
from typing import Any

from omegaconf import DictConfig
from transfer_queue import KVBatchMeta
from verl.trainer.ppo.v1.replay_buffer import ReplayBuffer

POLL_SECONDS = 0.05


class OrderedReplayBuffer(ReplayBuffer):
    """Configured by trainer.v1.sampler.custom_sampler.

    verl does not pass algorithm.filter_groups to a custom sampler, so ``sampler_kwargs`` must contain what verl's own
    buffer gets.
    """

    def __init__(self, *, trainer_mode: str, sampler_kwargs: DictConfig, **kwargs: Any) -> None:
        if trainer_mode != "sync":
            raise ValueError(
                f"the ordered replay buffer is for trainer.v1.trainer_mode=sync, not {trainer_mode}: "
                "set trainer.v1.sampler.custom_sampler.path=null"
            )
        groups = sampler_kwargs.filter_groups
        refill_failed = sampler_kwargs.sync_refill_failed_groups
        one_by_one = groups.enable or refill_failed
        super().__init__(
            trainer_mode=trainer_mode,
            sampler_kwargs=sampler_kwargs,
            poll_interval=POLL_SECONDS,
            filter_groups_metric=groups.metric if groups.enable else None,
            train_batch_size=sampler_kwargs.train_batch_size,
            gen_batch_size=1 if one_by_one else sampler_kwargs.gen_batch_size or sampler_kwargs.train_batch_size,
            max_inflight_gen_batches=groups.max_inflight_gen_batches,
            sync_refill_failed_groups=refill_failed,
            **kwargs,
        )

    def _sync_metadata_from_transfer_queue(self) -> None:
        """Waits until nothing is in flight, so that every decision is based on the same state in every run."""
        super()._sync_metadata_from_transfer_queue()
        last_message = time.time()
        while in_flight := [name for keys in (self.pending_keys, self.running_keys) for name in keys if keys[name]]:
            last_message = self._wait_for_next_poll(in_flight[0], last_message)
            super()._sync_metadata_from_transfer_queue()

    def _select_prompt_uids(
        self, partition_id: str, sampleable_keys: set[str], batch_size: int
    ) -> tuple[list[str], dict[str, dict], dict[str, int]]:
        # The queue lists prompts in the order in which they were submitted.
        submitted = self.prompt_global_steps[partition_id]
        chosen = [uid for uid in submitted if uid in sampleable_keys][:batch_size]
        return chosen, dict(self.partitions[partition_id]), dict(submitted)

    def _materialize_batch(
        self, partition_id: str, selected_prompt_uids: list[str], partition_snapshot: dict[str, dict]
    ) -> KVBatchMeta:
        place = {uid: number for number, uid in enumerate(selected_prompt_uids)}

        def order(key: str) -> tuple[int, int, int]:
            uid, session, index = key.rsplit("_", 2)
            return place[uid], int(session), int(index)

        keys = sorted((key for key in partition_snapshot if key.rsplit("_", 2)[0] in place), key=order)
        ordered = {key: partition_snapshot[key] for key in keys}
        return super()._materialize_batch(partition_id, selected_prompt_uids, ordered)
