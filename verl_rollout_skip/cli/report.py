"""``rollout-skip report``: recorded rollouts as one HTML file to look at, to search in and to pass on."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import click
from rich.console import Console

from verl_rollout_skip.cli.command import (
    PATH,
    Command,
    Result,
    number_option,
    path_argument,
    steps_option,
    tokenizer_option,
)
from verl_rollout_skip.cli.folders import find_place
from verl_rollout_skip.cli.text import line, progress
from verl_rollout_skip.sizes import format_size


def sampling_options(groups: str) -> Callable[[Any], Any]:
    """How much is shown: the same for the report and the live view."""
    options = (
        number_option("--groups", f"groups of a step to show (default: {groups})"),
        number_option("--responses", "responses of a group (default: 2)", 2),
        number_option("--tokens", "tokens of a text (default: 2000)", 2000),
        number_option("--seed", "chooses the groups (default: 0)", 0),
    )

    def decorate(function: Any) -> Any:
        for option in reversed(options):
            function = option(function)
        return function

    return decorate


@click.command(
    cls=Command,
    examples="rollout-skip report /data/dumps/RUN/VARIANT -o report.html\n"
    "rollout-skip report /data/dumps/RUN/VARIANT --groups 64 --responses 8",
)
@path_argument()
@click.option("-o", "--output", metavar="FILE", type=PATH, default="report.html", help="default: report.html")
@steps_option()
@sampling_options(groups="what fits")
@tokenizer_option()
def command(
    path: str,
    output: str,
    steps: str | None,
    groups: int | None,
    responses: int,
    tokens: int,
    seed: int,
    tokenizer: str | None,
) -> Result:
    """Write one HTML file with trends over the steps, a table, and groups of responses with their best and worst, token
    by token.

    The file loads nothing and can be passed on. Long recordings are sampled; the page says what it left out.

    The exit code is 1 if a rollout step cannot be read; the page then shows which and why.
    """
    from verl_rollout_skip.report import Sampling, build_report, write_report

    sampling = Sampling(seed, groups, responses, tokens)
    place = find_place(path, steps)
    variant = place.only_variant()
    keys = place.chosen_keys(variant)
    with progress() as bar:
        report = build_report(
            variant.path,
            sampling=sampling,
            keys=keys,
            tokenizer=tokenizer,
            progress=lambda found: bar.track(found, description=variant.name),
        )
    size = write_report(report, output)
    broken = [{"step": key.step, "gen_batch": key.gen_batch, "error": error} for key, error in report.broken]
    data = {
        "output": output,
        "bytes": size,
        "entries": len(report.entries),
        **vars(report.counted),
        "no_tokenizer": report.head["no_tokenizer"],
        "left_out": report.left_out,
        "problems": report.head["problems"],
        "broken": broken,
    }
    return Result(data, render, 1 if broken else 0)


def render(console: Console, data: dict[str, Any]) -> None:
    said = f"{data['entries']:,} rollout steps, {data['shown_responses']:,} of {data['rows']:,} responses with text"
    line(console, f"{data['output']}: {said}, {format_size(data['bytes'])}")
    if data["no_tokenizer"]:
        line(console, f"Token ids instead of text: {data['no_tokenizer']} Give one with --tokenizer DIR.")
    for text in data["left_out"]:
        line(console, text)
    for text in [*data["problems"], *(bad["error"] for bad in data["broken"])]:
        line(console, text, "red")
