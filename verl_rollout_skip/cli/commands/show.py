"""``rollout-skip show``: prints the record of one rollout step and some of its trajectories, as text if possible."""

from __future__ import annotations

import json
from dataclasses import asdict
from typing import Any

import click
from rich.console import Console

from verl_rollout_skip.cli.command import Command, Result, number_option, path_argument, tokenizer_option
from verl_rollout_skip.cli.output import format_number, print_line, print_no_text
from verl_rollout_skip.cli.selection import Selection, Variant, select
from verl_rollout_skip.config.skip_config import describe_steps
from verl_rollout_skip.errors import EntryNotFoundError
from verl_rollout_skip.key import RolloutKey
from verl_rollout_skip.store.sizes import format_size
from verl_rollout_skip.tools.decoding import TextDecoder, find_decoder
from verl_rollout_skip.tools.trajectories import Trajectory, conversation, read_trajectories

_SAMPLES = 3
_SHOWN_TOKENS = 64


@click.command(
    cls=Command,
    examples="rollout-skip show /data/dumps/RUN/VARIANT --step 2 --row 5\n"
    "rollout-skip show /data/dumps/RUN/VARIANT/step_000002/gen_000.json --json",
)
@path_argument()
@number_option("--step", "training step (default: the first recorded one)")
@number_option("--gen-batch", "generation batch within the step (default: 0)")
@number_option("--row", "show this row instead of the first three")
@tokenizer_option()
def command(path: str, step: int | None, gen_batch: int | None, row: int | None, tokenizer: str | None) -> Result:
    """Show the record of a rollout step and its first three rows, or the row that --row selects.

    Responses are decoded with --tokenizer, the tokenizer/ folder of the variant, or the tokenizer in the model's
    folder. Without any of them, token ids are shown.
    """
    selection = select(path)
    variant = selection.single_variant()
    key = _key(selection, variant, step, gen_batch)
    entry = variant.entries.entry(key, check_digest=True)
    if row is not None and not 0 <= row < entry.record.rows:
        raise EntryNotFoundError(f"{key} has rows 0 to {entry.record.rows - 1}, not {row}.")
    rows = range(min(entry.record.rows, _SAMPLES)) if row is None else [row]
    decoder, no_text = find_decoder(variant.path, variant.manifest, tokenizer)
    samples = [_sample(trajectory, decoder) for trajectory in read_trajectories(entry, rows)]
    source = None if decoder is None else decoder.source
    data = {"path": variant.path, "tokenizer": source, "no_tokenizer": no_text or None}
    return Result({**data, "record": asdict(entry.record), "samples": samples}, render)


def render(console: Console, data: dict[str, Any]) -> None:
    record = data["record"]
    print_line(console, data["path"], "bold")
    width = max(map(len, record))
    for name, value in record.items():
        if name == "key":
            value = RolloutKey(**value)
        if name == "info":
            value = json.dumps(value, ensure_ascii=False)
        if name == "parts":
            value = ", ".join(f"{part['file']} ({part['rows']} rows, {format_size(part['bytes'])})" for part in value)
        if value is not None:
            print_line(console, f"{name:<{width}}  {value}")
    for sample in data["samples"]:
        title = f"row {sample['row']}, score {format_number(sample['score'], 3)}, {sample['response_length']} tokens"
        print_line(console, f"\n{title}", "bold")
        for name in ("prompt", "response", "reward_model", "data_source"):
            if sample[name] is not None:
                print_line(console, f"{name}: {_readable(sample[name])}")
    if data["tokenizer"] is None and data["samples"]:
        console.print()
        print_no_text(console, data["no_tokenizer"])


def _key(selection: Selection, variant: Variant, step: int | None, gen_batch: int | None) -> RolloutKey:
    keys = selection.required_keys(variant)
    key = keys[0]
    if step is not None or gen_batch is not None:
        key = RolloutKey(key.step if step is None else step, gen_batch or 0)
    if key not in keys:
        batches = [other.gen_batch for other in keys if other.step == key.step]
        present = f"generation batches {batches}" if batches else f"steps {describe_steps({k.step for k in keys})}"
        raise EntryNotFoundError(f"{key} is not recorded in {selection.path}, which contains {present}.")
    return key


def _sample(trajectory: Trajectory, decoder: TextDecoder | None) -> dict[str, Any]:
    prompt, response = trajectory.prompt, trajectory.response
    shown: Any = prompt
    if decoder is not None and prompt is not None:
        shown = decoder.text(prompt)
    elif trajectory.messages is not None:
        shown = conversation(trajectory.messages)
    return {
        "row": trajectory.row,
        "score": trajectory.score,
        "prompt_length": None if prompt is None else len(prompt),
        "response_length": None if response is None else len(response),
        "prompt": shown,
        "response": decoder.text(response) if decoder is not None and response is not None else response,
        "reward_model": trajectory.reward_model,
        "data_source": trajectory.data_source,
    }


def _readable(value: Any) -> str:
    if isinstance(value, list) and value and all(isinstance(token, int) for token in value):
        more = f" … ({len(value)} tokens)" if len(value) > _SHOWN_TOKENS else ""
        return " ".join(map(str, value[:_SHOWN_TOKENS])) + more
    return value if isinstance(value, str) else json.dumps(value, ensure_ascii=False, default=str)
