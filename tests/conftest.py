"""Shared settings of all tests."""

from __future__ import annotations

import logging
import os
from collections.abc import Iterator

import pytest
from hypothesis import HealthCheck, settings

pytest_plugins = ["tests.environment"]

# Before torch, verl and datasets are imported: the tests run on a shared machine and never access the network.
os.environ.setdefault("OMP_NUM_THREADS", "1")
os.environ.setdefault("HF_HUB_OFFLINE", "1")
os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")

# How many examples a property test tries: few in make test, many in make test-all (--hypothesis-profile=full).
_PROFILE = settings(
    deadline=None, database=None, suppress_health_check=[HealthCheck.too_slow, HealthCheck.data_too_large]
)
settings.register_profile("quick", _PROFILE, max_examples=50)
settings.register_profile("full", _PROFILE, max_examples=500)
settings.load_profile("quick")


@pytest.fixture(scope="session", autouse=True)
def own_cache(tmp_path_factory: pytest.TempPathFactory) -> None:
    """Keep digests of test files out of the user's cache."""
    os.environ["VERL_ROLLOUT_SKIP_CACHE"] = str(tmp_path_factory.mktemp("cache"))


@pytest.fixture(autouse=True)
def nothing_left_behind() -> Iterator[None]:
    """Undo what trainers and libraries change in this process: logging and environment variables."""
    environment = dict(os.environ)
    logger = logging.getLogger("verl_rollout_skip")
    handlers, level, propagate = list(logger.handlers), logger.level, logger.propagate
    yield
    logger.handlers[:], logger.propagate = handlers, propagate
    logger.setLevel(level)
    for name in os.environ.keys() - environment.keys():
        del os.environ[name]
    os.environ.update(environment)
