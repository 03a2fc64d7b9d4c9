"""A training is recorded and trained again from its dumps: only the time may differ."""

from __future__ import annotations

import itertools
import json
import subprocess
import time
from typing import Any

import pytest
from omegaconf import OmegaConf
from verl.trainer.ppo.utils import Role

from tests.disks import mount
from tests.trainers.v0.stand_ins import VERL, Actor
from tests.trainers.v0.test_resume import checkpoint
from tests.trainers.v0.training import (
    Finished,
    SkipTrainer,
    Trainings,
    assert_same_batches,
    assert_same_training,
    score_answer,
)
from verl_rollout_skip.errors import DumpError, EntryExistsError, EntryNotFoundError

NO_LIMIT = "trainer.total_training_steps=null"


def test_a_recorded_training_is_repeated_from_its_dumps(trainings: Trainings) -> None:
    plain = trainings.run(None)
    recording = trainings.run("record")
    cached = trainings.run("cache")
    replayed = trainings.run("replay")
    assert [training.generated for training in (plain, recording, cached, replayed)] == [3, 3, 0, 0]
    assert trainings.recorded_keys == [(1, 0), (2, 0), (3, 0)]
    assert recording.hits == [0.0, 0.0, 0.0]
    assert cached.hits == replayed.hits == [1.0, 1.0, 1.0]
    for training in (recording, cached, replayed):
        assert_same_training(plain, training)


@pytest.mark.skipif(VERL < (0, 9), reason="verl before 0.9 does not have this setting")
def test_a_recording_of_a_v0_trainer_says_so_regardless_of_use_v1(trainings: Trainings) -> None:
    """verl's default is V1 and only its own entry point reads it; ``rollout-skip resume`` relies on it."""
    trainings.run("record", "trainer.use_v1=True")
    (manifest,) = trainings.dumps.glob("*/*/manifest.json")
    assert json.loads(manifest.read_text())["config"]["trainer"]["use_v1"] is False
    assert trainings.run("replay", "trainer.use_v1=False").hits == [1.0, 1.0, 1.0]


