"""``rollout-skip pin``: steps, or whole variants, that ``prune`` leaves alone."""

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
@click.option("--variant", "whole", is_flag=True, help="the whole variant")
@click.option("--note", metavar="TEXT", help="why, for those who come later")
def command(path: str, steps: str | None, whole: bool, note: str | None) -> Result:
    """Pin recorded steps, or a whole variant with what is recorded in it later: prune then leaves them alone.

    A pin is a small file under pins/ in the variant; unpin takes it away, pins lists them.
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
    """Either some steps or whole variants, never a part of a step."""
    if whole == place.is_part:
        raise ConfigError(f"Give either steps (--steps, or the path of a step) or --variant for all of {place.path}.")
    if place.gen_batch is not None:
        raise ConfigError(f"{place.path} is one generation batch; a step is pinned as a whole: give its path.")


def plain(variant: Variant, pin: Pin) -> dict[str, Any]:
    """A pin as JSON has it."""
    return {"path": variant.path, "step": pin.step, "note": pin.note, "pinned_at": pin.pinned_at}


def render_pins(console: Console, pins: list[dict[str, Any]]) -> None:
    """A table of pins for each variant."""
    for path in dict.fromkeys(pin["path"] for pin in pins):
        line(console, path, "bold")
        rows = [
            ("all" if pin["step"] is None else pin["step"], moment(pin["pinned_at"]), pin["note"] or NOTHING)
            for pin in pins
            if pin["path"] == path
        ]
        table(console, ("step", "pinned", "note"), rows, left=("pinned", "note"))
