"""The page of an audit: its data, and that no recorded text can leave the data block."""

from __future__ import annotations

import json
from pathlib import Path

from tests.report.test_page import Parts, sha
from tests.report.test_report import data_of
from tests.written_ledgers import RECORDING, REPLAY, with_metric, write
from verl_rollout_skip.report.audit_page import TEMPLATE, render_audit, write_audit
from verl_rollout_skip.report.page import policy
from verl_rollout_skip.store.storage import open_storage
from verl_rollout_skip.tools.audit import Audit, audit
from verl_rollout_skip.tools.ledgers import VariantLedgers

HOSTILE = "</script><script>window.owned=1</script><!--data--><img src=x onerror=alert(1)>"


def audits_in(variant: Path) -> list[Audit]:
    return [audit(*pair) for pair in VariantLedgers(open_storage(str(variant))).later_trainings()]


def test_the_page_has_both_curves_of_every_figure(tmp_path: Path) -> None:
    write(tmp_path, RECORDING, range(1, 6))
    write(tmp_path, REPLAY, range(1, 4), RECORDING, with_metric("actor/pg_loss", lambda value: value + 1, 2))
    size = write_audit(audits_in(tmp_path), tmp_path / "audit.html")
    assert (tmp_path / "audit.html").stat().st_size == size
    [pair] = data_of(tmp_path / "audit.html")["pairs"]
    assert pair["verdict"] == "different"
    assert pair["steps"] == [1, 2, 3, 4, 5]
    figures = {figure["name"]: figure for figure in pair["figures"]}
    loss = figures["actor/pg_loss"]
    assert loss["first_step"] == 2
    assert loss["b"] == [loss["a"][0], loss["a"][1] + 1, loss["a"][2] + 1, None, None]
    assert figures["responses"]["a"][:3] == figures["responses"]["b"][:3]
    assert figures["responses"]["tensor"]
    assert figures["weights of the actor"]["a"] is None


def test_numbers_that_json_lacks_are_texts(tmp_path: Path) -> None:
    write(tmp_path, RECORDING, range(1, 3), change=with_metric("actor/pg_loss", lambda _: float("nan")))
    write(tmp_path, REPLAY, range(1, 3), RECORDING, with_metric("actor/pg_loss", lambda _: float("-inf")))
    write_audit(audits_in(tmp_path), tmp_path / "audit.html")
    [pair] = data_of(tmp_path / "audit.html")["pairs"]
    [loss] = [figure for figure in pair["figures"] if figure["name"] == "actor/pg_loss"]
    assert (loss["a"], loss["b"]) == (["nan", "nan"], ["-inf", "-inf"])


def test_a_hostile_name_stays_data_and_the_policy_allows_only_the_script_of_the_page(tmp_path: Path) -> None:
    write(tmp_path, RECORDING, range(1, 2), mode=HOSTILE)
    write(tmp_path, REPLAY, range(1, 2), RECORDING, with_metric(HOSTILE, lambda _: 1.0))
    parts = Parts(render_audit(audits_in(tmp_path)))
    assert [attributes.get("type") for attributes, _ in parts.scripts] == ["application/json", None]
    [pair] = json.loads(parts.scripts[0][1])["pairs"]
    assert HOSTILE in {figure["name"] for figure in pair["figures"]}
    assert HOSTILE in pair["a"]["text"]
    rules = policy(live=False, template=TEMPLATE)
    assert f"'sha256-{sha(parts.scripts[1][1])}'" in rules
    assert ("meta", "content", rules) in parts.attributes
    assert not [name for _, name, _ in parts.attributes if name.startswith("on") or name in ("style", "src")]
