"""``rollout-skip mismatch``: how far the log-probs of the trainer are from those of the rollout engine."""

from __future__ import annotations

from dataclasses import asdict
from typing import TYPE_CHECKING, Any

import click
from rich.console import Console

from verl_rollout_skip.cli.command import (
    Command,
    Result,
    number_option,
    path_argument,
    steps_option,
    tokenizer_option,
)
from verl_rollout_skip.cli.output import MISSING, format_percent, pluralize, print_line, print_table, progress
from verl_rollout_skip.cli.selection import select
from verl_rollout_skip.errors import ConfigError
from verl_rollout_skip.tools.decoding import TextDecoder, find_decoder

if TYPE_CHECKING:
    from verl_rollout_skip.tools.mismatch import Mismatch, Rule


@click.command(
    cls=Command,
    examples="rollout-skip mismatch /data/dumps/RUN/VARIANT\n"
    "rollout-skip mismatch /data/dumps/RUN/VARIANT --steps 1-10 --worst 20\n"
    "rollout-skip mismatch /data/dumps/RUN/VARIANT --reject seq_mean_k3:0.005",
)
@path_argument()
@steps_option()
@click.option("--training", metavar="NAME", help="the training whose columns to read (default: the oldest)")
@click.option(
    "--truncate",
    multiple=True,
    metavar="LEVEL:THRESHOLD",
    help="what-if: weights as with rollout_is, e.g. token:2 or token:0.5_2; can be repeated",
)
@click.option(
    "--reject",
    multiple=True,
    metavar="LEVEL:THRESHOLD",
    help="what-if: rejection as with rollout_rs, e.g. seq_mean_k3:0.01; can be repeated",
)
@number_option("--worst", "number of tokens to show (default: 10)", 10)
@tokenizer_option()
def command(
    path: str,
    steps: str | None,
    training: str | None,
    truncate: tuple[str, ...],
    reject: tuple[str, ...],
    worst: int,
    tokenizer: str | None,
) -> Result:
    """Compare the log-probs of the trainer with those of the rollout engine, token by token.

    This needs training columns: train, or replay, with rollout_skip.training_columns=log_probs, and rollouts that were
    recorded with their log-probs. The formulas are those of verl's rollout correction. A ratio is the probability of a
    token under the trainer divided by that under the rollout engine.

    The exit code is 1 if columns are damaged. The others are counted.
    """
    from verl_rollout_skip.tools.mismatch import find_training, measure_mismatch

    if worst < 0:
        raise ConfigError(f"--worst is {worst}, but must be at least 0.")
    rules = _rules(truncate, reject)
    selection = select(path, steps)
    variant = selection.single_variant()
    chosen = find_training(variant.path, training)
    with progress() as bar:
        found = measure_mismatch(
            variant.path,
            chosen,
            wanted=selection.includes_step,
            rules=rules,
            worst=worst,
            manifest=variant.manifest,
            progress=lambda keys: bar.track(keys, description=variant.name),
        )
    decoder, no_text = find_decoder(variant.path, variant.manifest, tokenizer)
    data = {"run": variant.run, "variant": variant.name, "path": variant.path}
    return Result({**data, **_to_json(found, rules, decoder, no_text)}, render, 1 if found.problems else 0)


def render(console: Console, data: dict[str, Any]) -> None:
    print_line(console, f"{data['run']}/{data['variant']}, training {data['training']}", "bold")
    several = any(step["update"] for step in data["steps"])
    headers = ("step", "tokens", "k1", "k3", "mean abs", "max abs", "p1", "p99", "<1/2", ">2", "chi2 seq")
    print_table(console, headers, [_step_row(step, several) for step in data["steps"]])
    print_line(console, "k1, k3: KL of rollout and trainer; mean abs, max abs: difference of the log-probs")
    print_line(console, "p1, p99: percentiles of the ratio; <1/2, >2: tokens with such a ratio")
    _render_groups(console, "position", data["positions"])
    if len(data["turns"]) > 1:
        _render_groups(console, "turn", data["turns"])
    _render_tokens(console, data)
    _render_rules(console, data)
    for note in data["notes"]:
        print_line(console, note, "yellow")
    for problem in data["problems"]:
        print_line(console, problem["error"], "red")


def _rules(truncate: tuple[str, ...], reject: tuple[str, ...]) -> list[Rule]:
    from verl_rollout_skip.tools.mismatch import REJECTIONS, TRUNCATIONS, Kind, parse_rule

    given = [parse_rule(Kind.TRUNCATION, text) for text in truncate]
    given += [parse_rule(Kind.REJECTION, text) for text in reject]
    return given or [*TRUNCATIONS, *REJECTIONS]


