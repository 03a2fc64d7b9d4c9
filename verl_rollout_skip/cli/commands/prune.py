"""``rollout-skip prune``: shows which steps, variants and files it would delete and, with ``--yes``, deletes them."""

from __future__ import annotations

import time
from typing import Any

import click
from rich.console import Console

from verl_rollout_skip.cli.command import Command, Result, number_option, path_argument, steps_option
from verl_rollout_skip.cli.output import format_time, pluralize, print_line, print_table, progress
from verl_rollout_skip.cli.selection import Selection, select
from verl_rollout_skip.errors import ConfigError
from verl_rollout_skip.store.sizes import format_size, parse_size
from verl_rollout_skip.tools.prune import (
    Conditions,
    Kept,
    Plan,
    RecordedStep,
    execute,
    inspect_columns,
    inspect_variant,
    make_plans,
    parse_age,
    to_timestamp,
)

_IN_USE_S = 600.0
_LEFTOVER_AGE = "1d"


@click.command(
    cls=Command,
    examples="rollout-skip prune /data/dumps/RUN/VARIANT --keep-last 5\n"
    "rollout-skip prune /data/dumps --older-than 30d --keep-last 1 --yes\n"
    "rollout-skip prune /data/dumps --max-size 500GB\n"
    "rollout-skip prune /data/dumps/RUN --variants --older-than 90d\n"
    "rollout-skip prune /data/dumps/RUN/VARIANT --columns --older-than 7d\n"
    "rollout-skip prune /data/dumps --leftovers --set-aside --yes",
)
@path_argument()
@steps_option()
@click.option("--older-than", metavar="AGE", help="steps that are older than this, e.g. 30d or 12h")
@number_option("--keep-last", "keep the last N steps of each variant")
@click.option("--max-size", metavar="SIZE", help="the oldest steps, until the rest fits in this size, e.g. 500GB")
@click.option(
    "--variants",
    is_flag=True,
    help="whole variants instead of steps, with manifest and tokenizer; conditions then apply to variants",
)
@click.option("--columns", is_flag=True, help="only the training columns of the steps; the rollouts are kept")
@click.option(
    "--leftovers",
    is_flag=True,
    help="files of crashed writers: their process on this machine has ended, or they are a day old",
)
@click.option("--set-aside", is_flag=True, help="unreadable entries that were set aside as *.corrupt")
@click.option("--yes", is_flag=True, help="delete; without it, nothing is deleted")
def command(
    path: str,
    steps: str | None,
    older_than: str | None,
    keep_last: int | None,
    max_size: str | None,
    variants: bool,
    columns: bool,
    leftovers: bool,
    set_aside: bool,
    yes: bool,
) -> Result:
    """Delete recorded steps. Without --yes, only show what would be deleted and how much space that frees.

    A step is deleted, with all its generation batches and training columns, if it meets every condition that you pass.
    Pinned steps are kept.
    """
    selection = select(path, steps)
    conditions = None
    if columns and variants:
        raise ConfigError(
            "--variants deletes variants with their training columns, so it cannot be combined with --columns."
        )
    if selection.is_partial or variants or columns or (older_than, keep_last, max_size) != (None, None, None):
        conditions = _conditions(selection, older_than, keep_last, max_size, variants)
    elif not (leftovers or set_aside):
        raise ConfigError(
            "Choose what to delete with --steps, --older-than, --keep-last, --max-size, --variants, --columns, "
            "--leftovers or --set-aside. Nothing is deleted without --yes."
        )
    selection.check_not_empty()
    of_columns = [item for variant in selection.variants for item in inspect_columns(variant.path, variant.storage)]
    found = of_columns
    if not columns:
        found = [inspect_variant(variant.path, variant.run_path, variant.storage) for variant in selection.variants]
    leftover_age = parse_age(_LEFTOVER_AGE) if leftovers else None
    plans = make_plans(found, conditions, leftovers_older_than_s=leftover_age, set_aside=set_aside)
    if not columns:  # steps take their columns with them, so only other files are left to find
        plans += make_plans(of_columns, None, leftovers_older_than_s=leftover_age, set_aside=set_aside)
    total = sum(variant.bytes for variant in found)
    kept = _execute(plans) if yes else {}
    data = {
        "dry_run": not yes,
        "total_bytes": total,
        "freed_bytes": sum(plan.bytes for plan in plans) - sum(s.bytes for one in kept.values() for s in one.steps),
        "above_max_size": _bytes_above_limit(plans, conditions),
        "variants": [_to_json(plan, kept.get(plan.variant.path, Kept())) for plan in plans],
    }
    return Result(data, render)


