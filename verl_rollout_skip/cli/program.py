"""The program ``rollout-skip``: list of commands, exit codes, and errors as one line."""

from __future__ import annotations

import io
import logging
import os
import sys
from collections.abc import Sequence
from importlib import import_module

import click
from click.shell_completion import shell_complete

from verl_rollout_skip._version import __version__
from verl_rollout_skip.cli.command import BaseCommand, Formatter

NAME = "rollout-skip"
COMPLETE = "_ROLLOUT_SKIP_COMPLETE"
EXIT_CODES = {
    0: "success",
    1: "the command ran and found damage, or, with diff and audit, a difference",
    2: "the command failed; one line on standard error says why and what to do",
    130: "interrupted with Ctrl-C",
}
# Each command is the function ``command`` in the module commands/NAME.py, or in the module that _MODULES names.
COMMANDS = {
    "ls": "list runs, variants and steps, and how variants differ",
    "show": "show the record and some samples of a rollout step",
    "stats": "show scores, lengths, pass rate and groups per step",
    "report": "write trends, groups and responses as one HTML file",
    "view": "show the report in the browser while a training records",
    "mismatch": "compare the log-probs of trainer and rollout engine, token by token",
    "diff": "compare two runs, variants or steps: settings, prompts, responses",
    "audit": "compare what two trainings computed: metrics, tensors, weights",
    "verify": "check every digest, record and manifest",
    "resume": "continue a training from its manifest",
    "export": "write rollouts as text: JSONL for verl's viewer, Parquet, a dataset",
    "copy": "copy recordings between folders and object stores",
    "import": "import dumps of verl's own rollout skip",
    "prune": "delete steps by age, count or size; shows what it would delete first",
    "pin": "protect steps or a variant from prune",
    "unpin": "remove pins",
    "pins": "list pinned steps and variants",
    "completion": "print a completion script for bash, zsh or fish",
}
_MODULES = {"import": "import_dumps", "pins": "list_pins"}
_EXAMPLES = """\
rollout-skip ls /data/dumps                      all runs in a dump_dir
rollout-skip stats /data/dumps/RUN/VARIANT       numbers for each step
rollout-skip show /data/dumps/RUN/VARIANT --step 2 --row 5
                                                 one trajectory
rollout-skip verify /data/dumps --json           check everything, as JSON"""


class Program(BaseCommand, click.Group):
    """Lists the commands without importing them; only the one that is run or completed is loaded."""

    def list_commands(self, ctx: click.Context) -> list[str]:
        return list(self.commands)

    def resolve_command(
        self, ctx: click.Context, args: list[str]
    ) -> tuple[str | None, click.Command | None, list[str]]:
        name, listed, rest = super().resolve_command(ctx, args)
        return name, None if name is None or listed is None else load_command(name), rest

    def format_epilog(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        assert isinstance(formatter, Formatter)
        formatter.write_lines("Examples", _EXAMPLES)
        formatter.write_lines("Exit codes", "\n".join(f"{code:<4} {meaning}" for code, meaning in EXIT_CODES.items()))


program = Program(
    NAME,
    commands=[click.Command(name, short_help=help) for name, help in COMMANDS.items()],
    help="Inspect, check and manage recorded rollouts.",
    context_settings={"help_option_names": ["-h", "--help"]},
    no_args_is_help=False,
)
click.version_option(__version__, prog_name=NAME, message="%(prog)s %(version)s")(program)


def main(arguments: Sequence[str] | None = None) -> int:
    """Run one command and return the exit code."""
    given = sys.argv[1:] if arguments is None else list(arguments)
    logging.basicConfig(level=logging.ERROR, format="rollout-skip: %(message)s")
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(errors="replace")  # do not fail on an ASCII-only terminal
    # program.main() would treat a broken connection as a closed pipe and a truncated file as Ctrl-C.
    try:
        instruction = os.environ.get(COMPLETE)
        if instruction:
            return shell_complete(program, {}, NAME, COMPLETE, instruction)
        with program.make_context(NAME, given, color=False if os.environ.get("NO_COLOR") else None) as context:
            return int(program.invoke(context))
    except click.exceptions.Exit as done:
        return done.exit_code
    except KeyboardInterrupt:
        print("rollout-skip: interrupted", file=sys.stderr)
        return 130
    except Exception as error:  # file systems and libraries raise anything; users get one line
        print(f"rollout-skip: error: {describe(error)}", file=sys.stderr)
        return 2


def load_command(name: str) -> click.Command:
    """Import a command with its arguments."""
    found = import_module(f"verl_rollout_skip.cli.commands.{_MODULES.get(name, name)}").command
    assert isinstance(found, click.Command)
    return found


def describe(error: BaseException) -> str:
    """Format an error as one line. Control characters are escaped, because errors quote untrusted names and files."""
    from verl_rollout_skip.cli.output import escape_control

    if isinstance(error, OSError) and error.strerror:
        path = error.filename2 or error.filename
        text = f"{error.strerror}: {path}" if path else error.strerror
    elif isinstance(error, click.UsageError):
        program_name = NAME if error.ctx is None else error.ctx.command_path
        text = f"{error.format_message()} See {program_name} --help."
    else:
        text = str(error)
    return escape_control(" ".join(text.split())) or type(error).__name__
