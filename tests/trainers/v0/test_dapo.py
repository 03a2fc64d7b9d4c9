"""SkipDAPOTrainer's dynamic sampling around verl's own loop trains like a loop that is written for DAPO."""

from __future__ import annotations

from typing import Any

import pytest
from verl import DataProto

from tests.trainers.v0.dapo_loop import DapoLoop
from tests.trainers.v0.stand_ins import VERL
from tests.trainers.v0.test_remax import only_score
from tests.trainers.v0.test_resume import checkpoint
from tests.trainers.v0.training import (
    Finished,
    SkipTrainer,
    Trainings,
    VerlTrainer,
    assert_same_batches,
    assert_same_training,
    score_answer,
)
from verl_rollout_skip import RolloutSkipMixin, SkipDAPOTrainer
from verl_rollout_skip.errors import ConfigError
from verl_rollout_skip.trainers.v0.dapo import DynamicSampling

pytestmark = pytest.mark.skipif(VERL < (0, 7), reason="SkipDAPOTrainer needs rollouts that come with their rewards")

FILTER = (
    "algorithm.filter_groups.enable=True",
    "algorithm.filter_groups.metric=acc",
    "algorithm.filter_groups.max_num_gen_batches=0",
    "trainer.total_epochs=6",
    "trainer.balance_batch=False",
)


class SkipDapo(DynamicSampling, RolloutSkipMixin, VerlTrainer):  # type: ignore[misc, valid-type]
    """``SkipDAPOTrainer`` on stand-ins."""


def run(trainings: Trainings, mode: str, *overrides: str, **arguments: Any) -> Finished:
    return trainings.run(mode, *FILTER, *overrides, trainer=SkipDapo, **arguments)


def keys_of(training: Finished) -> list[tuple[int, int]]:
    return [
        (step, batch)
        for step, metrics in sorted(training.metrics.items())
        for batch in range(int(metrics["train/num_gen_batches"]))
    ]


def trained_rows(training: Finished) -> list[list[tuple[Any, ...]]]:
    """The prompts, responses, answers and advantages that each step trained on."""
    return [_rows(batch) for batch in training.trained]


def _rows(batch: DataProto) -> list[tuple[Any, ...]]:
    tensors = [batch.batch[key].tolist() for key in ("prompts", "responses", "token_level_rewards", "advantages")]
    return list(zip(*tensors, [repr(row) for row in batch.non_tensor_batch["reward_model"]], strict=True))


def test_skip_dapo_trainer_is_made_of_the_classes_that_are_tested_here() -> None:
    assert [kind.__name__ for kind in SkipDAPOTrainer.__bases__] == [
        "DynamicSampling",
        "RolloutSkipMixin",
        "RayPPOTrainer",
    ]


def test_it_trains_on_the_same_batches_as_a_loop_written_for_dapo(trainings: Trainings) -> None:
    dapo = run(trainings, "off")
    loop = trainings.run(None, *FILTER, trainer=DapoLoop)
    assert keys_of(dapo) == keys_of(loop)
    assert len(keys_of(dapo)) > 5, "steps must need several generation batches"
    assert trained_rows(dapo) == trained_rows(loop)


def test_a_recorded_training_is_repeated_from_its_dumps(trainings: Trainings) -> None:
    plain = run(trainings, "off")
    recording = run(trainings, "record")
    cached = run(trainings, "cache")
    replayed = run(trainings, "replay")
    assert trainings.recorded_keys == keys_of(plain) == keys_of(replayed)
    assert cached.generated == replayed.generated == 0
    assert recording.hits == [0.0, 0.0, 0.0]
    assert cached.hits == [1.0, 1.0, 1.0]
    for training in (recording, cached, replayed):
        assert_same_training(plain, training)


def test_a_recording_that_ended_within_a_step_is_completed(trainings: Trainings) -> None:
    plain = run(trainings, "off")
    run(trainings, "record")
    missing = [key for key in keys_of(plain) if key >= (2, 1)]
    trainings.forget(*missing)
    continued = run(trainings, "cache")
    assert continued.generated == len(missing)
    assert continued.events.count("sync 1") == 1
    assert "generate asleep" not in continued.events
    assert trainings.recorded_keys == keys_of(plain)
    assert_same_training(plain, continued)


