"""The synchronous V1 trainer with recorded rollouts: verl's own loop, dataloader, replay buffer and TransferQueue."""

from __future__ import annotations

import contextlib
import logging
import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pandas
import pytest
import ray
import transfer_queue as tq
import verl
from transfer_queue import KVBatchMeta
from verl.trainer.ppo.v1 import PPOTrainerSync
from verl.trainer.ppo.v1.replay_buffer import ReplayBuffer

from tests.batches import rollout_input, rollout_output
from tests.loaded_ahead import damage, wait_for_prefetch
from tests.trainers.v1.training import (
    PROMPTS,
    SAMPLES,
    Engine,
    PlainTrainer,
    SyncTrainer,
    Trainings,
    Weights,
    WithoutWorkers,
    hits,
    left_over,
)
from verl_rollout_skip import RolloutKey, RolloutStore
from verl_rollout_skip.errors import (
    ConfigError,
    EntryExistsError,
    EntryNotFoundError,
    InertError,
    MismatchError,
    UnsupportedBatchError,
    UnsupportedTrainerError,
)
from verl_rollout_skip.replay.rollout import RolloutSkip
from verl_rollout_skip.trainers.v1.transfer.rows import stack
from verl_rollout_skip.v1 import RolloutSkipMixin

pytestmark = pytest.mark.usefixtures("queue")

STEPS = [1, 2, 3]


def in_any_order(step: dict[str, Any]) -> list[tuple[Any, ...]]:
    """The rows of an update sorted by prompt, session and output, for runs whose trajectories finished in a
    different order."""
    columns = {name: values for name, values in step.items() if name not in ("keys", "uid")}
    rows = [
        (int(index), *key[1:], *(values[row] for values in columns.values()))
        for row, (index, key) in enumerate(zip(step["index"], step["keys"], strict=True))
    ]
    return sorted(rows, key=lambda row: row[:3])


def test_recording_changes_nothing(trainings: Trainings) -> None:
    plain, recorded = trainings.train(None, kind=PlainTrainer), trainings.train("record")
    assert [in_any_order(step) for step in plain.trained] == [in_any_order(step) for step in recorded.trained]
    assert recorded.engine.prompts == plain.engine.prompts
    assert recorded.weights.sent == plain.weights.sent == [0, 1, 2, 3]
    assert RolloutStore(trainings.variant()).keys() == [RolloutKey(step) for step in STEPS]
    assert recorded.left_over == plain.left_over == []