def _to_json(found: Mismatch, rules: list[Rule], decoder: TextDecoder | None, no_text: str) -> dict[str, Any]:
    def text(tokens: tuple[int, ...]) -> str | None:
        return None if decoder is None else decoder.text(tokens)

    return {
        "training": found.training,
        "steps": [
            {
                "step": step.key.step,
                "update": step.key.gen_batch,
                **({} if step.figures is None else asdict(step.figures)),
            }
            for step in found.steps
        ],
        "positions": [asdict(group) for group in found.positions],
        "turns": [asdict(group) for group in found.turns],
        "tokens": [{**asdict(group), "token": group.first, "text": text((group.first,))} for group in found.tokens],
        "worst": [
            {
                "step": token.key.step,
                "update": token.key.gen_batch,
                "gen_batch": token.place[0],
                "row": token.place[1],
                "position": token.position,
                "token": token.token,
                "training_log_prob": token.old,
                "rollout_log_prob": token.rollout,
                "before": text(token.before),
                "text": None if token.token is None else text((token.token,)),
                "after": text(token.after),
            }
            for token in found.worst
        ],
        "what_if": [
            {
                "setting": rule.kind.value,
                "level": rule.level,
                "threshold": rule.threshold,
                "overrides": rule.settings,
                **found.mean_effect(rule),
            }
            for rule in rules
        ],
        "notes": [*found.notes, *([f"Token ids instead of text: {no_text}"] if decoder is None else [])],
        "problems": [{"step": key.step, "update": key.gen_batch, "error": error} for key, error in found.problems],
    }


def _step_row(step: dict[str, Any], several: bool) -> list[Any]:
    name = f"{step['step']}/{step['update']}" if several else step["step"]
    if "tokens" not in step:
        return [name, 0, *[MISSING] * 9]
    figures = (step["k1"], step["k3"], step["mean_abs"], step["max_abs"])
    percentiles, tails = step["percentiles"], step["tails"]
    return [
        name,
        step["tokens"],
        *map(_small, figures),
        f"{percentiles['p1']:.3f}",
        f"{percentiles['p99']:.3f}",
        _percent(tails["below 1/2"]),
        _percent(tails["above 2"]),
        _small(step["chi2_seq"]),
    ]


def _render_groups(console: Console, name: str, groups: list[dict[str, Any]]) -> None:
    console.print()
    rows = [
        (
            str(group["first"]) if group["first"] == group["last"] else f"{group['first']}-{group['last']}",
            group["tokens"],
            *(_small(group[key]) for key in ("k1", "k3", "mean_abs", "max_abs")),
        )
        for group in groups
    ]
    print_table(console, (name, "tokens", "k1", "k3", "mean abs", "max abs"), rows)


def _render_tokens(console: Console, data: dict[str, Any]) -> None:
    if data["tokens"]:
        console.print()
        rows = [
            (_shown(token["text"], token["token"]), token["tokens"], _small(token["k3"]), _small(token["max_abs"]))
            for token in data["tokens"]
        ]
        print_table(console, ("token", "count", "k3", "max abs"), rows, left=("token",))
    if data["worst"]:
        console.print()
        print_line(console, f"the {pluralize(len(data['worst']), 'token')} with the largest difference", "bold")
    for token in data["worst"]:
        where = f"step {token['step']}, row {token['row']}, token {token['position']}"
        values = f"trainer {token['training_log_prob']:.4f}, rollout {token['rollout_log_prob']:.4f}"
        print_line(console, f"{where}: {values}")
        if token["token"] is not None:
            context = token["before"], _shown(token["text"], token["token"]), token["after"]
            print_line(console, "  " + _in_context(*context))


def _in_context(before: str | None, token: str, after: str | None) -> str:
    return f"{before or ''}⟦{token}⟧{after or ''}".replace("\n", "\\n")


def _render_rules(console: Console, data: dict[str, Any]) -> None:
    console.print()
    print_line(console, "what if: truncation (rollout_is) and rejection (rollout_rs)", "bold")
    rows = [
        (
            rule["setting"],
            rule["level"],
            rule["threshold"],
            _percent(rule["tokens"]),
            _percent(rule["sequences"]),
            _plain(rule["mean_weight"]),
            _plain(rule["max_weight"]),
            _percent(rule["effective"]),
        )
        for rule in data["what_if"]
    ]
    headers = ("setting", "level", "threshold", "tokens", "rows", "mean w", "max w", "effective")
    print_table(console, headers, rows, left=("setting", "level"))
    print_line(console, "tokens, rows: what is truncated or rejected, rows with at least one such token")
    print_line(console, "w: the weights after truncation; effective: effective sample size")


def _shown(text: str | None, token: int) -> str:
    return str(token) if text is None else repr(text)[1:-1] if text.strip() else repr(text)


def _small(value: float) -> str:
    return f"{value:.2g}"


def _plain(value: float | None) -> str:
    return MISSING if value is None else f"{value:.3f}"


def _percent(value: float | None) -> str:
    if value is None or value in (0.0, 1.0) or value >= 0.1:
        return format_percent(value)
    return f"{100 * value:.2g}%"
