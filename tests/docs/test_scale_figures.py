"""The figures in docs/scale.md and README.md are those of the last run of ``make bench-scale``."""

from __future__ import annotations

import json

from benchmarks import scale


def test_the_page_and_the_readme_quote_the_last_measurement() -> None:
    if not scale.RESULTS.exists():  # nothing was measured, so nothing may be quoted
        for file in (scale.PAGE, scale.README):
            assert f"{scale.BEGIN}{scale.END}" in file.read_text()
        return
    result = json.loads(scale.RESULTS.read_text())
    assert scale.markdown(result) in scale.PAGE.read_text()
    assert scale.sentence(result) in scale.README.read_text()
    assert scale.PICTURE.read_text() == scale.draw(result)