def test_nothing_is_synced_while_everything_is_loaded(trainings: Trainings) -> None:
    run(trainings, "record")
    assert run(trainings, "cache").events == ["sleep", "update", "update", "update"]


@pytest.mark.parametrize("size", [2, 6, 16])
def test_generation_batches_may_be_smaller_or_larger_than_training_batches(trainings: Trainings, size: int) -> None:
    plain = run(trainings, "off", f"data.gen_batch_size={size}")
    loop = trainings.run(None, *FILTER, f"data.gen_batch_size={size}", trainer=DapoLoop)
    assert trained_rows(plain) == trained_rows(loop)
    run(trainings, "record", f"data.gen_batch_size={size}")
    assert_same_training(plain, run(trainings, "replay", f"data.gen_batch_size={size}"))


def test_reaching_the_limit_of_generation_batches_raises_verls_own_error(trainings: Trainings) -> None:
    limit = "algorithm.filter_groups.max_num_gen_batches=2"
    failed = run(trainings, "record", limit, score=_always_the_same, fails=True)
    assert isinstance(failed.error, ValueError)
    assert str(failed.error).startswith(
        "num_gen_batches=2 >= max_num_gen_batches=2. Generated too many. Please check if your data are too difficult."
    )
    assert "Step 1: 0 of 4 prompts have responses that differ in 'acc'" in str(failed.error)
    assert trainings.recorded_keys == [(1, 0), (1, 1)]


@pytest.mark.parametrize("mode", ["cache", "replay"])
def test_the_limit_applies_to_loaded_generation_batches_too(trainings: Trainings, mode: str) -> None:
    limit = "algorithm.filter_groups.max_num_gen_batches=2"
    failed = run(trainings, "record", limit, score=_always_the_same, fails=True)
    again = run(trainings, mode, limit, score=_always_the_same, fails=True)
    assert again.generated == 0
    assert str(again.error) == str(failed.error)


def test_a_step_that_the_last_allowed_generation_batch_fills_is_within_the_limit(trainings: Trainings) -> None:
    free = run(trainings, "off")
    most = max(metrics["train/num_gen_batches"] for metrics in free.metrics.values())
    limited = run(trainings, "off", f"algorithm.filter_groups.max_num_gen_batches={int(most)}")
    assert_same_training(free, limited)


@pytest.mark.parametrize("metric", ["seq_reward", "seq_final_reward", "acc", "score"])
@pytest.mark.parametrize("penalty", [False, True])
def test_every_metric_can_be_used_as_filter(trainings: Trainings, metric: str, penalty: bool) -> None:
    settings = (f"algorithm.filter_groups.metric={metric}", f"algorithm.use_kl_in_reward={penalty}")
    plain = run(trainings, "off", *settings)
    run(trainings, "record", *settings)
    assert_same_training(plain, run(trainings, "replay", *settings))
    for batch in plain.trained:
        key = "token_level_rewards" if metric == "seq_final_reward" else "token_level_scores"
        values = batch.batch[key].sum(dim=-1).tolist()
        if metric == "acc":
            values = batch.non_tensor_batch["acc"].tolist()
        assert all(one != other for one, other in zip(values[::2], values[1::2], strict=True))


def test_equal_rewards_count_as_equal_despite_rounding(trainings: Trainings) -> None:
    """The standard deviation of three times 0.1 is not zero."""
    settings = ("actor_rollout_ref.rollout.n=3", "algorithm.filter_groups.max_num_gen_batches=2")
    failed = run(trainings, "off", *settings, score=lambda *_: {"score": 0.1, "acc": 0.1}, fails=True)
    assert "0 of 4 prompts" in str(failed.error)


