"""A hit is on-policy only if the training has learned from the same rollouts as the recorded one."""

from __future__ import annotations

import logging
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from tensordict import NonTensorData, NonTensorStack, TensorDict

from tests.batches import rollout_output
from tests.trainings import Engine, Training, inputs_of, never, unreachable
from verl_rollout_skip import RolloutKey, RolloutStore
from verl_rollout_skip.errors import DumpError
from verl_rollout_skip.replay.lineage import LINEAGE, ROLLOUT_DIGEST, proof_of, rollout_digest

STEPS = [RolloutKey(step) for step in range(1, 5)]
REPORTED = "was recorded after different rollouts than this training has learned from"
SCORED_AGAIN = "are scored again with a different reward"


@pytest.fixture
def training(tmp_path: Path) -> Training:
    """A training with four recorded steps; ``answers`` generates the same responses again."""
    made = Training(tmp_path)
    with made.open("record") as recording:
        for key in STEPS:
            recording.step(key, inputs_of(key), answers(key))
    return made


def answers(key: RolloutKey) -> Engine:
    """An engine that generates the same responses for a step each time."""
    return Engine(seed=10 * key.step)


def off_policy(
    training: Training,
    keys: list[RolloutKey],
    generate: Callable[[RolloutKey], Any] = lambda _: never,
    mode: str = "cache",
    skip: dict[str, Any] | None = None,
    **changes: Any,
) -> list[float | None]:
    """The metric of each step; None if it was generated."""
    with training.open(mode, skip, **changes) as run:
        rollouts = [run.step(key, inputs_of(key), generate(key)) for key in keys]
    return [rollout.metrics.get("rollout_skip/off_policy") for rollout in rollouts]


def forget(training: Training, key: RolloutKey) -> None:
    RolloutStore(training.variants()[0]).delete(key)


def test_the_same_training_again_is_on_policy_throughout(training: Training, caplog: pytest.LogCaptureFixture) -> None:
    assert off_policy(training, STEPS) == [0, 0, 0, 0]
    assert REPORTED not in caplog.text


def test_a_step_with_different_responses_makes_later_hits_off_policy_and_is_reported_once(
    training: Training, caplog: pytest.LogCaptureFixture
) -> None:
    forget(training, STEPS[1])
    with caplog.at_level(logging.WARNING):
        assert off_policy(training, STEPS, lambda _: Engine(seed=999)) == [0, None, 1, 1]
    assert caplog.text.count(REPORTED) == 1
    assert "step 3, generation batch 0 was recorded after different rollouts" in caplog.text


def test_a_step_with_the_same_responses_as_before_keeps_later_hits_on_policy(training: Training) -> None:
    forget(training, STEPS[1])
    assert off_policy(training, STEPS, answers) == [0, None, 0, 0]


def test_a_mixture_of_two_trainings_on_disk_is_not_mistaken_for_one_training(training: Training) -> None:
    forget(training, STEPS[1])
    off_policy(training, STEPS, lambda _: Engine(seed=999))
    assert off_policy(training, STEPS) == [0, 0, 1, 1], "step 3 still belongs to the step 2 that is gone"


def test_different_rewards_for_the_same_tokens_make_later_hits_off_policy(training: Training) -> None:
    def other_rewards(key: RolloutKey) -> Callable[[Any], Any]:
        def generate(inputs: Any) -> Any:
            batch = answers(key)(inputs)
            batch.batch["rm_scores"] += 1
            return batch

        return generate

    forget(training, STEPS[0])
    assert off_policy(training, STEPS[:2], other_rewards) == [None, 1]


def test_steps_that_are_not_selected_count_too(training: Training) -> None:
    skip = {"steps": [1, 3]}
    assert off_policy(training, STEPS[:3], answers, skip=skip) == [0, None, 0]
    assert off_policy(training, STEPS[:3], lambda _: Engine(seed=999), skip=skip) == [0, None, 1]


def test_a_training_that_starts_from_a_checkpoint_adopts_the_recorded_lineage(training: Training) -> None:
    assert off_policy(training, STEPS[2:]) == [0, 0]
    forget(training, STEPS[2])
    assert off_policy(training, STEPS[2:], answers) == [None, 0]
    forget(training, STEPS[2])
    assert off_policy(training, STEPS[2:], lambda _: Engine(seed=999)) == [None, 1]


def test_resuming_while_the_store_is_unreachable_leaves_the_lineage_unknown_and_the_log_says_so(
    training: Training, caplog: pytest.LogCaptureFixture
) -> None:
    for mode in ("cache", "refresh"):
        caplog.clear()
        with training.open(mode) as run:
            with unreachable(training.variants()[0]):
                assert not run.step(STEPS[2], inputs_of(STEPS[2]), answers(STEPS[2])).hit
            rollout = run.step(STEPS[3], inputs_of(STEPS[3]), answers(STEPS[3]))
        assert rollout.metrics.get("rollout_skip/off_policy") == (0 if mode == "cache" else None)
        assert caplog.text.count("is unknown what this training learned from before step 3, because") == 1
        assert "Too many levels of symbolic links" in caplog.text
        assert run.statistics.dump_failures > 0, "the dump of step 3 fails too"


