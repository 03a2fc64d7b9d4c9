"""Rollouts can be shown as text without the model, because the tokenizer is copied to the dumps."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
from pathlib import Path

from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

from tests.trainings import Training
from verl_rollout_skip.key import RolloutKey


def test_text_can_be_shown_after_the_model_was_deleted(tmp_path: Path) -> None:
    training = Training(tmp_path)
    model = tmp_path / "inputs" / "model"
    words = {f"word{number}": number for number in range(200_000)}
    tokenizer = Tokenizer(models.WordLevel(words, unk_token="word0"))
    tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
    PreTrainedTokenizerFast(tokenizer_object=tokenizer).save_pretrained(model)
    (model / "model.safetensors").write_bytes(b"weights stay where they are")

    training.record(RolloutKey(1))
    shutil.rmtree(model)

    (variant,) = training.variants()
    copied = {file.name for file in (variant / "tokenizer").iterdir()}
    assert "tokenizer.json" in copied
    assert "model.safetensors" not in copied
    command = [sys.executable, "-m", "verl_rollout_skip.cli", "show", str(variant), "--row", "0", "--json"]
    shown = json.loads(subprocess.run(command, check=True, capture_output=True, text=True).stdout)
    assert "word" in json.dumps(shown["samples"])


def test_training_with_a_model_from_the_hub_records_without_a_tokenizer(tmp_path: Path) -> None:
    training = Training(tmp_path)
    training.record(RolloutKey(1), actor_rollout_ref__model__path="some-org/some-model")
    (variant,) = training.variants()
    assert not (variant / "tokenizer").exists()
