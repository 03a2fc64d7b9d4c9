"""``columns/``: the tensors that the updates of a training received, beside the rollouts of a variant.

Each training has its own folder, ``columns/{training}/``, which is a store like the variant itself. It has one entry
per update, whose key is the training step and the number of the update within it. So columns are committed, checked,
read, copied and deleted like rollouts.
"""

from __future__ import annotations

from verl_rollout_skip.runs.paths import COLUMNS
from verl_rollout_skip.store.reader import StoreReader
from verl_rollout_skip.store.storage.locations import join, open_storage

GEN_BATCH, ROW = "rollout_gen_batch", "rollout_row"
"""The columns that identify the trajectory of a row: the generation batch of the step, and the row in its entry. Both
are -1 if the trajectory is not in a rollout of the step, e.g. padding."""
ROLE, LEVEL, TRAINING = "role", "level", "training"
"""Keys in the ``info`` of an entry: whose update it was (``actor`` or ``critic``), the setting, and the training."""
ACTOR, CRITIC = "actor", "critic"


def columns_folder(variant: str, training: str) -> str:
    """The folder of a training's columns."""
    return join(variant, COLUMNS, training)


def trainings_with_columns(variant: str) -> list[str]:
    """The trainings whose columns are in a variant folder, oldest first: their names begin with the time."""
    storage = open_storage(join(variant, COLUMNS))
    return sorted(name for name in storage.folders() if columns_of(variant, name).keys())


def columns_of(variant: str, training: str) -> StoreReader:
    """The entries of a training's columns."""
    return StoreReader.at(columns_folder(variant, training))
