"""Every message that docs/troubleshooting.md quotes must be in the source of the package.

``…`` in a quotation stands for a value.
"""

from __future__ import annotations

import re

import pytest

from tests.documents import ROOT, messages

DOCUMENT = ROOT / "docs" / "troubleshooting.md"
SAID = messages()


def quotations() -> list[str]:
    """The quoted messages in the first column, except those marked as verl's."""
    rows = [line.split("|")[1] for line in DOCUMENT.read_text(encoding="utf-8").splitlines() if line.startswith("| `")]
    return [quoted for row in rows if "(by verl)" not in row for quoted in re.findall(r"`([^`]+)`", row)]


def is_said(quotation: str) -> bool:
    pattern = ".+?".join(re.escape(piece) for piece in re.split(r"\s*…\s*", quotation))
    return any(re.search(pattern, message, re.DOTALL) for message in SAID)


@pytest.mark.parametrize("quotation", quotations())
def test_a_quoted_message_is_in_the_source(quotation: str) -> None:
    assert is_said(quotation), f"nothing in verl_rollout_skip says {quotation!r}"


def test_a_message_that_is_not_in_the_source_is_detected() -> None:
    assert len(quotations()) > 60
    assert is_said("a dump failed; the training continues:")
    assert not is_said("Step 1 passed without a rollout step through")
