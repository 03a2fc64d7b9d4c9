"""Logs a few rows of each rollout step (prompt, response and score) to the training's experiment trackers.

verl logs such rows for validation; these are from training steps, loaded or generated. A failure to log them never
stops a training.
"""

from __future__ import annotations

import logging
import os
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING, Any

from omegaconf import DictConfig

if TYPE_CHECKING:
    import torch

    Rows = Sequence[torch.Tensor] | torch.Tensor

logger = logging.getLogger(__name__)

NAME = "rollout_skip/samples"
_COLUMNS = ("prompt", "response", "score")
# Applied in one pass: a second one would escape the escapes.
_ESCAPED = str.maketrans({mark: f"&#{ord(mark)};" for mark in "&<>\"'\\`*_{}[]()#+-.!|~"} | {"\n": "↵ ", "\r": ""})


@dataclass(frozen=True)
class Sample:
    """One trajectory as text."""

    prompt: str
    response: str
    score: float | None

    @property
    def cells(self) -> list[Any]:
        return [self.prompt, self.response, self.score]


class SampleLog:
    """Logs to TensorBoard and wandb if the training does; other trackers are not supported."""

    def __init__(self, config: DictConfig, count: int) -> None:
        trainer = config.trainer
        loggers = trainer.get("logger") or []
        self._loggers = {loggers} if isinstance(loggers, str) else set(loggers)
        self._folder = f"tensorboard_log/{trainer.get('project_name')}/{trainer.get('experiment_name')}"
        self._count = count
        self._has_failed = False

    @property
    def is_on(self) -> bool:
        return self._count > 0 and bool(self._loggers & {"tensorboard", "wandb"}) and not self._has_failed

    def log(self, step: int, batch: Any, tokenizer: Any) -> None:
        """Log some rows of a rollout step, spread over the batch. After a failure, nothing more is logged."""
        if not self.is_on:
            return
        with self._stop_on_failure(f"step {step}"):
            samples = list(_samples(batch, tokenizer, self._count))
            if "tensorboard" in self._loggers:
                self._tensorboard.add_text(NAME, _markdown(samples), step)
            if "wandb" in self._loggers:
                _log_to_wandb(samples, step)

    def shown_rows(self, rows: int) -> list[int]:
        """The rows that ``log`` shows of a batch of this size."""
        return _spread(self._count, rows)

    def close(self) -> None:
        if "_tensorboard" in self.__dict__:
            with self._stop_on_failure("at the end"):
                self._tensorboard.close()

    @contextmanager
    def _stop_on_failure(self, when: str) -> Iterator[None]:
        try:
            yield
        except Exception as error:  # a failure (tokenizer, disk, tracker) never affects the rollouts
            if not self._has_failed:
                logger.warning(
                    "%s: cannot log sample rows (%s: %s); none are logged from now on. The training continues; "
                    "rollout_skip.log_samples=0 turns them off.",
                    when,
                    type(error).__name__,
                    error,
                )
            self._has_failed = True

    @cached_property
    def _tensorboard(self) -> Any:
        from torch.utils.tensorboard import SummaryWriter

        # The folder of verl's own events; TensorBoard shows all files of a folder together.
        return SummaryWriter(os.environ.get("TENSORBOARD_DIR", self._folder))


def _log_to_wandb(samples: list[Sample], step: int) -> None:
    import wandb

    if wandb.run is not None:
        table = wandb.Table(columns=list(_COLUMNS), data=[sample.cells for sample in samples])
        wandb.log({NAME: table}, step=step)


def _markdown(samples: list[Sample]) -> str:
    """A Markdown table. Model output is not markup, so all special characters are escaped."""
    lines = ["| " + " | ".join(_COLUMNS) + " |", "|---|---|---|"]
    for sample in samples:
        lines.append("| " + " | ".join(_cell(value) for value in sample.cells) + " |")
    return "\n".join(lines)


def _cell(value: Any) -> str:
    if not isinstance(value, str):
        return "" if value is None else f"{value:g}"
    return value.translate(_ESCAPED)


def _samples(batch: Any, tokenizer: Any, count: int) -> Iterator[Sample]:
    tensors = getattr(batch, "batch", batch)
    prompts, responses = _rows(tensors["prompts"]), _rows(tensors["responses"])
    mask, scores = tensors.get("attention_mask", None), tensors.get("rm_scores", None)
    for row in _spread(count, len(prompts)):
        prompt = _row_tokens(prompts, mask, row, is_prompt=True)
        response = _row_tokens(responses, mask, row, is_prompt=False)
        score = None if scores is None else float(scores[row].sum())
        yield Sample(tokenizer.decode(prompt), tokenizer.decode(response), score)


def _spread(count: int, rows: int) -> list[int]:
    shown = min(count, rows)
    return [number * rows // shown for number in range(shown)]


def _rows(tensor: torch.Tensor) -> Rows:
    """The rows of a padded tensor, or of a jagged one."""
    return tensor.unbind() if tensor.is_nested else tensor


def _row_tokens(tokens: Rows, mask: Rows | None, row: int, is_prompt: bool) -> list[int]:
    """The tokens of one row, without padding if there is an attention mask. The mask covers prompt, then response."""
    ids = tokens[row]
    if mask is not None and not isinstance(tokens, Sequence) and not isinstance(mask, Sequence):
        valid = mask[row][: len(ids)] if is_prompt else mask[row][len(mask[row]) - len(ids) :]
        ids = ids[valid.bool()]
    return [int(token) for token in ids.tolist()]
