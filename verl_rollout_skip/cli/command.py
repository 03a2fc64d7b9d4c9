"""The command line: arguments, exit codes, and errors in one line. 0: fine, 1: something is damaged, 2: an error."""

from __future__ import annotations

import argparse
import json
import logging
import os
import sys
from collections.abc import Sequence
from typing import Any

from verl_rollout_skip._version import __version__

_EXAMPLES = """\
examples:
  rollout-skip ls /data/dumps                                  all runs below a dump_dir
  rollout-skip ls /data/dumps/RUN                              what differs between the variants of a run
  rollout-skip show /data/dumps/RUN/VARIANT --step 3 --row 5   one trajectory
  rollout-skip verify s3://bucket/dumps --json                 check everything, for a script
"""


def main(arguments: Sequence[str] | None = None) -> int:
    """Run one command; returns the exit code."""
    parsed = make_parser().parse_args(arguments)
    logging.basicConfig(level=logging.ERROR, format="rollout-skip: %(message)s")
    try:
        code = _run(parsed)
        sys.stdout.flush()
        return code
    except KeyboardInterrupt:
        return 130
    except BrokenPipeError:
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())  # or the interpreter complains when it exits
        return 0
    except Exception as error:  # whatever a file system or a library raises is one line for the user
        text = " ".join(str(error).split()) or type(error).__name__
        print(f"rollout-skip: error: {text}", file=sys.stderr)
        return 2


def make_parser() -> argparse.ArgumentParser:
    """The parser of the whole command line."""
    parser = argparse.ArgumentParser(
        prog="rollout-skip",
        description="Look at recorded rollouts and check them.",
        epilog=_EXAMPLES,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--version", action="version", version=f"%(prog)s {__version__}")
    commands = parser.add_subparsers(dest="command", required=True, metavar="COMMAND")
    place = argparse.ArgumentParser(add_help=False)
    place.add_argument("path", metavar="PATH", help="a dump_dir, a run folder or a variant; local or a URL (s3://…)")
    place.add_argument("--json", action="store_true", help="print JSON, for scripts")
    text = "list runs, variants and what differs between them, and steps"
    commands.add_parser("ls", parents=[place], help=text, description=text.capitalize() + ".")
    text = "show the record of a rollout step and samples of it"
    show = commands.add_parser("show", parents=[place], help=text, description=text.capitalize() + ".")
    show.add_argument("--step", type=int, metavar="N", help="the training step (default: the first that is recorded)")
    show.add_argument("--gen-batch", type=int, default=0, metavar="N", help="the generate call within it (default: 0)")
    show.add_argument("--row", type=int, metavar="N", help="one row instead of the first three")
    show.add_argument(
        "--tokenizer", metavar="DIR", help="a tokenizer folder (default: the recorded one, or the model's)"
    )
    text = "check every digest, record and manifest; the exit code is 1 if anything is wrong"
    commands.add_parser("verify", parents=[place], help=text, description=text.capitalize() + ".")
    return parser


def _run(parsed: argparse.Namespace) -> int:
    # Imported late: `--help` and a misspelt option need neither torch nor pyarrow.
    from verl_rollout_skip.cli import ls, show, verify
    from verl_rollout_skip.cli.folders import find_variants
    from verl_rollout_skip.cli.text import make_console

    variants = find_variants(parsed.path)
    console = make_console()
    code, result, render = 0, None, None
    if parsed.command == "ls":
        result, render = ls.collect(variants), ls.render
    elif parsed.command == "show":
        result = show.collect(variants, parsed.step, parsed.gen_batch, parsed.row, parsed.tokenizer)
        render = show.render
    else:
        result, render = verify.collect(variants, quiet=parsed.json), verify.render
        code = 0 if result["ok"] else 1
    if parsed.json:
        print(json.dumps(result, indent=2, ensure_ascii=False, default=_plain))
    else:
        render(console, result)
    return code


def _plain(value: Any) -> Any:
    return value.tolist() if hasattr(value, "tolist") else repr(value)