@pytest.mark.parametrize("mode", ["cache", "replay"])
def test_a_recorded_training_is_loaded_in_its_row_order_without_generating_or_polling(
    after_recording: Trainings, recorded: Any, mode: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(ReplayBuffer, "_sync_metadata_from_transfer_queue", _never)
    again = after_recording.train(mode)
    assert again.trained == recorded.trained
    assert again.engine.prompts == []
    assert again.weights.sent == []
    assert again.left_over == []
    assert hits(again) == STEPS
    assert "3 loaded" in again.rollout_skip.summary()


class Starting(SyncTrainer):
    """A training whose first rollout becomes unreadable while its workers start."""

    def _setup(self) -> None:
        super()._setup()
        wait_for_prefetch()
        (source,) = self.rollout_skip.sources
        damage(Path(source.folder), step=1)


def test_the_first_rollout_is_in_memory_before_the_first_step_requests_it(
    after_recording: Trainings, recorded: Any
) -> None:
    again = after_recording.train("replay", "+rollout_skip.on_mismatch=reuse", kind=Starting)
    assert again.trained == recorded.trained
    assert hits(again) == STEPS


class OwnFit(SyncTrainer):
    """Has its own loop, which never calls the ``fit`` of the mixin."""

    def fit(self, engine: Any) -> None:
        WithoutWorkers.fit(self, engine)
        if engine.version == engine.fails_at:
            raise ZeroDivisionError("after the last step")


@pytest.mark.parametrize("fails_at", [None, 3])
def test_a_custom_fit_waits_for_the_dumps(
    trainings: Trainings, monkeypatch: pytest.MonkeyPatch, fails_at: int | None
) -> None:
    write, engine = RolloutStore._write, Engine()
    monkeypatch.setattr(RolloutStore, "_write", lambda *arguments: (time.sleep(0.5), write(*arguments)))
    engine.fails_at = fails_at  # type: ignore[attr-defined]
    with pytest.raises(ZeroDivisionError) if fails_at else contextlib.nullcontext():
        trainings.train("record", kind=OwnFit, engine=engine)
    assert RolloutStore(trainings.variant()).keys() == [RolloutKey(step) for step in STEPS]


def test_a_different_trainer_class_is_a_different_training(after_recording: Trainings) -> None:
    engine = Engine()
    engine.fails_at = None  # type: ignore[attr-defined]
    again = after_recording.train("replay", kind=OwnFit, engine=engine)
    assert [again.logged[step]["rollout_skip/off_policy"] for step in STEPS] == [0.0, 1.0, 1.0]


def test_an_asynchronous_fit_is_rejected(trainings: Trainings) -> None:
    class Asynchronous(SyncTrainer):
        async def fit(self, engine: Any) -> None:
            pass

    with pytest.raises(UnsupportedTrainerError, match="its fit is asynchronous"):
        trainings.train("record", kind=Asynchronous)


def test_the_recording_has_groups_of_unequal_size_several_outputs_and_failed_sessions(recorded: Any) -> None:
    trained = recorded.trained
    keys = [key for step in trained for key in step["keys"]]
    assert any(index == "1" for _, _, index in keys), "no session with several outputs"
    sessions = [{(prompt, session) for prompt, session, _ in step["keys"]} for step in trained]
    assert min(map(len, sessions)) < PROMPTS * SAMPLES, "no failed session"
    orders = [[prompt for prompt, _, _ in step["keys"]] for step in trained]
    assert any(order != sorted(order) for order in orders), "trajectories finished in the order of their prompts"


def test_missing_steps_are_generated_from_their_own_prompts_with_the_right_weights(
    after_recording: Trainings, recorded: Any
) -> None:
    RolloutStore(after_recording.variant()).delete(RolloutKey(2))
    partial = after_recording.train("cache")
    assert hits(partial) == [1, 3]
    assert partial.engine.prompts == recorded.engine.prompts[PROMPTS : 2 * PROMPTS]
    assert partial.weights.sent == [1]
    assert [in_any_order(step) for step in partial.trained] == [in_any_order(step) for step in recorded.trained]
    assert partial.trained[0] == recorded.trained[0]
    assert partial.trained[2] == recorded.trained[2]
    assert hits(after_recording.train("replay")) == STEPS


def test_running_a_finished_training_again_says_that_verl_resumes_from_its_last_checkpoint(
    trainings: Trainings, caplog: pytest.LogCaptureFixture
) -> None:
    same = ("trainer.save_freq=3", "trainer.resume_mode=auto")
    recorded = trainings.train("record", *same)
    again = trainings.train("cache", *same)
    assert again.trained == []
    checkpoint = f"{trainings.folder}/checkpoints/global_step_3 (trainer.resume_mode=auto)"
    assert f"verl resumes from {checkpoint}, the last step of this training: nothing is left to do." in caplog.text
    with pytest.raises(EntryNotFoundError, match=r"nothing to replay.*global_step_3 .*resume_mode=disable starts at"):
        trainings.train("replay", *same)
    assert trainings.train("replay").trained == recorded.trained


def test_a_selection_without_a_step_of_the_training_is_rejected(trainings: Trainings) -> None:
    with pytest.raises(ConfigError, match="steps is 50, but the training runs steps 1 to 3"):
        trainings.train("record", "+rollout_skip.steps=[50]")


def test_a_training_that_resumes_from_a_checkpoint_loads_its_own_steps(trainings: Trainings) -> None:
    settings = ("trainer.total_training_steps=4", "trainer.save_freq=2")
    recorded = trainings.train("record", *settings)
    resumed = trainings.train(
        "cache",
        *settings,
        "trainer.resume_mode=resume_path",
        f"trainer.resume_from_path={trainings.folder}/checkpoints/global_step_2",
    )
    assert resumed.trained == recorded.trained[2:]
    assert hits(resumed) == [3, 4]


def test_prompts_from_another_seed_are_a_miss_in_cache_and_an_error_in_replay(
    after_recording: Trainings,
) -> None:
    other = ("data.seed=2", "+rollout_skip.on_mismatch=reuse")
    with pytest.raises(MismatchError, match=r"step 1, .* 0 is recorded with a different input: \d+ of 18"):
        after_recording.train("replay", *other)
    generated = after_recording.train("cache", *other)
    assert hits(generated) == []
    assert len(generated.engine.prompts) == 3 * PROMPTS


@pytest.mark.parametrize("changed", ["data.seed=2", "actor_rollout_ref.rollout.temperature=0.7", "dataset"])
def test_a_changed_seed_temperature_or_dataset_is_never_a_hit(after_recording: Trainings, changed: str) -> None:
    overrides = [changed]
    if changed == "dataset":
        file = after_recording.folder / "inputs" / "train.parquet"
        rows = pandas.read_parquet(file)
        rows.at[39, "data_source"] = "another"
        rows.to_parquet(file)
        overrides = []
    other = after_recording.train("cache", "trainer.total_training_steps=1", *overrides)
    assert hits(other) == []
    assert len(other.engine.prompts) == PROMPTS
    assert len(list(after_recording.dumps.glob("*/*/manifest.json"))) == 2, "not a separate variant"


def test_the_recorded_batch_can_replace_other_prompts(after_recording: Trainings, recorded: Any) -> None:
    trainings = after_recording
    settings = ("data.seed=2", "+rollout_skip.on_mismatch=reuse", "+rollout_skip.prompts=recorded")
    replaced = trainings.train("replay", *settings)
    assert replaced.trained == recorded.trained
    unskipped = trainings.train(None, "data.seed=2", "trainer.total_training_steps=4", kind=PlainTrainer)
    later = trainings.train("cache", *settings, "trainer.total_training_steps=4")
    assert hits(later) == STEPS
    assert later.engine.prompts == unskipped.engine.prompts[3 * PROMPTS :], "the dataloader is at another position"


def test_repeat_cycles_through_the_recorded_steps_and_repeat_last_loads_the_last_one(
    after_recording: Trainings, recorded: Any
) -> None:
    repeated = after_recording.train("repeat", "trainer.total_training_steps=5")
    assert repeated.trained == [recorded.trained[step] for step in (0, 1, 2, 0, 1)]
    last = after_recording.train("repeat_last", "trainer.total_training_steps=5")
    assert last.trained == [recorded.trained[step] for step in (0, 1, 2, 2, 2)]
    assert repeated.engine.prompts == last.engine.prompts == []
    assert repeated.left_over == last.left_over == []


def test_only_selected_steps_are_recorded_and_loaded(trainings: Trainings) -> None:
    recorded = trainings.train("record", "+rollout_skip.steps=[2]")
    assert RolloutStore(trainings.variant()).keys() == [RolloutKey(2)]
    again = trainings.train("cache", "+rollout_skip.steps=[2]")
    assert hits(again) == [2]
    assert again.trained[1] == recorded.trained[1]
    assert again.engine.prompts == recorded.engine.prompts[:PROMPTS] + recorded.engine.prompts[2 * PROMPTS :]
    assert again.weights.sent == [0, 2]


def test_at_most_max_dump_steps_steps_are_dumped(trainings: Trainings) -> None:
    trainings.train("cache", "+rollout_skip.max_dump_steps=2")
    assert RolloutStore(trainings.variant()).keys() == [RolloutKey(1), RolloutKey(2)]


def test_record_never_overwrites_and_refresh_does(after_recording: Trainings) -> None:
    with pytest.raises(EntryExistsError, match="mode 'refresh' to replace it"):
        after_recording.train("record")
    refreshed = after_recording.train("refresh")
    assert after_recording.train("replay").trained == refreshed.trained


def test_a_replay_that_cannot_reach_its_last_step_does_not_start(after_recording: Trainings) -> None:
    with pytest.raises(EntryNotFoundError, match=r"would replay steps 1 to 5, but 4-5 are not recorded"):
        after_recording.train("replay", "trainer.total_training_steps=5")


def test_turning_on_verls_own_skip_as_well_is_an_error(trainings: Trainings) -> None:
    with pytest.raises(ConfigError, match=r"skip\.rollout_tq\.enable is True"):
        trainings.train("cache", "skip.rollout_tq.enable=True", "skip.rollout_tq.steps=[1]")


def test_a_rollout_of_a_v0_trainer_is_rejected_with_the_reason(after_recording: Trainings) -> None:
    with RolloutStore(after_recording.variant()) as store:
        store.put(RolloutKey(1), rollout_output(), inputs=rollout_input(), replace=True)
    with pytest.raises(MismatchError, match="not recorded by one of verl's V1 trainers"):
        after_recording.train("replay")


@pytest.mark.parametrize("prompts", ["check", "recorded"])
def test_a_v0_training_rejects_a_rollout_of_a_v1_trainer_with_the_reason(
    after_recording: Trainings, prompts: str
) -> None:
    settings = {"mode": "replay", "dump_dir": after_recording.dumps, "prompts": prompts}
    config = after_recording.config(*(f"+rollout_skip.{key}={value}" for key, value in settings.items()))
    with RolloutSkip.open(config) as skip, pytest.raises(MismatchError, match="one of verl's V1 trainers"):
        skip.step(RolloutKey(1), rollout_input(18), _never)


def test_a_loop_that_samples_differently_is_an_error(trainings: Trainings) -> None:
    class OwnLoop(SyncTrainer):
        def _step_once(self, metrics: dict[str, Any], timing_raw: dict[str, Any], sample_batch_size: int) -> Any:
            self._held.clear()
            return KVBatchMeta(partition_id="train", keys=[], tags=[])

    with pytest.raises(
        InertError,
        match=r"Step 1 has no rollout step that goes through OwnLoop: .* does not call self\.replay_buffer\.sample",
    ):
        trainings.train("record", kind=OwnLoop)


def test_a_replay_buffer_with_a_renamed_sampling_call_is_an_error_before_the_training_starts(
    trainings: Trainings,
) -> None:
    class Renamed(PPOTrainerSync):
        def _build_replay_buffer(self) -> Any:
            return SimpleNamespace(draw=super()._build_replay_buffer().sample)

    class SkipRenamed(RolloutSkipMixin, WithoutWorkers, Renamed):
        pass

    with pytest.raises(UnsupportedTrainerError, match="it has no sample, which RolloutSkipMixin needs to record"):
        trainings.train("record", kind=SkipRenamed)
    assert not trainings.dumps.exists()


def test_an_untested_version_of_verl_records_and_replays_with_one_warning(
    trainings: Trainings, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(verl, "__version__", "0.10.0")
    monkeypatch.setattr(logging.getLogger("verl_rollout_skip"), "propagate", True)
    recorded = trainings.train("record")
    warnings = [record.getMessage() for record in caplog.records if "is not a tested version" in record.getMessage()]
    assert len(set(warnings)) == 1
    assert "verl 0.10.0 has everything that the V1 trainers need" in warnings[0]
    assert trainings.train("replay").trained == recorded.trained


def test_a_trajectory_whose_prompt_was_submitted_differently_is_an_error(trainings: Trainings) -> None:
    class OwnPrompts(SyncTrainer):
        def _add_batch_to_generate(self) -> None:
            batch = self._next_train_batch()
            super(SyncTrainer.__mro__[1], self)._submit_batch_to_rollout(batch)  # verl's own

    with pytest.raises(InertError, match="did not pass through _submit_batch_to_rollout"):
        trainings.train("record", kind=OwnPrompts)


def test_prompts_that_a_sampler_keeps_are_replayed_and_never_lost_in_cache(trainings: Trainings) -> None:
    class Keeping(SyncTrainer):
        """Submits more prompts than it trains on, and trains on them in the next step."""

        def _next_train_batch(self, num_prompts: int | None = None) -> Any:
            batch = super()._next_train_batch(num_prompts)
            return batch if self.global_steps > 1 else super(SyncTrainer, self)._next_train_batch(2 * PROMPTS)

    recorded = trainings.train("record", kind=Keeping)
    assert len(recorded.left_over) > 0
    replayed = trainings.train("replay", kind=Keeping)
    assert replayed.trained == recorded.trained
    RolloutStore(trainings.variant()).delete(RolloutKey(2))
    with pytest.raises(UnsupportedTrainerError, match=f"{PROMPTS} prompts are left over from loaded steps"):
        trainings.train("cache", kind=Keeping)


@pytest.mark.slow
def test_fifty_loaded_steps_leave_transfer_queue_as_clean_as_fifty_generated_ones(trainings: Trainings) -> None:
    class Watched(SyncTrainer):
        def on_step_begin(self) -> None:
            self.found.append((left_over(), _allocated()))
            super().on_step_begin()

        def _setup(self) -> None:
            self.found: list[Any] = []
            super()._setup()

    settings = ("trainer.total_training_steps=50",)
    generated = trainings.train("record", *settings, kind=Watched)
    loaded = trainings.train("cache", *settings, kind=Watched)
    assert hits(loaded) == list(range(1, 51))
    assert loaded.trained == generated.trained
    for trainer in (generated, loaded):
        assert [keys for keys, _ in trainer.found] == [[]] * 50
    most = max(allocated for _, allocated in generated.found)
    assert all(allocated <= most for _, allocated in loaded.found), "rows of TransferQueue were not freed"


def test_a_step_whose_sessions_all_fail_ends_the_training_as_without_recording(trainings: Trainings) -> None:
    class Broken(Engine):
        def generate_sequences(self, batch: Any) -> None:
            tags = [{"status": "failure"}] * len(batch)
            tq.kv_batch_put(keys=batch["uid"], partition_id="train", tags=tags)

    with pytest.raises(RuntimeError, match="no materializable trajectories"):
        trainings.train("record", engine=Broken())


class WithOddData(WithoutWorkers):
    """Data with a column that cannot be stored."""

    def _fetch_one_gen_batch(self) -> Any:
        chunk = super()._fetch_one_gen_batch()  # type: ignore[misc]
        chunk.set("labels", stack([{1, 2}] * len(chunk)))
        return chunk


class OddTrainer(RolloutSkipMixin, WithOddData, PPOTrainerSync):
    """The synchronous trainer on such data."""


def test_prompts_that_cannot_be_stored_are_failed_dumps_and_the_training_continues(trainings: Trainings) -> None:
    trained = trainings.train("cache", kind=OddTrainer)
    assert list(trained.logged) == STEPS
    assert trained.logged[3]["rollout_skip/dump_failures"] == 3
    with pytest.raises(UnsupportedBatchError, match="labels"):
        trainings.train("record", kind=OddTrainer)
    one_step = trainings.train("cache", "+rollout_skip.steps=[3]", kind=OddTrainer)
    assert [step for step in STEPS if one_step.logged[step].get("rollout_skip/dump_failures")] == [3]


def test_prompts_that_cannot_be_stored_are_never_a_hit(
    after_recording: Trainings, caplog: pytest.LogCaptureFixture
) -> None:
    trained = after_recording.train("cache", kind=OddTrainer)
    assert hits(trained) == []
    assert list(trained.logged) == STEPS
    assert "step 1, generation batch 0 is recorded with a different input" in caplog.text


class SleepyWeights(Weights):
    """Tracks whether the engine is awake."""

    def __init__(self) -> None:
        super().__init__()
        self.awake = False

    def update_weights(self, global_steps: int | None = None) -> None:
        super().update_weights(-1 if global_steps is None else global_steps)
        self.awake = True

    def sleep_replicas(self) -> None:
        self.awake = False


class WithRewardModel(WithoutWorkers):
    """Validates two batches as verl does with a colocated reward model, which uses the engine's memory."""

    def _setup(self) -> None:
        super()._setup()
        self.checkpoint_manager = self.weights = SleepyWeights()
        self.awake: list[bool] = []

    def _validate(self) -> dict[str, float]:
        for _ in range(2):
            self.awake.append(self.weights.awake)
            self.checkpoint_manager.sleep_replicas()
            self.checkpoint_manager.update_weights()
        return {"val": 1.0}


class ValidatingTrainer(RolloutSkipMixin, WithRewardModel, PPOTrainerSync):
    """The synchronous trainer with that validation."""


def test_every_batch_of_a_validation_finds_the_engine_awake(after_recording: Trainings) -> None:
    validated = after_recording.train("cache", "trainer.test_freq=1", kind=ValidatingTrainer)
    assert hits(validated) == STEPS
    assert validated.awake == [True] * 2 * len(STEPS)
    assert [step for step in validated.weights.sent if step >= 0] == STEPS


def _allocated() -> int:
    """The number of rows that TransferQueue has allocated and not freed."""
    controller = ray.get_actor("TransferQueueController", namespace="transfer_queue")
    snapshot = ray.get(controller.get_partition_snapshot.remote("train"))
    return 0 if snapshot is None else len(snapshot.global_indexes)


def _never(*_: Any) -> Any:
    raise AssertionError("generated or polled, although the step should have been loaded")
