"""``rollout-skip stats``: each recorded step in numbers, from a few columns of it."""

from __future__ import annotations

from dataclasses import asdict
from typing import Any

import click
from rich.console import Console

from verl_rollout_skip.analysis import (
    LimitSource,
    PassSource,
    StepStatistics,
    configured_limit,
    step_columns,
    step_statistics,
    weighted_mean,
)
from verl_rollout_skip.cli.command import Command, Result, path_argument, steps_option
from verl_rollout_skip.cli.folders import Place, Variant, find_place
from verl_rollout_skip.cli.text import NOTHING, line, number, percent, progress, table
from verl_rollout_skip.errors import StoreError
from verl_rollout_skip.sizes import format_size

_PASSED = {
    PassSource.ACC: "pass: the reward function returned acc, 1 is a pass",
    PassSource.ACC_POSITIVE: "pass: the reward function returned acc, above 0 is a pass",
    PassSource.SCORE_POSITIVE: "pass: no acc was recorded, so a score above 0 is taken for a pass",
    PassSource.NONE: "pass: neither acc nor scores were recorded",
}
_LIMIT = {
    LimitSource.CONFIG: "max: responses as long as the configured {limit} tokens",
    LimitSource.PADDING: "max: responses as long as the padded width of {limit} tokens; the manifest has no limit",
    LimitSource.NONE: "max: the longest possible response is not known",
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
    """Each recorded step in numbers: scores, pass rate, lengths, groups, time and size.

    Below the table it says what counts as a pass and what as the limit of a response.
    """
    place = find_place(path, steps)
    place.check_chosen()
    variants = [_variant(place, variant) for variant in place.variants]
    damaged = any(variant["unreadable"] for variant in variants)
    return Result({"variants": variants}, render, 1 if damaged else 0)


def render(console: Console, data: dict[str, Any]) -> None:
    for variant in data["variants"]:
        line(console, f"{variant['run']}/{variant['variant']}", "bold")
        headers = ("step", "rows", "tokens", "score", "std", "pass", "mean", "p95", "max", "same", "time", "size")
        several = any(step["gen_batch"] for step in variant["steps"])
        rows = [_row(step, several) for step in variant["steps"]]
        if len(rows) > 1:
            rows.append(_total_row(variant["total"]))
        table(console, headers, rows)
        for note in variant["notes"]:
            line(console, note)
        for bad in variant["unreadable"]:
            line(console, bad["error"], "red")
        console.print()


def _variant(place: Place, variant: Variant) -> dict[str, Any]:
    limit = configured_limit(variant.manifest)
    steps: list[StepStatistics] = []
    unreadable = []
    with progress() as bar:
        for key in bar.track(place.keys(variant), description=variant.name):
            try:
                steps.append(step_statistics(step_columns(variant.entries.entry(key)), limit))
            except (StoreError, OSError) as error:
                unreadable.append({"step": key.step, "gen_batch": key.gen_batch, "error": str(error)})
    return {
        "run": variant.run,
        "variant": variant.name,
        "path": variant.path,
        "steps": [_plain(step) for step in steps],
        "total": _total(steps),
        "notes": _notes(steps),
        "unreadable": unreadable,
    }


def _plain(step: StepStatistics) -> dict[str, Any]:
    fields = asdict(step)
    key = fields.pop("key")
    return {**key, **fields}


def _total(steps: list[StepStatistics]) -> dict[str, Any]:
    """Over all steps; means count each trajectory once, that of the scores each one whose score is finite."""

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
    """What the columns rest on; more than one line if it differs from step to step."""
    notes = [_PASSED[source] for source in dict.fromkeys(step.pass_source for step in steps)]
    if any(step.key.gen_batch for step in steps):
        notes.insert(0, "step: with the number of the generate call within it")
    notes.append("mean, p95: of the response lengths in tokens")
    lengths = [step.length for step in steps if step.length is not None]
    notes += dict.fromkeys(_LIMIT[length.limit_source].format(limit=length.limit) for length in lengths)
    if any(step.groups is not None for step in steps):
        notes.append("same: prompts whose responses all have the same score, of those with more than one response")
    nonfinite = sum(step.score.nonfinite for step in steps if step.score is not None)
    if nonfinite:
        notes.append(f"{nonfinite} trajectories have a score that is no finite number; they are left out of the scores")
    return notes


def _row(step: dict[str, Any], several: bool) -> list[Any]:
    score, length, groups = step["score"] or {}, step["length"] or {}, step["groups"] or {}
    return [
        f"{step['step']}/{step['gen_batch']}" if several else step["step"],
        step["rows"],
        _tokens(step),
        number(score.get("mean"), 3),
        number(score.get("std"), 3),
        percent(step["pass_rate"]),
        number(length.get("mean"), 0),
        number(length.get("p95"), 0),
        percent(length.get("at_limit")),
        _share(groups.get("zero_variance"), groups.get("compared")),
        _time(step["generate_s"]),
        format_size(step["bytes"]),
    ]


def _total_row(total: dict[str, Any]) -> list[Any]:
    return [
        "all",
        total["rows"],
        _tokens(total),
        number(total["score_mean"], 3),
        "",
        percent(total["pass_rate"]),
        number(total["length_mean"], 0),
        "",
        percent(total["at_limit"]),
        _share(total["zero_variance"], total["groups"]),
        _time(total["generate_s"]),
        format_size(total["bytes"]),
    ]


def _tokens(counts: dict[str, Any]) -> str:
    if counts["response_tokens"] is None:
        return NOTHING
    tokens = (counts["prompt_tokens"] or 0) + counts["response_tokens"]
    return str(tokens) if tokens < 100_000 else f"{tokens / 1e6:.2f}M"


def _time(value: float | None) -> str:
    return NOTHING if value is None else f"{value:.1f}s" if value < 100 else f"{value:.0f}s"


def _share(part: int | None, whole: int | None) -> str:
    return NOTHING if part is None or not whole else percent(part / whole)
