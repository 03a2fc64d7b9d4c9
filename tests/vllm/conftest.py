"""Trainings with real vLLM: collected only where it is installed, by ``make test-vllm``."""

from __future__ import annotations

import importlib.util
import os
from pathlib import Path

import pytest

from tests.e2e.conftest import assets, dumps  # noqa: F401
from tests.e2e.training import Trainings

if importlib.util.find_spec("vllm") is None:
    collect_ignore_glob = ["test_*.py"]


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Raise the timeout: a test may run several trainings, and waits for other tests, which share one engine lock."""
    for item in items:
        if Path(__file__).parent in item.path.parents:
            item.add_marker(pytest.mark.timeout(1200))


@pytest.fixture(scope="module")
def trainings(tmp_path_factory: pytest.TempPathFactory, assets: Path) -> Trainings:  # noqa: F811
    return Trainings(tmp_path_factory.mktemp("trainings"), assets, engine="vllm")


@pytest.fixture(scope="session")
def plain_python() -> str:
    """The interpreter of an environment without vLLM."""
    return os.environ["PLAIN_PYTHON"]
