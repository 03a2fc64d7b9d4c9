"""The report in a real browser: hostile text executes nothing and sends nothing, and the page works."""

from __future__ import annotations

import http.server
import json
import shutil
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from tokenizers import AddedToken

from tests.arithmetic_run import SAMPLES, conversation, make_output, make_training, record, token_of_byte
from tests.batches import objects
from tests.browser import Browser, Page
from tests.entry_files import part_file
from verl_rollout_skip import RolloutKey, RolloutStore
from verl_rollout_skip.report import Sampling, build_report, write_report

pytestmark = pytest.mark.slow

HUGE = "HUGE" * 5000
OWN = "window.owned=1"


def payloads(leak: str) -> list[str]:
    """Texts that would run code or send a request on a page that interprets them as markup or code."""
    return [
        f"</script><script>{OWN};fetch('{leak}')</script>",
        f"<img src={leak} onerror={OWN}><img src=x onerror=alert(1)>",
        f"<svg onload={OWN}><animate onbegin={OWN} attributeName=x></svg>",
        f"<iframe src='{leak}' srcdoc='<script>parent.owned=1</script>'></iframe>",
        f"<style>@import '{leak}'; body {{ background: url({leak}) }}</style><link rel=stylesheet href={leak}>",
        f"<meta http-equiv=refresh content='0;url={leak}'><base href={leak}>",
        f"<a href='javascript:{OWN}' autofocus onfocus={OWN}>x</a><form action={leak}><input autofocus onfocus={OWN}>",
        f"<!--<script>{OWN}</script>--><!--data--><!--script--><![CDATA[<script>{OWN}</script>]]>",
        f'"}}]}};{OWN};//\\u003c/script\\u003e<script>{OWN}</script>',
        f"${{{OWN}}} {{{{constructor.constructor('{OWN}')()}}}} `${{{OWN}}}`",
        f"first\u2028{OWN}\u2029second",
        f"nul\0byte </scr\0ipt><script>{OWN}</script>",
        f"\x1b[31mred\x1b[0m \x1b]0;title\x07 \x9b31m {OWN}",
        "\u202etxt.exe\u202c \u2066isolate\u2069 \u200fmark \u061c",
        "\ufeffbom \ufffe\uffff \U000e0041\U000e0042 zero\u200bwidth",
        "Z" + "\u0335\u0489" * 120,
        "__proto__ constructor toString hasOwnProperty",
        "العربية עברית 中文 🙂👩‍👩‍👧 n̈",
    ]


class Canary:
    """A local server that must never receive a request."""

    def __init__(self) -> None:
        asked = self.asked = []

        class Handler(http.server.BaseHTTPRequestHandler):
            def do_GET(self) -> None:
                asked.append(self.path)
                self.send_response(204)
                self.end_headers()

            def log_message(self, *arguments: Any) -> None: ...

        self._server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self.address = f"http://127.0.0.1:{self._server.server_port}/leak"
        threading.Thread(target=self._server.serve_forever, daemon=True).start()

    def close(self) -> None:
        self._server.shutdown()
        self._server.server_close()


@pytest.fixture(scope="module")
def browser() -> Iterator[Browser]:
    found = Browser()
    yield found
    found.close()


@pytest.fixture(scope="module")
def canary() -> Iterator[Canary]:
    found = Canary()
    yield found
    found.close()


