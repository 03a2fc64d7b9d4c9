"""``LiveComparison``: compares each step of a training with the ledger of the training that recorded its rollouts.

It says nothing as long as both are identical, and warns once when they part.
"""

from __future__ import annotations

import logging
import shlex
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass

from verl_rollout_skip.errors import LedgerError, NoLedgerError
from verl_rollout_skip.replay.ledger.comparable import COMPARED, comparable_stages, is_comparable, learning_changes
from verl_rollout_skip.replay.ledger.compare import (
    Difference,
    compare_steps,
    layout_changes,
    settings_changes,
    versions_changes,
)
from verl_rollout_skip.replay.ledger.file import StepFinder
from verl_rollout_skip.replay.ledger.line import LedgerHeader, LedgerStep
from verl_rollout_skip.replay.ledger.stages import UP_TO_THE_UPDATE, Stage
from verl_rollout_skip.store.storage.locations import open_storage

logger = logging.getLogger(__name__)

_OFF_POLICY = "off-policy, as the training learned with other settings or rewards, or from other rollouts"


@dataclass(frozen=True)
class Hit:
    """A loaded rollout: the variant and the step it was recorded in, and the training that recorded it, if known.

    ``other_settings``: the user accepted a variant with different settings. ``other_reward``: it was scored by another
    reward function. ``other_lineage``: the recording training had learned from other rollouts before.
    """

    folder: str
    step: int
    training: str | None
    other_settings: bool = False
    other_reward: bool = False
    other_lineage: bool = False


class LiveComparison:
    """Counts the steps that are identical to the recording, until the first one that is not."""

    def __init__(self, header: LedgerHeader) -> None:
        self._header = header
        self._finders: dict[tuple[str, str | None], StepFinder | str] = {}
        self.identical = 0
        self.partly = 0
        self.generated = 0
        self.not_compared: Counter[str] = Counter()
        self.first: Difference | None = None

    def compare(self, line: LedgerStep, hits: Sequence[Hit]) -> None:
        """Compare a step with its recording."""
        if not hits:
            self.generated += 1
        elif self.first is None:
            found = self._find(line, hits)
            if isinstance(found, str):
                self.not_compared[found] += 1
            else:
                self._compare(line, hits, *found)

    def metrics(self) -> dict[str, float]:
        """What verl logs: how many steps were identical so far, and the first one that was not (0: none)."""
        if not (self.identical or self.partly or self.not_compared or self.first):
            return {}
        return {
            "rollout_skip/audit/identical_steps": float(self.identical),
            "rollout_skip/audit/first_difference": float(0 if self.first is None else self.first.step),
        }

    def describe(self) -> str | None:
        """The result in words, for the summary of the training; None if no step was loaded."""
        if self.first is not None:
            before = f"identical to the recording in {_steps(self.identical)}, then " if self.identical else ""
            where = f"step {self.first.step}, {self.first.stage.value}: {self.first.name}"
            return f"{before}different from the recording ({where})"
        parts = []
        if self.identical and not (self.partly or self.not_compared):
            loaded = "loaded " if self.generated else ""
            parts.append(f"identical to the recording in all {_steps(self.identical, loaded)}")
        elif self.identical:
            loaded_steps = self.identical + self.partly + self.not_compared.total()
            parts.append(f"identical to the recording in {self.identical} of {loaded_steps} loaded steps")
        if self.partly:
            parts.append("identical to the recording up to the update of its first step")
        parts += [f"{_steps(count)} not compared: {reason}" for reason, count in self.not_compared.items()]
        return "; ".join(parts) or None

    def _find(self, line: LedgerStep, hits: Sequence[Hit]) -> tuple[StepFinder, LedgerStep, frozenset[Stage]] | str:
        """The recorded step, its ledger, and the stages that can be equal; or why the step cannot be compared."""
        if len(hits) < len(line.rollouts):
            return "only a part of the step was loaded"
        if any(hit.step != line.step for hit in hits):
            return "repeats the rollouts of another step"
        finder = self._finder(hits[-1])
        if isinstance(finder, str):
            return finder
        stages = self._comparable(line.step, hits, finder.header)
        if isinstance(stages, str):
            return stages
        try:
            recorded = finder.find(line.step)
        except LedgerError as error:
            return self._unreadable(hits[-1], error)
        if recorded is None:
            return "the recording training ended before it logged the step"
        return finder, recorded, stages

    def _finder(self, hit: Hit) -> StepFinder | str:
        if hit.training is None:
            return "recorded by an earlier version, which wrote no ledger"
        key = (hit.folder, hit.training)
        if key not in self._finders:
            try:
                self._finders[key] = StepFinder(open_storage(hit.folder), hit.training)
            except NoLedgerError:
                self._finders[key] = "the recording training has no ledger"
            except (LedgerError, OSError) as error:
                self._finders[key] = self._unreadable(hit, error)
        return self._finders[key]

    def _unreadable(self, hit: Hit, error: Exception) -> str:
        logger.warning("the training cannot be compared with its recording: %s", error)
        reason = "the ledger of the recording training cannot be read"
        self._finders[hit.folder, hit.training] = reason
        return reason

    def _comparable(self, step: int, hits: Sequence[Hit], recorded: LedgerHeader) -> frozenset[Stage] | str:
        """The stages in which this step can be equal to the recorded one, or why there are none."""
        if any(hit.other_settings for hit in hits):
            return "recorded with different settings (on_mismatch=reuse)"
        changed = learning_changes(recorded, self._header)
        other_reward = any(hit.other_reward for hit in hits)
        if any(hit.other_lineage for hit in hits) or ((changed or other_reward) and step > 1):
            return _OFF_POLICY
        stages = comparable_stages(changed)
        if other_reward:
            stages = (stages & UP_TO_THE_UPDATE) - {Stage.REWARD, Stage.ADVANTAGES}
        return stages or _OFF_POLICY

    def _compare(
        self,
        line: LedgerStep,
        hits: Sequence[Hit],
        finder: StepFinder,
        recorded: LedgerStep,
        stages: frozenset[Stage],
    ) -> None:
        found = [item for item in compare_steps(recorded, line) if is_comparable(item.stage, item.name, stages)]
        if found:
            self.first = found[0]
            logger.warning("%s", self._explain(found, finder.header, hits[-1]))
        elif stages == COMPARED:
            self.identical += 1
        else:
            self.partly += 1

    def _explain(self, found: Sequence[Difference], recorded: LedgerHeader, hit: Hit) -> str:
        text = f"the training differs from its recording by {hit.training}: {found[0].describe()}."
        if len(found) > 1:
            text += f" {len(found) - 1} more values of this step differ."
        layout = layout_changes(recorded, self._header)
        if layout:
            text += f" A likely reason is the layout, which changes the last bits ({', '.join(layout)})."
        reasons = [*settings_changes(recorded, self._header), *versions_changes(recorded, self._header)]
        if reasons:
            text += f" The trainings also differ in {', '.join(reasons)}."
        command = f"rollout-skip audit {shlex.quote(hit.folder)}"
        return f"{text} Later steps are not compared. To list all differences: {command}"


def _steps(count: int, kind: str = "") -> str:
    return f"{count} {kind}step{'' if count == 1 else 's'}"
