"""What TensorBoard and wandb get to see of a rollout step, by the real libraries."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from omegaconf import OmegaConf
from tensordict import TensorDict

from tests.batches import rollout_output
from verl_rollout_skip.samples import NAME, SampleLog

HOSTILE = "<script>alert(1)</script> | **bold** [link](http://x) `code`"


class Words:
    """A tokenizer with one hostile word for every token, and the number of tokens."""

    def decode(self, tokens: list[int]) -> str:
        return f"{len(tokens)} tokens {HOSTILE}"


def config_with(*loggers: str) -> Any:
    return OmegaConf.create({"trainer": {"logger": list(loggers), "project_name": "p", "experiment_name": "e"}})


def jagged_batch(rows: int = 6) -> TensorDict:
    def lists(start: int) -> torch.Tensor:
        return torch.nested.as_nested_tensor([torch.arange(start + row) for row in range(rows)], layout=torch.jagged)

    scores = torch.nested.as_nested_tensor([torch.full((4 + row,), 0.5) for row in range(rows)], layout=torch.jagged)
    return TensorDict({"prompts": lists(2), "responses": lists(4), "rm_scores": scores}, batch_size=[rows])


@pytest.mark.parametrize("batch", [rollout_output(6), jagged_batch()], ids=["V0", "V1"])
def test_tensorboard_shows_a_few_rows_as_text(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, batch: Any) -> None:
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    monkeypatch.setenv("TENSORBOARD_DIR", str(tmp_path))
    log = SampleLog(config_with("tensorboard", "console"), 3)
    for step in (1, 2):
        log.log(step, batch, Words())
    log.close()
    events = EventAccumulator(str(tmp_path))
    events.Reload()
    (tag,) = events.Tags()["tensors"]
    assert tag == f"{NAME}/text_summary"
    shown = events.Tensors(tag)
    assert [event.step for event in shown] == [1, 2]
    text = shown[0].tensor_proto.string_val[0].decode()
    assert len(text.splitlines()) == 2 + 3
    assert "<script>" not in text
    assert "**bold**" not in text
    assert "&lt;script&gt;" in text


def test_wandb_gets_a_table(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    import wandb

    monkeypatch.setenv("WANDB_SILENT", "true")
    run = wandb.init(project="p", mode="offline", dir=str(tmp_path))
    SampleLog(config_with("wandb"), 2).log(7, jagged_batch(), Words())
    wandb.log({"rollout_skip/hit": 1.0}, step=7)
    run.finish()
    (table,) = tmp_path.glob("wandb/offline-run-*/files/media/table/rollout_skip/samples_*.table.json")
    content = json.loads(table.read_text())
    assert content["columns"] == ["prompt", "response", "score"]
    assert [row[0].split()[0] for row in content["data"]] == ["2", "5"]
    assert [row[2] for row in content["data"]] == [2.0, 3.5]


def test_nothing_is_decoded_for_other_loggers_or_if_no_rows_are_wanted(tmp_path: Path, monkeypatch: Any) -> None:
    monkeypatch.chdir(tmp_path)
    for log in (SampleLog(config_with("console", "file"), 4), SampleLog(config_with("tensorboard"), 0)):
        log.log(1, None, None)
        log.close()
    assert list(tmp_path.iterdir()) == []
