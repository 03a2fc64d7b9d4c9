"""A hit is on-policy only if the training has learned from what the recorded one had learned from by then."""

from __future__ import annotations

import logging
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from tensordict import NonTensorData, NonTensorStack, TensorDict

from tests.batches import rollout_output
from tests.trainings import Engine, Training, inputs_of, never
from verl_rollout_skip import RolloutKey, RolloutStore
from verl_rollout_skip.errors import DumpError
from verl_rollout_skip.history import HISTORY, IDENTITY, identity_of, proof_of

STEPS = [RolloutKey(step) for step in range(1, 5)]
TOLD = "was recorded after other rollouts than this training has learned from"


@pytest.fixture
def training(tmp_path: Path) -> Training:
    """Four recorded steps; ``answers`` gives what was generated in each."""
    made = Training(tmp_path)
    with made.open("record") as recording:
        for key in STEPS:
            recording.step(key, inputs_of(key), answers(key))
    return made


def answers(key: RolloutKey) -> Engine:
    """An engine that answers the prompts of a step in the same way each time."""
    return Engine(seed=10 * key.step)


def off_policy(
    training: Training,
    keys: list[RolloutKey],
    generate: Callable[[RolloutKey], Any] = lambda _: never,
    mode: str = "cache",
    skip: dict[str, Any] | None = None,
    **changes: Any,
) -> list[float | None]:
    """The metric of each step; None for one that was generated."""
    with training.open(mode, skip, **changes) as run:
        rollouts = [run.step(key, inputs_of(key), generate(key)) for key in keys]
    return [rollout.metrics.get("rollout_skip/off_policy") for rollout in rollouts]


def forget(training: Training, key: RolloutKey) -> None:
    RolloutStore(training.variants()[0]).delete(key)


def test_the_same_training_again_is_on_policy_throughout(training: Training, caplog: pytest.LogCaptureFixture) -> None:
    assert off_policy(training, STEPS) == [0, 0, 0, 0]
    assert TOLD not in caplog.text


def test_a_step_that_is_answered_differently_makes_the_following_ones_off_policy_and_it_is_told_once(
    training: Training, caplog: pytest.LogCaptureFixture
) -> None:
    forget(training, STEPS[1])
    with caplog.at_level(logging.WARNING):
        assert off_policy(training, STEPS, lambda _: Engine(seed=999)) == [0, None, 1, 1]
    assert caplog.text.count(TOLD) == 1
    assert "step 3, generation batch 0 was recorded after other rollouts" in caplog.text


def test_a_step_that_is_answered_as_before_changes_nothing(training: Training) -> None:
    forget(training, STEPS[1])
    assert off_policy(training, STEPS, answers) == [0, None, 0, 0]


def test_the_mixture_that_this_leaves_on_disk_is_not_taken_for_one_training(training: Training) -> None:
    forget(training, STEPS[1])
    off_policy(training, STEPS, lambda _: Engine(seed=999))
    assert off_policy(training, STEPS) == [0, 0, 1, 1], "step 3 still belongs to the step 2 that is gone"


def test_other_rewards_for_the_same_tokens_count(training: Training) -> None:
    def other_rewards(key: RolloutKey) -> Callable[[Any], Any]:
        def generate(inputs: Any) -> Any:
            batch = answers(key)(inputs)
            batch.batch["rm_scores"] += 1
            return batch

        return generate

    forget(training, STEPS[0])
    assert off_policy(training, STEPS[:2], other_rewards) == [None, 1]


def test_steps_that_are_not_covered_count_too(training: Training) -> None:
    skip = {"steps": [1, 3]}
    assert off_policy(training, STEPS[:3], answers, skip=skip) == [0, None, 0]
    assert off_policy(training, STEPS[:3], lambda _: Engine(seed=999), skip=skip) == [0, None, 1]


def test_a_training_that_begins_with_a_checkpoint_takes_the_recorded_history_for_its_own(training: Training) -> None:
    assert off_policy(training, STEPS[2:]) == [0, 0]
    forget(training, STEPS[2])
    assert off_policy(training, STEPS[2:], answers) == [None, 0]
    forget(training, STEPS[2])
    assert off_policy(training, STEPS[2:], lambda _: Engine(seed=999)) == [None, 1]


def test_repeated_steps_are_off_policy(training: Training) -> None:
    keys = [RolloutKey(step) for step in range(1, 7)]
    assert off_policy(training, keys, mode="repeat") == [0, 0, 0, 0, 1, 1]


