"""``rollout-skip show``: the record of one rollout step, and trajectories of it as text where that is possible."""

from __future__ import annotations

import json
import os
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from rich.panel import Panel
from rich.table import Table

from verl_rollout_skip.cli.folders import Variant
from verl_rollout_skip.cli.text import number, safe
from verl_rollout_skip.errors import EntryNotFoundError, StoreError
from verl_rollout_skip.key import RolloutKey
from verl_rollout_skip.rollout import describe_steps
from verl_rollout_skip.store.batch import Batch, BatchKind, take_apart

_SAMPLES = 3
_SHOWN_TOKENS = 64
_FOLDER = "tokenizer"


def collect(
    variants: list[Variant], step: int | None, gen_batch: int, row: int | None, tokenizer: str | None
) -> dict[str, Any]:
    """The record, and one row or the first few."""
    if len(variants) > 1:
        listed = ", ".join(variant.path for variant in variants)
        raise StoreError(f"There are {len(variants)} variants, choose one: {listed}")
    [variant] = variants
    key = _key(variant, step, gen_batch)
    entry = variant.store.load(key)
    rows = range(min(entry.record.rows, _SAMPLES)) if row is None else [row]
    if row is not None and not 0 <= row < entry.record.rows:
        raise EntryNotFoundError(f"{key} has rows 0 to {entry.record.rows - 1}, not {row}.")
    given = entry.inputs(BatchKind.TENSORDICT) if rows else None
    batch, inputs = entry.decode(), None if given is None else take_apart(given)
    decode, source = _tokenizer(variant, tokenizer)
    samples = [_sample(batch, inputs, number, decode) for number in rows]
    return {"path": variant.path, "tokenizer": source, "record": asdict(entry.record), "samples": samples}


def render(console: Console, result: dict[str, Any]) -> None:
    """The same for people."""
    record = result["record"]
    table = Table(show_header=False)
    for name, value in record.items():
        if name == "key":
            value = RolloutKey(**value)
        if name == "info":
            value = json.dumps(value, ensure_ascii=False)
        if value is not None:
            table.add_row(name, safe(value))
    console.print(safe(result["path"], "bold"), soft_wrap=True)
    console.print(table)
    for sample in result["samples"]:
        title = f"row {sample['row']}, score {number(sample['score'], 3)}, {sample['response_length']} tokens"
        body = safe("")
        for name in ("prompt", "response", "reward_model", "data_source"):
            if sample[name] is not None:
                body.append_text(safe(f"{name}: ", "bold")).append_text(safe(f"{_readable(sample[name])}\n"))
        body.rstrip()
        console.print(Panel(body, title=title, title_align="left"))
    if result["tokenizer"] is None and result["samples"]:
        console.print(safe("Token ids, because no tokenizer was found: give one with --tokenizer DIR."))


def _key(variant: Variant, step: int | None, gen_batch: int) -> RolloutKey:
    keys = variant.store.keys()
    if not keys:
        raise EntryNotFoundError(f"Nothing is recorded in {variant.path}.")
    key = keys[0] if step is None and not gen_batch else RolloutKey(keys[0].step if step is None else step, gen_batch)
    if key not in keys:
        batches = [other.gen_batch for other in keys if other.step == key.step]
        held = f"generation batches {batches}" if batches else f"steps {describe_steps({k.step for k in keys})}"
        raise EntryNotFoundError(f"{key} is not recorded in {variant.path}, which holds {held}.")
    return key


def _sample(batch: Batch, inputs: Batch | None, row: int, decode: Any) -> dict[str, Any]:
    prompt_ids, response_ids = _tokens(batch, "prompts", row), _tokens(batch, "responses", row)
    messages = _cell(inputs, "raw_prompt", row)
    scores = batch.tensors.get(("rm_scores",))
    prompt: Any = decode(prompt_ids) if decode and prompt_ids is not None else None
    if prompt is None:
        prompt = _conversation(messages) if messages is not None else prompt_ids
    return {
        "row": row,
        "score": None if scores is None else float(_row(scores, row).double().sum()),
        "prompt_length": None if prompt_ids is None else len(prompt_ids),
        "response_length": None if response_ids is None else len(response_ids),
        "prompt": prompt,
        "response": decode(response_ids) if decode and response_ids is not None else response_ids,
        "reward_model": _cell(inputs, "reward_model", row),
        "data_source": _cell(inputs, "data_source", row),
    }


def _tokens(batch: Batch, name: str, row: int) -> list[int] | None:
    """The tokens of one row, without padding."""
    tensor, mask = batch.tensors.get((name,)), batch.tensors.get(("attention_mask",))
    if tensor is None:
        return None
    ids = _row(tensor, row)
    if not tensor.is_nested and mask is not None and not mask.is_nested:
        valid = mask[row][: len(ids)] if name == "prompts" else mask[row][-len(ids) :] if len(ids) else mask[row][:0]
        ids = ids[valid.bool()]
    return [int(token) for token in ids.tolist()]


def _row(tensor: torch.Tensor, row: int) -> torch.Tensor:
    return tensor.unbind()[row] if tensor.is_nested else tensor[row]


def _cell(batch: Batch | None, name: str, row: int) -> Any:
    array = None if batch is None else batch.arrays.get((name,))
    return None if array is None else array[row]


def _conversation(messages: Any) -> str:
    try:
        return "\n".join(f"{message['role']}: {message['content']}" for message in messages)
    except (TypeError, KeyError):
        return str(messages)


def _readable(value: Any) -> str:
    if isinstance(value, list) and value and all(isinstance(token, int) for token in value):
        more = f" … ({len(value)} tokens)" if len(value) > _SHOWN_TOKENS else ""
        return " ".join(map(str, value[:_SHOWN_TOKENS])) + more
    return value if isinstance(value, str) else json.dumps(value, ensure_ascii=False, default=str)


def _tokenizer(variant: Variant, given: str | None) -> tuple[Any, str | None]:
    """A function from tokens to text and where it comes from. Code that comes with a tokenizer is never run."""
    for folder in [given] if given else _tokenizer_folders(variant):
        if not (Path(folder) / "tokenizer_config.json").is_file() and not (Path(folder) / "tokenizer.json").is_file():
            if given:
                raise StoreError(f"{folder} is no tokenizer folder: it has no tokenizer.json or tokenizer_config.json.")
            continue
        try:
            os.environ.setdefault("TRANSFORMERS_VERBOSITY", "error")
            from transformers import AutoTokenizer

            return AutoTokenizer.from_pretrained(folder, local_files_only=True).decode, str(folder)
        except Exception as error:
            if given:
                raise StoreError(f"The tokenizer in {folder} cannot be loaded: {error}") from error
    return None, None


def _tokenizer_folders(variant: Variant) -> list[str]:
    found = [] if "://" in variant.path else [str(Path(variant.path) / _FOLDER)]
    if variant.manifest is not None:
        model = variant.manifest.config.get("actor_rollout_ref", {}).get("model", {})
        paths = (model.get("tokenizer_path"), model.get("path")) if isinstance(model, dict) else ()
        found += [os.path.expanduser(path) for path in paths if isinstance(path, str) and os.path.isabs(path)]
    return found
