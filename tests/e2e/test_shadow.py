"""Mode shadow in real trainings: a correct engine repeats the recording, and one with old weights does not."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path

import pytest

from tests.e2e.training import (
    PPO,
    TWO_AGENT_LOOPS,
    VERL_V1,
    EntryPoint,
    Finished,
    Trainings,
    assert_same_results,
    assert_same_weights,
    skip,
    skip_v1,
)

pytestmark = pytest.mark.slow

STEPS = 3
ROWS = 8 * 4
GRPO = (f"trainer.total_training_steps={STEPS}", f"trainer.save_freq={STEPS}", TWO_AGENT_LOOPS)
BROKEN_SYNC = {"VERL_USE_EXTERNAL_MODULES": "recipes.cpu.plugin,tests.e2e.first_weights_only"}


@dataclass(frozen=True)
class Family:
    """V0 or V1: how it is started, and how its metrics are named."""

    entry_point: EntryPoint
    skip: Callable[[str, Path], tuple[str, ...]]
    metrics: str
    plus: str = ""

    def train(
        self, trainings: Trainings, name: str, mode: str, dumps: Path, *settings: str, **options: bool
    ) -> Finished:
        return trainings.run(self.entry_point, name, *GRPO, *self.skip(mode, dumps), *settings, **options)

    def with_broken_sync(self) -> Family:
        return replace(self, entry_point=replace(self.entry_point, env=BROKEN_SYNC))

    def ratios(self, training: Finished) -> list[float]:
        name = f"{self.metrics}rollout_skip/shadow/match_ratio"
        return [metrics[name] for _, metrics in sorted(training.metrics().items()) if name in metrics]


FAMILIES = {"V0": Family(PPO, skip, "timing_s/"), "V1": Family(VERL_V1, skip_v1, "", "+")}


@pytest.fixture(scope="module", params=FAMILIES)
def family(request: pytest.FixtureRequest) -> Family:
    return FAMILIES[request.param]


@pytest.fixture(scope="module")
def dumps(family: Family, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("dumps")


@pytest.fixture(scope="module")
def recorded(family: Family, trainings: Trainings, dumps: Path) -> Finished:
    return family.train(trainings, f"record-{family.entry_point.module}", "record", dumps)


def warnings(training: Finished) -> list[str]:
    return [text for text in training.messages if "generated rows differ from the recording" in text]


def test_every_row_of_every_step_matches_and_the_training_is_the_recorded_one(
    family: Family, trainings: Trainings, recorded: Finished, dumps: Path
) -> None:
    shadowed = family.train(trainings, f"shadow-{family.entry_point.module}", "shadow", dumps)
    assert family.ratios(shadowed) == [1.0] * STEPS
    assert warnings(shadowed) == []
    assert f"shadow: all {STEPS * ROWS} rows of {STEPS} steps are identical to the recording" in shadowed.summary
    assert shadowed.trace("generate") == recorded.trace("generate")
    assert shadowed.trace("sync") == recorded.trace("sync")
    assert_same_results(recorded, shadowed)
    assert_same_weights(recorded, shadowed, STEPS)


def test_old_weights_in_the_engine_are_found_and_the_training_is_still_the_recorded_one(
    family: Family, trainings: Trainings, recorded: Finished, dumps: Path
) -> None:
    broken = family.with_broken_sync()
    shadowed = broken.train(trainings, f"broken-{family.entry_point.module}", "shadow", dumps)
    ratios = family.ratios(shadowed)
    assert ratios[0] == 1.0
    assert min(ratios) < 1.0
    first = next(step for step, ratio in enumerate(ratios, 1) if ratio < 1.0)
    (warning,) = warnings(shadowed)
    assert f"step {first}, generation batch 0" in warning
    assert "The most likely cause is the weight sync" in warning
    assert f"step {first} is the first that does not" in shadowed.summary
    assert_same_results(recorded, shadowed)
    assert_same_weights(recorded, shadowed, STEPS)


def test_old_weights_in_the_engine_stop_a_training_that_requires_a_match(
    family: Family, trainings: Trainings, recorded: Finished, dumps: Path
) -> None:
    setting = f"{family.plus}rollout_skip.shadow_min_match=1"
    name = f"required-{family.entry_point.module}"
    failed = family.with_broken_sync().train(trainings, name, "shadow", dumps, setting, fails=True)
    assert "is below rollout_skip.shadow_min_match=1" in failed.log
    assert len(failed.metrics()) < STEPS
