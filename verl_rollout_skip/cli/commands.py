"""The commands of ``rollout-skip``: one line for each, and what each of their modules provides.

A module has ``add_arguments(parser)``, ``run(parsed) -> Result`` and ``render(console, data)``. It is imported when its
command is run, and must not import torch at its top, because ``completion`` and the reference import them all.
"""

from __future__ import annotations

import argparse
from dataclasses import dataclass
from importlib import import_module
from typing import TYPE_CHECKING, Any, Protocol, cast

if TYPE_CHECKING:
    from rich.console import Console


@dataclass(frozen=True)
class Result:
    """What a command found: JSON as ``--json`` prints it, and the exit code."""

    data: dict[str, Any]
    exit_code: int = 0


class CommandModule(Protocol):
    """What the module of a command provides."""

    def add_arguments(self, parser: argparse.ArgumentParser) -> None:
        """Description, arguments and examples."""

    def run(self, parsed: argparse.Namespace) -> Result:
        """Do it; print nothing to standard output."""

    def render(self, console: Console, data: dict[str, Any]) -> None:
        """Print the data of the result for people."""


@dataclass(frozen=True)
class Command:
    """A command: its name, the module behind it, and one line of help."""

    name: str
    module: str
    help: str

    def load(self) -> CommandModule:
        return cast(CommandModule, import_module(f"verl_rollout_skip.cli.{self.module}"))


COMMANDS = (
    Command("ls", "ls", "list runs, variants and what differs between them, and steps"),
    Command("show", "show", "show the record of a rollout step and samples of it"),
    Command("stats", "stats", "scores, lengths, pass rate and groups of each step"),
    Command("report", "report", "trends, groups and responses as one HTML file"),
    Command("view", "view", "the same in the browser, while a training records"),
    Command("diff", "diff", "compare two runs, variants or steps: settings, prompts, responses"),
    Command("verify", "verify", "check every digest, record and manifest"),
    Command("resume", "resume", "go on with a training from its manifest"),
    Command("export", "export", "write rollouts as text: JSONL for verl's viewer, Parquet, a dataset"),
    Command("copy", "copy", "copy recordings between folders and object stores"),
    Command("import", "import_dumps", "bring in dumps of verl's own rollout skip"),
    Command("prune", "prune", "remove steps by age, number or size; shows first what would go"),
    Command("pin", "pin", "keep steps or a variant from being pruned"),
    Command("unpin", "unpin", "take pins away"),
    Command("pins", "list_pins", "list what is pinned"),
    Command("completion", "completion", "a script for the Tab key of bash, zsh or fish"),
)
