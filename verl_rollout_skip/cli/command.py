"""The command line: arguments, exit codes, and errors in one line."""

from __future__ import annotations

import argparse
import io
import json
import logging
import os
import sys
from collections.abc import Sequence
from typing import Any, NoReturn

from verl_rollout_skip._version import __version__
from verl_rollout_skip.cli.commands import COMMANDS, Result

EXIT_CODES = {
    0: "all is well",
    1: "it worked and found something damaged, or, with diff, something different",
    2: "it did not work; one line on standard error says why and what to do",
    130: "interrupted with Ctrl-C",
}
_WIDTH = 80
_EXAMPLES = """\
examples:
  rollout-skip ls /data/dumps                      all runs below a dump_dir
  rollout-skip stats /data/dumps/RUN/VARIANT       its steps in numbers
  rollout-skip show /data/dumps/RUN/VARIANT --step 2 --row 5
                                                   one trajectory
  rollout-skip verify /data/dumps --json           check all, for a script
"""


def main(arguments: Sequence[str] | None = None) -> int:
    """Run one command; returns the exit code."""
    given = sys.argv[1:] if arguments is None else list(arguments)
    logging.basicConfig(level=logging.ERROR, format="rollout-skip: %(message)s")
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(errors="replace")  # a terminal that knows only ASCII is no reason to fail
    try:
        parsed = make_parser(given[:1]).parse_args(given)
        result = parsed.module.run(parsed)
        _show(parsed, result)
        return int(result.exit_code)
    except KeyboardInterrupt:
        print("rollout-skip: interrupted", file=sys.stderr)
        return 130
    except Exception as error:  # whatever a file system or a library raises is one line for the user
        print(f"rollout-skip: error: {describe(error)}", file=sys.stderr)
        return 2


def make_parser(commands: Sequence[str] | None = None) -> argparse.ArgumentParser:
    """The parser of the command line with the arguments of these commands, or of all."""
    codes = "\n".join(f"  {code:<4} {meaning}" for code, meaning in EXIT_CODES.items())
    parser = _Parser(
        prog="rollout-skip",
        description="Look at recorded rollouts, check them and look after them.",
        epilog=f"{_EXAMPLES}\nexit codes:\n{codes}",
        formatter_class=_formatter,
    )
    parser.add_argument("--version", action="version", version=f"%(prog)s {__version__}")
    subparsers = parser.add_subparsers(dest="command", required=True, metavar="COMMAND", title="commands")
    for command in COMMANDS:
        one = subparsers.add_parser(command.name, help=command.help, formatter_class=_formatter, allow_abbrev=False)
        if commands is None or command.name in commands:
            module = command.load()
            module.add_arguments(one)
            one.add_argument("--json", action="store_true", help="print JSON, for scripts")
            one.set_defaults(module=module)
    return parser


def describe(error: BaseException) -> str:
    """An error in one line."""
    if isinstance(error, OSError) and error.strerror:
        place = error.filename2 or error.filename
        text = f"{error.strerror}: {place}" if place else error.strerror
    else:
        text = str(error)
    return _one_line(text) or type(error).__name__


def _one_line(text: str) -> str:
    """Nothing in it commands a terminal: errors quote names and files of others."""
    from verl_rollout_skip.cli.text import clean

    return clean(" ".join(text.split()))


class _Parser(argparse.ArgumentParser):
    """Says what is wrong with the arguments in one line, as it is with every other error."""

    def error(self, message: str) -> NoReturn:
        self.exit(2, f"rollout-skip: error: {_one_line(message)}; see {self.prog} --help\n")


def _formatter(prog: str) -> argparse.HelpFormatter:
    return argparse.RawDescriptionHelpFormatter(prog, width=_WIDTH, max_help_position=26)


def _show(parsed: argparse.Namespace, result: Result) -> None:
    """Print what a command found. A reader that stops early has seen enough, and the exit code stays the same."""
    from verl_rollout_skip.cli.text import make_console

    try:
        if parsed.json:
            # Infinities and NaN become words: every JSON reader takes those.
            data = json.loads(json.dumps(result.data, default=_plain), parse_constant=str)
            print(json.dumps(data, indent=2, ensure_ascii=False))
        else:
            parsed.module.render(make_console(), result.data)
        sys.stdout.flush()
    except BrokenPipeError:
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())  # or the interpreter complains when it exits


def _plain(value: Any) -> Any:
    return value.tolist() if hasattr(value, "tolist") else repr(value)
