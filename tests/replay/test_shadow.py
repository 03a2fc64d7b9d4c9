"""Mode shadow: the engine generates every step, which is compared with the recording; the recording is trained on."""

from __future__ import annotations

import copy
import logging
from pathlib import Path
from typing import Any

import pytest
import torch
from verl import DataProto

from tests.batches import assert_same_batch
from tests.trainings import ROWS, Engine, Training, contents, inputs_of, without_timings
from verl_rollout_skip import RolloutKey, RolloutStore
from verl_rollout_skip.errors import ShadowError
from verl_rollout_skip.replay.results import Rollout

STEPS = [RolloutKey(1), RolloutKey(2), RolloutKey(3)]


@pytest.fixture
def training(tmp_path: Path) -> Training:
    return Training(tmp_path)


class Repeating:
    """An engine that generates what is recorded; ``change`` may change it, given the step and the batch."""

    def __init__(self, training: Training, change: Any = None) -> None:
        (variant,) = training.variants()
        self._store, self._change = RolloutStore(variant), change
        self.inputs: list[DataProto] = []

    def __call__(self, inputs: DataProto) -> DataProto:
        self.inputs.append(inputs)
        step = inputs.meta_info["global_steps"]
        batch = copy.deepcopy(self._store.get(RolloutKey(step)))
        batch.meta_info["timing"] = {"agent_loop/generate_sequences/mean": 7.0}
        if self._change is not None:
            self._change(step, batch)
        return batch


def recorded(training: Training) -> dict[RolloutKey, DataProto]:
    training.record(*STEPS)
    (variant,) = training.variants()
    return {key: RolloutStore(variant).get(key) for key in STEPS}


def follow(
    training: Training, engine: Any, skip: dict[str, Any] | None = None, **changes: Any
) -> tuple[list[Rollout], str]:
    """The rollouts of a training in mode shadow, and its summary."""
    with training.open("shadow", skip, **changes) as shadow:
        rollouts = [shadow.step(key, inputs_of(key), engine) for key in STEPS]
        return rollouts, shadow.summary()


def warnings(caplog: pytest.LogCaptureFixture) -> list[str]:
    return [text for text in caplog.messages if "differ from the recording" in text]


def length_of(batch: DataProto, row: int) -> int:
    return int(batch.batch["response_mask"][row].sum())


def longest(batch: DataProto) -> int:
    return int(batch.batch["response_mask"].sum(-1).argmax())


def replace_token(batch: DataProto, row: int, position: int, token: int = 7) -> None:
    batch.batch["responses"][row, position] = token


def test_an_engine_that_repeats_the_recording_matches_in_every_row(
    training: Training, caplog: pytest.LogCaptureFixture
) -> None:
    batches = recorded(training)
    before = contents(training.dumps)
    engine = Repeating(training)
    with caplog.at_level(logging.WARNING):
        rollouts, summary = follow(training, engine)
    for key, rollout in zip(STEPS, rollouts, strict=True):
        assert rollout.hit
        assert_same_batch(without_timings(batches[key]), without_timings(rollout.batch))
        assert rollout.metrics["rollout_skip/shadow/match_ratio"] == 1.0
        assert rollout.metrics["rollout_skip/shadow/rows"] == ROWS
        assert rollout.metrics["rollout_skip/shadow/log_prob_diff/max"] == 0.0
        assert "rollout_skip/shadow/first_difference/min" not in rollout.metrics
        assert rollout.metrics["rollout_skip/saved_s"] == 0.0
    assert len(engine.inputs) == len(STEPS)
    assert warnings(caplog) == []
    assert f"all {3 * ROWS} rows of 3 steps are identical to the recording" in summary
    assert "differ by at most 0" in summary
    assert contents(training.dumps) == before, "shadow writes nothing"


def test_the_timings_of_the_generation_are_logged_with_the_metrics(training: Training) -> None:
    recorded(training)
    rollouts, _ = follow(training, Repeating(training))
    timing = rollouts[0].batch.meta_info["timing"]
    assert timing["agent_loop/generate_sequences/mean"] == 7.0
    assert timing["rollout_skip/shadow/match_ratio"] == 1.0
    assert timing["rollout_skip/hit"] == 1.0


