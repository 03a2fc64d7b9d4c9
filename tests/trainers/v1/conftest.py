"""Fixtures of the tests with verl's V1 training loop."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.trainers.v1.training import Trainings, transfer_queue


@pytest.fixture(scope="module")
def queue() -> Iterator[None]:
    """Ray and a TransferQueue on it. A module whose tests train needs ``pytestmark = usefixtures("queue")``."""
    with transfer_queue():
        yield


@pytest.fixture
def messages(caplog: pytest.LogCaptureFixture) -> None:
    """Capture this package's messages, which a training does not pass on to other loggers."""
    logger = logging.getLogger("verl_rollout_skip")
    logger.setLevel(logging.INFO)
    logger.addHandler(caplog.handler)  # removed again by tests/conftest.py


@pytest.fixture
def trainings(tmp_path: Path) -> Trainings:
    """Nothing is recorded yet."""
    return Trainings(tmp_path)


@pytest.fixture(scope="module")
def recording(
    request: pytest.FixtureRequest, queue: None, tmp_path_factory: pytest.TempPathFactory
) -> tuple[Trainings, Any]:
    """A training of three steps with the module's ``RECORDED_WITH`` settings, and its trainer."""
    trainings = Trainings(tmp_path_factory.mktemp("recording"))
    return trainings, trainings.train("record", *getattr(request.module, "RECORDED_WITH", ()))


@pytest.fixture
def recorded(recording: tuple[Trainings, Any]) -> Any:
    """The trainer that recorded what ``after_recording`` has."""
    return recording[1]


@pytest.fixture
def after_recording(recording: tuple[Trainings, Any], tmp_path: Path) -> Trainings:
    """Three recorded steps, in a copy that a test may change."""
    return recording[0].copied(tmp_path)
