"""What TensorBoard and wandb show of a rollout step, with the real libraries."""

from __future__ import annotations

import html
import json
import re
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import example, given
from hypothesis import strategies as st
from omegaconf import OmegaConf
from tensordict import TensorDict

from tests.batches import rollout_output
from verl_rollout_skip.trainers.samples import NAME, SampleLog, _cell, _samples

HOSTILE = "<script>alert(1)</script> | **bold** [link](http://x) `code`"


class Words:
    """A tokenizer that decodes to a hostile word and the number of tokens."""

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
    assert HOSTILE in html.unescape(text)


@pytest.mark.slow
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


@given(st.text())
@example("a*b 'q' #5 &amp; &#42; <b>")
def test_a_cell_shows_the_text_verbatim_with_markup_escaped(text: str) -> None:
    cell = _cell(text)
    assert html.unescape(cell) == text.replace("\n", "↵ ").replace("\r", "")
    assert not set(re.sub(r"&#[0-9]+;", "", cell)) & set("&<>\"'\\`*_{}[]()#+-.!|~\n\r")


@pytest.mark.parametrize(("rows", "count"), [(3, 4), (1, 4), (4, 4), (6, 4), (0, 4), (7, 3)])
def test_all_rows_are_shown_up_to_the_count(rows: int, count: int) -> None:
    batch = rollout_output(max(rows, 1))[:rows]
    shown = [sample.prompt for sample in _samples(batch, Spelled(), count)]
    assert len(shown) == min(rows, count)
    tokens = [row[mask[: len(row)].bool()].tolist() for row, mask in zip(*prompts_of(batch), strict=True)]
    assert all(prompt in map(str, tokens) for prompt in shown)


class Spelled:
    """A tokenizer that shows the tokens themselves."""

    def decode(self, tokens: list[int]) -> str:
        return str(tokens)


def prompts_of(batch: Any) -> tuple[torch.Tensor, torch.Tensor]:
    return batch.batch["prompts"], batch.batch["attention_mask"]


class Broken:
    def decode(self, tokens: list[int]) -> str:
        raise RuntimeError("no such token")


def without(name: str) -> Any:
    batch = rollout_output(6)
    del batch.batch[name]
    return batch


@pytest.mark.parametrize(
    ("batch", "tokenizer", "reason"),
    [(rollout_output(6), Broken(), "RuntimeError: no such token"), (without("prompts"), Words(), "KeyError")],
    ids=["tokenizer", "batch"],
)
def test_a_failure_is_one_warning_and_the_training_continues(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
    batch: Any,
    tokenizer: Any,
    reason: str,
) -> None:
    monkeypatch.setenv("TENSORBOARD_DIR", str(tmp_path))
    log = SampleLog(config_with("tensorboard"), 3)
    with caplog.at_level("WARNING", logger="verl_rollout_skip"):
        for step in (1, 2):
            log.log(step, batch, tokenizer)
        log.log(3, rollout_output(6), Words())
        log.close()
    [record] = caplog.records
    assert "step 1: cannot log sample rows" in record.getMessage()
    assert reason in record.getMessage()
    assert not log.is_on
    assert list(tmp_path.iterdir()) == []


def test_without_an_attention_mask_the_padding_is_shown_too(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TENSORBOARD_DIR", str(tmp_path))
    log = SampleLog(config_with("tensorboard"), 3)
    log.log(1, without("attention_mask"), Spelled())
    log.close()
    assert log.is_on


def test_nothing_is_decoded_for_other_loggers_or_if_no_rows_are_requested(tmp_path: Path, monkeypatch: Any) -> None:
    monkeypatch.chdir(tmp_path)
    for log in (SampleLog(config_with("console", "file"), 4), SampleLog(config_with("tensorboard"), 0)):
        log.log(1, None, None)
        log.close()
    assert list(tmp_path.iterdir()) == []
