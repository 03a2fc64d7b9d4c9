"""Runs the Python examples in README.md and docs/ and checks their output.

The Python blocks of a document run in order, in one namespace and an empty folder. A ``text`` block directly after a
Python block is its expected output; hexadecimal names may differ.
"""

from __future__ import annotations

import re
from pathlib import Path

import pytest

import verl_rollout_skip

ROOT = Path(__file__).resolve().parents[2]
DOCUMENTS = [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))]
BLOCK = re.compile(r"^```python\n(?P<code>.*?)^```\n(?:\n```text\n(?P<output>.*?)^```$)?", re.DOTALL | re.MULTILINE)


@pytest.mark.parametrize("document", DOCUMENTS, ids=lambda path: path.name)
def test_examples_print_the_documented_output(document, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("datasets.config.HF_DATASETS_CACHE", tmp_path / "cache")
    text = document.read_text(encoding="utf-8")
    namespace: dict = {"__name__": "example"}
    for block in BLOCK.finditer(text):
        line = text.count("\n", 0, block.start("code"))
        capsys.readouterr()
        exec(compile("\n" * line + block["code"], document, "exec"), namespace)
        if block["output"] is not None:
            assert _comparable(capsys.readouterr().out) == _comparable(block["output"]), f"{document.name}:{line}"


def test_every_public_name_is_in_the_api_reference() -> None:
    reference = (ROOT / "docs" / "api.rst").read_text(encoding="utf-8")
    public = set(verl_rollout_skip.__all__) - {"__version__"}
    assert set(re.findall(r"autoclass:: verl_rollout_skip\.(\w+)$", reference, re.MULTILINE)) == public


def _comparable(output: str) -> str:
    lines = [re.sub(r"\b[0-9a-f]{6,}\b", "<hex>", line.rstrip()) for line in output.splitlines()]
    return "\n".join(lines).strip()
