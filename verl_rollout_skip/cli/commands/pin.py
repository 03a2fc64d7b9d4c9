"""``rollout-skip pin``: protects steps or whole variants from ``prune``."""

from __future__ import annotations

from typing import Any

import click
from rich.console import Console

from verl_rollout_skip.cli.command import Command, Result, path_argument, steps_option
from verl_rollout_skip.cli.output import MISSING, format_time, print_line, print_table
from verl_rollout_skip.cli.selection import Selection, Variant, select
from verl_rollout_skip.errors import ConfigError
from verl_rollout_skip.runs.pins import Pin, add_pin


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
    """Protect recorded steps from prune, or a whole variant, including steps that are recorded later.

    A pin is a small file under pins/ in the variant. Use unpin to remove pins and pins to list them.
    """
    selection = select(path, steps)
    check_selection(selection, whole)
    chosen: list[tuple[Variant, int | None]]
    if whole:
        chosen = [(variant, None) for variant in selection.variants]
    else:
        variant = selection.single_variant()
        chosen = [(variant, step) for step in sorted({key.step for key in selection.required_keys(variant)})]
    made = [pin_to_json(variant, add_pin(variant.storage, step, note)) for variant, step in chosen]
    return Result({"pinned": made}, render)


def render(console: Console, data: dict[str, Any]) -> None:
    render_pins(console, data["pinned"])


def check_selection(selection: Selection, whole: bool) -> None:
    """Require either steps or ``--variant``, and no single generation batches."""
    if whole == selection.is_partial:
        raise ConfigError(
            f"Use either steps (--steps, or the path of a step) or --variant for all of {selection.path}."
        )
    if selection.gen_batch is not None:
        raise ConfigError(
            f"{selection.path} is one generation batch, but only whole steps can be pinned. Use the step's path."
        )


def pin_to_json(variant: Variant, pin: Pin) -> dict[str, Any]:
    """A pin for ``--json``."""
    return {"path": variant.path, "step": pin.step, "note": pin.note, "pinned_at": pin.pinned_at}


def render_pins(console: Console, pins: list[dict[str, Any]]) -> None:
    """Print one table of pins per variant."""
    for path in dict.fromkeys(pin["path"] for pin in pins):
        print_line(console, path, "bold")
        rows = [
            ("all" if pin["step"] is None else pin["step"], format_time(pin["pinned_at"]), pin["note"] or MISSING)
            for pin in pins
            if pin["path"] == path
        ]
        print_table(console, ("step", "pinned", "note"), rows, left=("pinned", "note"))
