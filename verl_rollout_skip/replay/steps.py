"""Compares the steps of a training with the recorded and selected steps, before any worker starts.

verl resumes automatically from the latest checkpoint (``trainer.resume_mode=auto``), so running the same command again
may leave nothing to do. A training that cannot reach its end, or that would load and record nothing, is an error.
Recorded steps that a training skips are logged.
"""

from __future__ import annotations

import logging
import os
from dataclasses import dataclass

from omegaconf import DictConfig

from verl_rollout_skip.config.modes import Mode
from verl_rollout_skip.config.skip_config import BLOCK, describe_steps
from verl_rollout_skip.errors import ConfigError, EntryExistsError, EntryNotFoundError
from verl_rollout_skip.key import RolloutKey
from verl_rollout_skip.replay.explain import explain_steps, explain_taken, folders_of
from verl_rollout_skip.replay.rollout import RolloutSkip

logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class Checkpoint:
    """The checkpoint that verl resumes from. ``is_own``: it is in the folder where this training saves checkpoints."""

    path: str
    step: int
    resume_mode: str
    is_own: bool

    def __str__(self) -> str:
        return f"verl resumes from {self.path} (trainer.resume_mode={self.resume_mode})"

    @property
    def advice(self) -> str:
        """How to start at the first step instead."""
        keep = " (also set another trainer.default_local_dir to keep the existing checkpoints)"
        return f"trainer.resume_mode=disable starts at step 1{keep if self.is_own else ''}."


def find_checkpoint(trainer: DictConfig) -> Checkpoint | None:
    """The checkpoint that a training with these settings resumes from; None if it starts at step 1."""
    mode = trainer.get("resume_mode", "disable")
    folder = os.path.abspath(trainer.get("default_local_dir") or "")
    if mode == "resume_path":
        path = os.path.abspath(str(trainer.get("resume_from_path")))
        step = path.rpartition("global_step_")[2]
        # verl itself reports a path without a step.
        return Checkpoint(path, int(step), mode, path.startswith(f"{folder}{os.sep}")) if step.isdigit() else None
    tracker = os.path.join(folder, "latest_checkpointed_iteration.txt")
    if mode != "auto" or not os.path.isfile(tracker):
        return None
    with open(tracker) as file:
        step = file.read().strip()
    path = os.path.join(folder, f"global_step_{step}")
    # verl starts from scratch if the checkpoint itself is gone.
    return Checkpoint(path, int(step), mode, True) if step.isdigit() and os.path.isdir(path) else None


def first_step(trainer: DictConfig) -> int:
    """The step that a training with these settings begins with."""
    return TrainingSteps(last=0, checkpoint=find_checkpoint(trainer)).first


@dataclass(frozen=True)
class TrainingSteps:
    """The steps that a training will run: from its checkpoint to the last step.

    ``runs_extra_step``: a loop that checks its limit after each step runs one step even if none is left.
    """

    last: int
    checkpoint: Checkpoint | None = None
    runs_extra_step: bool = False

    @property
    def first(self) -> int:
        return 1 if self.checkpoint is None else self.checkpoint.step + 1

    @property
    def are_done(self) -> bool:
        return self.first > self.last

    @property
    def range(self) -> range:
        return range(self.first, (self.first if self.are_done and self.runs_extra_step else self.last) + 1)


def check_steps(skip: RolloutSkip, training: TrainingSteps, gen_batches: int = 1) -> None:
    """Raise if a training would load and record nothing, or cannot reach its end; log the recorded steps it skips.

    ``gen_batches`` is the minimum number of generation batches per step.
    """
    _check_selection(skip, training)
    if skip.settings.mode is Mode.RECORD:
        recorded = {key.step for key in skip.written_keys()}
        taken = [step for step in training.range if step in skip.settings.steps and step in recorded]
        if taken:
            raise EntryExistsError(
                explain_taken(f"Steps {describe_steps(taken)} of this training are", skip.run.write_folder)
            )
    if skip.settings.mode.needs_all_steps:
        _check_replay(skip, training, gen_batches)
    if training.checkpoint is not None:
        _report(skip, training, training.checkpoint)


def _check_selection(skip: RolloutSkip, training: TrainingSteps) -> None:
    steps = skip.settings.steps
    if any(step in steps for step in training.range):
        return
    if training.last and not any(step in steps for step in range(1, training.last + 1)):
        raise ConfigError(
            f"{BLOCK}.steps is {steps}, but the training runs steps 1 to {training.last} "
            "(trainer.total_training_steps, trainer.total_epochs), so nothing would be recorded or loaded. Select "
            f"steps of this training, or remove {BLOCK}.steps to select all of them."
        )
    if steps.ranges is not None:
        logger.warning("%s.steps is %s: none of the remaining steps is recorded or loaded", BLOCK, steps)


def _check_replay(skip: RolloutSkip, training: TrainingSteps, gen_batches: int) -> None:
    keys = set(skip.recorded_keys())
    whole = {key.step for key in keys if all(RolloutKey(key.step, number) in keys for number in range(gen_batches))}
    covered = [step for step in training.range if step in skip.settings.steps]
    checkpoint = training.checkpoint
    is_past = checkpoint is not None and checkpoint.step >= max(whole, default=0)
    if checkpoint is not None and is_past and (covered or not training.range):
        raise EntryNotFoundError(
            f"There is nothing to replay: {checkpoint}, so the training starts at step {training.first}, but the "
            f"recorded steps are {describe_steps(whole) or 'none'} ({folders_of(skip.sources)}). {checkpoint.advice}"
        )
    missing = [step for step in covered if step not in whole]
    if missing:
        text = explain_steps(training.range, missing, keys, gen_batches, skip.sources)
        raise EntryNotFoundError(text if checkpoint is None else f"{text} Note that {checkpoint}; {checkpoint.advice}")


def _report(skip: RolloutSkip, training: TrainingSteps, checkpoint: Checkpoint) -> None:
    """Log the checkpoint, because it is easy to forget one that verl finds automatically."""
    is_used = skip.settings.mode.loads_own_steps
    before = {key.step for key in skip.recorded_keys() if key.step < training.first} if is_used else set()
    unused = f" Recorded steps {describe_steps(before)} are not used; {checkpoint.advice}" if before else ""
    if training.are_done:
        one_more = f"; verl runs step {training.first} before it ends" if training.range else ""
        logger.warning("%s, the last step of this training: nothing is left to do%s.%s", checkpoint, one_more, unused)
    elif before:
        logger.info("%s, so the training starts at step %d.%s", checkpoint, training.first, unused)