def test_a_changed_token_is_one_warning_with_the_row_the_text_and_the_likely_cause(
    training: Training, caplog: pytest.LogCaptureFixture
) -> None:
    batches = recorded(training)
    row = longest(batches[RolloutKey(2)])

    def change(step: int, batch: DataProto) -> None:
        if step > 1:
            replace_token(batch, row, 2)

    with caplog.at_level(logging.WARNING), training.open("shadow") as shadow:
        assert shadow.shadow is not None
        shadow.shadow.show_text(lambda tokens: " ".join(f"<{token}>" for token in tokens))
        rollouts = [shadow.step(key, inputs_of(key), Repeating(training, change)) for key in STEPS]
        summary = shadow.summary()
    (message,) = warnings(caplog)
    tokens = batches[RolloutKey(2)].batch["responses"][row].tolist()
    assert message.startswith(f"step 2, generation batch 0: 1 of {ROWS} generated rows differ from the recording.")
    assert "The steps before it match" in message
    assert "The most likely cause is the weight sync" in message
    assert f"row {row} differs from token 2 on" in message
    assert f"recorded  '<{tokens[0]}> <{tokens[1]}>' then '<{tokens[2]}>" in message
    assert f"generated '<{tokens[0]}> <{tokens[1]}>' then '<7>" in message
    assert_same_batch(without_timings(batches[RolloutKey(2)]), without_timings(rollouts[1].batch))
    metrics = rollouts[1].metrics
    assert metrics["rollout_skip/shadow/match_ratio"] == (ROWS - 1) / ROWS
    assert metrics["rollout_skip/shadow/first_difference/min"] == 2.0
    assert metrics["rollout_skip/shadow/first_difference/mean"] == 2.0
    assert f"{3 * ROWS - 2} of {3 * ROWS} rows are identical to the recording" in summary
    assert "1 of 3 steps match completely, step 2 is the first that does not" in summary


def test_tokens_that_cannot_be_decoded_do_not_end_the_training(
    training: Training, caplog: pytest.LogCaptureFixture
) -> None:
    def decode(tokens: list[int]) -> str:
        raise OverflowError("out of range integral type conversion attempted")

    training.record(RolloutKey(1))
    with caplog.at_level(logging.WARNING), training.open("shadow") as shadow:
        assert shadow.shadow is not None
        shadow.shadow.show_text(decode)
        assert shadow.step(RolloutKey(1), inputs_of(RolloutKey(1)), Engine(seed=1)).hit
    (message,) = warnings(caplog)
    assert "(they cannot be decoded)" in message


def test_a_difference_in_the_first_step_points_at_the_engine_and_not_at_the_weight_sync(
    training: Training, caplog: pytest.LogCaptureFixture
) -> None:
    recorded(training)
    with caplog.at_level(logging.WARNING):
        rollouts, summary = follow(training, Engine(seed=1))
    (message,) = warnings(caplog)
    assert "It is the first step, before any update" in message
    assert "(1) an engine that is not deterministic" in message
    assert "… and" in message
    assert rollouts[0].metrics["rollout_skip/shadow/match_ratio"] < 0.5
    assert "0 of 3 steps match completely, step 1 is the first" in summary


def test_another_learning_rate_explains_why_the_engine_generates_something_else(
    training: Training, caplog: pytest.LogCaptureFixture
) -> None:
    recorded(training)

    def change(step: int, batch: DataProto) -> None:
        if step == 2:
            replace_token(batch, 0, 0)

    with caplog.at_level(logging.WARNING):
        rollouts, _ = follow(training, Repeating(training, change), actor_rollout_ref__actor__optim__lr=1e-3)
    (message,) = warnings(caplog)
    assert "If its weights differ too, the engine has to generate something else. If they do not: " in message
    assert "actor_rollout_ref.actor.optim.lr: 0.000001 → 0.001" in message or "lr: 1e-06 → 0.001" in message
    assert [rollout.metrics["rollout_skip/off_policy"] for rollout in rollouts] == [0.0, 1.0, 1.0]


def test_a_response_that_ends_earlier_differs_where_it_ends(training: Training) -> None:
    batches = recorded(training)
    row = longest(batches[RolloutKey(1)])
    length = length_of(batches[RolloutKey(1)], row)

    def shorten(step: int, batch: DataProto) -> None:
        batch.batch["attention_mask"][row, -(10 - length) - 1 if length < 10 else -1] = 0

    rollouts, _ = follow(training, Repeating(training, lambda step, batch: step == 1 and shorten(step, batch)))
    assert rollouts[0].metrics["rollout_skip/shadow/first_difference/min"] == length - 1


