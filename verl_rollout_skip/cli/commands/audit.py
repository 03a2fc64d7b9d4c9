"""``rollout-skip audit``: compares what two trainings computed, step by step."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import click
from rich.console import Console

from verl_rollout_skip.cli.command import PATH, Argument, Command, Result, path_argument
from verl_rollout_skip.cli.output import MISSING, print_line, print_table
from verl_rollout_skip.cli.selection import select
from verl_rollout_skip.errors import LedgerError
from verl_rollout_skip.replay.ledger.compare import Tolerance
from verl_rollout_skip.runs.paths import LEDGERS
from verl_rollout_skip.store.sizes import format_size
from verl_rollout_skip.store.storage import open_storage
from verl_rollout_skip.tools.audit import Audit, Figure, Rules, Verdict, audit, explain, summarize
from verl_rollout_skip.tools.differing_rows import describe_rows
from verl_rollout_skip.tools.ledgers import Side, VariantLedgers

if TYPE_CHECKING:
    from collections.abc import Iterator

_HELP = "a variant, or one of its trainings: VARIANT/ledgers/TRAINING; the beginning of its name is enough"
_STYLES = {Verdict.DIFFERENT.value: "red", Verdict.NOT_COMPARED.value: "yellow"}


@dataclass(frozen=True)
class _Named:
    """What a path refers to: the ledgers of a variant, or one training of them."""

    ledgers: VariantLedgers
    training: str | None

    def side(self) -> Side:
        return self.ledgers.recording() if self.training is None else self.ledgers.training(self.training)


class _ToleranceType(click.ParamType):
    """``PATTERN=RTOL`` or ``PATTERN=RTOL,ATOL``."""

    name = "tolerance"

    def convert(self, value: Any, param: Any, ctx: Any) -> tuple[str, tuple[float, float | None]]:
        pattern, _, numbers = str(value).rpartition("=")
        try:
            limits = [float(number) for number in numbers.split(",")]
        except ValueError:
            limits = []
        if not pattern or len(limits) not in (1, 2) or not all(_is_limit(limit) for limit in limits):
            self.fail(f"{value!r} is not PATTERN=RTOL or PATTERN=RTOL,ATOL, for example 'actor/*=1e-5'.", param, ctx)
        return pattern, (limits[0], limits[1] if len(limits) == 2 else None)


def _limit_option(name: str, help: str) -> Any:
    def check(ctx: Any, param: Any, value: float) -> float:
        if not _is_limit(value):
            raise click.BadParameter(f"{value} is not a finite number of 0 or more.", ctx, param)
        return value

    return click.option(name, type=float, default=0.0, metavar="X", callback=check, help=help)


@click.command(
    cls=Command,
    examples="rollout-skip audit /data/dumps/RUN/VARIANT\n"
    "rollout-skip audit /data/dumps/RUN/VARIANT /data/dumps/RUN/OTHER --all-steps\n"
    "rollout-skip audit /data/dumps/RUN/VARIANT --tolerance 'actor/*=1e-3'\n"
    "rollout-skip audit /data/dumps/RUN/VARIANT -o audit.html",
)
@path_argument("a", _HELP)
@click.argument(
    "b",
    cls=Argument,
    type=PATH,
    required=False,
    metavar="[B]",
    help="what to compare it with (default: compare each training in A with the recording that it loaded)",
)
@_limit_option("--rtol", "accept relative differences up to X (default: 0, exact)")
@_limit_option("--atol", "accept absolute differences up to X (default: 0, exact)")
@click.option(
    "--tolerance",
    "overrides",
    type=_ToleranceType(),
    multiple=True,
    metavar="NAME=RTOL[,ATOL]",
    help="other limits for figures with this name or pattern; can be repeated",
)
@click.option("--ignore", multiple=True, metavar="NAME", help="leave out figures with this name or pattern")
@click.option("--all", "show_all", is_flag=True, help="list all figures, not only those that differ")
@click.option("--all-steps", is_flag=True, help="also compare steps that cannot be equal (off-policy)")
@click.option("-o", "--output", metavar="FILE", type=PATH, help="also write both curves of each figure as HTML")
def command(
    a: str,
    b: str | None,
    rtol: float,
    atol: float,
    overrides: tuple[tuple[str, tuple[float, float | None]], ...],
    ignore: tuple[str, ...],
    show_all: bool,
    all_steps: bool,
    output: str | None,
) -> Result:
    """Compare what two trainings computed: every metric, the tensors that the updates received, and the weights.

    Reads the ledgers that trainings write beside the rollouts. The first difference in the order of the data flow
    points at its cause. Steps that only one of the trainings has are listed, but not counted as a difference.

    The exit code is 0 if all compared figures are the same or within the tolerance, and 1 otherwise. If there is
    nothing to compare, it is 2.
    """
    limits = {
        pattern: (own_rtol, atol if own_atol is None else own_atol) for pattern, (own_rtol, own_atol) in overrides
    }
    rules = Rules(Tolerance(rtol, atol, limits), ignore, all_steps)
    audits = [audit(*pair, rules) for pair in _pairs(a, b)]
    if all(found.verdict is Verdict.NOT_COMPARED for found in audits):
        reasons = dict.fromkeys(line for found in audits for line in explain(found))
        raise LedgerError(f"There is nothing to compare. {'; '.join(reasons)}")
    same = all(found.verdict is not Verdict.DIFFERENT for found in audits)
    data = {
        "same": same,
        "exact": rules.tolerance.is_exact,
        "audits": [_to_json(found, show_all) for found in audits],
        "output": output,
        "bytes": None,
    }
    if output is not None:
        from verl_rollout_skip.report.audit_page import write_audit

        data["bytes"] = write_audit(audits, output)
    return Result(data, render, 0 if same else 1)


def render(console: Console, data: dict[str, Any]) -> None:
    for number, found in enumerate(data["audits"]):
        if number:
            console.print()
        print_line(console, f"a: {found['a']}")
        print_line(console, f"b: {found['b']}")
        print_line(console, found["summary"], _STYLES.get(found["verdict"], "green"))
        for line in [*found["notes"], *found["rows"]]:
            print_line(console, f"  {line}")
        if found["figures"]:
            headers = ("stage", "figure", "first step", "differ", "max abs", "max rel")
            rows = [_row(figure) for figure in found["figures"]]
            print_table(console, headers, rows, left=("stage", "figure"), shorten=("figure",))
    if data["output"] is not None:
        print_line(console, f"{data['output']}: {format_size(data['bytes'])}")


def _pairs(a: str, b: str | None) -> Iterator[tuple[Side, Side]]:
    named = _find(a)
    if b is not None:
        yield named.side(), _find(b).side()
    elif named.training is None:
        yield from named.ledgers.later_trainings()
    else:
        recorded = named.ledgers.recording_for(named.training)
        if recorded is None:
            raise LedgerError(
                f"{named.ledgers.full_name(named.training)} loaded no rollouts, so there is no recording to compare it "
                "with. Name a second training."
            )
        yield recorded, named.side()


def _find(path: str) -> _Named:
    folder, _, name = path.rstrip("/").rpartition("/")
    if folder.rpartition("/")[2] == LEDGERS:
        variant = folder.rpartition("/")[0] or ("/" if folder.startswith("/") else ".")
        return _Named(VariantLedgers(open_storage(variant)), name.removesuffix(".jsonl"))
    selection = select(path)
    if selection.is_partial:
        raise LedgerError(f"{path} is a rollout step, but audit compares trainings. Pass a variant, or {_HELP}.")
    return _Named(VariantLedgers(selection.single_variant().storage), None)


def _is_limit(value: float) -> bool:
    return math.isfinite(value) and value >= 0


def _to_json(found: Audit, show_all: bool) -> dict[str, Any]:
    chosen = found.figures if show_all else found.differing
    return {
        "a": found.a.describe(),
        "b": found.b.describe(),
        "verdict": found.verdict.value,
        "summary": summarize(found),
        "notes": explain(found),
        "rows": describe_rows(found),
        "steps": found.steps,
        "only_in_a": found.only_a,
        "only_in_b": found.only_b,
        "uncompared": [vars(item) for item in found.uncompared],
        "first": None if found.first is None else {**vars(found.first), "stage": found.first.stage.value},
        "figures": [_figure_to_json(figure) for figure in chosen],
        "layout": found.layout,
        "settings": found.settings,
        "versions": found.versions,
    }


def _figure_to_json(figure: Figure) -> dict[str, Any]:
    fields = {key: value for key, value in vars(figure).items() if key != "name"}
    return {
        "stage": figure.name.stage.value,
        "kind": figure.name.kind.value,
        "name": figure.name.text,
        **fields,
    }


def _row(figure: dict[str, Any]) -> list[str]:
    first = MISSING if figure["first_step"] is None else str(figure["first_step"])
    differ = f"{figure['differing']} of {figure['compared']}" if figure["differing"] else "same"
    sizes = [MISSING if figure[key] is None else f"{figure[key]:.2g}" for key in ("max_absolute", "max_relative")]
    return [figure["stage"], figure["name"], first, differ, *sizes]