def test_generation_batches_of_a_step_are_made_with_the_same_weights(tmp_path: Path) -> None:
    training = Training(tmp_path)
    keys = [RolloutKey(1), RolloutKey(2, 0), RolloutKey(2, 1), RolloutKey(3)]
    with training.open("record") as recording:
        for key in keys:
            recording.step(key, inputs_of(key), answers(key))
    forget(training, keys[1])
    assert off_policy(training, keys, lambda _: Engine(seed=999)) == [0, None, 0, 1]


def test_another_reward_function_makes_recomputed_rollouts_off_policy_and_it_is_told(
    training: Training, caplog: pytest.LogCaptureFixture
) -> None:
    (training.folder / "inputs" / "reward.py").write_text("v2")
    with caplog.at_level(logging.WARNING):
        assert off_policy(training, STEPS, skip={"reward": "recompute"}) == [0, 1, 1, 1]
    assert "the reward is another one than it was recorded with" in caplog.text
    assert "reward.custom_reward_function.path" in caplog.text


def test_the_same_reward_function_computed_again_changes_nothing(
    training: Training, caplog: pytest.LogCaptureFixture
) -> None:
    assert off_policy(training, STEPS, skip={"reward": "recompute"}) == [0, 0, 0, 0]
    assert "another one than it was recorded with" not in caplog.text


def test_entries_of_which_it_is_not_known_are_not_accused(training: Training) -> None:
    store = RolloutStore(training.variants()[0])
    entry = store.load(STEPS[1])
    info = {name: value for name, value in entry.record.info.items() if name not in (IDENTITY, HISTORY)}
    store.put(STEPS[1], entry.batch(), inputs=entry.inputs(), info=info, replace=True)
    store.close()
    assert off_policy(training, STEPS) == [0, 0, 0, 0]


def test_an_identity_is_one_of_values_types_and_order() -> None:
    responses = torch.arange(12).reshape(3, 4)
    jagged = torch.nested.nested_tensor([torch.arange(2), torch.arange(3)], layout=torch.jagged)
    other = torch.nested.nested_tensor([torch.arange(3), torch.tensor([0, 1])], layout=torch.jagged)
    batches = [
        TensorDict({"responses": responses}, batch_size=[3]),
        TensorDict({"responses": responses.flip(0)}, batch_size=[3]),
        TensorDict({"responses": responses.to(torch.int32)}, batch_size=[3]),
        TensorDict({"responses": responses, "rm_scores": torch.zeros(3, 4)}, batch_size=[3]),
        TensorDict({"responses": responses, "rm_scores": torch.zeros(3, 4, dtype=torch.bfloat16)}, batch_size=[3]),
        TensorDict({"responses": jagged}, batch_size=[2]),
        TensorDict({"responses": other}, batch_size=[2]),
        TensorDict({}, batch_size=[2]),
    ]
    assert len({identity_of(batch) for batch in batches}) == len(batches)
    assert identity_of(batches[0]) == identity_of(TensorDict({"responses": responses.clone()}, batch_size=[3]))


def test_rewards_that_only_some_rows_have_count_with_the_rows_that_they_belong_to() -> None:
    def rollout(*rewards: torch.Tensor | None) -> TensorDict:
        column = NonTensorStack.from_list([NonTensorData(reward) for reward in rewards])
        return TensorDict({"responses": torch.arange(3), "rm_scores": column}, batch_size=[3])

    one, other = torch.ones(2), torch.zeros(1)
    same = identity_of(rollout(one, None, other))
    assert identity_of(rollout(one.clone(), None, other)) == same
    assert len({same, identity_of(rollout(one, other, None)), identity_of(rollout(other, None, one))}) == 3


def test_a_rollout_that_nobody_changes_is_proved_whatever_its_shape(tmp_path: Path) -> None:
    """Padded, jagged, and with rewards for some rows only, as V1's agent loops may leave them."""
    jagged = torch.nested.nested_tensor_from_jagged(torch.arange(9), torch.tensor([0, 2, 9]))
    some = NonTensorStack.from_list([NonTensorData(None), NonTensorData(torch.tensor([0.0, 1.0]))])
    batches = [
        rollout_output(4),
        TensorDict({"responses": jagged, "rm_scores": jagged * 0.5}, batch_size=[2]),
        TensorDict({"responses": jagged, "rm_scores": some}, batch_size=[2]),
    ]
    with RolloutStore(tmp_path) as store:
        for step, batch in enumerate(batches):
            store.put(RolloutKey(step), batch, proof=proof_of(identity_of(batch)))
        store.flush()
        store.put(RolloutKey(9), batches[0], proof=proof_of(identity_of(batches[1])))
        with pytest.raises(DumpError, match="responses or rm_scores"):
            store.flush()
        assert len(store) == 3
