"""``rollout-skip unpin``: takes pins away; what was pinned stays until it is pruned."""

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
@click.option("--variant", "whole", is_flag=True, help="the pin of the whole variant")
def command(path: str, steps: str | None, whole: bool) -> Result:
    """Take pins away. Nothing is removed by this: what was pinned stays until it is pruned."""
    place = find_place(path, steps)
    check_choice(place, whole)
    removed = []
    for variant in place.variants if whole else [place.only_variant()]:
        for pin in read_pins(variant.storage):
            meant = whole if pin.step is None else not whole and pin.step in place.steps
            if meant and remove_pin(variant.storage, pin.step):
                removed.append(plain(variant, pin))
    return Result({"unpinned": removed}, render)


def render(console: Console, data: dict[str, Any]) -> None:
    if data["unpinned"]:
        render_pins(console, data["unpinned"])
    else:
        line(console, "was not pinned")
