"""Mode shadow in verl's V1 loop: each step is generated, compared with the recording, and trained as recorded.

The engine returns trajectories in another order in each run, so rows are paired by prompt, session and output.
"""

from __future__ import annotations

from typing import Any

import pytest

from tests.trainers.v1.test_async import KINDS
from tests.trainers.v1.training import (
    PROMPTS,
    Engine,
    PlainTrainer,
    Rewards,
    Trainings,
    Weights,
    hits,
    results,
)
from verl_rollout_skip import RolloutKey, RolloutStore
from verl_rollout_skip.errors import ConfigError, EntryNotFoundError, ShadowError

pytestmark = pytest.mark.usefixtures("queue", "messages")

STEPS = [1, 2, 3]
FILTER = ("algorithm.filter_groups.enable=True", "algorithm.filter_groups.metric=acc")


@pytest.fixture
def broken_sync(recorded: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """A weight sync that is broken on purpose: the engine keeps the weights that it started with."""
    monkeypatch.setattr(Weights, "update_weights", lambda weights, global_steps: weights.sent.append(global_steps))


class FewerOutputs(Engine):
    """With the weights of the second step, sessions have one output only."""

    def _session(self, prompt: dict[str, Any], session: int) -> list[dict[str, Any]]:
        outputs = super()._session(prompt, session)
        return outputs[:1] if self.version == 1 else outputs


def shadow_metric(trainer: Any, name: str) -> list[float]:
    return [trainer.logged[step][f"rollout_skip/shadow/{name}"] for step in sorted(trainer.logged)]


def warnings(caplog: pytest.LogCaptureFixture) -> list[str]:
    return [text for text in caplog.messages if "differ from the recording" in text]


def test_every_row_of_a_correct_engine_matches_and_the_training_is_the_recorded_one(
    after_recording: Trainings, recorded: Any, caplog: pytest.LogCaptureFixture
) -> None:
    shadowed = after_recording.train("shadow")
    assert shadowed.trained == recorded.trained
    assert results(shadowed) == results(recorded)
    assert shadowed.engine.prompts == recorded.engine.prompts
    assert shadowed.engine.versions == recorded.engine.versions
    assert shadowed.weights.sent == recorded.weights.sent == [0, 1, 2, 3]
    assert shadowed.left_over == []
    assert hits(shadowed) == STEPS
    assert shadow_metric(shadowed, "match_ratio") == [1.0, 1.0, 1.0]
    assert shadow_metric(shadowed, "rows") == [len(step["keys"]) for step in recorded.trained]
    assert shadow_metric(shadowed, "log_prob_diff/max") == [0.0, 0.0, 0.0]
    assert warnings(caplog) == []
    rows = sum(len(step["keys"]) for step in recorded.trained)
    assert f"shadow: all {rows} rows of 3 steps are identical" in shadowed.rollout_skip.summary()


@pytest.mark.usefixtures("broken_sync")
def test_a_broken_weight_sync_is_found_in_the_first_step_after_an_update(
    after_recording: Trainings, recorded: Any, caplog: pytest.LogCaptureFixture
) -> None:
    shadowed = after_recording.train("shadow")
    assert shadowed.trained == recorded.trained
    ratios = shadow_metric(shadowed, "match_ratio")
    assert ratios[0] == 1.0
    assert max(ratios[1:]) < 1.0
    (warning,) = warnings(caplog)
    assert "step 2, generation batch 0" in warning
    assert "The most likely cause is the weight sync" in warning
    assert "differs from token 0 on" in warning
    assert "generated '" in warning, "the rows are not shown as text"
    assert shadowed.left_over == []


@pytest.mark.usefixtures("broken_sync")
def test_a_broken_weight_sync_stops_a_training_that_requires_a_match(after_recording: Trainings) -> None:
    with pytest.raises(ShadowError, match=r"step 2, generation batch 0: \d+ of \d+ generated rows differ"):
        after_recording.train("shadow", "+rollout_skip.shadow_min_match=1")


def test_a_correct_engine_passes_the_strictest_limit(after_recording: Trainings) -> None:
    assert hits(after_recording.train("shadow", "+rollout_skip.shadow_min_match=1")) == STEPS


def test_rows_that_only_one_side_has_count_as_different(
    after_recording: Trainings, recorded: Any, caplog: pytest.LogCaptureFixture
) -> None:
    shadowed = after_recording.train("shadow", engine=FewerOutputs())
    assert shadowed.trained == recorded.trained
    ratios, rows = shadow_metric(shadowed, "match_ratio"), shadow_metric(shadowed, "rows")
    missing = sum(index != "0" for _, _, index in recorded.trained[1]["keys"])
    assert missing > 0
    assert ratios[1] == pytest.approx(1 - missing / rows[1])
    assert "was not generated" in warnings(caplog)[0]


def test_filtered_groups_are_generated_with_their_refills_and_the_common_prompts_compared(trainings: Trainings) -> None:
    recorded = trainings.train("record", *FILTER)
    assert len(recorded.engine.prompts) > 3 * PROMPTS, "no step drew more prompts than it trained on"
    shadowed = trainings.train("shadow", *FILTER)
    assert shadowed.trained == recorded.trained
    assert results(shadowed) == results(recorded)
    assert shadowed.left_over == []
    assert shadow_metric(shadowed, "match_ratio") == [1.0, 1.0, 1.0]
    assert min(shadow_metric(shadowed, "rows")) > 0


class MoreFiltered(Engine):
    """Fewer groups have answers of different quality, so a step draws more prompts than the recorded one."""

    def _reward(self, rng: Any, session: int) -> float:
        return float(rng.random() < 0.08)


class Unfiltered(Engine):
    """Every group has good and bad answers, so a step draws fewer prompts than the recorded one."""

    def _reward(self, rng: Any, session: int) -> float:
        return float(session % 2)


@pytest.mark.parametrize("engine", [MoreFiltered, Unfiltered])
def test_an_engine_that_draws_other_refills_does_not_move_the_dataloader(
    trainings: Trainings, engine: type[Engine]
) -> None:
    recorded = trainings.train("record", *FILTER)
    shadowed = trainings.train("shadow", *FILTER, engine=engine())
    assert len(shadowed.engine.prompts) != len(recorded.engine.prompts)
    assert shadowed.trained == recorded.trained
    assert shadowed.left_over == []


def test_with_recorded_prompts_the_engine_gets_the_recorded_ones(after_recording: Trainings, recorded: Any) -> None:
    settings = ("data.seed=2", "+rollout_skip.on_mismatch=reuse", "+rollout_skip.prompts=recorded")
    shadowed = after_recording.train("shadow", *settings)
    assert shadowed.trained == recorded.trained
    assert set(shadowed.engine.asked(0)) >= {int(index) for index in recorded.trained[0]["index"]}
    assert shadow_metric(shadowed, "match_ratio") == [1.0, 1.0, 1.0]


def test_scores_of_a_colocated_reward_model_are_computed_for_the_recorded_rows(trainings: Trainings) -> None:
    recorded = trainings.train("record", engine=Engine(Rewards.BY_LOOP))
    shadowed = trainings.train("shadow", engine=Engine(Rewards.BY_LOOP))
    assert shadowed.trained == recorded.trained
    assert shadow_metric(shadowed, "match_ratio") == [1.0, 1.0, 1.0]


def test_checkpoints_of_a_shadow_training_resume_at_the_right_prompt(trainings: Trainings) -> None:
    longer = (*FILTER, "trainer.total_training_steps=4")
    trainings.train("record", *FILTER)
    unskipped = trainings.train(None, *longer, kind=PlainTrainer)
    trainings.train("shadow", *FILTER, "trainer.save_freq=3", engine=MoreFiltered())
    resumed = trainings.train(
        None,
        *longer,
        "trainer.resume_mode=resume_path",
        f"trainer.resume_from_path={trainings.folder}/checkpoints/global_step_3",
        kind=PlainTrainer,
    )
    assert resumed.engine.prompts == unskipped.engine.asked(3)


def test_only_the_selected_steps_are_compared_and_the_others_generated(
    after_recording: Trainings, recorded: Any
) -> None:
    shadowed = after_recording.train("shadow", "+rollout_skip.steps=[1,3]")
    assert hits(shadowed) == [1, 3]
    assert "rollout_skip/shadow/rows" not in shadowed.logged[2]
    assert shadowed.trained[2] == recorded.trained[2]


def test_a_step_that_is_not_recorded_is_rejected_before_the_training_starts(after_recording: Trainings) -> None:
    RolloutStore(after_recording.variant()).delete(RolloutKey(2))
    with pytest.raises(EntryNotFoundError, match=r"steps 1 to 3, but 2 is not recorded"):
        after_recording.train("shadow")


@pytest.mark.parametrize("kind", KINDS)
def test_asynchronous_trainers_are_rejected_with_the_reason(trainings: Trainings, kind: str) -> None:
    trainer, settings = KINDS[kind]
    trainings.train("record", *settings, kind=trainer)
    with pytest.raises(ConfigError, match=r"mode is 'shadow', but an asynchronous training generates ahead"):
        trainings.train("shadow", *settings, kind=trainer)
