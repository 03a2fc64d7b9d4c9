"""Digests of the weights in checkpoints: the same for any number of workers, and nothing is executed."""

from __future__ import annotations

import os
import pickle
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from verl_rollout_skip.trainers.checkpoints import UnknownShards, digest_of, digests_of

# Shards a model as FSDP2 does and saves it as verl does, with real process groups.
WORKER = """
import sys
import torch
from torch import nn
from torch.distributed import destroy_process_group, init_process_group
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

rank, size, folder, changed = int(sys.argv[1]), int(sys.argv[2]), sys.argv[3], sys.argv[4] == "changed"
init_process_group("gloo", init_method=f"file://{folder}/rendezvous", rank=rank, world_size=size)
torch.manual_seed(0)
model = nn.Sequential(nn.Linear(3, 5), nn.Linear(5, 1))
if changed:
    with torch.no_grad():
        model[0].weight[4, 2] += 1e-7
fully_shard(model, mesh=init_device_mesh("cpu", (size,)))
torch.save(model.state_dict(), f"{folder}/model_world_size_{size}_rank_{rank}.pt")
destroy_process_group()
"""


def saved(folder: Path, workers: int, state: str = "same") -> Path:
    """A checkpoint that several workers saved."""
    folder.mkdir()
    command = [sys.executable, "-c", WORKER]
    running = [
        subprocess.Popen([*command, str(rank), str(workers), str(folder), state], env={**os.environ})
        for rank in range(workers)
    ]
    assert [process.wait(timeout=120) for process in running] == [0] * workers
    return folder


def test_the_digest_is_the_same_for_one_and_two_workers_and_another_for_other_weights(tmp_path: Path) -> None:
    one, two = saved(tmp_path / "one", 1), saved(tmp_path / "two", 2)
    changed = saved(tmp_path / "changed", 1, "changed")
    assert digest_of(one) == digest_of(two)
    assert digest_of(changed) != digest_of(one)


def test_a_checkpoint_without_the_file_of_a_worker_has_no_digest(tmp_path: Path) -> None:
    torch.save({"weight": torch.zeros(2)}, tmp_path / "model_world_size_2_rank_1.pt")
    with pytest.raises(UnknownShards, match="one file of each FSDP worker"):
        digest_of(tmp_path)


def test_weights_that_are_not_sharded_have_a_digest(tmp_path: Path) -> None:
    torch.save({"weight": torch.ones(2, 2), "scale": torch.tensor(3.0)}, tmp_path / "model_world_size_1_rank_0.pt")
    assert len(digest_of(tmp_path)) == 32


class Payload:
    """Creates a file when it is unpickled."""

    def __init__(self, path: str) -> None:
        self.path = path

    def __reduce__(self) -> tuple[object, tuple[str]]:
        return os.mkdir, (self.path,)


def test_a_checkpoint_that_would_execute_code_has_no_digest_and_executes_nothing(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    folder = tmp_path / "actor"
    folder.mkdir()
    torch.save({"weight": Payload(str(tmp_path / "executed"))}, folder / "model_world_size_1_rank_0.pt")
    caplog.set_level("INFO", logger="verl_rollout_skip")
    assert digests_of(tmp_path) == {}
    assert not (tmp_path / "executed").exists()
    with pytest.raises(pickle.UnpicklingError):
        digest_of(folder)
