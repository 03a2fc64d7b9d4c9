"""Fixtures of the driver-level tests, which run on every supported version of verl."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.trainers.v0.training import ROLLOUT_MODES, Trainings


@pytest.fixture(params=ROLLOUT_MODES)
def trainings(request: pytest.FixtureRequest, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Trainings:
    """On verl 0.6.1 each test runs twice: with rollouts in the workers, and with agent loops."""
    return Trainings(tmp_path, request.param, monkeypatch)
