"""``python -m verl_rollout_skip.cli.reference docs/cli.md``: writes the reference of all commands into the document.

It stands between two marks, made from the program's own arguments; what is around it is written by hand. ``--check``
changes nothing and fails if it is not current.
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

from verl_rollout_skip.cli.command import EXIT_CODES, make_parser
from verl_rollout_skip.cli.commands import COMMANDS
from verl_rollout_skip.cli.completion import subparsers_of

BEGIN, END = "<!-- reference: begin -->", "<!-- reference: end -->"


def reference() -> str:
    """The reference in Markdown."""
    parsers = subparsers_of(make_parser())
    codes = [f"| {code} | {meaning} |" for code, meaning in EXIT_CODES.items()]
    sections = ["### Exit codes", "", "| code | meaning |", "|---|---|", *codes, ""]
    for command in COMMANDS:
        sections += _section(command.name, parsers[command.name])
    return "\n".join(sections).rstrip() + "\n"


def replace_reference(text: str) -> str:
    """A document with the current reference between its marks."""
    before, begin, rest = text.partition(BEGIN)
    _, end, after = rest.partition(END)
    if not begin or not end:
        raise ValueError(f"The document has no {BEGIN} … {END} to write the reference between.")
    return f"{before}{BEGIN}\n\n{reference()}\n{END}{after}"


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m verl_rollout_skip.cli.reference", description=__doc__)
    parser.add_argument("file", type=Path)
    parser.add_argument("--check", action="store_true")
    parsed = parser.parse_args(arguments)
    text = parsed.file.read_text(encoding="utf-8")
    current = replace_reference(text)
    if current == text:
        return 0
    if parsed.check:
        print(f"{parsed.file} is not current: run python -m verl_rollout_skip.cli.reference {parsed.file}")
        return 1
    parsed.file.write_text(current, encoding="utf-8")
    return 0


def _section(name: str, parser: argparse.ArgumentParser) -> list[str]:
    taken = [_taken(action) for action in parser._actions if not action.option_strings]
    usage = " ".join(["rollout-skip", name, *taken, "[options]"])
    description = " ".join((parser.description or "").split())
    examples = [line[2:] for line in (parser.epilog or "").splitlines()[1:]]
    rows = [f"| {_names(action)} | {_help(action)} |" for action in parser._actions if action.dest != "help"]
    table = ["| argument | |", "|---|---|", *rows]
    shown = ["```text", *examples, "```", ""] if examples else []
    return [f"### {name}", "", description, "", "```text", usage, "```", "", *table, "", *shown]


def _taken(action: argparse.Action) -> str:
    name = str(action.metavar or action.dest)
    return f"[{name} …]" if action.nargs == "*" else name


def _names(action: argparse.Action) -> str:
    if not action.option_strings:
        return f"`{action.metavar or action.dest}`"
    taken = "" if action.nargs == 0 else f" {action.metavar or action.dest.upper()}"
    return ", ".join(f"`{name}{taken}`" for name in action.option_strings)


def _help(action: argparse.Action) -> str:
    values = {"choices": ", ".join(map(str, action.choices or ())), "default": action.default}
    return ((action.help or "") % values).replace("|", "\\|")


if __name__ == "__main__":
    sys.exit(main())
