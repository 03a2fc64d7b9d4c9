"""``rollout-skip pin``: protects steps or whole variants from ``prune``."""

from __future__ import annotations

from typing import Any

import click
from rich.console import Console

from verl_rollout_skip.cli.command import Command, Result, path_argument, steps_option
from verl_rollout_skip.cli.folders import Place, Variant, find_place
from verl_rollout_skip.cli.text import NOTHING, line, moment, table
from verl_rollout_skip.errors import ConfigError
from verl_rollout_skip.pins import Pin, add_pin


@click.command(
    cls=Command,
    examples="rollout-skip pin /data/dumps/RUN/VARIANT --steps 1-2 --note 'good baseline'\n"
    "rollout-skip pin /data/dumps/RUN/VARIANT/step_000002\n"
    "rollout-skip pin /data/dumps/RUN/VARIANT --variant",
)
@path_argument()
@steps_option()
@click.option("--variant", "whole", is_flag=True, help="pin the whole variant")
@click.option("--note", metavar="TEXT", help="the reason, shown by the command pins")
def command(path: str, steps: str | None, whole: bool, note: str | None) -> Result:
    """Protect recorded steps from prune, or a whole variant including steps that are recorded later.

    A pin is a small file under pins/ in the variant. The command unpin removes pins, the command pins lists them.
    """
    place = find_place(path, steps)
    check_choice(place, whole)
    chosen: list[tuple[Variant, int | None]]
    if whole:
        chosen = [(variant, None) for variant in place.variants]
    else:
        variant = place.only_variant()
        chosen = [(variant, step) for step in sorted({key.step for key in place.chosen_keys(variant)})]
    made = [plain(variant, add_pin(variant.storage, step, note)) for variant, step in chosen]
    return Result({"pinned": made}, render)


def render(console: Console, data: dict[str, Any]) -> None:
    render_pins(console, data["pinned"])


def check_choice(place: Place, whole: bool) -> None:
    """Require either some steps or whole variants, never a part of a step."""
    if whole == place.is_part:
        raise ConfigError(f"Use either steps (--steps, or the path of a step) or --variant for all of {place.path}.")
    if place.gen_batch is not None:
        raise ConfigError(
            f"{place.path} is one generation batch, but only whole steps can be pinned. Use the step's path."
        )


def plain(variant: Variant, pin: Pin) -> dict[str, Any]:
    """A pin as JSON."""
    return {"path": variant.path, "step": pin.step, "note": pin.note, "pinned_at": pin.pinned_at}


def render_pins(console: Console, pins: list[dict[str, Any]]) -> None:
    """Print one table of pins per variant."""
    for path in dict.fromkeys(pin["path"] for pin in pins):
        line(console, path, "bold")
        rows = [
            ("all" if pin["step"] is None else pin["step"], moment(pin["pinned_at"]), pin["note"] or NOTHING)
            for pin in pins
            if pin["path"] == path
        ]
        table(console, ("step", "pinned", "note"), rows, left=("pinned", "note"))
