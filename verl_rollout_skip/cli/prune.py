"""``rollout-skip prune``: what of a recording can go, and, with ``--yes``, its removal."""

from __future__ import annotations

import argparse
import time
from typing import Any

from rich.console import Console

from verl_rollout_skip.cli.arguments import add_path, add_steps, describe
from verl_rollout_skip.cli.commands import Result
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


def add_arguments(parser: argparse.ArgumentParser) -> None:
    describe(
        parser,
        "Remove recorded steps. Without --yes it only shows what would go and how much that frees. A step goes if "
        "every condition that is given allows it, and it goes with all its generation batches. Pinned steps stay.",
        "  rollout-skip prune /data/dumps/RUN/VARIANT --keep-last 5\n"
        "  rollout-skip prune /data/dumps --older-than 30d --keep-last 1 --yes\n"
        "  rollout-skip prune /data/dumps --max-size 500GB\n"
        "  rollout-skip prune /data/dumps/RUN --variants --older-than 90d\n"
        "  rollout-skip prune /data/dumps --leftovers --set-aside --yes",
    )
    add_path(parser)
    add_steps(parser)
    parser.add_argument("--older-than", metavar="AGE", help="steps recorded longer ago than this, e.g. 30d or 12h")
    parser.add_argument("--keep-last", type=int, metavar="N", help="keep the last N steps of each variant")
    parser.add_argument(
        "--max-size", metavar="SIZE", help="the oldest steps, until all entries together fit, e.g. 500GB"
    )
    parser.add_argument(
        "--variants",
        action="store_true",
        help="whole variants instead of steps, with manifest and tokenizer; the conditions then count variants",
    )
    parser.add_argument(
        "--leftovers",
        action="store_true",
        help="what crashed writers left: if their process on this machine is gone, or after a day",
    )
    parser.add_argument("--set-aside", action="store_true", help="entries that were set aside as *.corrupt")
    parser.add_argument("--yes", action="store_true", help="do it")


def run(parsed: argparse.Namespace) -> Result:
    place = find_place(parsed.path, parsed.steps)
    conditions = _conditions(parsed, place)
    place.check_chosen()
    plans = [look_at(variant.path, variant.run_path, variant.storage) for variant in place.variants]
    if conditions is not None:
        choose_steps(plans, conditions)
    for plan in plans:
        if parsed.leftovers:
            plan.files += find_leftovers(plan.storage, parse_age(_LEFTOVER_AGE))
        if parsed.set_aside:
            plan.files += find_set_aside(plan.storage)
    total = sum(step.bytes for plan in plans for step in plan.held)
    stayed = _carry_out(plans, parsed.json) if parsed.yes else {}
    data = {
        "dry_run": not parsed.yes,
        "total_bytes": total,
        "freed_bytes": sum(plan.bytes for plan in plans) - sum(s.bytes for one in stayed.values() for s in one.steps),
        "above_max_size": _above(plans, conditions),
        "variants": [_plain(plan, stayed.get(plan.path, Stayed())) for plan in plans],
    }
    return Result(data)


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


def _conditions(parsed: argparse.Namespace, place: Place) -> Conditions | None:
    """What was asked for; None if only leftovers and what was set aside are to go."""
    asked = (parsed.older_than, parsed.keep_last, parsed.max_size)
    if not (place.is_part or parsed.variants or any(value is not None for value in asked)):
        if parsed.leftovers or parsed.set_aside:
            return None
        raise ConfigError(
            "Say what may go: --steps, --older-than, --keep-last, --max-size, --variants, --leftovers or --set-aside. "
            "Nothing is removed without --yes."
        )
    if place.gen_batch is not None:
        raise ConfigError(f"{place.path} is one generation batch; a step goes as a whole: give the path of the step.")
    if parsed.variants and place.is_part:
        raise ConfigError("--variants removes variants with all their steps: leave the steps out.")
    if parsed.keep_last is not None and parsed.keep_last < 0:
        raise ConfigError(f"--keep-last is {parsed.keep_last}; give 0 or more.")
    return Conditions(
        steps=place.steps,
        older_than_s=None if parsed.older_than is None else parse_age(parsed.older_than),
        keep_last=parsed.keep_last,
        max_size=None if parsed.max_size is None else parse_size(parsed.max_size, "--max-size"),
        whole_variants=parsed.variants,
    )


def _carry_out(plans: list[VariantPlan], quiet: bool) -> dict[str, Stayed]:
    with progress(quiet) as bar:
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
