"""``rollout-skip stats``: statistics per step, from a few columns of each entry."""

from __future__ import annotations

from dataclasses import asdict
from typing import Any

import click
from rich.console import Console

from verl_rollout_skip.cli.command import Command, Result, path_argument, steps_option
from verl_rollout_skip.cli.output import MISSING, format_number, format_percent, print_line, print_table, progress
from verl_rollout_skip.cli.selection import Selection, Variant, select
from verl_rollout_skip.errors import StoreError
from verl_rollout_skip.store.sizes import format_size
from verl_rollout_skip.tools.stats import (
    LimitSource,
    PassSource,
    StepStatistics,
    configured_limit,
    step_columns,
    step_statistics,
    weighted_mean,
)

_PASSED = {
    PassSource.ACC: "pass: acc, as returned by the reward function, is 1",
    PassSource.ACC_POSITIVE: "pass: acc, as returned by the reward function, is above 0",
    PassSource.SCORE_POSITIVE: "pass: the score is above 0, because no acc was recorded",
    PassSource.NONE: "pass: unknown, because neither acc nor scores were recorded",
}
_LIMIT = {
    LimitSource.CONFIG: "max: responses at the configured limit of {limit} tokens",
    LimitSource.PADDING: "max: responses at the padded width of {limit} tokens, because the manifest has no limit",
    LimitSource.NONE: "max: the length limit is unknown",
}


@click.command(
    cls=Command,
    examples="rollout-skip stats /data/dumps/RUN/VARIANT\n"
    "rollout-skip stats /data/dumps/RUN/VARIANT --steps 1-10\n"
    "rollout-skip stats /data/dumps --json",
)
@path_argument()
@steps_option()
def command(path: str, steps: str | None) -> Result:
    """Show statistics per step: scores, pass rate, lengths, groups, time and size.

    The lines below the table explain its columns, including what counts as a pass.
    """
    selection = select(path, steps)
    selection.check_not_empty()
    variants = [_variant(selection, variant) for variant in selection.variants]
    damaged = any(variant["unreadable"] for variant in variants)
    return Result({"variants": variants}, render, 1 if damaged else 0)


def render(console: Console, data: dict[str, Any]) -> None:
    for variant in data["variants"]:
        print_line(console, f"{variant['run']}/{variant['variant']}", "bold")
        headers = ("step", "rows", "tokens", "score", "std", "pass", "mean", "p95", "max", "same", "time", "size")
        several = any(step["gen_batch"] for step in variant["steps"])
        rows = [_row(step, several) for step in variant["steps"]]
        if len(rows) > 1:
            rows.append(_total_row(variant["total"]))
        print_table(console, headers, rows)
        for note in variant["notes"]:
            print_line(console, note)
        for bad in variant["unreadable"]:
            print_line(console, bad["error"], "red")
        console.print()


def _variant(selection: Selection, variant: Variant) -> dict[str, Any]:
    limit = configured_limit(variant.manifest)
    steps: list[StepStatistics] = []
    unreadable = []
    with progress() as bar:
        for key in bar.track(selection.keys(variant), description=variant.name):
            try:
                steps.append(step_statistics(step_columns(variant.entries.entry(key)), limit))
            except (StoreError, OSError) as error:
                unreadable.append({"step": key.step, "gen_batch": key.gen_batch, "error": str(error)})
    return {
        "run": variant.run,
        "variant": variant.name,
        "path": variant.path,
        "steps": [_to_json(step) for step in steps],
        "total": _total(steps),
        "notes": _notes(steps),
        "unreadable": unreadable,
    }


def _to_json(step: StepStatistics) -> dict[str, Any]:
    fields = asdict(step)
    key = fields.pop("key")
    return {**key, **fields}


def _total(steps: list[StepStatistics]) -> dict[str, Any]:
    """Totals over all steps. Means are over trajectories; the mean score is over those with a finite score."""

    def total(values: list[Any]) -> Any:
        return None if not values or None in values else sum(values)

    scores = [(step.score.mean, step.rows - step.score.nonfinite) for step in steps if step.score is not None]

    return {
        "entries": len(steps),
        "rows": sum(step.rows for step in steps),
        "prompt_tokens": total([step.prompt_tokens for step in steps]),
        "response_tokens": total([step.response_tokens for step in steps]),
        "score_mean": weighted_mean(scores),
        "pass_rate": weighted_mean((step.pass_rate, step.rows) for step in steps),
        "length_mean": weighted_mean((None if step.length is None else step.length.mean, step.rows) for step in steps),
        "at_limit": weighted_mean((None if step.length is None else step.length.at_limit, step.rows) for step in steps),
        "groups": total([step.groups and step.groups.compared for step in steps]),
        "zero_variance": total([step.groups and step.groups.zero_variance for step in steps]),
        "generate_s": total([step.generate_s for step in steps]),
        "bytes": sum(step.bytes for step in steps),
    }


def _notes(steps: list[StepStatistics]) -> list[str]:
    """Explanations of the columns, with more than one line if they differ between steps."""
    notes = [_PASSED[source] for source in dict.fromkeys(step.pass_source for step in steps)]
    if any(step.key.gen_batch for step in steps):
        notes.insert(0, "step: training step / generation batch")
    notes.append("mean, p95: response length in tokens")
    lengths = [step.length for step in steps if step.length is not None]
    notes += dict.fromkeys(_LIMIT[length.limit_source].format(limit=length.limit) for length in lengths)
    if any(step.groups is not None for step in steps):
        notes.append("same: prompts whose responses all have the same score, among those with several responses")
    nonfinite = sum(step.score.nonfinite for step in steps if step.score is not None)
    if nonfinite:
        notes.append(f"{nonfinite} trajectories with a score that is not finite are excluded from the scores")
    return notes


def _row(step: dict[str, Any], several: bool) -> list[Any]:
    score, length, groups = step["score"] or {}, step["length"] or {}, step["groups"] or {}
    return [
        f"{step['step']}/{step['gen_batch']}" if several else step["step"],
        step["rows"],
        _tokens(step),
        format_number(score.get("mean"), 3),
        format_number(score.get("std"), 3),
        format_percent(step["pass_rate"]),
        format_number(length.get("mean"), 0),
        format_number(length.get("p95"), 0),
        format_percent(length.get("at_limit")),
        _percent_of(groups.get("zero_variance"), groups.get("compared")),
        _time(step["generate_s"]),
        format_size(step["bytes"]),
    ]


def _total_row(total: dict[str, Any]) -> list[Any]:
    return [
        "all",
        total["rows"],
        _tokens(total),
        format_number(total["score_mean"], 3),
        "",
        format_percent(total["pass_rate"]),
        format_number(total["length_mean"], 0),
        "",
        format_percent(total["at_limit"]),
        _percent_of(total["zero_variance"], total["groups"]),
        _time(total["generate_s"]),
        format_size(total["bytes"]),
    ]


def _tokens(counts: dict[str, Any]) -> str:
    if counts["response_tokens"] is None:
        return MISSING
    tokens = (counts["prompt_tokens"] or 0) + counts["response_tokens"]
    return str(tokens) if tokens < 100_000 else f"{tokens / 1e6:.2f}M"


def _time(value: float | None) -> str:
    return MISSING if value is None else f"{value:.1f}s" if value < 100 else f"{value:.0f}s"


def _percent_of(part: int | None, whole: int | None) -> str:
    return MISSING if part is None or not whole else format_percent(part / whole)
