"""``rollout-skip prune``: what of a recording can go, and, with ``--yes``, its removal."""

from __future__ import annotations

import time
from typing import Any

import click
from rich.console import Console

from verl_rollout_skip.cli.command import Command, Result, number_option, path_argument, steps_option
from verl_rollout_skip.cli.folders import Place, find_place
from verl_rollout_skip.cli.text import counted, line, moment, progress, table
from verl_rollout_skip.errors import ConfigError
from verl_rollout_skip.pruning import (
    Conditions,
    RecordedStep,
    Stayed,
    VariantPlan,
    carry_out,
    choose_steps,
    find_leftovers,
    find_set_aside,
    look_at,
    parse_age,
    stamp,
)
from verl_rollout_skip.sizes import format_size, parse_size

_IN_USE_S = 600.0
_LEFTOVER_AGE = "1d"


@click.command(
    cls=Command,
    examples="rollout-skip prune /data/dumps/RUN/VARIANT --keep-last 5\n"
    "rollout-skip prune /data/dumps --older-than 30d --keep-last 1 --yes\n"
    "rollout-skip prune /data/dumps --max-size 500GB\n"
    "rollout-skip prune /data/dumps/RUN --variants --older-than 90d\n"
    "rollout-skip prune /data/dumps --leftovers --set-aside --yes",
)
@path_argument()
@steps_option()
@click.option("--older-than", metavar="AGE", help="steps recorded longer ago than this, e.g. 30d or 12h")
@number_option("--keep-last", "keep the last N steps of each variant")
@click.option("--max-size", metavar="SIZE", help="the oldest steps, until all entries together fit, e.g. 500GB")
@click.option(
    "--variants",
    is_flag=True,
    help="whole variants instead of steps, with manifest and tokenizer; the conditions then count variants",
)
@click.option(
    "--leftovers",
    is_flag=True,
    help="what crashed writers left: if their process on this machine is gone, or after a day",
)
@click.option("--set-aside", is_flag=True, help="entries that were set aside as *.corrupt")
@click.option("--yes", is_flag=True, help="do it")
def command(
    path: str,
    steps: str | None,
    older_than: str | None,
    keep_last: int | None,
    max_size: str | None,
    variants: bool,
    leftovers: bool,
    set_aside: bool,
    yes: bool,
) -> Result:
    """Remove recorded steps. Without --yes it only shows what would go and how much that frees.

    A step goes if every condition that is given allows it, and it goes with all its generation batches. Pinned steps
    stay.
    """
    place = find_place(path, steps)
    conditions = None
    if place.is_part or variants or (older_than, keep_last, max_size) != (None, None, None):
        conditions = _conditions(place, older_than, keep_last, max_size, variants)
    elif not (leftovers or set_aside):
        raise ConfigError(
            "Say what may go: --steps, --older-than, --keep-last, --max-size, --variants, --leftovers or --set-aside. "
            "Nothing is removed without --yes."
        )
    place.check_chosen()
    plans = [look_at(variant.path, variant.run_path, variant.storage) for variant in place.variants]
    if conditions is not None:
        choose_steps(plans, conditions)
    for plan in plans:
        if leftovers:
            plan.files += find_leftovers(plan.storage, parse_age(_LEFTOVER_AGE))
        if set_aside:
            plan.files += find_set_aside(plan.storage)
    total = sum(step.bytes for plan in plans for step in plan.held)
    stayed = _carry_out(plans) if yes else {}
    data = {
        "dry_run": not yes,
        "total_bytes": total,
        "freed_bytes": sum(plan.bytes for plan in plans) - sum(s.bytes for one in stayed.values() for s in one.steps),
        "above_max_size": _above(plans, conditions),
        "variants": [_plain(plan, stayed.get(plan.path, Stayed())) for plan in plans],
    }
    return Result(data, render)


