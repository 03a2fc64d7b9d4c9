"""Text from dumps on a terminal: nothing in it is taken for markup or for a command to the terminal."""

from __future__ import annotations

from typing import Any

from rich.console import Console
from rich.text import Text

_PIPE_WIDTH = 160


def make_console() -> Console:
    """Standard output; wide where nobody looks at the width."""
    console = Console(highlight=False, markup=False, emoji=False)
    return console if console.is_terminal else Console(highlight=False, markup=False, emoji=False, width=_PIPE_WIDTH)


def safe(value: Any, style: str = "") -> Text:
    """Recorded text with everything that is no printable character spelt out."""
    letters = (letter if letter.isprintable() or letter == "\n" else repr(letter)[1:-1] for letter in str(value))
    return Text("".join(letters), style=style)


def number(value: float | None, digits: int = 2) -> str:
    return "–" if value is None else f"{value:.{digits}f}"
