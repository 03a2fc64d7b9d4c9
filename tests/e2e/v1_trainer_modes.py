"""Trainer modes of the V1 end-to-end tests, found by verl's own entry point through VERL_USE_EXTERNAL_MODULES.

``watched_sync`` is ``skip_sync`` and writes down, in the file that WATCHED names if it is set, when it was ready to
train and which actors Ray had in its second step.
"""

from __future__ import annotations

import json
import os
import time
from pathlib import Path
from types import ModuleType
from typing import Any

from verl_rollout_skip.v1.plugin import call_after_import


def register(module: ModuleType) -> None:
    import ray
    from ray.util.state import list_actors

    from verl_rollout_skip.v1 import SkipPPOTrainerSync

    class WatchedTrainer(SkipPPOTrainerSync):
        def on_train_begin(self) -> None:
            self.ready_at = time.time()
            super().on_train_begin()

        def _update_actor(self, batch: Any, metrics: dict[str, Any]) -> Any:
            if self.global_steps == 2 and "WATCHED" in os.environ:
                cluster = ray.get_runtime_context().gcs_address
                found = list_actors(address=cluster, limit=1000, filters=[("state", "=", "ALIVE")])
                watched = {"ready_at": self.ready_at, "actors": [actor.class_name for actor in found]}
                Path(os.environ["WATCHED"]).write_text(json.dumps(watched))
            return super()._update_actor(batch, metrics)

    module.register_trainer("watched_sync")(WatchedTrainer)


call_after_import("verl.trainer.ppo.v1", register)
