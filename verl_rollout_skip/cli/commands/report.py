"""``rollout-skip report``: writes a recording as one HTML file."""

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
from verl_rollout_skip.cli.output import print_line, print_no_text, progress
from verl_rollout_skip.cli.selection import Selection, Variant, select
from verl_rollout_skip.store.sizes import format_size

if TYPE_CHECKING:
    from verl_rollout_skip.report import Sampling


@dataclass(frozen=True)
class Page:
    """What a page shows: the selected steps of one variant, the sampling, and the tokenizer."""

    selection: Selection
    variant: Variant
    sampling: Sampling
    tokenizer: str | None


def page_options(groups: str) -> Callable[[Any], Any]:
    """The options that ``report`` and ``view`` share, passed to the command as a ``Page``."""
    options = (
        steps_option(),
        number_option("--groups", f"groups to show per step (default: {groups})"),
        number_option("--responses", "responses to show per group (default: 2)", 2),
        number_option("--tokens", "tokens to show per text (default: 2000)", 2000),
        number_option("--seed", "seed that selects the groups (default: 0)", 0),
        tokenizer_option(),
    )

    def decorate(function: Any) -> Any:
        @wraps(function)
        def call(path: str, steps: str | None, tokenizer: str | None, **given: Any) -> Any:
            from verl_rollout_skip.report import Sampling

            sampling = Sampling(*(given.pop(name) for name in ("seed", "groups", "responses", "tokens")))
            selection = select(path, steps)
            return function(Page(selection, selection.single_variant(), sampling, tokenizer), **given)

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
@page_options(groups="as many as fit")
def command(page: Page, output: str) -> Result:
    """Write one HTML file with trends over the steps, a table, and groups with their best and worst response, token by
    token.

    The file is self-contained, so you can share it. Long recordings are sampled, and the page says what it omits.

    The exit code is 1 if a rollout step cannot be read. The page then says which one and why.
    """
    from verl_rollout_skip.report import build_report, write_report

    keys = page.selection.required_keys(page.variant)
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
    shown = f"{data['entries']:,} rollout steps, {data['shown_responses']:,} of {data['rows']:,} responses with text"
    print_line(console, f"{data['output']}: {shown}, {format_size(data['bytes'])}")
    if data["no_tokenizer"]:
        print_no_text(console, data["no_tokenizer"])
    for text in data["left_out"]:
        print_line(console, text)
    for text in [*data["problems"], *(bad["error"] for bad in data["broken"])]:
        print_line(console, text, "red")