@pytest.mark.parametrize(
    ("mode", "skip"),
    [("refresh", {"on_dump_error": "fail"}), ("replay", {"steps": [4], "engine": "on"})],
    ids=["failed dumps stop the training", "only loads"],
)
def test_resuming_while_the_store_is_unreachable_stops_a_training_that_needs_it(
    training: Training, mode: str, skip: dict[str, Any]
) -> None:
    with training.open(mode, skip) as run, unreachable(training.variants()[0]):
        with pytest.raises(OSError, match="Too many levels of symbolic links"):
            run.step(STEPS[2], inputs_of(STEPS[2]), answers(STEPS[2]))


def test_repeated_steps_are_off_policy(training: Training) -> None:
    keys = [RolloutKey(step) for step in range(1, 7)]
    assert off_policy(training, keys, mode="repeat") == [0, 0, 0, 0, 1, 1]


def test_generation_batches_of_a_step_have_the_same_lineage(tmp_path: Path) -> None:
    training = Training(tmp_path)
    keys = [RolloutKey(1), RolloutKey(2, 0), RolloutKey(2, 1), RolloutKey(3)]
    with training.open("record") as recording:
        for key in keys:
            recording.step(key, inputs_of(key), answers(key))
    forget(training, keys[1])
    assert off_policy(training, keys, lambda _: Engine(seed=999)) == [0, None, 0, 1]


def test_a_different_reward_function_makes_recomputed_rollouts_off_policy_and_the_log_says_so(
    training: Training, caplog: pytest.LogCaptureFixture
) -> None:
    (training.folder / "inputs" / "reward.py").write_text("v2")
    with caplog.at_level(logging.WARNING):
        assert off_policy(training, STEPS, skip={"reward": "recompute"}) == [0, 1, 1, 1]
    assert SCORED_AGAIN in caplog.text
    assert "reward.custom_reward_function.path" in caplog.text


@pytest.mark.parametrize("is_own", [True, False], ids=["own variant", "another recording"])
def test_the_same_reward_function_computed_again_changes_nothing(
    training: Training, caplog: pytest.LogCaptureFixture, is_own: bool
) -> None:
    other = {} if is_own else {"source": str(training.variants()[0]), "dump_dir": str(training.folder / "elsewhere")}
    with caplog.at_level(logging.WARNING):
        assert off_policy(training, STEPS, skip={"reward": "recompute", **other}) == [0, 0, 0, 0]
    assert SCORED_AGAIN not in caplog.text


def test_entries_without_a_lineage_do_not_count_as_off_policy(training: Training) -> None:
    store = RolloutStore(training.variants()[0])
    entry = store.load(STEPS[1])
    info = {name: value for name, value in entry.record.info.items() if name not in (ROLLOUT_DIGEST, LINEAGE)}
    store.put(STEPS[1], entry.batch(), inputs=entry.inputs(), info=info, replace=True)
    store.close()
    assert off_policy(training, STEPS) == [0, 0, 0, 0]


def test_a_digest_depends_on_values_types_and_order() -> None:
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
    assert len({rollout_digest(batch) for batch in batches}) == len(batches)
    assert rollout_digest(batches[0]) == rollout_digest(TensorDict({"responses": responses.clone()}, batch_size=[3]))


def test_rewards_that_only_some_rows_have_are_digested_with_their_rows() -> None:
    def rollout(*rewards: torch.Tensor | None) -> TensorDict:
        column = NonTensorStack.from_list([NonTensorData(reward) for reward in rewards])
        return TensorDict({"responses": torch.arange(3), "rm_scores": column}, batch_size=[3])

    one, other = torch.ones(2), torch.zeros(1)
    same = rollout_digest(rollout(one, None, other))
    assert rollout_digest(rollout(one.clone(), None, other)) == same
    assert len({same, rollout_digest(rollout(one, other, None)), rollout_digest(rollout(other, None, one))}) == 3


def test_an_unchanged_rollout_passes_its_proof_regardless_of_shape(tmp_path: Path) -> None:
    """Padded, jagged, and with rewards for only some rows, as in V1."""
    jagged = torch.nested.nested_tensor_from_jagged(torch.arange(9), torch.tensor([0, 2, 9]))
    some = NonTensorStack.from_list([NonTensorData(None), NonTensorData(torch.tensor([0.0, 1.0]))])
    batches = [
        rollout_output(4),
        TensorDict({"responses": jagged, "rm_scores": jagged * 0.5}, batch_size=[2]),
        TensorDict({"responses": jagged, "rm_scores": some}, batch_size=[2]),
    ]
    with RolloutStore(tmp_path) as store:
        for step, batch in enumerate(batches):
            store.put(RolloutKey(step), batch, proof=proof_of(rollout_digest(batch)))
        store.flush()
        store.put(RolloutKey(9), batches[0], proof=proof_of(rollout_digest(batches[1])))
        with pytest.raises(DumpError, match="responses or rm_scores"):
            store.flush()
        assert len(store) == 3
