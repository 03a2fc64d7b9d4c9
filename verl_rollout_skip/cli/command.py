"""The base of all ``rollout-skip`` commands: shared arguments, help, and how results are printed.

Click does the parsing, completion and help layout. This module adds help for arguments, examples and ``--json``.
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

PATH = click.Path(readable=False)  # not checked by Click, because it may be a URL
PATH_HELP = "a dump_dir, run folder, variant, step folder or file; a local path or a URL (s3://…)"
_JSON = f"{__name__}.json"


@dataclass(frozen=True)
class Result:
    """The result of a command: the data for ``--json``, a function that prints it as text, and the exit code."""

    data: dict[str, Any]
    render: Callable[[Console, dict[str, Any]], None]
    exit_code: int = 0


class Formatter(click.HelpFormatter):
    """Help with bold headings and colored names; Click drops the styling if there is no terminal."""

    def write_usage(self, prog: str, args: str = "", prefix: str | None = None) -> None:
        super().write_usage(prog, args, click.style("Usage: ", bold=True) if prefix is None else prefix)

    def write_heading(self, heading: str) -> None:
        self.write(f"{'':>{self.current_indent}}{click.style(f'{heading}:', bold=True)}\n")

    def write_dl(self, rows: Any, *args: Any, **options: Any) -> None:
        super().write_dl([(click.style(name, fg="cyan"), text) for name, text in rows], *args, **options)

    def write_lines(self, heading: str, text: str) -> None:
        """Write a section without rewrapping its lines."""
        with self.section(heading):
            self.write("".join(f"{'':>{self.current_indent}}{line}\n" for line in text.splitlines()))


class Context(click.Context):
    formatter_class = Formatter


class Argument(click.Argument):
    """An argument with help, which Click supports only from 8.5 on."""

    def __init__(self, *args: Any, help: str, **attributes: Any) -> None:
        super().__init__(*args, **attributes)
        self.help = help


class BaseCommand(click.Command):
    """Base of the program and its commands: colored help, and no error if the reader closes the pipe early."""

    context_class = Context

    def make_context(self, *args: Any, **options: Any) -> click.Context:
        try:
            return super().make_context(*args, **options)
        except BrokenPipeError:
            _discard_output()
            raise click.exceptions.Exit(0) from None


class Command(BaseCommand):
    """A command whose function returns a ``Result``. ``invoke`` prints it and returns its exit code."""

    def __init__(self, *args: Any, examples: str, **attributes: Any) -> None:
        super().__init__(*args, **attributes)
        self.examples = examples
        self.params.append(click.Option(["--json"], is_flag=True, help="print JSON, for scripts"))

    def format_help(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        assert isinstance(formatter, Formatter)
        self.format_usage(ctx, formatter)
        self.format_help_text(ctx, formatter)
        with formatter.section("Arguments"):
            formatter.write_dl([(param.metavar, param.help) for param in self.params if isinstance(param, Argument)])
        self.format_options(ctx, formatter)
        formatter.write_lines("Examples", self.examples)

    def invoke(self, ctx: click.Context) -> int:
        ctx.meta[_JSON] = ctx.params.pop("json")
        result: Result = super().invoke(ctx)
        _print(result)
        return result.exit_code


def wants_json() -> bool:
    """Whether ``--json`` was passed to the current command."""
    return bool(click.get_current_context().meta[_JSON])


def path_argument(name: str = "path", help: str = PATH_HELP) -> Callable[[Any], Any]:
    return click.argument(name, cls=Argument, type=PATH, metavar=name.upper(), help=help)


def steps_option() -> Callable[[Any], Any]:
    return click.option("--steps", metavar="STEPS", help="only these training steps, e.g. 5 or 1,3-10")


def tokenizer_option(default: str = "the recorded tokenizer, or the model's") -> Callable[[Any], Any]:
    return click.option("--tokenizer", metavar="DIR", type=PATH, help=f"tokenizer folder (default: {default})")


def number_option(name: str, help: str, default: int | None = None) -> Callable[[Any], Any]:
    return click.option(name, type=int, metavar="N", default=default, help=help)


def _print(result: Result) -> None:
    """Print a result. A pipe that the reader closes early does not change the exit code."""
    from verl_rollout_skip.cli.output import make_console

    try:
        if wants_json():
            # Infinities and NaN become strings, because JSON cannot represent them.
            data = json.loads(json.dumps(result.data, default=_to_json), parse_constant=str)
            print(json.dumps(data, indent=2, ensure_ascii=False))
        else:
            result.render(make_console(), result.data)
        sys.stdout.flush()
    except BrokenPipeError:
        _discard_output()


def _discard_output() -> None:
    """Redirect stdout to /dev/null, or the interpreter reports the closed pipe at exit."""
    os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())


def _to_json(value: Any) -> Any:
    return value.tolist() if hasattr(value, "tolist") else repr(value)
