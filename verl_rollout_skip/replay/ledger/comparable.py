"""How far two trainings can be equal: which stages of a step the settings that differ between them cannot change."""

from __future__ import annotations

from collections.abc import Sequence

from verl_rollout_skip.fingerprint.fingerprint import CHECKPOINT, TRAINER
from verl_rollout_skip.replay.ledger.compare import settings_changes
from verl_rollout_skip.replay.ledger.line import LedgerHeader
from verl_rollout_skip.replay.ledger.stages import UP_TO_THE_UPDATE, Stage

COMPARED = frozenset(Stage) - {Stage.VALIDATION}
"""All stages that are compared. Validation always generates, so it is not part of what is replayed."""
# The stages before the update that other settings are meant to change, by the first matching prefix. A setting that is
# not listed changes nothing before the update, or it is worth a warning that it does.
_CHANGES: dict[str, frozenset[Stage]] = {
    "algorithm.": frozenset({Stage.ADVANTAGES}),
    "actor_rollout_ref.ref": frozenset({Stage.REFERENCE, Stage.ADVANTAGES}),
    "actor_rollout_ref.actor.use_kl_loss": frozenset({Stage.REFERENCE}),
    "trainer.balance_batch": UP_TO_THE_UPDATE,
}


def learning_changes(recorded: LedgerHeader, current: LedgerHeader) -> list[str]:
    """The settings for learning that differ. Whether the trainer's code or a checkpoint changes anything, comparing
    shows."""
    return [line for line in settings_changes(recorded, current) if not line.startswith((TRAINER, CHECKPOINT))]


def comparable_stages(changes: Sequence[str]) -> frozenset[Stage]:
    """The stages of the first step that can be equal although these settings differ."""
    stages = UP_TO_THE_UPDATE if changes else COMPARED
    for line in changes:
        stages -= next((lost for prefix, lost in _CHANGES.items() if line.startswith(prefix)), frozenset())
    return stages


def is_comparable(stage: Stage, name: str, stages: frozenset[Stage]) -> bool:
    """Whether a value can be equal if these stages can. Metrics of the actor may depend on the settings of its loss."""
    return stage in stages and (stages == COMPARED or not name.startswith("actor/"))
