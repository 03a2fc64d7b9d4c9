"""The fenced code blocks of the documentation, and all messages in the source of the package."""

from __future__ import annotations

import ast
import re
from dataclasses import dataclass
from pathlib import Path
from textwrap import dedent

ROOT = Path(__file__).resolve().parents[1]
DOCUMENTS = [
    *(ROOT / name for name in ("README.md", "CONTRIBUTING.md", "SECURITY.md")),
    *sorted((ROOT / "docs").glob("*.md")),
    *sorted((ROOT / "recipes").rglob("README.md")),
]
_FENCE = re.compile(r"^(?P<indent> *)```(?P<language>\S*)\n(?P<text>.*?)^(?P=indent)```$", re.DOTALL | re.MULTILINE)


@dataclass(frozen=True)
class Block:
    """A fenced block. ``before`` is the language of the block directly before it, if any."""

    document: str
    line: int
    language: str
    text: str
    before: str | None

    def __str__(self) -> str:
        return f"{self.document}:{self.line}"

    @property
    def commands(self) -> list[str]:
        """The commands of a shell session: continuation lines joined, without output and comments."""
        lines = self.text.replace("\\\n", " ").splitlines()
        if self.language == "console":
            lines = [line.removeprefix("$ ") for line in lines if line.startswith("$ ")]
        return [line for line in (re.sub(r"\s+# .*", "", line).strip() for line in lines) if line]


def blocks_of(document: Path) -> list[Block]:
    text = document.read_text(encoding="utf-8")
    found: list[Block] = []
    end = -1
    for match in _FENCE.finditer(text):
        line = text.count("\n", 0, match.start()) + 1
        before = found[-1].language if found and not text[end : match.start()].strip() else None
        name = str(document.relative_to(ROOT))
        found.append(Block(name, line, match["language"], dedent(match["text"]), before))
        end = match.end()
    return found


def messages() -> list[str]:
    """Every string in the package's source, with ``…`` in place of values."""
    found: list[str] = []
    for path in sorted((ROOT / "verl_rollout_skip").rglob("*.py")):
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if isinstance(node, ast.JoinedStr):
                found.append("".join(_piece(value) for value in node.values))
            elif isinstance(node, ast.Constant) and isinstance(node.value, str):
                found.append(re.sub(r"%[sdr]", "…", node.value))
    return found


def _piece(value: ast.expr) -> str:
    if isinstance(value, ast.Constant):
        return str(value.value)
    inner = value.value if isinstance(value, ast.FormattedValue) else None
    return "rollout_skip" if isinstance(inner, ast.Name) and inner.id == "BLOCK" else "…"
