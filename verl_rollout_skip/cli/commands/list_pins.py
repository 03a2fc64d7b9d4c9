"""``rollout-skip pins``: lists pins, with date and note."""

from __future__ import annotations

from typing import Any

import click
from rich.console import Console

from verl_rollout_skip.cli.command import Command, Result, path_argument
from verl_rollout_skip.cli.commands.pin import pin_to_json, render_pins
from verl_rollout_skip.cli.output import print_line
from verl_rollout_skip.cli.selection import select
from verl_rollout_skip.runs.pins import read_pins


@click.command(cls=Command, examples="rollout-skip pins /data/dumps\nrollout-skip pins /data/dumps/RUN/VARIANT --json")
@path_argument()
def command(path: str) -> Result:
    """List pinned steps and variants, with date and note."""
    selection = select(path)
    found = [(variant, pin) for variant in selection.variants for pin in read_pins(variant.storage)]
    return Result({"pins": [pin_to_json(variant, pin) for variant, pin in found]}, render)


def render(console: Console, data: dict[str, Any]) -> None:
    if data["pins"]:
        render_pins(console, data["pins"])
    else:
        print_line(console, "nothing is pinned")
