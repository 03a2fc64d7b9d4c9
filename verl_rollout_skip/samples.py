"""A few rows of each rollout step for the trackers of a training: what was asked, what was answered, how it scored.

verl logs such rows of its validation; these are of the steps that it trains on, loaded or generated.
"""

from __future__ import annotations

import os
from collections.abc import Iterable
from dataclasses import dataclass
from functools import cached_property
from html import escape
from typing import Any

import torch
from omegaconf import DictConfig

NAME = "rollout_skip/samples"
_COLUMNS = ("prompt", "response", "score")


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
    """Logs to TensorBoard and wandb, if the training does; to others it logs nothing."""

    def __init__(self, config: DictConfig, count: int) -> None:
        trainer = config.trainer
        loggers = trainer.get("logger") or []
        self._loggers = {loggers} if isinstance(loggers, str) else set(loggers)
        self._folder = f"tensorboard_log/{trainer.get('project_name')}/{trainer.get('experiment_name')}"
        self._count = count

    @property
    def is_on(self) -> bool:
        return self._count > 0 and bool(self._loggers & {"tensorboard", "wandb"})

    def log(self, step: int, batch: Any, tokenizer: Any) -> None:
        """Log some rows of a rollout step, spread over the batch."""
        if not self.is_on:
            return
        samples = list(_samples(batch, tokenizer, self._count))
        if "tensorboard" in self._loggers:
            self._tensorboard.add_text(NAME, _markdown(samples), step)
        if "wandb" in self._loggers:
            _log_to_wandb(samples, step)

    def close(self) -> None:
        if "_tensorboard" in self.__dict__:
            self._tensorboard.close()

    @cached_property
    def _tensorboard(self) -> Any:
        from torch.utils.tensorboard import SummaryWriter

        # Where verl writes its own events; TensorBoard shows all files of a folder together.
        return SummaryWriter(os.environ.get("TENSORBOARD_DIR", self._folder))


def _log_to_wandb(samples: list[Sample], step: int) -> None:
    import wandb

    if wandb.run is not None:
        table = wandb.Table(columns=list(_COLUMNS), data=[sample.cells for sample in samples])
        wandb.log({NAME: table}, step=step)


def _markdown(samples: list[Sample]) -> str:
    """A table. What a model says is no markup, so everything that could be is shown as it stands."""
    lines = ["| " + " | ".join(_COLUMNS) + " |", "|---|---|---|"]
    for sample in samples:
        lines.append("| " + " | ".join(_cell(value) for value in sample.cells) + " |")
    return "\n".join(lines)


def _cell(value: Any) -> str:
    if not isinstance(value, str):
        return "" if value is None else f"{value:g}"
    text = escape(value).replace("\n", "↵ ").replace("\r", "")
    for mark in "\\`*_{}[]()#+-.!|~":
        text = text.replace(mark, f"&#{ord(mark)};")
    return text


def _samples(batch: Any, tokenizer: Any, count: int) -> Iterable[Sample]:
    tensors = getattr(batch, "batch", batch)
    prompts = tensors["prompts"]
    scores = tensors["rm_scores"] if "rm_scores" in tensors.keys() else None  # noqa: SIM118 - a TensorDict is no dict
    rows = len(prompts) if not prompts.is_nested else prompts.size(0)
    for row in sorted({number * rows // count for number in range(min(count, rows))}):
        prompt, response = (_tokens(tensors, name, row) for name in ("prompts", "responses"))
        score = None if scores is None else float(scores[row].sum())
        yield Sample(tokenizer.decode(prompt), tokenizer.decode(response), score)


def _tokens(tensors: Any, name: str, row: int) -> list[int]:
    """The tokens of a row without its padding."""
    values: torch.Tensor = tensors[name][row]
    if not tensors[name].is_nested:
        width = tensors["prompts"].shape[1]
        mask = tensors["attention_mask"][row]
        values = values[(mask[:width] if name == "prompts" else mask[width:]).bool()]
    tokens: list[int] = values.tolist()
    return tokens
