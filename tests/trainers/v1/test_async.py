"""Asynchronous V1 trainers: recorded and replayed from the first step to the last, or not at all."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from typing import Any

import pytest
from verl.trainer.ppo.v1 import PPOTrainer, PPOTrainerSeparateAsync
from verl.trainer.ppo.v1.trainer_separate_async import HybridEngineMode

from tests.trainers.v1.training import (
    PROMPTS,
    ColocateTrainer,
    SeparateTrainer,
    Trainings,
    hits,
    results,
)
from verl_rollout_skip import RolloutKey, RolloutStore
from verl_rollout_skip.errors import ConfigError, EntryExistsError, EntryNotFoundError, MismatchError

pytestmark = pytest.mark.usefixtures("queue")

STEPS = ("trainer.total_training_steps=4",)
SEPARATE = (
    *STEPS,
    "actor_rollout_ref.hybrid_engine=False",
    "actor_rollout_ref.rollout.nnodes=1",
    "actor_rollout_ref.rollout.checkpoint_engine.backend=nccl",
    f"actor_rollout_ref.actor.ppo_mini_batch_size={PROMPTS // 2}",
    "trainer.v1.separate_async.parameter_sync_step=2",
)
KINDS = {"colocate": (ColocateTrainer, STEPS), "separate": (SeparateTrainer, SEPARATE)}

# verl 0.9.0 refills its prefetch window even though a checkpoint has restored the prompts in it.
resumes_exactly = pytest.mark.skipif(
    not hasattr(PPOTrainer, "_add_async_warmup_batches"), reason="verl 0.9.0 draws more prompts after a resume"
)
lends_gpus = pytest.mark.skipif(
    not hasattr(PPOTrainerSeparateAsync, "_wait_for_sampleable_and_switch"), reason="verl 0.9.0 lends no GPUs"
)


def prompts_left(trainer: Any) -> int:
    return sum("_" not in key for key in trainer.left_over)


@pytest.mark.parametrize("kind", KINDS)
def test_a_replay_samples_the_recorded_batches_with_their_staleness(trainings: Trainings, kind: str) -> None:
    trainer, settings = KINDS[kind]
    recorded = trainings.train("record", *settings, kind=trainer)
    again = trainings.train("replay", *settings, kind=trainer)
    assert again.trained == recorded.trained
    assert results(again) == results(recorded)
    lags = {step - 1 - tag["max_global_steps"] for step, batch in _by_step(recorded) for tag in batch["tags"]}
    assert lags == {0, 1}, "nothing was generated ahead"
    assert again.engine.prompts == []
    assert again.weights.sent == []
    assert prompts_left(again) == prompts_left(recorded) == PROMPTS
    assert len(again.left_over) == PROMPTS, "loaded rows are still in TransferQueue"


def test_several_samples_per_step_are_recorded_separately(trainings: Trainings) -> None:
    trainings.train("record", *SEPARATE, kind=SeparateTrainer)
    keys = RolloutStore(trainings.variant()).keys()
    assert keys == [RolloutKey(step, update) for step in (1, 2, 3, 4) for update in (0, 1)]


@pytest.mark.parametrize("kind", KINDS)
def test_filtered_groups_are_replaced_as_in_the_recording(trainings: Trainings, kind: str) -> None:
    trainer, settings = KINDS[kind]
    settings = (*settings, "algorithm.filter_groups.enable=True", "algorithm.filter_groups.metric=acc")
    recorded = trainings.train("record", *settings, kind=trainer)
    again = trainings.train("replay", *settings, kind=trainer)
    assert len(recorded.engine.prompts) > 5 * PROMPTS, "nothing was evicted and drawn again"
    assert again.trained == recorded.trained
    assert results(again) == results(recorded)
    assert prompts_left(again) == prompts_left(recorded)


@resumes_exactly
def test_a_replay_resumes_from_checkpoints_of_the_recording_and_from_its_own(trainings: Trainings) -> None:
    settings = (*STEPS, "trainer.save_freq=2")
    resume = (
        "trainer.resume_mode=resume_path",
        f"trainer.resume_from_path={trainings.folder}/checkpoints/global_step_2",
    )
    recorded = trainings.train("record", *settings, kind=ColocateTrainer)
    assert trainings.train("replay", *settings, *resume, kind=ColocateTrainer).trained == recorded.trained[2:]
    whole = trainings.train("replay", *settings, kind=ColocateTrainer)
    assert whole.trained == recorded.trained
    assert trainings.train("replay", *settings, *resume, kind=ColocateTrainer).trained == recorded.trained[2:]


@resumes_exactly
def test_a_generating_training_resumes_from_a_checkpoint_of_a_replay(trainings: Trainings) -> None:
    def resume(step: int) -> tuple[str, ...]:
        folder = f"{trainings.folder}/checkpoints/global_step_{step}"
        return "trainer.resume_mode=resume_path", f"trainer.resume_from_path={folder}"

    settings = (*STEPS, "trainer.v1.colocate_async.num_warmup_batches=2")
    recorded = trainings.train("record", *settings, "trainer.save_freq=2", kind=ColocateTrainer)
    trainings.train("replay", *settings, "trainer.save_freq=3", *resume(2), kind=ColocateTrainer)
    resumed = trainings.train("refresh", *settings, *resume(3), kind=ColocateTrainer)
    trained = {index for step in recorded.trained[:3] for index in step["index"]}
    (update,) = resumed.trained
    assert len(set(update["index"]) - trained) == PROMPTS
    assert len(resumed.engine.prompts) == 3 * PROMPTS, "two batches were in flight, and one was drawn"


def test_the_end_of_a_recording_says_how_to_continue_from_its_checkpoint(
    trainings: Trainings, caplog: pytest.LogCaptureFixture
) -> None:
    logging.getLogger("verl_rollout_skip").addHandler(caplog.handler)
    trainings.train("record", "trainer.total_training_steps=1", kind=ColocateTrainer)
    assert "to continue from here" not in caplog.text, "it cannot continue without a checkpoint"
    trainings.train("refresh", "trainer.total_training_steps=1", "trainer.save_freq=1", kind=ColocateTrainer)
    assert "manifest.json (from its last checkpoint; the steps after it are recorded again)" in caplog.text


def test_a_recording_that_resumes_from_a_checkpoint_can_be_replayed_as_a_whole(trainings: Trainings) -> None:
    settings = (*STEPS, "trainer.save_freq=2")
    first = trainings.train("record", *settings, kind=ColocateTrainer)
    resumed = trainings.train(
        "refresh",
        *settings,
        "trainer.resume_mode=resume_path",
        f"trainer.resume_from_path={trainings.folder}/checkpoints/global_step_2",
        kind=ColocateTrainer,
    )
    assert len(resumed.trained) == 2
    whole = trainings.train("replay", *settings, kind=ColocateTrainer)
    assert whole.trained == [*first.trained[:2], *resumed.trained]


def test_cache_records_if_nothing_is_recorded_and_never_mixes_loaded_and_generated_steps(trainings: Trainings) -> None:
    recorded = trainings.train("cache", *STEPS, kind=ColocateTrainer)
    assert hits(recorded) == []
    assert trainings.train("replay", *STEPS, kind=ColocateTrainer).trained == recorded.trained
    with pytest.raises(EntryExistsError, match=r"Steps 1-4 of this training are already recorded .* generates ahead"):
        trainings.train("cache", "trainer.total_training_steps=6", kind=ColocateTrainer)


def test_settings_that_cannot_be_replayed_exactly_are_rejected_before_anything_starts(trainings: Trainings) -> None:
    trainings.train("record", *STEPS, kind=ColocateTrainer)
    for mode in ("repeat", "repeat_last"):
        with pytest.raises(ConfigError, match="a recorded step cannot replace another one"):
            trainings.train(mode, *STEPS, kind=ColocateTrainer)
    with pytest.raises(ConfigError, match="loaded and generated steps cannot be mixed"):
        trainings.train("replay", *STEPS, "+rollout_skip.steps=[2]", "+rollout_skip.engine=on", kind=ColocateTrainer)


def test_other_prompts_or_another_number_of_steps_are_never_replayed(trainings: Trainings) -> None:
    trainings.train("record", *STEPS, kind=ColocateTrainer)
    with pytest.raises(MismatchError, match="rows differ"):
        trainings.train("replay", *STEPS, "data.seed=2", "+rollout_skip.on_mismatch=reuse", kind=ColocateTrainer)
    with pytest.raises(EntryNotFoundError, match="but 5 is not recorded"):
        trainings.train("replay", "trainer.total_training_steps=5", kind=ColocateTrainer)


def test_a_synchronous_recording_is_not_used_in_an_asynchronous_training(trainings: Trainings) -> None:
    trainings.train("record", *STEPS)
    with pytest.raises(MismatchError, match=r"trainer_mode: sync → colocate_async"):
        trainings.train("replay", *STEPS, "trainer.v1.trainer_mode=skip_colocate_async", kind=ColocateTrainer)
    reuse = (*STEPS, "+rollout_skip.on_mismatch=reuse")
    with pytest.raises(MismatchError, match=r"was recorded with trainer\.v1\.trainer_mode=sync.*=skip_sync"):
        trainings.train("replay", *reuse, "trainer.v1.trainer_mode=skip_colocate_async", kind=ColocateTrainer)


def _by_step(trainer: Any) -> Iterator[tuple[int, dict[str, Any]]]:
    updates = len(trainer.trained) // len(trainer.logged)
    for number, batch in enumerate(trainer.trained):
        yield number // updates + 1, batch


def test_a_recording_that_ended_during_a_step_is_rejected_before_anything_starts(trainings: Trainings) -> None:
    trainings.train("record", *SEPARATE, kind=SeparateTrainer)
    RolloutStore(trainings.variant()).delete(RolloutKey(4, 1))
    with pytest.raises(EntryNotFoundError, match=r"but 4 is not recorded. Recorded steps: 1-3 .*1 of 2 generation"):
        trainings.train("replay", *SEPARATE, kind=SeparateTrainer)


class LendingTrainer(SeparateTrainer):
    """Lends the GPUs of the training to generation while it waits. Without GPUs, only the switching is real."""

    def _setup(self) -> None:
        super()._setup()
        self.current_mode = HybridEngineMode.ROLLOUT
        self.lent = 0

    def _wait_for_sampleable_and_switch(self) -> dict[str, Any]:
        self.lent += self.current_mode == HybridEngineMode.ROLLOUT
        return super()._wait_for_sampleable_and_switch()

    def _nothing(self) -> None:
        pass

    add_replicas_to_balancer = remove_replicas_from_balancer = clear_sticky_cache = _nothing


@lends_gpus
def test_prompts_evicted_while_gpus_were_lent_are_reported_by_a_replay_that_lends_none(trainings: Trainings) -> None:
    settings = (
        *SEPARATE,
        "actor_rollout_ref.hybrid_engine=True",
        "trainer.v1.separate_async.hybrid_rollout.enable_switch=True",
        "trainer.v1.separate_async.hybrid_rollout.switch_threshold_ratio=1.0",
        "trainer.v1.separate_async.num_warmup_batches=0",
        "algorithm.filter_groups.enable=True",
        "algorithm.filter_groups.metric=acc",
    )
    recorded = trainings.train("record", *settings, kind=LendingTrainer)
    again = trainings.train("replay", *settings, kind=LendingTrainer)
    assert recorded.lent > 0, "no GPUs were lent"
    assert again.lent == 0
    evicted = "training/filter_groups/evicted_samples"
    assert sum(metrics.get(evicted, 0) for metrics in results(recorded).values()) > 0
    assert again.trained == recorded.trained
    assert _without_switching(again) == _without_switching(recorded)


def _without_switching(trainer: Any) -> dict[int, dict[str, Any]]:
    return {
        step: {name: value for name, value in metrics.items() if not name.startswith("separate_async/")}
        for step, metrics in results(trainer).items()
    }
