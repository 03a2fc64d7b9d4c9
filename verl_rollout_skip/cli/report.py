"""``rollout-skip report``: recorded rollouts as one HTML file to look at, to search in and to pass on."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import wraps
from typing import TYPE_CHECKING, Any

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
from verl_rollout_skip.cli.folders import Place, Variant, find_place
from verl_rollout_skip.cli.text import line, progress
from verl_rollout_skip.sizes import format_size

if TYPE_CHECKING:
    from verl_rollout_skip.report import Sampling


@dataclass(frozen=True)
class Page:
    """What a page shows: the chosen steps of one variant, how much of them, and with which tokenizer."""

    place: Place
    variant: Variant
    sampling: Sampling
    tokenizer: str | None


def page_options(groups: str) -> Callable[[Any], Any]:
    """The options that the report and the live view share; the command is called with the ``Page`` they describe."""
    options = (
        steps_option(),
        number_option("--groups", f"groups of a step to show (default: {groups})"),
        number_option("--responses", "responses of a group (default: 2)", 2),
        number_option("--tokens", "tokens of a text (default: 2000)", 2000),
        number_option("--seed", "chooses the groups (default: 0)", 0),
        tokenizer_option(),
    )

    def decorate(function: Any) -> Any:
        @wraps(function)
        def call(path: str, steps: str | None, tokenizer: str | None, **given: Any) -> Any:
            from verl_rollout_skip.report import Sampling

            sampling = Sampling(*(given.pop(name) for name in ("seed", "groups", "responses", "tokens")))
            place = find_place(path, steps)
            return function(Page(place, place.only_variant(), sampling, tokenizer), **given)

        for option in reversed(options):
            call = option(call)
        return call

    return decorate


@click.command(
    cls=Command,
    examples="rollout-skip report /data/dumps/RUN/VARIANT -o report.html\n"
    "rollout-skip report /data/dumps/RUN/VARIANT --groups 64 --responses 8",
)
@path_argument()
@click.option("-o", "--output", metavar="FILE", type=PATH, default="report.html", help="default: report.html")
@page_options(groups="what fits")
def command(page: Page, output: str) -> Result:
    """Write one HTML file with trends over the steps, a table, and groups of responses with their best and worst, token
    by token.

    The file loads nothing and can be passed on. Long recordings are sampled; the page says what it left out.

    The exit code is 1 if a rollout step cannot be read; the page then shows which and why.
    """
    from verl_rollout_skip.report import build_report, write_report

    keys = page.place.chosen_keys(page.variant)
    with progress() as bar:
        report = build_report(
            page.variant.path,
            sampling=page.sampling,
            keys=keys,
            tokenizer=page.tokenizer,
            progress=lambda found: bar.track(found, description=page.variant.name),
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
        line(console, f"Token ids instead of text: {data['no_tokenizer']} Choose one with --tokenizer DIR.")
    for text in data["left_out"]:
        line(console, text)
    for text in [*data["problems"], *(bad["error"] for bad in data["broken"])]:
        line(console, text, "red")
