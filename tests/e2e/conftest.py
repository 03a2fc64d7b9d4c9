"""Fixtures of the end-to-end tests: the model and data, created once, and ``Trainings`` for each module."""

from __future__ import annotations

from pathlib import Path

import pytest

from recipes.cpu.assets import make_assets
from tests.e2e.training import Trainings


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """A test may run several trainings, and the first one that uses a fixture also waits for its trainings."""
    for item in items:
        if Path(__file__).parent in item.path.parents:
            item.add_marker(pytest.mark.timeout(1200))


@pytest.fixture(scope="session")
def assets(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_assets(tmp_path_factory.mktemp("assets") / "tiny").folder


@pytest.fixture(scope="module")
def trainings(tmp_path_factory: pytest.TempPathFactory, assets: Path) -> Trainings:
    return Trainings(tmp_path_factory.mktemp("trainings"), assets)


@pytest.fixture(scope="module")
def dumps(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder with the recording that the tests of a module load."""
    return tmp_path_factory.mktemp("dumps")
