"""``trainings/``: which training recorded which steps into a variant, when, and on which machine.

Each training has its own file, which only it rewrites, so any number of trainings can record at once on any storage.
Rollouts do not depend on these files.
"""

from __future__ import annotations

import logging
import secrets
from collections.abc import Iterable
from datetime import datetime, timezone
from typing import Any

from verl_rollout_skip.errors import ManifestError
from verl_rollout_skip.fingerprint.layout import host, versions
from verl_rollout_skip.runs import checked_json
from verl_rollout_skip.runs.paths import TRAININGS
from verl_rollout_skip.store.storage import Storage

logger = logging.getLogger(__name__)

TRAINING = "training"
"""The key in an entry's record for the name of the training that recorded it."""


def training_name() -> str:
    """A new name for the files of a training. Names sort by time, to the millisecond."""
    now = datetime.now(timezone.utc)
    return f"{now:%Y%m%dT%H%M%S}.{now.microsecond // 1000:03d}Z-{secrets.token_hex(4)}"


class TrainingFile:
    """The file of the current training: written at its first dump, and again at its end with all recorded steps."""

    def __init__(self, storage: Storage, layout: dict[str, Any], name: str) -> None:
        self._storage = storage
        self._name = f"{name}.json"
        self._fields = {
            "started_at": checked_json.timestamp(),
            "host": host(),
            "gpu_layout": layout,
            "versions": versions(),
        }

    def save(self, steps: Iterable[int]) -> None:
        """Write the file with the steps that are recorded so far."""
        fields = {**self._fields, "updated_at": checked_json.timestamp(), "steps": sorted(set(steps))}
        checked_json.publish(self._storage, TRAININGS, self._name, fields, replace=True)


def read_trainings(storage: Storage) -> tuple[list[dict[str, Any]], list[ManifestError]]:
    """All trainings that recorded into a variant, oldest first, and an error for each unreadable file."""
    found, errors = [], []
    for name in sorted(storage.names(TRAININGS)):
        if name.endswith(".json") and not name.startswith("."):
            try:
                found.append(checked_json.read(storage, TRAININGS, name))
            except ManifestError as error:
                errors.append(error)
    return found, errors


def readable_trainings(storage: Storage) -> list[dict[str, Any]]:
    """All trainings that recorded into a variant, oldest first. Logs a warning for each unreadable file."""
    found, errors = read_trainings(storage)
    for error in errors:
        logger.warning("ignored, because the rollouts do not depend on it: %s", error)
    return found