def render(console: Console, data: dict[str, Any]) -> None:
    steps = files = wholes = 0
    for variant in data["variants"]:
        if any(variant[key] for key in ("steps", "files", "pinned", "recorded_again", "whole", "stays_because")):
            _render_variant(console, variant)
        steps += len(variant["steps"])
        files += len(variant["files"])
        wholes += variant["whole"]
    verb = "would free" if data["dry_run"] else "freed"
    parts = [pluralize(steps, "step")]
    parts += [pluralize(wholes, "whole variant")] if wholes else []
    parts += [pluralize(files, "file")] if files else []
    total = format_size(data["total_bytes"])
    print_line(console, f"{verb} {format_size(data['freed_bytes'])} of {total}: {', '.join(parts)}", "bold")
    if data["above_max_size"]:
        print_line(
            console,
            f"still {format_size(data['above_max_size'])} above --max-size: everything else is pinned or kept",
            "yellow",
        )
    if data["dry_run"] and (steps or files or wholes):
        print_line(console, "Nothing was deleted. Pass --yes to delete.")


def _conditions(
    selection: Selection, older_than: str | None, keep_last: int | None, max_size: str | None, variants: bool
) -> Conditions:
    if selection.gen_batch is not None:
        raise ConfigError(f"{selection.path} is one generation batch, but only whole steps are deleted. Pass the step.")
    if variants and selection.is_partial:
        raise ConfigError("--variants deletes variants with all their steps, so it cannot be combined with steps.")
    if keep_last is not None and keep_last < 0:
        raise ConfigError(f"--keep-last is {keep_last}, but must be at least 0.")
    return Conditions(
        steps=selection.steps,
        older_than_s=None if older_than is None else parse_age(older_than),
        keep_last=keep_last,
        max_size=None if max_size is None else parse_size(max_size, "--max-size"),
        whole_variants=variants,
    )


def _execute(plans: list[Plan]) -> dict[str, Kept]:
    with progress() as bar:
        task = bar.add_task("deleting", total=sum(len(plan.steps) for plan in plans))
        return {plan.variant.path: execute(plan, lambda: bar.advance(task)) for plan in plans}


def _bytes_above_limit(plans: list[Plan], conditions: Conditions | None) -> int:
    if conditions is None or conditions.max_size is None:
        return 0
    left = sum(plan.variant.bytes for plan in plans) - sum(s.bytes for plan in plans for s in plan.steps)
    return max(left - conditions.max_size, 0)


def _to_json(plan: Plan, kept: Kept) -> dict[str, Any]:
    return {
        "path": plan.variant.path,
        "whole": plan.whole and not kept.reasons,
        "stays_because": kept.reasons,
        "steps": [_step_to_json(step) for step in plan.steps if step not in kept.steps],
        "pinned": [_step_to_json(step) for step in [*plan.pinned, *kept.pinned]],
        "recorded_again": [_step_to_json(step) for step in kept.recorded_again],
        "files": [
            {"path": plan.variant.storage.where(file.folder, file.name), "bytes": file.bytes} for file in plan.files
        ],
        "in_use": (plan.whole or bool(plan.steps)) and time.time() - plan.variant.recorded < _IN_USE_S,
    }


def _step_to_json(step: RecordedStep) -> dict[str, Any]:
    return {
        "step": step.step,
        "entries": len(step.keys),
        "bytes": step.bytes,
        "recorded_at": to_timestamp(step.recorded),
    }


def _render_variant(console: Console, variant: dict[str, Any]) -> None:
    print_line(console, variant["path"] + (": the whole variant" if variant["whole"] else ""), "bold")
    if variant["steps"]:
        rows = [
            (step["step"], step["entries"], format_size(step["bytes"]), format_time(step["recorded_at"]))
            for step in variant["steps"]
        ]
        print_table(console, ("step", "entries", "size", "recorded"), rows)
    for file in variant["files"]:
        print_line(console, f"{file['path']} ({format_size(file['bytes'])})")
    for key, reason in (("pinned", "pinned"), ("recorded_again", "recorded again in the meantime")):
        if variant[key]:
            steps = ", ".join(str(step["step"]) for step in variant[key])
            print_line(console, f"kept because {reason}: {steps}", "yellow")
    for reason in variant["stays_because"]:
        print_line(console, f"the variant is kept: {reason}", "yellow")
    if variant["in_use"]:
        print_line(console, "last written less than ten minutes ago: a training may be using it", "yellow")
    console.print()
