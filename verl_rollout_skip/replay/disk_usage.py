"""What counts toward ``max_disk``: the rollouts of a variant, and the training columns beside them."""

from __future__ import annotations

from verl_rollout_skip.runs.columns import columns_folder
from verl_rollout_skip.runs.paths import COLUMNS
from verl_rollout_skip.store.disk_usage import DiskUsage, stored_bytes
from verl_rollout_skip.store.storage.locations import join, open_storage


def variant_usage(variant: str, limit: int | None) -> DiskUsage:
    """How much of ``max_disk`` is used by the rollouts of a variant and all columns beside them."""

    def measure() -> int:
        columns = open_storage(join(variant, COLUMNS)).folders()
        return sum(
            stored_bytes(open_storage(folder))
            for folder in [variant, *(columns_folder(variant, name) for name in columns)]
        )

    return DiskUsage(open_storage(variant).where(), measure, limit)
