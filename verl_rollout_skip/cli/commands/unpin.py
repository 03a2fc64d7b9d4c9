"""``rollout-skip unpin``: removes pins, but never the pinned steps."""

from __future__ import annotations

from typing import Any

import click
from rich.console import Console

from verl_rollout_skip.cli.command import Command, Result, path_argument, steps_option
from verl_rollout_skip.cli.commands.pin import check_selection, pin_to_json, render_pins
from verl_rollout_skip.cli.output import print_line
from verl_rollout_skip.cli.selection import select
from verl_rollout_skip.runs.pins import read_pins, remove_pin


@click.command(
    cls=Command,
    examples="rollout-skip unpin /data/dumps/RUN/VARIANT --steps 1\n"
    "rollout-skip unpin /data/dumps/RUN/VARIANT --variant",
)
@path_argument()
@steps_option()
@click.option("--variant", "whole", is_flag=True, help="remove the pin on the whole variant")
def command(path: str, steps: str | None, whole: bool) -> Result:
    """Remove pins. The steps stay until you prune them."""
    selection = select(path, steps)
    check_selection(selection, whole)
    removed = []
    for variant in selection.variants if whole else [selection.single_variant()]:
        for pin in read_pins(variant.storage):
            selected = whole if pin.step is None else not whole and pin.step in selection.steps
            if selected and remove_pin(variant.storage, pin.step):
                removed.append(pin_to_json(variant, pin))
    return Result({"unpinned": removed}, render)


def render(console: Console, data: dict[str, Any]) -> None:
    if data["unpinned"]:
        render_pins(console, data["unpinned"])
    else:
        print_line(console, "nothing was pinned")
