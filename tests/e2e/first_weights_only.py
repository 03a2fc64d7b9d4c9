"""A weight sync that is broken on purpose: every sync after the first sends the weights of the first one again.

verl imports this module in every process (VERL_USE_EXTERNAL_MODULES). The version that the engine reports, and its
seeds, are those of a correct sync, so only the weights make a difference.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch

from recipes.cpu.rollout import CPUServerAdapter

_send = CPUServerAdapter.update_weights
_first: dict[str, torch.Tensor] = {}


async def send_first_weights(
    adapter: CPUServerAdapter, weights: Iterable[tuple[str, torch.Tensor]], *args: Any, **kwargs: Any
) -> None:
    current = {name: weight.detach().cpu().clone() for name, weight in weights}
    if not _first:
        _first.update(current)
    await _send(adapter, iter(_first.items()), *args, **kwargs)


CPUServerAdapter.update_weights = send_first_weights  # type: ignore[method-assign]
