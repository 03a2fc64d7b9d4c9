"""A command of ``rollout-skip``: the arguments that several share, its help, and how its result is printed.

Click parses, completes and lays out the help; here is what it leaves open: arguments with help, examples, ``--json``.
"""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import click

if TYPE_CHECKING:
    from rich.console import Console

PATH = click.Path(readable=False)  # checks nothing: it may be a URL, and errors are our own
PATH_HELP = "a dump_dir, a run folder, a variant, or a step or file in it; local or a URL (s3://…)"
_JSON = f"{__name__}.json"


@dataclass(frozen=True)
class Result:
    """What a command found: JSON as ``--json`` prints it, a function that prints it for people, and the exit code."""

    data: dict[str, Any]
    render: Callable[[Console, dict[str, Any]], None]
    exit_code: int = 0


class Formatter(click.HelpFormatter):
    """Help with bold headings and colored names, which Click leaves out where there is no terminal."""

    def write_usage(self, prog: str, args: str = "", prefix: str | None = None) -> None:
        super().write_usage(prog, args, click.style("Usage: ", bold=True) if prefix is None else prefix)

    def write_heading(self, heading: str) -> None:
        self.write(f"{'':>{self.current_indent}}{click.style(f'{heading}:', bold=True)}\n")

    def write_dl(self, rows: Any, *args: Any, **options: Any) -> None:
        super().write_dl([(click.style(name, fg="cyan"), text) for name, text in rows], *args, **options)

    def write_lines(self, heading: str, text: str) -> None:
        """A section whose lines stay as they are."""
        with self.section(heading):
            self.write("".join(f"{'':>{self.current_indent}}{line}\n" for line in text.splitlines()))


class Context(click.Context):
    formatter_class = Formatter


class Argument(click.Argument):
    """An argument with help; Click itself has that from 8.5 on."""

    def __init__(self, *args: Any, help: str, **attributes: Any) -> None:
        super().__init__(*args, **attributes)
        self.help = help


class Helpful(click.Command):
    """What the program and its commands have in common: help in color, which a reader may stop reading early."""

    context_class = Context

    def make_context(self, *args: Any, **options: Any) -> click.Context:
        try:
            return super().make_context(*args, **options)
        except BrokenPipeError:
            _discard_output()
            raise click.exceptions.Exit(0) from None


class Command(Helpful):
    """A command whose function returns a ``Result``. That is printed, and its exit code is what ``invoke`` returns."""

    def __init__(self, *args: Any, examples: str, **attributes: Any) -> None:
        super().__init__(*args, **attributes)
        self.examples = examples
        self.params.append(click.Option(["--json"], is_flag=True, help="print JSON, for scripts"))

    def format_help(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        assert isinstance(formatter, Formatter)
        self.format_usage(ctx, formatter)
        self.format_help_text(ctx, formatter)
        with formatter.section("Arguments"):
            formatter.write_dl([(one.metavar, one.help) for one in self.params if isinstance(one, Argument)])
        self.format_options(ctx, formatter)
        formatter.write_lines("Examples", self.examples)

    def invoke(self, ctx: click.Context) -> int:
        ctx.meta[_JSON] = ctx.params.pop("json")
        result: Result = super().invoke(ctx)
        _print(result)
        return result.exit_code


def wants_json() -> bool:
    """Whether the command that runs was given ``--json``."""
    return bool(click.get_current_context().meta[_JSON])


def path_argument(name: str = "path", help: str = PATH_HELP) -> Callable[[Any], Any]:
    return click.argument(name, cls=Argument, type=PATH, metavar=name.upper(), help=help)


def steps_option() -> Callable[[Any], Any]:
    return click.option("--steps", metavar="STEPS", help="only these training steps, e.g. 5 or 1,3-10")


def tokenizer_option(default: str = "the recorded one, or the model's") -> Callable[[Any], Any]:
    return click.option("--tokenizer", metavar="DIR", type=PATH, help=f"a tokenizer folder (default: {default})")


def number_option(name: str, help: str, default: int | None = None) -> Callable[[Any], Any]:
    return click.option(name, type=int, metavar="N", default=default, help=help)


def _print(result: Result) -> None:
    """A reader that stops early has seen enough, and the exit code stays the same."""
    from verl_rollout_skip.cli.text import make_console

    try:
        if wants_json():
            # Infinities and NaN become words: every JSON reader takes those.
            data = json.loads(json.dumps(result.data, default=_plain), parse_constant=str)
            print(json.dumps(data, indent=2, ensure_ascii=False))
        else:
            result.render(make_console(), result.data)
        sys.stdout.flush()
    except BrokenPipeError:
        _discard_output()


def _discard_output() -> None:
    """Without this the interpreter complains about the closed pipe when it exits."""
    os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())


def _plain(value: Any) -> Any:
    return value.tolist() if hasattr(value, "tolist") else repr(value)
