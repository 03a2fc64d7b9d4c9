"""Dynamic sampling in V1 (``algorithm.filter_groups``): a step may draw more prompts than it trains on."""

from __future__ import annotations

import random
from typing import Any

import pandas
import pytest

from tests.trainers.v1.training import PROMPTS, Engine, PlainTrainer, Trainings, hits, results
from verl_rollout_skip import RolloutKey, RolloutStore
from verl_rollout_skip.errors import ConfigError

pytestmark = pytest.mark.usefixtures("queue")

RECORDED_WITH = FILTER = ("algorithm.filter_groups.enable=True", "algorithm.filter_groups.metric=acc")
EVICTED = "training/filter_groups/evicted_samples"


@pytest.mark.parametrize("mode", ["cache", "replay"])
def test_kept_groups_refills_and_evictions_are_loaded_as_recorded(
    after_recording: Trainings, recorded: Any, mode: str
) -> None:
    again = after_recording.train(mode, *FILTER)
    assert again.trained == recorded.trained
    assert results(again) == results(recorded)
    assert sum(metrics.get(EVICTED, 0) for metrics in results(again).values()) > 0
    assert again.engine.prompts == []
    assert again.left_over == recorded.left_over == []


def test_after_loaded_steps_the_dataloader_has_the_state_that_it_would_have_had(
    after_recording: Trainings, recorded: Any
) -> None:
    longer = (*FILTER, "trainer.total_training_steps=5")
    unskipped = after_recording.train(None, *longer, kind=PlainTrainer)
    assert len(recorded.engine.prompts) > 3 * PROMPTS, "no step drew more prompts than it trained on"
    RolloutStore(after_recording.variant()).delete(RolloutKey(2))
    partial = after_recording.train("cache", *longer)
    assert hits(partial) == [1, 3]
    for version in (1, 3, 4):
        assert partial.engine.asked(version) == unskipped.engine.asked(version)
    assert partial.engine.prompts == [prompt for version in (1, 3, 4) for prompt in unskipped.engine.asked(version)]


def test_checkpoints_of_loaded_steps_resume_at_the_right_prompt(after_recording: Trainings) -> None:
    longer = (*FILTER, "trainer.total_training_steps=4")
    unskipped = after_recording.train(None, *longer, kind=PlainTrainer)
    after_recording.train("cache", *FILTER, "trainer.save_freq=1")
    resumed = after_recording.train(
        None,
        *longer,
        "trainer.resume_mode=resume_path",
        f"trainer.resume_from_path={after_recording.folder}/checkpoints/global_step_3",
        kind=PlainTrainer,
    )
    assert resumed.engine.prompts == unskipped.engine.asked(3)


class Mixed(Engine):
    """Every group has good and bad answers, so none is filtered."""

    def _reward(self, rng: random.Random, session: int) -> float:
        return float(session % 2)


def change(trainings: Trainings, prompt: int) -> None:
    file = trainings.folder / "inputs" / "train.parquet"
    rows = pandas.read_parquet(file)
    rows.at[prompt, "data_source"] = "subtraction"
    rows.to_parquet(file)


def test_prompts_that_were_drawn_ahead_and_put_back_are_not_lost_with_a_checkpoint(
    after_recording: Trainings, recorded: Any
) -> None:
    drawn, kept = recorded.engine.asked(0), {int(index) for index in recorded.trained[0]["index"]}
    change(after_recording, next(prompt for prompt in reversed(drawn) if prompt not in kept))
    two_steps = (*FILTER, "trainer.total_training_steps=2", "+rollout_skip.on_mismatch=reuse")
    unskipped = after_recording.train(None, *two_steps[:-1], kind=PlainTrainer, engine=Mixed())
    one_step = (*FILTER, "trainer.total_training_steps=1", "+rollout_skip.on_mismatch=reuse", "trainer.save_freq=1")
    saved = after_recording.train("cache", *one_step, engine=Mixed())
    assert hits(saved) == []
    assert len(saved.engine.prompts) == PROMPTS < len(drawn), "no prompts drawn ahead are left"
    resumed = after_recording.train(
        None,
        *two_steps[:-1],
        "trainer.resume_mode=resume_path",
        f"trainer.resume_from_path={after_recording.folder}/checkpoints/global_step_1",
        kind=PlainTrainer,
        engine=Mixed(),
    )
    assert resumed.engine.prompts == unskipped.engine.asked(1)


def test_nothing_is_drawn_ahead_if_the_first_prompts_have_changed(
    after_recording: Trainings, recorded: Any, caplog: pytest.LogCaptureFixture
) -> None:
    drawn, kept = recorded.engine.asked(0), {int(index) for index in recorded.trained[0]["index"]}
    first = next(prompt for prompt in drawn[:PROMPTS] if prompt in kept)
    change(after_recording, first)
    settings = (*FILTER, "trainer.total_training_steps=1", "+rollout_skip.on_mismatch=reuse")
    again = after_recording.train("cache", *settings, engine=Mixed())
    assert hits(again) == []
    assert again._push_back.next() is None
    assert (
        f"prompt {drawn.index(first)} of the {len(drawn)} that its step drew from the data has changed" in caplog.text
    )
    assert "current  subtraction" in caplog.text or 'current  "subtraction"' in caplog.text


def test_a_changed_prompt_that_was_dropped_is_a_miss_and_no_prompt_is_lost(
    after_recording: Trainings, recorded: Any, caplog: pytest.LogCaptureFixture
) -> None:
    drawn = recorded.engine.asked(0)
    kept = {int(index) for index in recorded.trained[0]["index"]}
    dropped = next(prompt for prompt in reversed(drawn) if prompt not in kept)
    assert drawn.index(dropped) >= PROMPTS, "none of the refills was dropped"
    change(after_recording, dropped)
    settings = (*FILTER, "trainer.total_training_steps=2")
    unskipped = after_recording.train(None, *settings, kind=PlainTrainer)
    again = after_recording.train("cache", *settings, "+rollout_skip.on_mismatch=reuse")
    assert hits(again) == [2]
    assert again.engine.prompts == unskipped.engine.asked(0)
    number = drawn.index(dropped)
    assert (
        f"prompt {number} of the {len(drawn)} that its step drew from the data, which it did not train on, has changed"
        in caplog.text
    )


def test_rewards_cannot_be_recomputed_if_they_selected_the_groups(after_recording: Trainings) -> None:
    with pytest.raises(ConfigError, match="might have kept others"):
        after_recording.train("cache", *FILTER, "+rollout_skip.reward=recompute")
