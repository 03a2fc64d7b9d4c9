"""``rollout-skip export``: recorded rollouts as text, for verl's viewer, SQL, pandas and Hugging Face datasets."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import click
from rich.console import Console

from verl_rollout_skip.cli.command import PATH, Command, Result, path_argument, steps_option, tokenizer_option
from verl_rollout_skip.cli.folders import Variant, find_place
from verl_rollout_skip.cli.text import counted, line, progress
from verl_rollout_skip.decoding import need_decoder
from verl_rollout_skip.errors import ConfigError
from verl_rollout_skip.exporting import Format, export
from verl_rollout_skip.key import RolloutKey
from verl_rollout_skip.store.storage import is_url
from verl_rollout_skip.trajectories import Trajectory, read_trajectories


@click.command(
    cls=Command,
    examples="rollout-skip export /data/dumps/RUN/VARIANT -o texts --format jsonl\n"
    "rollout-skip export /data/dumps/RUN/VARIANT -o first --steps 1\n"
    "rollout-skip export /data/dumps/RUN/VARIANT -o a.parquet --format parquet\n"
    "rollout-skip export /data/dumps/RUN/VARIANT -o dataset --format dataset",
)
@path_argument()
@click.option("-o", "--out", metavar="OUT", type=PATH, required=True, help="a local folder, or a file with parquet")
@click.option(
    "--format",
    type=click.Choice([form.value for form in Format]),
    default=Format.JSONL.value,
    metavar="FORMAT",
    help="jsonl (default), parquet or dataset",
)
@steps_option()
@tokenizer_option()
@click.option("--overwrite", is_flag=True, help="replace what is there")
def command(path: str, out: str, format: str, steps: str | None, tokenizer: str | None, overwrite: bool) -> Result:
    """Write recorded rollouts as text.

    jsonl: a folder with one file per step and the keys of verl's trainer.rollout_data_dir (input, output, gts, score,
    step and what the reward function returned besides); verl's rollout_viewer reads it. parquet: one file with all
    steps, text and tokens. dataset: a folder for datasets.load_from_disk.

    Special tokens are left out of the text, as verl does. The digest of each entry is checked; a file appears when it
    is complete.
    """
    place = find_place(path, steps)
    variant = place.only_variant()
    keys = place.chosen_keys(variant)
    form, target = Format(format), Path(out).expanduser()
    _check_out(out, target, variant, form)
    decoder = need_decoder(variant.path, variant.manifest, tokenizer)
    rows = 0

    def rollouts(bar: Any) -> Iterator[tuple[RolloutKey, Iterator[Trajectory]]]:
        nonlocal rows
        for key in bar.track(keys, description=variant.name):
            entry = variant.entries.entry(key, check_digest=True)
            rows += entry.record.rows
            yield key, read_trajectories(entry)

    with progress() as bar:
        made = export(rollouts(bar), decoder, form, target, overwrite)
    data = {"path": variant.path, "format": format, "tokenizer": decoder.source, "entries": len(keys)}
    return Result({**data, "rows": rows, "files": [str(path) for path in made]}, render)


def render(console: Console, data: dict[str, Any]) -> None:
    for path in data["files"]:
        line(console, path)
    rows, entries = counted(data["rows"], "trajectory", "trajectories"), counted(data["entries"], "entry", "entries")
    line(console, f"{rows} of {entries} as {data['format']}", "green")


def _check_out(given: str, out: Path, variant: Variant, form: Format) -> None:
    """Nothing is written into a recording, and no folder that holds one is taken for a dataset to replace."""
    if is_url(given):
        raise ConfigError(f"--out is {given}; exports go to a local folder.")
    if is_url(variant.path):
        return
    source, target = os.path.realpath(variant.path), os.path.realpath(out)
    if f"{target}/".startswith(f"{source}/") or (form is Format.DATASET and f"{source}/".startswith(f"{target}/")):
        raise ConfigError(f"--out {given} and {variant.path} lie within one another: give a place beside the source.")
