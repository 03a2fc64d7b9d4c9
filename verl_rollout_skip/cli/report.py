"""``rollout-skip report``: recorded rollouts as one HTML file to look at, to search in and to pass on."""

from __future__ import annotations

import argparse
from typing import Any

from rich.console import Console

from verl_rollout_skip.cli.arguments import add_path, add_steps, add_tokenizer, describe
from verl_rollout_skip.cli.commands import Result
from verl_rollout_skip.cli.folders import find_place
from verl_rollout_skip.cli.text import line, progress
from verl_rollout_skip.sizes import format_size


def add_arguments(parser: argparse.ArgumentParser) -> None:
    describe(
        parser,
        "Write one HTML file with trends over the steps, a table, and groups of\n"
        "responses with their best and worst, token by token. The file loads nothing and\n"
        "can be passed on. Long recordings are sampled; the page says what it left out.\n"
        "The exit code is 1 if a rollout step cannot be read; the page then shows which\n"
        "and why.",
        "  rollout-skip report /data/dumps/RUN/VARIANT -o report.html\n"
        "  rollout-skip report /data/dumps/RUN/VARIANT --groups 64 --responses 8",
    )
    add_path(parser)
    parser.add_argument("-o", "--output", metavar="FILE", default="report.html", help="default: report.html")
    add_steps(parser)
    add_sampling(parser, groups="what fits")
    add_tokenizer(parser)


def add_sampling(parser: argparse.ArgumentParser, groups: str) -> None:
    """How much is shown: the same for the report and the live view."""
    parser.add_argument("--groups", type=int, metavar="N", help=f"groups of a step to show (default: {groups})")
    parser.add_argument("--responses", type=int, default=2, metavar="N", help="responses of a group (default: 2)")
    parser.add_argument("--tokens", type=int, default=2000, metavar="N", help="tokens of a text (default: 2000)")
    parser.add_argument("--seed", type=int, default=0, metavar="N", help="chooses the groups (default: 0)")


def run(parsed: argparse.Namespace) -> Result:
    from verl_rollout_skip.report import Sampling, build_report, write_report

    sampling = Sampling(parsed.seed, parsed.groups, parsed.responses, parsed.tokens)
    place = find_place(parsed.path, parsed.steps)
    variant = place.only_variant()
    keys = place.chosen_keys(variant)
    with progress(parsed.json) as bar:
        report = build_report(
            variant.path,
            sampling=sampling,
            keys=keys,
            tokenizer=parsed.tokenizer,
            progress=lambda found: bar.track(found, description=variant.name),
        )
    size = write_report(report, parsed.output)
    broken = [{"step": key.step, "gen_batch": key.gen_batch, "error": error} for key, error in report.broken]
    data = {
        "output": parsed.output,
        "bytes": size,
        "entries": len(report.entries),
        **vars(report.counted),
        "no_tokenizer": report.head["no_tokenizer"],
        "left_out": report.left_out,
        "problems": report.head["problems"],
        "broken": broken,
    }
    return Result(data, 1 if broken else 0)


def render(console: Console, data: dict[str, Any]) -> None:
    said = f"{data['entries']:,} rollout steps, {data['shown_responses']:,} of {data['rows']:,} responses with text"
    line(console, f"{data['output']}: {said}, {format_size(data['bytes'])}")
    if data["no_tokenizer"]:
        line(console, f"Token ids instead of text: {data['no_tokenizer']} Give one with --tokenizer DIR.")
    for text in data["left_out"]:
        line(console, text)
    for text in [*data["problems"], *(bad["error"] for bad in data["broken"])]:
        line(console, text, "red")
