"""``rollout-skip pins``: what is pinned, since when and why."""

from __future__ import annotations

import argparse
from typing import Any

from rich.console import Console

from verl_rollout_skip.cli.arguments import add_path, describe
from verl_rollout_skip.cli.commands import Result
from verl_rollout_skip.cli.folders import find_place
from verl_rollout_skip.cli.pin import plain, render_pins
from verl_rollout_skip.cli.text import line
from verl_rollout_skip.pins import read_pins


def add_arguments(parser: argparse.ArgumentParser) -> None:
    describe(
        parser,
        "List what is pinned, since when and why.",
        "  rollout-skip pins /data/dumps\n  rollout-skip pins /data/dumps/RUN/VARIANT --json",
    )
    add_path(parser)


def run(parsed: argparse.Namespace) -> Result:
    place = find_place(parsed.path)
    found = [(variant, pin) for variant in place.variants for pin in read_pins(variant.storage)]
    return Result({"pins": [plain(variant, pin) for variant, pin in found]})


def render(console: Console, data: dict[str, Any]) -> None:
    if data["pins"]:
        render_pins(console, data["pins"])
    else:
        line(console, "nothing is pinned")
