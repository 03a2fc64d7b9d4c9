"""The live view in a real browser while a training records: new steps appear, and filters are kept."""

from __future__ import annotations

import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from urllib.parse import urlsplit

import pytest

from tests.arithmetic_run import make_training, record
from tests.browser import Browser
from tests.entry_files import part_file
from tests.environment import ROOT
from verl_rollout_skip import RolloutKey, RolloutStore

pytestmark = pytest.mark.slow

STEPS = "document.querySelectorAll('#steps tbody tr').length"


@pytest.fixture(scope="module")
def browser() -> Iterator[Browser]:
    found = Browser()
    yield found
    found.close()


@pytest.fixture
def view() -> Iterator[list[subprocess.Popen[str]]]:
    """The ``rollout-skip view`` processes that a test starts."""
    started: list[subprocess.Popen[str]] = []
    yield started
    for process in started:
        if process.poll() is None:
            process.send_signal(signal.SIGINT)
        process.communicate(timeout=60)


def start(view: list[subprocess.Popen[str]], variant: Path, *options: str) -> str:
    command = [sys.executable, "-m", "verl_rollout_skip.cli", "view", str(variant), "--no-browser", *options]
    view.append(subprocess.Popen(command, cwd=ROOT, text=True, stdout=subprocess.PIPE))
    assert view[-1].stdout is not None
    return view[-1].stdout.readline().strip()


def test_a_newly_recorded_step_appears_on_the_open_page(
    browser: Browser, view: list[subprocess.Popen[str]], tmp_path: Path
) -> None:
    training, tokenizer = make_training(tmp_path)
    variant = record(training, tokenizer, range(1, 4), prompts=4)
    address = start(view, variant)
    with browser.page() as page:
        page.open(address)
        page.wait_for(f"{STEPS} === 3")
        page.click("#f-variance")
        page.type("#f-text", "box")
        page.wait_for("location.hash.includes('text=box')")
        page.click(".card .prompt summary")
        page.wait_for("document.querySelector('.card .prompt').open")
        page.run("document.querySelector('.card').dataset.mine = 'yes'; document.querySelector('#f-text').focus()")
        page.click("th[data-key=bytes] button")
        page.run("document.querySelector('#f-text').focus()")
        before = page.text("#count")

        record(training, tokenizer, range(1, 6), prompts=4)

        page.wait_for(f"{STEPS} === 5")
        page.wait_for("document.querySelector('#live').innerText.includes('5 steps')")
        page.wait_for(f"document.querySelector('#count').innerText !== '{before}'")
        assert page.run("document.querySelector('#f-variance').checked")
        assert page.run("document.querySelector('#f-text').value") == "box"
        assert page.run("document.activeElement.id") == "f-text"
        assert page.run("document.querySelector('.card').dataset.mine") == "yes", "the same card as before"
        assert page.run("document.querySelector('.card .prompt').open")
        assert page.run("document.querySelector('th[data-key=bytes]').ariaSort") == "ascending"
        assert page.run("document.querySelectorAll('[data-chart=score] .line').length") == 1
        assert page.text("[data-chart=score] .value").startswith("step 5")
        assert page.problems == []
        origin = f"http://{urlsplit(address).netloc}{urlsplit(address).path}"
        assert {request.split("?")[0] for request in page.requests} == {origin, f"{origin}api/changes"}


def test_replaced_broken_and_removed_steps_are_updated(
    browser: Browser, view: list[subprocess.Popen[str]], tmp_path: Path
) -> None:
    training, tokenizer = make_training(tmp_path)
    variant = record(training, tokenizer, range(1, 4), prompts=2)
    with browser.page() as page:
        page.open(start(view, variant))
        page.wait_for(f"{STEPS} === 3")
        part_file(variant, 2).write_bytes(b"damaged")
        page.wait_for("document.querySelector('#steps tr.bad')?.innerText.includes('broken')")
        assert "step 2" in page.text("#problems")
        RolloutStore(variant).delete(RolloutKey(3))
        page.wait_for(f"{STEPS} === 2")
        RolloutStore(variant).delete(RolloutKey(2))
        page.wait_for(f"{STEPS} === 1")
        page.wait_for("document.querySelector('#problems').hidden")
        assert page.problems == []


def test_more_groups_and_all_responses_can_be_loaded(
    browser: Browser, view: list[subprocess.Popen[str]], tmp_path: Path
) -> None:
    variant = record(*make_training(tmp_path), range(1, 3), prompts=10)
    with browser.page() as page:
        page.open(start(view, variant, "--groups", "3"))
        page.wait_for(f"{STEPS} === 2")
        assert page.text("#count").startswith("6 of 6")
        page.click("#steps tbody tr button.small")
        page.wait_for("document.querySelector('#count').innerText.startsWith('10 of 13')")
        assert page.run("document.querySelector('#f-steps').value") == "1"
        assert page.run("document.querySelectorAll('.card:first-child .response').length") == 2
        page.click(".card:first-child > button.small")
        page.wait_for("document.querySelectorAll('.card:first-child .response').length === 4")
        assert page.problems == []


def test_when_the_server_stops_the_page_says_so_and_keeps_its_data(
    browser: Browser, view: list[subprocess.Popen[str]], tmp_path: Path
) -> None:
    variant = record(*make_training(tmp_path), range(1, 3), prompts=2)
    with browser.page() as page:
        page.open(start(view, variant))
        page.wait_for(f"{STEPS} === 2")
        view[0].send_signal(signal.SIGINT)
        assert view[0].wait(60) == 0
        page.wait_for("document.querySelector('#live').innerText.startsWith('no connection')")
        assert page.run(STEPS) == 2
        assert page.run("document.querySelectorAll('.card').length") == 4
