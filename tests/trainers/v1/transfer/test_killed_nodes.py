"""Nodes die at random moments of recording and loading. Nothing that was committed is lost."""

from __future__ import annotations

import random
import threading
from pathlib import Path

import pytest

from tests.trainers.v1.training import Trainings, hits
from tests.trainers.v1.transfer.cluster import cluster
from tests.trainers.v1.transfer.storms import LAST, SETTINGS, SlowEngine, committed

pytestmark = pytest.mark.slow


@pytest.mark.timeout(900)
def test_nodes_that_die_at_random_moments_cost_at_most_their_dumps(tmp_path: Path) -> None:
    rng = random.Random(16)
    with cluster() as nodes:
        for attempt in range(5):
            trainings = Trainings(tmp_path / str(attempt))
            nodes.add()
            timer = threading.Timer(rng.uniform(0.5, 5), nodes.kill_last)
            if attempt % 2:
                timer.start()
            try:
                recorded = trainings.train("cache", *SETTINGS, engine=SlowEngine())
                if not attempt % 2:
                    timer.start()
                again = trainings.train("cache", *SETTINGS)
            finally:
                timer.join()
            missing = recorded.rollout_skip.statistics.dump_failures
            assert len(committed(trainings)) == LAST
            assert len(hits(again)) == LAST - missing
            assert all(again.trained[step - 1] == recorded.trained[step - 1] for step in hits(again))
            assert again.left_over == recorded.left_over == []
