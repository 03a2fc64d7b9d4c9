"""The page: no text can leave the data block, and the policy allows exactly one script."""

from __future__ import annotations

import base64
import hashlib
import json
import os
import re
import subprocess
from html.parser import HTMLParser
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from verl_rollout_skip.errors import StoreError
from verl_rollout_skip.report import Report, render_page, write_report
from verl_rollout_skip.report.collect import script_json
from verl_rollout_skip.report.page import policy, render_live_page

HEAD = {"run": "r", "problems": [], "facts": []}


class Parts(HTMLParser):
    """The script and style elements of a page, and all attributes, as an HTML parser finds them."""

    def __init__(self, page: bytes) -> None:
        super().__init__()
        self.scripts: list[tuple[dict[str, str | None], str]] = []
        self.styles: list[str] = []
        self.attributes: list[tuple[str, str, str | None]] = []
        self._open: str | None = None
        self.feed(page.decode())

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.attributes += [(tag, name, value) for name, value in attrs]
        self._open = tag if tag in ("script", "style") else None
        if tag == "script":
            self.scripts.append((dict(attrs), ""))
        elif tag == "style":
            self.styles.append("")

    def handle_endtag(self, tag: str) -> None:
        self._open = None

    def handle_data(self, data: str) -> None:
        if self._open == "script":
            attributes, text = self.scripts[-1]
            self.scripts[-1] = (attributes, text + data)
        elif self._open == "style":
            self.styles[-1] += data


def sha(text: str) -> str:
    return base64.b64encode(hashlib.sha256(text.encode()).digest()).decode()


@given(
    st.recursive(
        st.text() | st.none() | st.integers(), lambda inner: st.lists(inner) | st.dictionaries(st.text(), inner)
    )
)
def test_any_value_round_trips_through_the_data_block(value: object) -> None:
    text = script_json(value)
    assert json.loads(text) == value
    assert not re.search("[<>&\u2028\u2029\x00-\x1f]", text)
    text.encode()


@pytest.mark.parametrize(
    "text",
    [
        "</script><script>x()</script>",
        "<!--<script>",
        "<!--policy-->",
        "<!--data-->",
        "<!--script-->",
        "]]>",
        "\ud800",
        "\0",
    ],
)
def test_data_cannot_add_a_script_to_the_page(text: str) -> None:
    report = Report({**HEAD, "run": text}, [script_json({"step": 1, "broken": text, "groups": []})])
    parts = Parts(render_page(report))
    assert [attributes.get("type") for attributes, _ in parts.scripts] == ["application/json", None]
    data = json.loads(parts.scripts[0][1])
    assert data["head"]["run"] == text
    assert data["entries"][0]["broken"] == text


@pytest.mark.parametrize("live", [False, True], ids=["report", "live"])
def test_the_policy_allows_only_the_script_and_style_of_the_page(live: bool) -> None:
    page = render_live_page(script_json(HEAD)) if live else render_page(Report(HEAD))
    parts = Parts(page)
    [rules] = [value for tag, name, value in parts.attributes if tag == "meta" and name == "content" and "src" in value]
    assert rules == policy(live)
    given = dict(rule.split(" ", 1) for rule in rules.split("; "))
    assert given["default-src"] == "'none'"
    assert given["script-src"] == f"'sha256-{sha(parts.scripts[1][1])}'"
    assert given["style-src"] == f"'sha256-{sha(parts.styles[0])}'"
    assert given["connect-src"] == ("'self'" if live else "'none'")
    assert given["base-uri"] == given["form-action"] == given["trusted-types"] == "'none'"


def test_the_page_has_no_handlers_inline_styles_or_urls() -> None:
    page = render_page(Report(HEAD))
    for tag, name, value in Parts(page).attributes:
        assert not name.startswith("on"), f"{tag} {name}"
        assert name not in ("style", "src"), f"{tag} {name}"
        if name == "href":
            assert value in ("data:,", "#groups")
    text = page.decode()
    assert set(re.findall(r"https?://[^\"' ]+", text)) == {"http://www.w3.org/2000/svg"}, (
        "the name of SVG, not an address"
    )
    assert not re.search(
        r"innerHTML|outerHTML|insertAdjacentHTML|document\.write|eval\(|new Function|setAttribute\(.on", text
    )


def test_a_report_is_written_atomically(tmp_path: Path) -> None:
    target = tmp_path / "report.html"
    target.write_text("the old one")
    size = write_report(Report(HEAD), target)
    assert target.stat().st_size == size == len(render_page(Report(HEAD)))
    assert os.listdir(tmp_path) == ["report.html"]
    with pytest.raises(StoreError, match="was not written to"):
        write_report(Report(HEAD), tmp_path / "missing" / "report.html")
    with pytest.raises(StoreError, match="Is a directory"):
        write_report(Report(HEAD), tmp_path)
    with pytest.raises(StoreError, match="Not a directory"):
        write_report(Report(HEAD), target / "report.html")
    assert os.listdir(tmp_path) == ["report.html"]


def test_a_report_is_written_through_a_symbolic_link(tmp_path: Path) -> None:
    (tmp_path / "there").mkdir()
    link = tmp_path / "report.html"
    link.symlink_to(tmp_path / "there" / "real.html")
    for _ in range(2):
        size = write_report(Report(HEAD), link)
        assert link.is_symlink()
        assert (tmp_path / "there" / "real.html").stat().st_size == size
    assert os.listdir(tmp_path / "there") == ["real.html"]


def test_a_report_is_written_to_a_named_pipe(tmp_path: Path) -> None:
    pipe = tmp_path / "pipe"
    os.mkfifo(pipe)
    with subprocess.Popen(["cat", str(pipe)], stdout=subprocess.PIPE) as reader:
        write_report(Report(HEAD), pipe)
        received, _ = reader.communicate(timeout=30)
    assert received == render_page(Report(HEAD))
    assert os.listdir(tmp_path) == ["pipe"]
