"""Arguments that several commands share, so that they are called and explained the same everywhere."""

from __future__ import annotations

import argparse
import textwrap

_WIDTH = 78
PATH_HELP = "a dump_dir, a run folder, a variant, or a step or file in it; local or a URL (s3://…)"


def describe(parser: argparse.ArgumentParser, text: str, examples: str) -> None:
    """What a command does, and examples of it."""
    parser.description = textwrap.fill(text, _WIDTH)
    parser.epilog = f"examples:\n{examples}"


def add_path(parser: argparse.ArgumentParser, name: str = "path", help: str = PATH_HELP) -> None:
    parser.add_argument(name, metavar=name.upper(), help=help)


def add_steps(parser: argparse.ArgumentParser, help: str = "only these training steps, e.g. 5 or 1,3-10") -> None:
    parser.add_argument("--steps", metavar="STEPS", help=help)


def add_tokenizer(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--tokenizer", metavar="DIR", help="a tokenizer folder (default: the recorded one, or the model's)"
    )
