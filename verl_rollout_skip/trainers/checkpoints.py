"""Digests of the weights in a checkpoint, which do not depend on how many workers saved it.

Only checkpoints of FSDP2 on a folder that the driver reaches have one: there, each worker saves consecutive rows of
each parameter. Loading them executes no code.
"""

from __future__ import annotations

import logging
import os
import re
from collections.abc import Iterator
from contextlib import contextmanager
from importlib import import_module
from pathlib import Path
from typing import Any

import torch
import xxhash
from omegaconf import OmegaConf

from verl_rollout_skip.replay.ledger.training import TrainingLedger
from verl_rollout_skip.store.sizes import format_size

logger = logging.getLogger(__name__)

_ROLES = ("actor", "critic")
_FILE = re.compile(r"model_world_size_(\d+)_rank_(\d+)\.pt")
_MAX_BYTES = 16 << 30


class UnknownShards(Exception):
    """Why a checkpoint has no digest."""


def observe_checkpoint(trainer: Any, ledger: TrainingLedger) -> None:
    """A trainer has saved a checkpoint: its weights are read in the background."""
    step, settings = trainer.global_steps, trainer.config
    folder = Path(os.path.abspath(settings.trainer.default_local_dir)) / f"global_step_{step}"
    if OmegaConf.select(settings, "actor_rollout_ref.actor.checkpoint.async_save"):
        return  # it is still being written
    ledger.observe_weights(step, lambda: digests_of(folder))


def digests_of(folder: Path) -> dict[str, str]:
    """The digest of each role whose weights are in a checkpoint folder. The log says why a role has none."""
    found = {}
    for role in _ROLES:
        if (folder / role).is_dir():
            try:
                found[role] = digest_of(folder / role)
            except Exception as error:  # also a file of another format, and one that is removed meanwhile
                logger.info("%s has no digest in the ledger: %s", folder / role, error)
    return found


def digest_of(folder: Path) -> str:
    """The digest of all parameters in the files of one role. Raises if it would depend on the number of files."""
    import_module("torch.distributed.tensor")  # or files with sharded tensors cannot be read

    shards = _load(_files(folder))
    digest = xxhash.xxh3_128()
    for name in sorted(shards[0]):
        whole = xxhash.xxh3_128()
        shape, dtype, rows = None, None, 0
        for value in _parts(name, shards):
            local = _local(value)
            shape, dtype, rows = tuple(value.shape), value.dtype, rows + (local.shape[0] if local.dim() else 0)
            whole.update(local.detach().contiguous().flatten().view(torch.uint8).numpy().data)
        if shape and rows != shape[0]:
            raise UnknownShards(f"the files have {rows} rows of {name}, which has {shape[0]}")
        digest.update(f"{name} {dtype} {shape} {whole.hexdigest()}\n".encode())
    return digest.hexdigest()


def _files(folder: Path) -> list[Path]:
    """The files of all workers, in their order."""
    found = {int(match[2]): path for path in folder.iterdir() if (match := _FILE.fullmatch(path.name))}
    sizes = {match[1] for path in found.values() if (match := _FILE.fullmatch(path.name))}
    if len(sizes) != 1 or sorted(found) != list(range(int(next(iter(sizes))))):
        raise UnknownShards("it does not have one file of each FSDP worker")
    total = sum(path.stat().st_size for path in found.values())
    if total > _MAX_BYTES:
        raise UnknownShards(f"it has {format_size(total)}, and at most {format_size(_MAX_BYTES)} are read")
    return [found[rank] for rank in sorted(found)]


def _load(files: list[Path]) -> list[dict[str, Any]]:
    with _without_mesh_warnings():
        return [torch.load(path, map_location="cpu", mmap=True, weights_only=True) for path in files]


def _parts(name: str, shards: list[dict[str, Any]]) -> list[Any]:
    """The parts of a parameter. One that is not sharded is the same in all files."""
    placements = getattr(shards[0][name], "placements", None)
    if placements is None:
        return [shards[0][name]]
    if len(placements) == 1 and placements[0].is_shard(dim=0):
        return [shard[name] for shard in shards]
    raise UnknownShards(f"{name} is sharded as {placements}")


def _local(value: Any) -> torch.Tensor:
    local: torch.Tensor = value.to_local() if hasattr(value, "to_local") else value
    return local


@contextmanager
def _without_mesh_warnings() -> Iterator[None]:
    """torch warns that the process groups of the workers do not exist here."""
    mesh = logging.getLogger("torch.distributed.device_mesh")
    level = mesh.level
    mesh.setLevel(logging.ERROR)
    try:
        yield
    finally:
        mesh.setLevel(level)
