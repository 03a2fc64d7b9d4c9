"""``rollout-skip unpin``: removes pins, never the steps."""

from __future__ import annotations

from typing import Any

import click
from rich.console import Console

from verl_rollout_skip.cli.command import Command, Result, path_argument, steps_option
from verl_rollout_skip.cli.folders import find_place
from verl_rollout_skip.cli.pin import check_choice, plain, render_pins
from verl_rollout_skip.cli.text import line
from verl_rollout_skip.pins import read_pins, remove_pin


@click.command(
    cls=Command,
    examples="rollout-skip unpin /data/dumps/RUN/VARIANT --steps 1\n"
    "rollout-skip unpin /data/dumps/RUN/VARIANT --variant",
)
@path_argument()
@steps_option()
@click.option("--variant", "whole", is_flag=True, help="remove the pin of the whole variant")
def command(path: str, steps: str | None, whole: bool) -> Result:
    """Remove pins. The steps stay until you prune them."""
    place = find_place(path, steps)
    check_choice(place, whole)
    removed = []
    for variant in place.variants if whole else [place.only_variant()]:
        for pin in read_pins(variant.storage):
            selected = whole if pin.step is None else not whole and pin.step in place.steps
            if selected and remove_pin(variant.storage, pin.step):
                removed.append(plain(variant, pin))
    return Result({"unpinned": removed}, render)


def render(console: Console, data: dict[str, Any]) -> None:
    if data["unpinned"]:
        render_pins(console, data["unpinned"])
    else:
        line(console, "nothing was pinned")