def test_log_probs_are_reported_in_front_of_the_first_difference_and_do_not_decide(training: Training) -> None:
    batches = recorded(training)
    row = longest(batches[RolloutKey(1)])

    def change(step: int, batch: DataProto) -> None:
        batch.batch["rollout_log_probs"][row, 0] += 0.25
        if step == 2:
            batch.batch["rollout_log_probs"][row, 1:] += 1000
            replace_token(batch, row, 1)

    rollouts, summary = follow(training, Repeating(training, change))
    assert rollouts[0].metrics["rollout_skip/shadow/match_ratio"] == 1.0
    assert rollouts[0].metrics["rollout_skip/shadow/log_prob_diff/max"] == pytest.approx(0.25, abs=1e-6)
    tokens = int(batches[RolloutKey(1)].batch["response_mask"].sum())
    mean = rollouts[0].metrics["rollout_skip/shadow/log_prob_diff/mean"]
    assert mean == pytest.approx(0.25 / tokens, rel=1e-4)
    assert rollouts[1].metrics["rollout_skip/shadow/log_prob_diff/max"] == pytest.approx(0.25, abs=1e-6)
    assert "differ by at most 0.25" in summary


def test_equal_infinities_are_equal_and_a_nan_on_one_side_is_an_infinite_difference(training: Training) -> None:
    training.record(RolloutKey(1))

    def change(step: int, batch: DataProto) -> None:
        batch.batch["rollout_log_probs"][0, 0] = torch.nan

    with training.open("shadow") as shadow:
        rollout = shadow.step(RolloutKey(1), inputs_of(RolloutKey(1)), Repeating(training, change))
    assert rollout.metrics["rollout_skip/shadow/log_prob_diff/max"] == float("inf")
    assert rollout.metrics["rollout_skip/shadow/match_ratio"] == 1.0


def test_an_engine_without_log_probs_is_compared_by_tokens_only(training: Training) -> None:
    recorded(training)
    rollouts, summary = follow(training, Repeating(training, lambda _, batch: batch.batch.pop("rollout_log_probs")))
    assert rollouts[0].metrics["rollout_skip/shadow/match_ratio"] == 1.0
    assert not any("log_prob" in name for name in rollouts[0].metrics)
    assert "log-probs" not in summary


def test_too_few_identical_rows_stop_the_training_before_it_trains_on_them(training: Training) -> None:
    recorded(training)

    def change(step: int, batch: DataProto) -> None:
        if step == 2:
            for row in range(3):
                replace_token(batch, row, 0)

    ratio = (ROWS - 3) / ROWS
    follow(training, Repeating(training, change), {"shadow_min_match": ratio})
    with pytest.raises(ShadowError) as caught:
        follow(training, Repeating(training, change), {"shadow_min_match": ratio + 0.01})
    message = str(caught.value)
    assert message.startswith(f"step 2, generation batch 0: 3 of {ROWS} generated rows differ from the recording.")
    assert f"The match ratio {ratio:.4g} is below rollout_skip.shadow_min_match={ratio + 0.01:g}" in message
    assert "the weight sync" in message
    assert "row 0 differs from token 0 on" in message
    assert "lower rollout_skip.shadow_min_match" in message


def test_several_generation_batches_of_a_step_are_counted_together(training: Training) -> None:
    keys = [RolloutKey(1, 0), RolloutKey(1, 1)]
    training.record(*keys)
    (variant,) = training.variants()
    store = RolloutStore(variant)
    with training.open("shadow") as shadow:
        first = shadow.step(keys[0], inputs_of(keys[0]), lambda _: copy.deepcopy(store.get(keys[0])))
        second = shadow.step(keys[1], inputs_of(keys[1]), Engine(seed=5))
    assert first.metrics["rollout_skip/shadow/match_ratio"] == 1.0
    assert second.metrics["rollout_skip/shadow/rows"] == 2 * ROWS
    assert 0.5 <= second.metrics["rollout_skip/shadow/match_ratio"] < 1.0


def test_with_recorded_prompts_the_engine_gets_the_recorded_ones(training: Training) -> None:
    training.record(RolloutKey(1))
    engine = Repeating(training)
    other = inputs_of(RolloutKey(7))
    other.meta_info["global_steps"] = 1
    with training.open("shadow", {"prompts": "recorded"}) as shadow:
        rollout = shadow.step(RolloutKey(1), other, engine)
    assert engine.inputs[0].non_tensor_batch["raw_prompt"].tolist() == (
        inputs_of(RolloutKey(1)).non_tensor_batch["raw_prompt"].tolist()
    )
    assert rollout.metrics["rollout_skip/shadow/match_ratio"] == 1.0


def test_steps_that_are_not_selected_are_generated_and_trained_on(training: Training) -> None:
    recorded(training)
    engine = Engine()
    with training.open("shadow", {"steps": [1, 2]}) as shadow:
        rollout = shadow.step(STEPS[2], inputs_of(STEPS[2]), engine)
    assert not rollout.hit
    assert rollout.batch is engine.last
