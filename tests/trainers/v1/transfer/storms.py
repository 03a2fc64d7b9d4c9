"""The training that tests kill at random moments, and what must hold afterwards."""

from __future__ import annotations

import time

from tensordict import TensorDict

from tests.trainers.v1.training import Engine, Trainings
from verl_rollout_skip import RolloutKey, RolloutStore
from verl_rollout_skip.runs.paths import PARTIAL
from verl_rollout_skip.trainers.v1.transfer.partial import _GROUPS, Groups

LAST = 6
SETTINGS = (
    "+rollout_skip.tasks=on",
    "+rollout_skip.part_bytes=1500",
    "+rollout_skip.partial_every=0.05",
    f"trainer.total_training_steps={LAST}",
)


class SlowEngine(Engine):
    """Takes a while for each prompt, so that a training can be killed in between."""

    def generate_sequences(self, batch: TensorDict) -> None:
        for row in range(len(batch)):
            time.sleep(0.1)
            super().generate_sequences(batch[[row]])


def committed(trainings: Trainings) -> set[RolloutKey]:
    """The recorded steps. Checks that each of them, and each partial one, can be read."""
    found: set[RolloutKey] = set()
    for manifest in trainings.dumps.glob("*/*/manifest.json"):
        store, partial = RolloutStore(manifest.parent), RolloutStore(manifest.parent / PARTIAL)
        for key in store:
            store.verify(key)
        for key in partial:
            record = partial.verify(key)
            Groups.parse(record.parts, record.info[_GROUPS])
        found |= set(store.keys())
    return found
