"""The section of the report about the mismatch of rollout and trainer."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import pytest

from tests.arithmetic_run import make_training, record
from tests.report.test_report import data_of
from tests.training_columns import TRAINING, WORST, add_columns, trained
from verl_rollout_skip import RolloutKey
from verl_rollout_skip.report import build_report, write_report


@pytest.fixture(scope="module")
def recorded(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return record(*make_training(tmp_path_factory.mktemp("run")), range(1, 4), prompts=2)


@pytest.fixture
def variant(recorded: Path, tmp_path: Path) -> Path:
    copied = Path(shutil.copytree(recorded, tmp_path / "run" / recorded.name))
    add_columns(copied)
    return copied


def page(variant: Path, tmp_path: Path, **options: Any) -> dict[str, Any]:
    write_report(build_report(str(variant), **options), tmp_path / "report.html")
    return data_of(tmp_path / "report.html")


def test_report_has_the_tables_and_the_text_of_the_worst_token(variant: Path, tmp_path: Path) -> None:
    section = page(variant, tmp_path)["head"]["mismatch"]
    assert section["training"] == TRAINING
    tables = {table["title"]: table for table in section["tables"]}
    assert [row[0] for row in tables["By step"]["rows"]] == ["1", "2", "3"]
    step, row, position = WORST
    worst = tables["Worst tokens"]["rows"][0]
    assert worst[:4] == [str(step), str(row), str(position), "-9.0000"]
    before, token, after = worst[5]
    assert token
    assert before + token + after
    assert all(len(row) == len(table["headers"]) for table in tables.values() for row in table["rows"])


def test_charts_show_k3_of_each_step(variant: Path, tmp_path: Path) -> None:
    for entry in page(variant, tmp_path)["entries"]:
        tensors = trained(variant, RolloutKey(entry["step"]))
        chosen = tensors["response_mask"].bool()
        ratio = (tensors["old_log_probs"] - tensors["rollout_log_probs"])[chosen].double()
        assert entry["statistics"]["mismatch_k3"] == pytest.approx((ratio.exp() - ratio - 1).mean().item(), rel=1e-5)


def test_report_without_columns_has_no_section(recorded: Path, tmp_path: Path) -> None:
    found = page(recorded, tmp_path)
    assert "mismatch" not in found["head"]
    assert all("mismatch_k3" not in entry["statistics"] for entry in found["entries"])


def test_damaged_columns_are_named_and_the_rest_of_the_report_is_written(variant: Path, tmp_path: Path) -> None:
    [part] = variant.glob("columns/*/step_000002/*.parquet")
    part.write_bytes(part.read_bytes()[:-100])
    found = page(variant, tmp_path)
    assert any("is damaged" in note for note in found["head"]["mismatch"]["notes"])
    assert [entry["step"] for entry in found["entries"]] == [1, 2, 3]
    for file in variant.glob("columns/*/*/*.parquet"):
        file.write_bytes(b"")
    found = page(variant, tmp_path)
    assert any("training columns: " in problem for problem in found["head"]["problems"])


def test_report_of_some_steps_shows_only_their_mismatch(variant: Path, tmp_path: Path) -> None:
    found = page(variant, tmp_path, keys=[RolloutKey(3)])
    assert [row[0] for row in found["head"]["mismatch"]["tables"][0]["rows"]] == ["3"]