@pytest.mark.parametrize("metric", ["accuracy", "data_source", "note", "null"])
def test_an_unknown_metric_is_an_error_that_names_the_known_ones(trainings: Trainings, metric: str) -> None:
    def score(response: str, answer: str) -> dict[str, Any]:
        return {**score_answer(response, answer), "note": "well done"}

    failed = run(trainings, "off", f"algorithm.filter_groups.metric={metric}", score=score, fails=True)
    assert isinstance(failed.error, ConfigError)
    assert str(failed.error).endswith(
        "Valid values are seq_reward, seq_final_reward, and numbers that the reward function returns: score, acc."
    )


def test_a_step_continues_in_the_next_epoch(trainings: Trainings) -> None:
    trainings.write_data("train", 12)
    plain = run(trainings, "off", "trainer.total_training_steps=4")
    loop = trainings.run(None, *FILTER, "trainer.total_training_steps=4", trainer=DapoLoop)
    assert trained_rows(plain) == trained_rows(loop)
    assert plain.metrics[4]["training/epoch"] > 0
    assert len(keys_of(plain)) % 3 != 0, "the last step must end within an epoch"
    run(trainings, "record", "trainer.total_training_steps=4")
    assert_same_training(plain, run(trainings, "replay", "trainer.total_training_steps=4"))


@pytest.mark.parametrize("rows", [12, 16])
@pytest.mark.parametrize("step", [1, 2, 3, 4])
def test_the_stream_of_prompts_continues_exactly_after_a_checkpoint(trainings: Trainings, step: int, rows: int) -> None:
    trainings.write_data("train", rows)
    length = "trainer.total_training_steps=5"
    plain = run(trainings, "record", length, "trainer.save_freq=1")
    generated = run(trainings, "off", length, *checkpoint(trainings, 1, step))
    loaded = run(trainings, "replay", length, *checkpoint(trainings, 1, step))
    later = list(range(step + 1, 6))
    for resumed in (generated, loaded):
        assert trained_rows(resumed) == trained_rows(plain)[step:]
        assert_same_training(plain, resumed, steps=later)
    assert loaded.generated == 0


def test_a_checkpoint_of_a_training_without_filtering_is_rejected(trainings: Trainings) -> None:
    trainings.run("record", "trainer.save_freq=1")
    failed = run(trainings, "off", *checkpoint(trainings, 1, 1), fails=True)
    assert isinstance(failed.error, ConfigError)
    assert "written without algorithm.filter_groups.enable=True" in str(failed.error)


@pytest.mark.parametrize("rows", [8, 16])
def test_running_out_of_data_is_reported_and_can_be_replayed(trainings: Trainings, rows: int) -> None:
    trainings.write_data("train", rows)
    used_up = ("trainer.total_epochs=2", "trainer.total_training_steps=null")
    recording = run(trainings, "record", *used_up)
    done = len(recording.metrics)
    assert 0 < done < rows // 2
    message = f"the data of 2 epochs is used up: the training ends after step {done} of {rows // 2}"
    assert recording.said(message)
    replayed = run(trainings, "replay", *used_up)
    assert replayed.said(message)
    assert_same_training(recording, replayed)


def test_a_training_that_reaches_its_last_step_does_not_report_used_up_data(trainings: Trainings) -> None:
    assert not run(trainings, "record").said("used up")


def test_remax_gets_its_baseline_for_the_kept_prompts(trainings: Trainings) -> None:
    remax = ("algorithm.adv_estimator=remax", "algorithm.filter_groups.metric=seq_reward")
    plain = run(trainings, "off", *remax, score=only_score)
    run(trainings, "record", *remax, score=only_score)
    replayed = run(trainings, "replay", *remax, score=only_score)
    counts = {step: metrics["train/num_gen_batches"] for step, metrics in plain.metrics.items()}
    assert trainings.recorded_keys == [(step, batch) for step in (1, 2, 3) for batch in range(int(counts[step]) + 1)]
    calls = plain.trainer.workers.engine.training_calls
    assert sum(call.rows == 4 for call in calls) == 3, "a greedy response to each prompt of each step"
    assert_same_training(plain, replayed)