@pytest.fixture(scope="module")
def hostile(tmp_path_factory: pytest.TempPathFactory, canary: Canary) -> tuple[Path, list[str]]:
    """A report in which every text is hostile, and the texts."""
    folder = tmp_path_factory.mktemp("hostile")
    training, tokenizer = make_training(folder)
    texts = payloads(canary.address)
    tokenizer.add_tokens([AddedToken(HUGE, normalized=False), AddedToken("<b>bold</b>", normalized=False)])
    tokenizer.add_special_tokens([AddedToken(f"<|<img src={canary.address} onerror={OWN}>|>", special=True)])
    tokenizer.save(str(folder / "inputs" / "model" / "tokenizer.json"))
    inputs, _, _ = conversation(1, (len(texts) + 4) // SAMPLES + 1, seed=0)
    rows = len(inputs.non_tensor_batch["raw_prompt"])
    ids = [tokenizer.encode(text).ids for text in texts]
    ids += [[tokenizer.token_to_id(HUGE)], [tokenizer.get_vocab_size() - 1, tokenizer.get_vocab_size() - 2]]
    ids += [[token_of_byte(tokenizer, byte) for byte in bytes(range(256))], [10**6, 5]]
    ids += [ids[0]] * (rows - len(ids))
    output = make_output(tokenizer, inputs, ids, list(np.linspace(0, 1, rows)), width=1200)
    columns = inputs.non_tensor_batch
    every = [texts[row % len(texts)] for row in range(rows)]
    columns["raw_prompt"] = objects([[{"role": text, "content": text}] for text in every])
    columns["reward_model"] = objects([{"ground_truth": text, text: 1} for text in every])
    columns["data_source"] = objects(every)
    output.non_tensor_batch[f"<img src={canary.address} onerror={OWN}>"] = objects(every)
    path = f"{folder}/inputs/model"
    with training.open("cache", trainer__project_name=f"<img src=x onerror={OWN}>") as skip:
        skip.step(RolloutKey(1), inputs, lambda _: output)
        skip.step(RolloutKey(2), inputs, lambda _: output)
    [variant] = [found for run in training.dumps.iterdir() for found in run.iterdir()]
    damaged = part_file(variant, 2)
    damaged.write_bytes(b"</script><script>window.owned=1</script>")
    report = build_report(str(variant), sampling=Sampling(responses=100, tokens=5000), tokenizer=path)
    report.head["run"] = texts[0]
    report.head["facts"].append([texts[1], texts[2]])
    report.head["problems"].append(texts[0])
    report.left_out.append(texts[1])
    assert report.counted.shown_responses == rows
    write_report(report, folder / "report.html")
    return folder / "report.html", [*texts, HUGE, "<b>bold</b>"]


@pytest.fixture(scope="module")
def ordinary(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A report of a small training with a broken step."""
    folder = tmp_path_factory.mktemp("ordinary")
    variant = record(*make_training(folder), range(1, 13), prompts=6)
    part_file(variant, 7).write_bytes(b"broken")
    write_report(build_report(str(variant)), folder / "report.html")
    return folder / "report.html"


@pytest.fixture
def page(browser: Browser, ordinary: Path) -> Iterator[Page]:
    with browser.page() as found:
        found.open(ordinary.as_uri())
        yield found
        assert found.problems == []
        assert set(found.requests) == {ordinary.as_uri()}


def numbers(page: Page, column: str) -> list[str]:
    """The cells of a table column, without the broken row."""
    return page.run(
        "(() => { const heads = [...document.querySelectorAll('#steps th')].map(e => e.dataset.key);"
        f"const at = heads.indexOf({json.dumps(column)});"
        "return [...document.querySelectorAll('#steps tbody tr:not(.bad)')].map(r => r.cells[at].innerText) })()"
    )


def shown_groups(page: Page) -> list[dict[str, Any]]:
    return page.run(
        "[...document.querySelectorAll('.card')].map(c => ({title: c.querySelector('h3').innerText,"
        "meta: c.querySelector('.meta').innerText, text: c.innerText}))"
    )


def count(page: Page) -> int:
    return int(page.text("#count").split()[0])


# Hostile text


def test_hostile_text_executes_nothing_and_sends_no_request(
    browser: Browser, hostile: tuple[Path, list[str]], canary: Canary
) -> None:
    file, texts = hostile
    for dark in (False, True):
        with browser.page(dark=dark) as page:
            page.open(file.as_uri())
            while page.run("!document.getElementById('more').hidden"):
                page.click("#more")
            page.run("document.querySelectorAll('details').forEach(d => { d.open = true })")
            page.run("document.querySelectorAll('button.gap').forEach(b => b.click())")
            for field in ("f-space", "f-special", "f-shade"):
                page.click(f"#{field}")
            for selector in (".response .tokens .t:not(.special)", "#charts .chart", ".strip"):
                page.click(selector)
            for text in texts[:4]:
                page.type("#f-text", text[:40])
                page.wait_for("document.querySelector('#count').innerText.length > 0")
            page.run("new Promise(done => setTimeout(done, 300))")
            assert page.run("typeof window.owned") == "undefined"
            assert page.run(
                "document.querySelectorAll('script, img, iframe, style, link, base, form, svg animate').length"
            ) == len(["the script", "the style", "the icon", "the form of the filters"])
            assert page.run("Object.keys(Object.prototype).length") == 0
            assert page.problems == []
            assert set(page.requests) == {file.as_uri()}
    assert canary.asked == []


def test_hostile_text_is_shown_verbatim(browser: Browser, hostile: tuple[Path, list[str]]) -> None:
    file, texts = hostile
    with browser.page() as page:
        page.open(file.as_uri())
        while page.run("!document.getElementById('more').hidden"):
            page.click("#more")
        page.run("document.querySelectorAll('button.gap').forEach(b => b.click())")
        shown = page.run("[...document.querySelectorAll('.response .tokens')].map(e => e.textContent)")
        page_names = {
            "\0": "\\x00", "\x1b": "\\x1b", "\x07": "\\x07", "\x9b": "\\x9b",
            "\u2028": "U+2028", "\u2029": "U+2029", "\u202e": "U+202E", "\u202c": "U+202C", "\u2066": "U+2066",
            "\u2069": "U+2069", "\u200f": "U+200F", "\u061c": "U+061C", "\ufeff": "U+FEFF", "\u200b": "U+200B",
            "\U000e0041": "U+E0041", "\U000e0042": "U+E0042",
        }  # fmt: skip
        for text in texts:
            for letter, name in page_names.items():
                text = text.replace(letter, name)
            assert any(text in found for found in shown), text
        invalid = next(found for found in shown if "\\xff" in found)
        assert "\\x80\\x81" in invalid
        assert any(" 1000000 " in found for found in shown)
        assert page.run("document.title").startswith("</script>")
        assert "broken: The record of step 2" in page.text("#steps tbody tr.bad") or "damaged" in page.text("tr.bad")


def test_no_text_is_wider_than_the_page(browser: Browser, hostile: tuple[Path, list[str]]) -> None:
    for width in (1280, 700, 390):
        with browser.page(width=width) as page:
            page.open(hostile[0].as_uri())
            assert page.run("document.documentElement.scrollWidth") <= width


def test_an_unsafe_page_is_detected(browser: Browser, canary: Canary, tmp_path: Path) -> None:
    """Checks the detectors with the same texts on a page without any protection."""
    careless = tmp_path / "careless.html"
    body = "".join(payloads(f"{canary.address}-on-purpose")[:2])
    careless.write_text(f"<html data-ready=yes><body><script>0</script>{body}", encoding="utf-8")
    with browser.page() as page:
        page.open(careless.as_uri())
        page.wait_for("window.owned === 1")
        deadline = time.monotonic() + 30
        while not canary.asked and time.monotonic() < deadline:
            time.sleep(0.05)
        assert any("leak-on-purpose" in request for request in page.requests)
        assert any(problem.startswith("dialog") for problem in page.problems)
    assert "/leak-on-purpose" in canary.asked
    canary.asked.clear()


def test_the_policy_blocks_injected_scripts(browser: Browser, ordinary: Path, tmp_path: Path) -> None:
    """Even injected markup does not run, because the policy and Trusted Types are in force."""
    file = tmp_path / "report.html"
    text = ordinary.read_text(encoding="utf-8")
    file.write_text(text.replace("<main>", f"<main><script>{OWN}</script><img src=x onerror={OWN}>"), encoding="utf-8")
    with browser.page() as page:
        page.open(file.as_uri())
        assert page.run("typeof window.owned") == "undefined"
        assert any("Content Security Policy" in problem for problem in page.problems)
        blocked = page.run(
            "(() => { try { document.body.innerHTML = '<b>x</b>'; return '' } catch (e) { return e.name } })()"
        )
        assert blocked == "TypeError"


# What a person does with it


def test_the_page_shows_trends_steps_and_groups(page: Page) -> None:
    assert page.texts("#charts h3") == [
        "Score",
        "Pass rate",
        "Response length in tokens",
        "Groups without variance",
        "Generation time",
        "Size on disk",
    ]
    assert page.run("document.querySelectorAll('#charts .line:not(.thin):not(.dashed)').length") == 6
    assert page.run("document.querySelectorAll('#charts .broken').length") == 6, (
        "a mark in each chart for the broken step"
    )
    assert len(numbers(page, "score")) == 11
    assert "broken" in page.text("#steps tr.bad")
    assert "step 7" in page.text("#problems")
    assert "cannot be read" in page.text("#left-out")
    assert count(page) == 66
    first = shown_groups(page)[0]
    assert "What is" in first["title"]
    assert "Best" in first["text"]
    assert "<|im_end|>" in first["text"]


def test_the_table_sorts_by_any_column_in_both_directions(page: Page) -> None:
    for column in ("score", "length_max", "bytes", "pass_rate"):
        page.click(f"th[data-key={column}] button")
        up = numbers(page, column)
        assert page.run(f"document.querySelector('th[data-key={column}]').ariaSort") == "ascending"
        page.click(f"th[data-key={column}] button")
        down = numbers(page, column)
        assert page.run(f"document.querySelector('th[data-key={column}]').ariaSort") == "descending"
        values = [float(text.split()[0].replace(",", "").removesuffix("%")) for text in up]
        assert values == sorted(values)
        assert [float(text.split()[0].replace(",", "").removesuffix("%")) for text in down] == sorted(
            values, reverse=True
        )
        assert page.run("[...document.querySelectorAll('#steps tbody tr')].pop().className") == "bad", (
            "broken comes last"
        )
    page.click("th[data-key=step] button")
    assert numbers(page, "step") == [str(step) for step in range(1, 13) if step != 7]


def test_groups_are_filtered_by_step_score_variance_and_outcome(page: Page) -> None:
    page.type("#f-steps", "2, 4-5")
    page.wait_for("document.querySelector('#count').innerText.startsWith('18 of 66')")
    assert {group["meta"].split(" · ")[0] for group in shown_groups(page)} <= {"step 2", "step 4", "step 5"}
    page.type("#f-steps", "nonsense")
    page.wait_for("document.querySelector('#steps-error').innerText.includes('ranges')")
    page.click("button[type=reset]")
    page.wait_for("document.querySelector('#count').innerText.startsWith('66')")

    page.click("#f-variance")
    with_variance = count(page)
    assert 0 < with_variance < 66
    assert all("no variance" not in group["meta"] for group in shown_groups(page))
    page.click("#f-variance")
    page.run("document.querySelector('#f-outcome').value = 'all'")
    page.run("document.querySelector('#f-outcome').dispatchEvent(new Event('change', {bubbles: true}))")
    assert all("scores 1 to 1" in group["meta"] for group in shown_groups(page))
    page.click("button[type=reset]")
    page.wait_for("document.querySelector('#count').innerText.startsWith('66')")

    page.type("#f-min", "0.05")
    page.type("#f-max", "0.5")
    page.wait_for("location.hash.includes('max=0.5')")
    scores = page.run("[...document.querySelectorAll('.strip')].map(e => e.ariaLabel.split(': ')[1].split(', '))")
    assert scores
    assert all("0.1" in group for group in scores), "the only score between the two"
    assert 0 < count(page) < 66


def test_groups_are_filtered_by_length_limit_and_invalid_text(
    browser: Browser, hostile: tuple[Path, list[str]]
) -> None:
    with browser.page() as page:
        page.open(hostile[0].as_uri())
        everything = count(page)
        page.click("#f-bytes")
        assert 0 < count(page) < everything
        page.click("#f-bytes")
        page.click("#f-limit")
        assert "no group matches" in page.text("#count")


def test_search_filters_groups_and_highlights_matches(page: Page) -> None:
    page.type("#f-text", "not sure, maybe")
    page.wait_for("!document.querySelector('#count').innerText.startsWith('66')")
    found = shown_groups(page)
    assert found
    assert all("not sure, maybe" in group["text"].lower() for group in found)
    marked = page.run("[...document.querySelectorAll('.card .hit')].map(e => e.textContent).join('')")
    assert "not sure, maybe" in marked
    page.type("#f-text", "nobody ever said this")
    page.wait_for("document.querySelector('#count').innerText.includes('no group matches')")
    page.press("Escape")
    page.wait_for("document.querySelector('#count').innerText.startsWith('66')")


def test_a_long_text_shows_the_first_match(browser: Browser, tmp_path: Path) -> None:
    inputs, _, _ = conversation(1, 1, seed=0)
    _, tokenizer = make_training(tmp_path)
    filler = tokenizer.encode("So it goes on. ").ids * 100
    needle = tokenizer.encode("the needle").ids
    answers = [[*filler, *needle, *filler], filler, filler, filler]
    output = make_output(tokenizer, inputs, answers, [1.0, 0.0, 0.0, 0.0], width=len(filler) * 2 + 50)
    RolloutStore(tmp_path / "plain", background=False).put(RolloutKey(1), output, inputs=inputs)
    sampling = Sampling(tokens=100_000)
    report = build_report(str(tmp_path / "plain"), sampling=sampling, tokenizer=str(tmp_path / "inputs" / "model"))
    write_report(report, tmp_path / "report.html")
    shown = "document.querySelector('.response .tokens').textContent"
    with browser.page() as page:
        page.open((tmp_path / "report.html").as_uri())
        assert "needle" not in page.run(shown)
        page.type("#f-text", "the needle")
        page.wait_for(f"{shown}.includes('the needle')")
        marked = page.run("[...document.querySelectorAll('.response .hit')].map(e => e.textContent).join('')")
        assert marked == "the needle"
        assert len(page.run(shown)) < 4000
        page.click(".response .tokens button.gap")
        assert page.run("document.querySelectorAll('.response:first-child [data-index]').length") == len(answers[0])
        assert page.problems == []


def test_filters_survive_a_reload(page: Page, ordinary: Path) -> None:
    page.type("#f-steps", "3")
    page.click("#f-variance")
    page.wait_for("location.hash.includes('steps=3')")
    before = page.text("#count")
    page.call("Page.reload")
    page.wait_for(f"document.querySelector('#count')?.innerText === {json.dumps(before)}")
    assert page.run("document.querySelector('#f-steps').value") == "3"
    assert page.run("document.querySelector('#f-variance').checked")
    page.requests[:] = [request.split("#")[0] for request in page.requests]


def test_the_theme_follows_the_system_and_the_switch(page: Page) -> None:
    ground = "getComputedStyle(document.body).backgroundColor"
    light = page.run(ground)
    page.prefer("dark")
    dark = page.run(ground)
    assert light != dark
    page.click("#theme")
    assert (page.text("#theme"), page.run(ground)) == ("Theme: light", light)
    page.prefer("light")
    page.click("#theme")
    assert (page.text("#theme"), page.run(ground)) == ("Theme: dark", dark)
    page.press("t")
    assert (page.text("#theme"), page.run(ground)) == ("Theme: auto", light)


def test_log_probs_special_tokens_and_spaces_can_be_toggled(page: Page) -> None:
    colour = "getComputedStyle(document.querySelector('.tokens .l4, .tokens .l3')).backgroundColor"
    shaded = page.run(colour)
    page.click("#f-shade")
    assert page.run(colour) != shaded
    special = "document.querySelector('.tokens .special').checkVisibility()"
    assert page.run(special)
    page.click("#f-special")
    assert not page.run(special)
    page.click("#f-space")
    sign = "getComputedStyle(document.querySelector('.tokens .space'), '::before').content"
    assert page.run(sign) in ('"·"', '"↵"')


def test_hovering_over_a_token_shows_its_id_and_probability(page: Page) -> None:
    page.click(".response .tokens .t")
    assert "token " in page.text(".response .info")
    assert "probability" in page.text(".response .info")
    page.run("document.querySelector('.response .tokens').focus()")
    infos = []
    for _ in range(3):
        page.press("ArrowRight")
        infos.append(page.text(".response .info"))
    assert len(set(infos)) == 3


def test_the_prompt_expands_and_shows_special_tokens(page: Page) -> None:
    page.click(".prompt summary")
    page.wait_for("document.querySelector('.prompt .tokens')?.innerText.includes('<|im_start|>')")


def test_clicking_a_chart_shows_the_groups_of_the_step(page: Page) -> None:
    page.run("document.querySelector('[data-chart=score] .chart').focus()")
    for _ in range(3):
        page.press("ArrowRight")
    assert page.text("[data-chart=score] .value").startswith("step 3: ")
    assert page.text("[data-chart=bytes] .value").startswith("step 3: "), "all charts point at the same step"
    page.press("Enter")
    assert page.run("document.querySelector('#f-steps').value") == "3"
    assert count(page) == 6
    page.click("#steps tbody tr:nth-child(5) button.link")
    assert page.run("document.querySelector('#f-steps').value") == "5"


def test_the_page_works_with_the_keyboard(page: Page) -> None:
    page.press("/")
    assert page.run("document.activeElement.id") == "f-text"
    page.press("j")
    assert page.run("document.querySelector('#f-text').value") == "j", "in a field a letter is a letter"
    page.press("Escape")
    page.run("document.activeElement.blur()")
    page.press("j")
    first = page.run("document.activeElement.dataset.group")
    page.press("j")
    assert page.run("document.activeElement.dataset.group") != first
    page.press("k")
    assert page.run("document.activeElement.dataset.group") == first
    page.press("?")
    assert page.run("document.querySelector('#help').open")
    page.press("Escape")
    page.wait_for("!document.querySelector('#help').open")
    page.run("window.scrollTo(0, 0); document.activeElement.blur()")
    reached = set()
    for _ in range(140):
        page.press("Tab")
        reached.add(page.run("(e => e.id || e.className?.baseVal || e.tagName)(document.activeElement)"))
    assert {"theme", "chart", "f-text", "f-order", "f-space", "BUTTON"} <= reached


def test_more_groups_are_shown_on_request(page: Page) -> None:
    before = len(shown_groups(page))
    page.click("#more")
    assert len(shown_groups(page)) > before
    while page.run("!document.getElementById('more').hidden"):
        page.click("#more")
    assert len(shown_groups(page)) == 66


def test_groups_can_be_sorted(page: Page) -> None:
    def choose(order: str) -> list[str]:
        page.run(f"document.querySelector('#f-order').value = '{order}'")
        page.run("document.querySelector('#f-order').dispatchEvent(new Event('change', {bubbles: true}))")
        return [group["meta"] for group in shown_groups(page)]

    assert choose("newest")[0].startswith("step 12")
    means = [float(meta.split("mean ")[1].split()[0]) for meta in choose("worst")]
    assert means == sorted(means)
    means = [float(meta.split("mean ")[1].split()[0]) for meta in choose("best")]
    assert means == sorted(means, reverse=True)
    assert choose("step")[0].startswith("step 1 ")


def test_generation_batches_of_a_step_are_shown_separately(browser: Browser, tmp_path: Path) -> None:
    variant = record(*make_training(tmp_path), range(1, 3), prompts=2, gen_batches=3)
    write_report(build_report(str(variant)), tmp_path / "report.html")
    with browser.page() as page:
        page.open((tmp_path / "report.html").as_uri())
        assert numbers(page, "gen_batch") == ["0", "1", "2"] * 2
        page.click("#steps tbody tr:nth-child(2) button.link")
        assert page.run("document.querySelector('#f-steps').value") == "1.1"
        assert count(page) == 2
        assert "generation batch 1" in shown_groups(page)[0]["meta"]
        assert page.problems == []


def test_a_step_without_scores_or_log_probs_is_shown(browser: Browser, tmp_path: Path) -> None:
    inputs, texts, scores = conversation(1, 2, seed=0)
    del texts, scores
    training, tokenizer = make_training(tmp_path)
    del training
    output = make_output(tokenizer, inputs, [[5, 6, 7]] * 8, [0.0] * 8)
    for name in ("rm_scores", "rollout_log_probs"):
        del output.batch[name]
    output.non_tensor_batch = {}
    RolloutStore(tmp_path / "plain", background=False).put(RolloutKey(1), output)
    write_report(build_report(str(tmp_path / "plain")), tmp_path / "report.html")
    with browser.page() as page:
        page.open((tmp_path / "report.html").as_uri())
        assert page.text("[data-chart=score] .value") == "not recorded"
        assert " 5 " in page.run("document.querySelector('.response .tokens').textContent")
        page.click(".response .tokens .t")
        assert "token 5" in page.text(".response .info")
        assert page.problems == []


def test_the_report_opens_from_any_path(browser: Browser, ordinary: Path, tmp_path: Path) -> None:
    moved = tmp_path / "a folder & more" / "rép#ort.html"
    moved.parent.mkdir()
    shutil.copy(ordinary, moved)
    with browser.page() as page:
        page.open(moved.as_uri())
        page.click("#f-variance")
        assert page.problems == []
