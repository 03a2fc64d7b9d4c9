"""The section about the mismatch of rollout and trainer, in a real browser."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.arithmetic_run import make_training, record
from tests.browser import Browser, Page
from tests.training_columns import TRAINING, add_columns
from verl_rollout_skip.report import build_report, write_report

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def recorded(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return record(*make_training(tmp_path_factory.mktemp("run")), range(1, 4), prompts=2)


@pytest.fixture
def page() -> Iterator[Page]:
    browser = Browser()
    with browser.page() as made:
        yield made
    browser.close()


def show(page: Page, variant: Path, folder: Path) -> None:
    write_report(build_report(str(variant)), folder / "report.html")
    page.open((folder / "report.html").as_uri())
    page.wait_for("document.documentElement.dataset.ready")


def test_section_and_chart_appear_only_with_columns(page: Page, recorded: Path, tmp_path: Path) -> None:
    show(page, recorded, tmp_path)
    assert page.run("document.getElementById('mismatch').hidden")
    assert not page.run("document.querySelector('[data-chart=mismatch]') !== null")
    add_columns(recorded)
    show(page, recorded, tmp_path)
    assert not page.run("document.getElementById('mismatch').hidden")
    assert TRAINING in page.text("#mismatch")
    assert page.run("document.querySelectorAll('[data-chart=mismatch] path').length") > 0
    assert page.run("document.querySelectorAll('#mismatch-tables table').length") == 5
    assert page.texts("#mismatch-tables mark")
