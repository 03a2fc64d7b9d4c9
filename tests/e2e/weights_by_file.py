"""A checkpoint engine for ``trainer_mode=separate_async`` on CPU: the trainer passes weights to the servers in a file.

verl's own engines need GPUs. Named by ``rollout.checkpoint_engine.custom_backend_module``.
"""

from __future__ import annotations

import os
import tempfile
import time
import uuid
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from verl.checkpoint_engine import CheckpointEngineRegistry
from verl.checkpoint_engine.base import CheckpointEngine

BACKEND = "file"


@CheckpointEngineRegistry.register(BACKEND)
class WeightsByFile(CheckpointEngine):
    """One file per weight sync; all workers are on one machine."""

    def __init__(self, bucket_size: int, is_master: bool = False) -> None:
        self.is_master = is_master
        self.file = Path()

    def prepare(self) -> dict[str, Any]:
        return {}

    @classmethod
    def build_topology(
        cls, actor_wg_world_size: int, rollout_world_size: int, metadata: list[dict[str, Any]]
    ) -> tuple[dict[str, list[Any]], dict[str, list[Any]]]:
        file = str(Path(tempfile.gettempdir()) / f"weights-{uuid.uuid4().hex}")
        return {"file": [file] * actor_wg_world_size}, {"file": [file] * rollout_world_size}

    def init_process_group(self, file: str) -> None:
        self.file = Path(file)

    def finalize(self) -> None:
        self.file.unlink(missing_ok=True)

    async def send_weights(self, weights: Iterator[tuple[str, torch.Tensor]], global_steps: int | None = None) -> None:
        # Gathering a sharded weight is a collective: every worker must iterate over all of them.
        state = {name: weight.detach().cpu() for name, weight in weights}
        if self.is_master:
            torch.save(state, f"{self.file}.part")
            os.replace(f"{self.file}.part", self.file)

    def receive_weights(self, global_steps: int | None = None) -> Iterator[tuple[str, torch.Tensor]]:  # type: ignore[override]
        while not self.file.exists():
            time.sleep(0.02)
        yield from torch.load(self.file).items()