def render(console: Console, data: dict[str, Any]) -> None:
    steps = files = wholes = 0
    for variant in data["variants"]:
        if any(variant[key] for key in ("steps", "files", "pinned", "whole", "stays_because")):
            _render_variant(console, variant)
        steps += len(variant["steps"])
        files += len(variant["files"])
        wholes += variant["whole"]
    verb = "would free" if data["dry_run"] else "freed"
    parts = [counted(steps, "step")]
    parts += [counted(wholes, "whole variant")] if wholes else []
    parts += [counted(files, "file")] if files else []
    total = format_size(data["total_bytes"])
    line(console, f"{verb} {format_size(data['freed_bytes'])} of {total}: {', '.join(parts)}", "bold")
    if data["above_max_size"]:
        line(
            console,
            f"still {format_size(data['above_max_size'])} above --max-size: the rest is kept or pinned",
            "yellow",
        )
    if data["dry_run"] and (steps or files or wholes):
        line(console, "Nothing was removed. Add --yes to do it.")


def _conditions(
    place: Place, older_than: str | None, keep_last: int | None, max_size: str | None, variants: bool
) -> Conditions:
    if place.gen_batch is not None:
        raise ConfigError(f"{place.path} is one generation batch; a step goes as a whole: give the path of the step.")
    if variants and place.is_part:
        raise ConfigError("--variants removes variants with all their steps: leave the steps out.")
    if keep_last is not None and keep_last < 0:
        raise ConfigError(f"--keep-last is {keep_last}; give 0 or more.")
    return Conditions(
        steps=place.steps,
        older_than_s=None if older_than is None else parse_age(older_than),
        keep_last=keep_last,
        max_size=None if max_size is None else parse_size(max_size, "--max-size"),
        whole_variants=variants,
    )


def _carry_out(plans: list[VariantPlan]) -> dict[str, Stayed]:
    with progress() as bar:
        task = bar.add_task("removing", total=sum(len(plan.steps) for plan in plans))
        return {plan.path: carry_out(plan, lambda: bar.advance(task)) for plan in plans}


def _above(plans: list[VariantPlan], conditions: Conditions | None) -> int:
    if conditions is None or conditions.max_size is None:
        return 0
    left = sum(step.bytes for plan in plans for step in plan.held) - sum(s.bytes for plan in plans for s in plan.steps)
    return max(left - conditions.max_size, 0)


def _plain(plan: VariantPlan, stayed: Stayed) -> dict[str, Any]:
    return {
        "path": plan.path,
        "whole": plan.whole and not stayed.reasons,
        "stays_because": stayed.reasons,
        "steps": [_plain_step(step) for step in plan.steps if step not in stayed.steps],
        "pinned": [_plain_step(step) for step in [*plan.pinned, *stayed.steps]],
        "files": [{"path": plan.storage.where(file.folder, file.name), "bytes": file.bytes} for file in plan.files],
        "in_use": (plan.whole or bool(plan.steps)) and time.time() - plan.recorded < _IN_USE_S,
    }


def _plain_step(step: RecordedStep) -> dict[str, Any]:
    return {"step": step.step, "entries": len(step.keys), "bytes": step.bytes, "recorded_at": stamp(step.recorded)}


def _render_variant(console: Console, variant: dict[str, Any]) -> None:
    line(console, variant["path"] + (": the whole variant" if variant["whole"] else ""), "bold")
    if variant["steps"]:
        rows = [
            (step["step"], step["entries"], format_size(step["bytes"]), moment(step["recorded_at"]))
            for step in variant["steps"]
        ]
        table(console, ("step", "entries", "size", "recorded"), rows)
    for file in variant["files"]:
        line(console, f"{file['path']} ({format_size(file['bytes'])})")
    if variant["pinned"]:
        steps = ", ".join(str(step["step"]) for step in variant["pinned"])
        line(console, f"pinned, so it stays: {steps}", "yellow")
    for reason in variant["stays_because"]:
        line(console, f"the variant stays: {reason}", "yellow")
    if variant["in_use"]:
        line(console, "recorded into within the last ten minutes: a training may be using it", "yellow")
    console.print()
