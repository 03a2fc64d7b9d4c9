"""The page of an audit in a real browser: it draws both curves, its filters work, and hostile names do nothing."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.browser import Browser, Page
from tests.report.test_audit_page import HOSTILE, audits_in
from tests.written_ledgers import OTHER_REPLAY, RECORDING, REPLAY, with_metric, with_tensor, write
from verl_rollout_skip.report.audit_page import write_audit

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def browser() -> Iterator[Browser]:
    found = Browser()
    yield found
    found.close()


@pytest.fixture
def page(browser: Browser, tmp_path: Path) -> Iterator[Page]:
    """The page of a recording with two replays: a different loss from step 3 on, and different advantages."""
    write(tmp_path, RECORDING, range(1, 7))
    write(tmp_path, REPLAY, range(1, 7), RECORDING, with_metric("actor/pg_loss", lambda value: value + 1e-6, 3))
    write(tmp_path, OTHER_REPLAY, range(1, 7), RECORDING, with_tensor("advantages", lambda values: values * 2))
    file = tmp_path / "audit.html"
    write_audit(audits_in(tmp_path), file)
    with browser.page() as found:
        found.open(file.as_uri())
        yield found
        assert found.problems == []
        assert set(found.requests) == {file.as_uri()}


def choose(page: Page, selector: str, value: str) -> None:
    page.run(f"document.querySelector('{selector}').value = '{value}'")
    page.run(f"document.querySelector('{selector}').dispatchEvent(new Event('change', {{bubbles: true}}))")


def names(page: Page) -> list[str]:
    return page.texts("#figures tbody td:nth-child(2)")


def test_the_figure_that_differs_is_shown_with_both_curves(page: Page) -> None:
    assert page.text("#verdict").startswith("different from step 3 on")
    assert names(page) == ["actor/pg_loss"]
    assert page.texts("#figures tbody tr")[0].split("\t")[2:4] == ["3", "4 of 6"]
    assert page.texts("#charts h3") == ["actor/pg_loss"]
    assert page.run("document.querySelectorAll('#charts .line').length") == 2
    assert page.run("document.querySelectorAll('#charts .broken').length") == 1
    assert "first differs in step 3; the largest difference is 1.000e-6" in page.text("#charts .note")


def test_the_exact_values_of_a_step_are_read_with_the_keyboard(page: Page) -> None:
    page.run("document.querySelector('#charts .chart').focus()")
    page.press("ArrowRight")
    assert page.text("#charts .value").startswith("step 1: ")
    page.press("ArrowRight")
    assert page.text("#charts .value").startswith("step 2: ")
    assert "(b " in page.text("#charts .value")


def test_figures_are_filtered_and_the_difference_is_drawn(page: Page) -> None:
    choose(page, "#f-which", "all")
    assert len(names(page)) == 9
    assert len(page.texts("#charts h3")) == 8  # weights have no curve
    page.type("#f-name", "CRITIC/")
    page.wait_for("document.querySelectorAll('#figures tbody tr').length === 2")
    page.type("#f-name", "pg_loss")
    page.wait_for("document.querySelectorAll('#figures tbody tr').length === 1")
    choose(page, "#f-curves", "difference")
    assert page.run("document.querySelectorAll('#charts .line').length") == 1
    page.run("document.querySelector('#charts .chart').focus()")
    page.press("ArrowLeft")
    assert page.text("#charts .value").startswith("step 6: 1.000e-6")


def test_another_training_is_chosen(page: Page) -> None:
    choose(page, "#pair", "1")
    assert page.text("#verdict").startswith("different from step 1 on")
    assert names(page) == ["advantages"]
    assert "mean of the tensor" in page.text("#charts .note")


@pytest.mark.parametrize("width", [1280, 390])
def test_hostile_names_do_nothing_and_fit_the_page(browser: Browser, tmp_path: Path, width: int) -> None:
    write(tmp_path, RECORDING, range(1, 3), mode=HOSTILE, training_settings={HOSTILE: 1, "x" * 500: 2})
    change = with_metric(HOSTILE, lambda _: 1e308)
    write(tmp_path, REPLAY, range(1, 3), RECORDING, change, training_settings={})
    write(tmp_path, OTHER_REPLAY, range(1, 3), RECORDING, with_metric("x" * 900, lambda _: -1e-300))
    write_audit(audits_in(tmp_path), tmp_path / "audit.html")
    with browser.page(width=width) as page:
        page.open((tmp_path / "audit.html").as_uri())
        for pair in ("0", "1"):
            choose(page, "#pair", pair)
            choose(page, "#f-which", "all")
        assert page.run("typeof window.owned") == "undefined"
        assert page.run("document.querySelectorAll('script, img').length") == 1
        assert page.run("document.documentElement.scrollWidth") <= width
        assert page.problems == []
        assert set(page.requests) == {(tmp_path / "audit.html").as_uri()}