def test_everything_that_a_step_waits_for_counts_as_loading(
    trainings: Trainings, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With a clock that the reward function advances."""
    trainings.run("record")
    passed = [0.0]
    clock = time.perf_counter

    def slow_rewards(*_: Any) -> None:
        passed[0] += 1000

    monkeypatch.setattr(time, "perf_counter", lambda: clock() + passed[0])
    monkeypatch.setattr("verl_rollout_skip.trainers.v0.mixin.recompute_rewards", slow_rewards)
    cached = trainings.run("cache", "rollout_skip.reward=recompute")
    assert cached.hits == [1.0, 1.0, 1.0]
    assert all(metrics["timing_s/rollout_skip/load_s"] >= 1000 for metrics in cached.metrics.values())
    assert all(metrics["timing_s/rollout_skip/saved_s"] == 0 for metrics in cached.metrics.values())
    assert cached.said("3 loaded in 3000.")


def test_a_recording_that_ended_early_is_completed(trainings: Trainings) -> None:
    plain = trainings.run(None)
    trainings.run("record")
    trainings.forget((2, 0))
    continued = trainings.run("cache")
    assert continued.hits == [1.0, 0.0, 1.0]
    assert trainings.recorded_keys == [(1, 0), (2, 0), (3, 0)]
    assert_same_training(plain, continued)
    assert continued.said("3 rollout steps: 2 loaded")


def test_a_replay_that_lacks_a_step_is_rejected_before_it_starts(trainings: Trainings) -> None:
    trainings.run("record")
    trainings.forget((2, 0))
    with pytest.raises(EntryNotFoundError, match=r"steps 1 to 3, but 2 is not recorded. Recorded steps: 1, 3"):
        trainings.make("replay")


class Sampling(SkipTrainer):
    """An engine that can generate different responses, as real engines do each time."""

    temperature = 1.0

    def init_workers(self) -> None:
        super().init_workers()
        engine = self.workers.engine
        engine._rollout = OmegaConf.merge(engine._rollout, {"temperature": self.temperature})


def off_policy(training: Finished) -> dict[int, float]:
    """The metric of the loaded steps."""
    name = "timing_s/rollout_skip/off_policy"
    return {step: metrics[name] for step, metrics in training.metrics.items() if name in metrics}


def test_record_never_overwrites(trainings: Trainings) -> None:
    recording = trainings.run("record")
    with pytest.raises(EntryExistsError, match=r"Steps 1-3 of this training are already recorded in .*mode 'refresh'"):
        trainings.make("record")  # before any worker is started
    assert_same_training(recording, trainings.run("cache"))


def test_a_recording_continues_after_the_recorded_steps(trainings: Trainings) -> None:
    trainings.run("record", "trainer.save_freq=1")
    longer = "trainer.total_training_steps=4"
    trainings.run("record", longer, *checkpoint(trainings, 1, 3))
    assert [step for step, _ in trainings.recorded_keys] == [1, 2, 3, 4]


def test_a_longer_training_with_a_constant_learning_rate_is_the_same_training(trainings: Trainings) -> None:
    trainings.run("record", "trainer.total_training_steps=2")
    longer = trainings.run("cache", "trainer.total_training_steps=4")
    assert longer.hits == [1, 1, 0, 0]
    assert off_policy(longer) == {1: 0, 2: 0}
    assert not longer.said("off-policy")


def test_hits_after_a_step_that_was_generated_again_are_off_policy_and_the_log_says_so(
    trainings: Trainings, monkeypatch: pytest.MonkeyPatch
) -> None:
    trainings.run("record", "trainer.total_training_steps=4", trainer=Sampling)
    trainings.forget((2, 0))
    again = trainings.run("cache", "trainer.total_training_steps=4", trainer=Sampling)
    assert again.hits == [1, 0, 1, 1]
    assert off_policy(again) == {1: 0, 3: 0, 4: 0}, "the same answers again: the training is the recorded one"
    trainings.forget((2, 0))
    monkeypatch.setattr(Sampling, "temperature", 9.0)
    other = trainings.run("cache", "trainer.total_training_steps=4", trainer=Sampling)
    assert off_policy(other) == {1: 0, 3: 1, 4: 1}
    assert other.said("step 3, generation batch 0 was recorded after different rollouts")
    assert other.said("2 loaded off-policy")


def test_a_changed_temperature_is_never_a_hit_and_the_log_says_what_differs(trainings: Trainings) -> None:
    trainings.run("record")
    warmer = "actor_rollout_ref.rollout.temperature=0.7"
    plain, other = trainings.run(None, warmer), trainings.run("cache", warmer)
    assert other.hits == [0.0, 0.0, 0.0]
    assert_same_training(plain, other)
    assert other.said("actor_rollout_ref.rollout.temperature: 1.0 → 0.7")
    assert len(list(trainings.dumps.glob("*/*/manifest.json"))) == 2


def test_steps_are_counted_across_epochs(trainings: Trainings) -> None:
    plain = trainings.run(None, "trainer.total_epochs=2", NO_LIMIT)
    trainings.run("record", "trainer.total_epochs=2", NO_LIMIT)
    replayed = trainings.run("replay", "trainer.total_epochs=2", NO_LIMIT)
    assert trainings.recorded_keys == [(step, 0) for step in range(1, 9)]
    assert replayed.metrics[8]["training/global_step"] == 8
    assert_same_training(plain, replayed)


def test_repeat_continues_by_cycling_through_the_recorded_steps(trainings: Trainings) -> None:
    recording = trainings.run("record", "trainer.total_training_steps=2")
    repeated = trainings.run("repeat", "trainer.total_training_steps=4")
    assert repeated.generated == 0
    ones, others = (
        [batch.select(["prompts", "responses"]).batch for batch in training.trained]
        for training in (recording, repeated)
    )
    for repeat, batch in enumerate(others):
        assert (batch["responses"] == ones[repeat % 2]["responses"]).all()
        assert (batch["prompts"] == ones[repeat % 2]["prompts"]).all()


ALGORITHMS = {
    "critic": ["algorithm.adv_estimator=gae"],
    "penalty in the reward": ["algorithm.use_kl_in_reward=True"],
    "one sample per prompt": ["actor_rollout_ref.rollout.n=1", "algorithm.adv_estimator=reinforce_plus_plus"],
    "rollouts in another order": ["trainer.balance_batch=False"],
}


@pytest.mark.parametrize("overrides", ALGORITHMS.values(), ids=ALGORITHMS.keys())
def test_other_algorithms_are_replayed_as_well(trainings: Trainings, overrides: list[str]) -> None:
    arguments: dict[str, Any] = {}
    if VERL < (0, 7) and "algorithm.use_kl_in_reward=True" in overrides:
        arguments = {"roles": {Role.RefPolicy: None}}
    plain = trainings.run(None, *overrides, **arguments)
    trainings.run("record", *overrides, **arguments)
    cached = trainings.run("cache", *overrides, **arguments)
    assert cached.generated == 0
    assert_same_training(plain, cached)


@pytest.mark.skipif(VERL < (0, 9), reason="up to 0.8.0 verl itself cannot make a dataloader of it")
def test_gen_batch_size_may_be_null(trainings: Trainings) -> None:
    trainings.run("record", "data.gen_batch_size=null")
    assert trainings.run("cache", "data.gen_batch_size=null").generated == 0
    (run,) = trainings.dumps.iterdir()
    assert run.name == "exp_proj_TrainGBS4__InferGBS4__N2"


def test_mode_off_trains_like_verl(trainings: Trainings) -> None:
    plain, off = trainings.run(None), trainings.run("off")
    assert_same_training(plain, off)
    assert off.events == plain.events
    assert off.metrics[1].keys() == plain.metrics[1].keys()
    assert off.messages == []
    assert not trainings.dumps.exists()


def test_verls_old_setting_skip_rollout_means_cache_and_is_hidden_from_verl(trainings: Trainings) -> None:
    switch = (
        "actor_rollout_ref.rollout.skip_rollout=True",
        f"actor_rollout_ref.rollout.skip_dump_dir={trainings.dumps}",
    )
    plain = trainings.run(None)
    recording = trainings.run("off", *switch)
    cached = trainings.run("off", *switch)
    assert (recording.generated, cached.generated) == (3, 0)
    assert "skip_rollout" not in cached.trainer.config.actor_rollout_ref.rollout
    assert_same_training(plain, cached)
    suffixes = {path.suffix for path in trainings.dumps.rglob("*") if path.is_file()}
    assert suffixes <= {".parquet", ".json", ".jsonl", ".jinja"}


def test_a_failed_dump_stops_mode_record(trainings: Trainings) -> None:
    failed = trainings.run("record", "rollout_skip.max_disk=2KB", fails=True)
    assert isinstance(failed.error, DumpError)
    assert "max_disk" in str(failed.error)


def test_a_failed_dump_does_not_stop_mode_cache(trainings: Trainings) -> None:
    plain = trainings.run(None)
    warned = trainings.run("cache", "rollout_skip.max_disk=2KB")
    assert_same_training(plain, warned)
    assert warned.said("dump failed: step 1, generation batch 0")
    assert warned.said("3 dumps failed")


def test_failed_dumps_are_counted_in_the_metrics_of_the_step(trainings: Trainings) -> None:
    warned = trainings.run("cache", "rollout_skip.max_disk=2KB", "rollout_skip.background=False")
    assert [warned.metrics[step]["timing_s/rollout_skip/dump_failures"] for step in (1, 2, 3)] == [1, 2, 3]


def test_a_folder_that_becomes_read_only_is_reported_and_the_training_continues(trainings: Trainings) -> None:
    plain = trainings.run(None)
    folder = str(trainings.dumps)
    trainings.dumps.mkdir()
    if not mount("--bind", folder, folder):
        pytest.skip("file systems cannot be mounted here: only root can, and not in every container")

    calls = itertools.count(1)

    def score(response: str, answer: str) -> dict[str, float]:
        if next(calls) == 9:  # the first response of the second step
            while not (any(trainings.dumps.glob("*/*/step_000001/*.json")) and mount("-o", "remount,ro,bind", folder)):
                time.sleep(0.01)
        return score_answer(response, answer)

    try:
        warned = trainings.run("cache", score=score)
    finally:
        subprocess.run(["umount", "-l", folder], check=True)
    assert_same_training(plain, warned)
    failed = [text for text in warned.messages if "dump failed: step" in text]
    assert failed
    assert all("Read-only file system" in text for text in failed)
    assert warned.said("the list of steps that this training recorded could not be written")
    assert warned.said(f"{len(failed)} dumps failed")


def test_an_error_in_the_training_loses_no_dump(trainings: Trainings, monkeypatch: pytest.MonkeyPatch) -> None:
    plain = trainings.run(None)
    with monkeypatch.context() as patched:
        patched.setattr(Actor, "update_actor", _out_of_memory_in_step(3))
        crashed = trainings.run("record", fails=True)
    assert str(crashed.error) == "out of memory"
    assert trainings.recorded_keys == [(1, 0), (2, 0), (3, 0)]
    continued = trainings.run("cache")
    assert continued.hits == [1.0, 1.0, 1.0]
    assert_same_training(plain, continued)


def _out_of_memory_in_step(step: int) -> Any:
    update = Actor.update_actor

    def update_actor(actor: Actor, data: Any) -> Any:
        if actor.updates + 1 == step:
            raise RuntimeError("out of memory")
        return update(actor, data)

    return update_actor


def test_background_dumps_do_not_affect_the_training(trainings: Trainings) -> None:
    plain = trainings.run(None)
    direct = trainings.run("record", "rollout_skip.background=False")
    assert_same_batches(plain.trained, direct.trained)
    assert_same_training(plain, trainings.run("cache"))