def test_recorded_prompts_replace_those_of_each_generation_batch(trainings: Trainings) -> None:
    recording = run(trainings, "record", train_sampler=list(range(16)))
    replayed = run(trainings, "replay", "rollout_skip.prompts=recorded", train_sampler=list(range(15, -1, -1)))
    assert_same_batches(recording.trained, replayed.trained)
    assert_same_training(recording, replayed)


def test_tensors_of_the_dataset_belong_to_the_recorded_prompts_too(
    trainings: Trainings, monkeypatch: pytest.MonkeyPatch
) -> None:
    import torch
    from verl.utils.dataset.rl_dataset import RLHFDataset

    get = RLHFDataset.__getitem__

    def with_difficulty(dataset: Any, item: int) -> dict[str, Any]:
        row = get(dataset, item)
        return {**row, "difficulty": torch.tensor([row["index"] / 100])}

    monkeypatch.setattr(RLHFDataset, "__getitem__", with_difficulty)
    recording = run(trainings, "record", train_sampler=list(range(16)))
    replayed = run(trainings, "replay", "rollout_skip.prompts=recorded", train_sampler=list(range(15, -1, -1)))
    assert "difficulty" in replayed.trained[0].batch.keys()  # noqa: SIM118 - a TensorDict is not a dict
    assert_same_batches(recording.trained, replayed.trained)


def test_a_colocated_reward_model_scores_after_each_generation_batch(trainings: Trainings) -> None:
    model = "reward.reward_model.enable=True"
    plain = run(trainings, "off", model)
    run(trainings, "record", model)
    cached = run(trainings, "cache", model)
    assert plain.events.count("reward") == len(keys_of(plain))
    assert "generate asleep" not in plain.events
    assert cached.generated == 0
    assert_same_training(plain, cached)


@pytest.mark.skipif(VERL < (0, 8), reason="fit of verl 0.7.1 leaves the baseline's scores in its batch")
def test_remax_and_a_colocated_reward_model_work_together(trainings: Trainings) -> None:
    settings = (
        "reward.reward_model.enable=True",
        "algorithm.adv_estimator=remax",
        "algorithm.filter_groups.metric=seq_reward",
    )
    plain = run(trainings, "off", *settings, score=only_score)
    run(trainings, "record", *settings, score=only_score)
    cached = run(trainings, "cache", *settings, score=only_score)
    assert "generate asleep" not in plain.events
    assert cached.generated == 0
    assert_same_training(plain, cached)


def test_a_dataset_with_its_own_uids_works(trainings: Trainings, monkeypatch: pytest.MonkeyPatch) -> None:
    from verl.utils.dataset.rl_dataset import RLHFDataset

    get = RLHFDataset.__getitem__
    monkeypatch.setattr(RLHFDataset, "__getitem__", lambda data, item: {**get(data, item), "uid": f"row {item}"})
    plain = run(trainings, "record")
    assert_same_training(plain, run(trainings, "replay"))


def test_validation_is_generated(trainings: Trainings) -> None:
    validation = ("trainer.val_before_train=True", "trainer.test_freq=2")
    plain = run(trainings, "off", *validation)
    run(trainings, "record", *validation)
    cached = run(trainings, "cache", *validation)
    assert [call.weights for call in cached.trainer.workers.engine.calls] == [0, 2, 3]
    assert_same_training(plain, cached)


def test_without_filtering_it_is_ppo(trainings: Trainings) -> None:
    off = ("algorithm.filter_groups.enable=False", "algorithm.filter_groups.metric=acc", "trainer.balance_batch=False")
    ppo = trainings.run("off", *off, trainer=SkipTrainer)
    assert_same_training(ppo, trainings.run("off", *off, trainer=SkipDapo))


@pytest.mark.skipif(VERL >= (0, 9), reason="verl 0.9.1 always has the block")
def test_a_configuration_without_the_block_is_rejected(trainings: Trainings) -> None:
    with pytest.raises(ConfigError, match=r"algorithm\.filter_groups is not set, but SkipDapo needs it"):
        trainings.make("off", trainer=SkipDapo)


def _always_the_same(response: str, answer: str) -> dict[str, float]:
    return {"score": 1.0, "acc": 1.0}
