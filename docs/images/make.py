"""Creates the screenshots for docs/report.md from a synthetic recording.

Run it from the root of the checkout: ``python -m docs.images.make``. Chromium must be installed.
"""

from __future__ import annotations

import io
import tempfile
from pathlib import Path

import numpy as np
from PIL import Image

from tests.arithmetic_run import conversation, encode, make_training, record
from tests.browser import Browser, Page
from verl_rollout_skip import RolloutKey, RolloutStore
from verl_rollout_skip.report import build_report, write_report

HERE = Path(__file__).resolve().parent
STEPS = range(1, 61)
VARIANT = "27c2eee4d2ee"
SHOWN = {"run": "synthetic-arithmetic", "variant": VARIANT, "path": f"/data/dumps/synthetic-arithmetic/{VARIANT}"}
FACTS = {"model": "/models/synthetic", "tokenizer": f"{SHOWN['path']}/tokenizer"}


def main() -> None:
    with tempfile.TemporaryDirectory() as name:
        report = make_report(Path(name))
        browser = Browser()
        try:
            with browser.page(1280, 860) as page:
                page.open(report.as_uri())
                save(page, "report.png")
                page.run("document.querySelector('#f-order').value = 'spread'")
                page.run("document.querySelector('#f-order').dispatchEvent(new Event('change', {bubbles: true}))")
                page.run("document.querySelector('#groups').scrollIntoView()")
                save(page, "report-groups.png")
            with browser.page(1280, 860, dark=True) as page:
                page.open(report.as_uri())
                page.run("document.querySelector('#steps-title').scrollIntoView()")
                save(page, "report-dark.png")
        finally:
            browser.close()


def make_report(folder: Path) -> Path:
    """A report of sixty synthetic steps with plausible times."""
    training, tokenizer = make_training(folder)
    variant = record(training, tokenizer, STEPS[:1])
    rng = np.random.default_rng(0)
    with RolloutStore(variant) as store:
        for step in STEPS:
            inputs, texts, scores = conversation(step, 32, seed=step)
            seconds = 34 + 0.2 * step + 3 * rng.random()
            output = encode(tokenizer, inputs, texts, scores, seed=step)
            store.put(RolloutKey(step), output, inputs=inputs, info={"generate_s": seconds}, replace=True)
    report = build_report(str(variant))
    report.head |= SHOWN
    kept = [fact for fact in report.head["facts"] if fact[0] not in FACTS]
    report.head["facts"] = [*([name, value] for name, value in FACTS.items()), *kept]
    write_report(report, folder / "report.html")
    return folder / "report.html"


def save(page: Page, name: str) -> None:
    """Save with a small palette, because the page has few colors."""
    picture = Image.open(io.BytesIO(page.screenshot())).convert("RGB")
    picture.quantize(128, dither=Image.Dither.NONE).save(HERE / name, optimize=True)


if __name__ == "__main__":
    main()
