"""``rollout-skip export``: writes rollouts as text, for verl's viewer, SQL, pandas and Hugging Face datasets."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import click
from rich.console import Console

from verl_rollout_skip.cli.command import PATH, Command, Result, path_argument, steps_option, tokenizer_option
from verl_rollout_skip.cli.output import pluralize, print_line, progress
from verl_rollout_skip.cli.selection import Variant, select
from verl_rollout_skip.errors import ConfigError
from verl_rollout_skip.key import RolloutKey
from verl_rollout_skip.store.storage import is_url
from verl_rollout_skip.tools.decoding import need_decoder
from verl_rollout_skip.tools.export import Format, export
from verl_rollout_skip.tools.trajectories import Trajectory, read_trajectories


@click.command(
    cls=Command,
    examples="rollout-skip export /data/dumps/RUN/VARIANT -o texts --format jsonl\n"
    "rollout-skip export /data/dumps/RUN/VARIANT -o first --steps 1\n"
    "rollout-skip export /data/dumps/RUN/VARIANT -o a.parquet --format parquet\n"
    "rollout-skip export /data/dumps/RUN/VARIANT -o dataset --format dataset",
)
@path_argument()
@click.option("-o", "--out", metavar="OUT", type=PATH, required=True, help="a local folder; with parquet, a file")
@click.option(
    "--format",
    type=click.Choice([form.value for form in Format]),
    default=Format.JSONL.value,
    metavar="FORMAT",
    help="jsonl (default), parquet or dataset",
)
@steps_option()
@tokenizer_option()
@click.option("--overwrite", is_flag=True, help="replace existing files")
def command(path: str, out: str, format: str, steps: str | None, tokenizer: str | None, overwrite: bool) -> Result:
    """Write recorded rollouts as text.

    jsonl: a folder with one file per step, in the format of verl's trainer.rollout_data_dir (input, output, gts, score,
    step and any extra values of the reward function), which verl's rollout_viewer reads. parquet: one file with the
    text and tokens of all steps. dataset: a folder for datasets.load_from_disk.

    Special tokens are omitted from the text, as verl does. The digest of each entry is checked. Files appear only once
    they are complete.
    """
    selection = select(path, steps)
    variant = selection.single_variant()
    keys = selection.required_keys(variant)
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
        print_line(console, path)
    rows, entries = (
        pluralize(data["rows"], "trajectory", "trajectories"),
        pluralize(data["entries"], "entry", "entries"),
    )
    print_line(console, f"{rows} of {entries} as {data['format']}", "green")


def _check_out(given: str, out: Path, variant: Variant, form: Format) -> None:
    """Refuse to write into a recording, or to replace a folder that contains one."""
    if is_url(given):
        raise ConfigError(f"--out is {given}, but export writes only to local paths.")
    if is_url(variant.path):
        return
    source, target = os.path.realpath(variant.path), os.path.realpath(out)
    if f"{target}/".startswith(f"{source}/") or (form is Format.DATASET and f"{source}/".startswith(f"{target}/")):
        raise ConfigError(f"One of --out {given} and {variant.path} contains the other. Choose a path outside PATH.")
