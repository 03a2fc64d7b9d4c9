"""Assembles the page: one HTML file with its script, its style, the data, and a Content-Security-Policy.

The policy allows only this script and style, by hash, and no network access. The data is in a JSON block that no text
can close. The script inserts it as text, and Trusted Types prevent anything else.
"""

from __future__ import annotations

import base64
import hashlib
import os
from dataclasses import dataclass
from functools import cache
from importlib import resources
from pathlib import Path

from verl_rollout_skip.errors import StoreError
from verl_rollout_skip.report.collect import Report, script_json
from verl_rollout_skip.store.new_files import new_file

_MARKS = ("<!--policy-->", "<!--style-->", "<!--data-->", "<!--script-->")


@dataclass(frozen=True)
class Template:
    """The parts of a page in ``static/``: its HTML, and its scripts in order."""

    html: str
    scripts: tuple[str, ...]


_REPORT = Template(
    "page.html",
    ("dom", "theme", "model", "charts", "trends", "table", "tokens", "groups", "mismatch", "filters", "live", "main"),
)


def render_page(report: Report) -> bytes:
    """A report as one self-contained HTML file."""
    head = script_json({**report.head, "live": False, "left_out": report.left_out})
    return assemble(_REPORT, f'{{"head":{head},"entries":[{",".join(report.entries)}]}}')


def render_live_page(head: str) -> bytes:
    """The page of the live view, which fetches the rollout steps from its own server."""
    return assemble(_REPORT, f'{{"head":{head},"entries":[]}}', live=True)


def write_report(report: Report, path: str | os.PathLike[str]) -> int:
    """Write the page to a file atomically and return its size in bytes."""
    return write_page(render_page(report), path, "report")


def write_page(page: bytes, path: str | os.PathLike[str], name: str) -> int:
    """Write a page to a file atomically and return its size in bytes. ``name`` is what errors call it."""
    try:
        with new_file(Path(path)) as file:
            file.write_bytes(page)
    except OSError as error:
        raise StoreError(f"The {name} was not written to {path}: {error.strerror or error}.") from error
    return len(page)


def policy(live: bool, template: Template = _REPORT) -> str:
    """The Content-Security-Policy, which allows only the page's own script and style."""
    rules = {
        "default-src": "'none'",
        "script-src": f"'sha256-{_hash(_script(template.scripts))}'",
        "style-src": f"'sha256-{_hash(_asset('page.css'))}'",
        "img-src": "data:",  # the empty icon, which keeps browsers from requesting one
        "connect-src": "'self'" if live else "'none'",
        "base-uri": "'none'",
        "form-action": "'none'",
        "require-trusted-types-for": "'script'",
        "trusted-types": "'none'",
    }
    return "; ".join(f"{name} {value}" for name, value in rules.items())


def assemble(template: Template, data: str, live: bool = False) -> bytes:
    """A page with its data, which is the text of a JSON value from ``script_json``."""
    rest = _asset(template.html)
    page = []
    contents = (policy(live, template), _asset("page.css"), data, _script(template.scripts))
    for mark, content in zip(_MARKS, contents, strict=True):
        before, rest = rest.split(mark)
        page += [before, content]
    return "".join([*page, rest]).encode()


@cache
def _script(names: tuple[str, ...]) -> str:
    parts = "\n".join(_asset(f"{name}.js") for name in names)
    return f'"use strict";\n(() => {{\n{parts}}})();\n'


@cache
def _asset(name: str) -> str:
    return (resources.files(__package__) / "static" / name).read_text(encoding="utf-8")


def _hash(text: str) -> str:
    return base64.b64encode(hashlib.sha256(text.encode()).digest()).decode()
