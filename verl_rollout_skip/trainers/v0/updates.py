"""Observes the batches that the updates of actor and critic receive, for the training's ledger."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from typing import Any

import torch

from verl_rollout_skip.replay.ledger.training import TrainingLedger
from verl_rollout_skip.replay.ledger.updates import UpdateSlice
from verl_rollout_skip.trainers.v0 import compat


def observe_updates(trainer: Any, ledger: TrainingLedger) -> None:
    """Observe the updates of a trainer from now on. Call this after ``init_workers``.

    The batch is read while the workers update, and nothing may change it before that is done.
    """
    under_way: set[str] = set()
    for role, workers, method in compat.updates_of(trainer):
        setattr(workers, method, _observed(getattr(workers, method), role, ledger, under_way))


def _observed(update: Callable[..., Any], role: str, ledger: TrainingLedger, under_way: set[str]) -> Callable[..., Any]:
    def observed(*args: Any, **kwargs: Any) -> Any:
        if not ledger.is_observing or role in under_way:  # one name of the method may call another
            return update(*args, **kwargs)
        under_way.add(role)
        batch = next(iter((*args, *kwargs.values())))
        whole = UpdateSlice(0, tensors_of(batch), batch)
        ledger.observe_update(role, lambda: [whole])
        try:
            return update(*args, **kwargs)
        finally:
            under_way.discard(role)
            ledger.wait()

    return observed


def tensors_of(batch: Any) -> Mapping[str, Any]:
    """The tensors of a DataProto or a TensorDict, by name."""
    columns = batch if getattr(batch, "batch", None) is None else batch.batch
    return {name: value for name, value in _items(columns) if isinstance(value, torch.Tensor)}


def _items(columns: Any) -> Iterator[tuple[str, Any]]:
    return ((str(name), columns.get(name)) for name in columns.keys())  # noqa: SIM118 - a TensorDict iterates over rows
