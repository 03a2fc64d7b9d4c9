"""``rollout-skip unpin``: takes pins away; what was pinned stays until it is pruned."""

from __future__ import annotations

import argparse
from typing import Any

from rich.console import Console

from verl_rollout_skip.cli.arguments import add_path, add_steps, describe
from verl_rollout_skip.cli.commands import Result
from verl_rollout_skip.cli.folders import find_place
from verl_rollout_skip.cli.pin import check_choice, plain, render_pins
from verl_rollout_skip.cli.text import line
from verl_rollout_skip.pins import read_pins, remove_pin


def add_arguments(parser: argparse.ArgumentParser) -> None:
    describe(
        parser,
        "Take pins away. Nothing is removed by this: what was pinned stays until it is pruned.",
        "  rollout-skip unpin /data/dumps/RUN/VARIANT --steps 1\n"
        "  rollout-skip unpin /data/dumps/RUN/VARIANT --variant",
    )
    add_path(parser)
    add_steps(parser)
    parser.add_argument("--variant", action="store_true", help="the pin of the whole variant")


def run(parsed: argparse.Namespace) -> Result:
    place = find_place(parsed.path, parsed.steps)
    check_choice(place, parsed.variant)
    removed = []
    for variant in place.variants if parsed.variant else [place.only_variant()]:
        for pin in read_pins(variant.storage):
            meant = parsed.variant if pin.step is None else not parsed.variant and pin.step in place.steps
            if meant and remove_pin(variant.storage, pin.step):
                removed.append(plain(variant, pin))
    return Result({"unpinned": removed})


def render(console: Console, data: dict[str, Any]) -> None:
    if data["unpinned"]:
        render_pins(console, data["unpinned"])
    else:
        line(console, "was not pinned")
