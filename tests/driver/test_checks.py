"""A training in which nothing would be recorded or replayed is refused, and the message says what can be done."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import verl
from verl import DataProto
from verl.trainer.ppo.ray_trainer import RayPPOTrainer

from tests.driver.stand_ins import VERL
from tests.driver.training import DriverOnly, SkipTrainer, Trainings, VerlTrainer
from verl_rollout_skip import RolloutSkipMixin
from verl_rollout_skip.errors import ConfigError, InertError, UnsupportedTrainerError
from verl_rollout_skip.trainers.v0.compat import TESTED
from verl_rollout_skip.trainers.v0.dapo import DynamicSampling

ONE_STEP = "trainer.total_training_steps=1"


class OwnGeneration(VerlTrainer):  # type: ignore[misc, valid-type]
    """Asks its engine in a way of its own, as a trainer with an engine elsewhere may do."""

    def fit(self) -> None:
        self.global_steps = 0
        self._load_checkpoint()
        self.global_steps += 1
        for raw in self.train_dataloader:
            self._step(DataProto.from_single_dict(raw))
            if self.global_steps >= self.total_training_steps:
                return
            self.global_steps += 1

    def _step(self, batch: DataProto) -> None:
        self.actor_rollout_wg.update_actor(batch)


def test_a_loop_that_generates_in_another_way_is_stopped_before_it_trains(trainings: Trainings) -> None:
    class OwnLoop(RolloutSkipMixin, OwnGeneration):
        pass

    failed = trainings.run("record", ONE_STEP, trainer=OwnLoop, fails=True)
    assert isinstance(failed.error, InertError)
    message = str(failed.error)
    assert "Step 1 has no rollout step that goes through OwnLoop" in message
    assert "generate_sequences" in message
    assert "call RolloutSkip.step in your own loop" in message
    assert "update" not in failed.events


def test_a_misspelled_block_is_refused_before_anything_is_made(trainings: Trainings) -> None:
    with pytest.raises(ConfigError, match=r"Nothing reads rolout_skip: did you mean 'rollout_skip'"):
        trainings.make(None, "rolout_skip.mode=cache", f"rolout_skip.dump_dir={trainings.dumps}", trainer=SkipTrainer)
    assert not trainings.dumps.exists()


def test_a_loop_that_does_not_even_update_is_stopped_after_its_first_step(trainings: Trainings) -> None:
    class OwnLoop(RolloutSkipMixin, OwnGeneration):
        def _step(self, batch: DataProto) -> None:
            pass

    failed = trainings.run("cache", trainer=OwnLoop, fails=True)
    assert isinstance(failed.error, InertError)
    assert "Step 1 has no rollout step" in str(failed.error)


def test_a_loop_that_generates_in_another_way_may_do_so_if_the_mode_is_off(trainings: Trainings) -> None:
    class OwnLoop(RolloutSkipMixin, OwnGeneration):
        def _step(self, batch: DataProto) -> None:
            pass

    trainings.run("off", trainer=OwnLoop)


def test_the_mixin_named_after_the_trainer_is_an_error_when_the_class_is_made() -> None:
    with pytest.raises(UnsupportedTrainerError, match=r"Write class Wrong\(RolloutSkipMixin, RayPPOTrainer\)"):
        type("Wrong", (DriverOnly, RayPPOTrainer, RolloutSkipMixin), {})


def test_a_class_derived_from_a_right_one_is_right(trainings: Trainings) -> None:
    class Derived(SkipTrainer):
        """With something of its own."""

    trainings.run("record", trainer=Derived)
    assert trainings.run("cache").generated == 0


@pytest.mark.parametrize("version", ["0.10.0", "0.9.1.dev0", "1.0.0+gabc123"])
def test_a_version_that_nobody_has_tested_trains_with_one_warning_that_names_the_tested_ones(
    trainings: Trainings, monkeypatch: pytest.MonkeyPatch, version: str
) -> None:
    monkeypatch.setattr(verl, "__version__", version)
    recorded = trainings.run("record")
    warnings = [message for message in recorded.messages if f"verl {version} has everything" in message]
    assert len(warnings) == 1
    assert warnings[0].startswith("WARNING")
    assert ", ".join(TESTED) in warnings[0]
    assert trainings.run("replay").generated == 0
    assert not trainings.run("off").said("has everything")


def test_the_installed_version_is_a_tested_one_or_the_warning_comes(trainings: Trainings) -> None:
    assert trainings.run("record").said("is not a tested version") is (verl.__version__ not in TESTED)


def test_something_that_is_no_trainer_of_verl_is_an_error_that_names_all_that_is_missing(trainings: Trainings) -> None:
    class Foreign(RolloutSkipMixin):
        def fit(self) -> None:
            pass

    with pytest.raises(UnsupportedTrainerError, match="Foreign cannot be recorded or replayed: it has no init_w") as no:
        Foreign(trainings.config("record"))
    message = str(no.value)
    assert "it has no _get_gen_batch, which RolloutSkipMixin needs to record the answers that fit keeps" in message
    assert f"Supported are RayPPOTrainer of verl {', '.join(TESTED)}" in message
    assert not trainings.dumps.exists()


def test_a_method_that_verl_has_no_more_is_an_error_before_anything_is_made(
    trainings: Trainings, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delattr(RayPPOTrainer, "_load_checkpoint")
    with pytest.raises(UnsupportedTrainerError, match="it has no _load_checkpoint, which RolloutSkipMixin needs to"):
        trainings.make("record")
    assert not trainings.dumps.exists()


def test_a_method_with_other_parameters_is_an_error_that_shows_them(trainings: Trainings) -> None:
    class Planned(VerlTrainer):  # type: ignore[misc, valid-type]
        def _get_gen_batch(self, batch: DataProto, plan: str) -> DataProto:
            return super()._get_gen_batch(batch)

    message = r"its _get_gen_batch takes \(batch.*plan.*but RolloutSkipMixin needs \(batch\) to .*argument: 'plan'"
    with pytest.raises(UnsupportedTrainerError, match=message):
        trainings.make("record", trainer=type("SkipPlanned", (RolloutSkipMixin, Planned), {}))
    trainings.make("off", trainer=type("SkipPlanned", (RolloutSkipMixin, Planned), {}))


def test_a_method_may_take_more_than_it_is_given(trainings: Trainings) -> None:
    class Planned(VerlTrainer):  # type: ignore[misc, valid-type]
        def _get_gen_batch(self, prompts: DataProto, plan: str = "none") -> DataProto:
            return super()._get_gen_batch(prompts)

    planned = type("SkipPlanned", (RolloutSkipMixin, Planned), {})
    trainings.run("record", trainer=planned)
    assert trainings.run("cache", trainer=planned).generated == 0


def test_batches_of_another_kind_are_refused_before_workers_start(trainings: Trainings) -> None:
    class Indexed(VerlTrainer):  # type: ignore[misc, valid-type]
        data_proto_cls = type("NeoProto", (), {})

    with pytest.raises(UnsupportedTrainerError, match=r"its batches are NeoProto.*trainer\.data_plane=classic"):
        trainings.make("record", trainer=type("SkipIndexed", (RolloutSkipMixin, Indexed), {}))


def test_a_renamed_generating_call_is_an_error_that_names_it(trainings: Trainings) -> None:
    class Renamed(VerlTrainer):  # type: ignore[misc, valid-type]
        def init_workers(self) -> None:
            super().init_workers()
            generator = SimpleNamespace(rollout=self.workers.engine.generate_sequences, update_actor=None)
            self.async_rollout_manager = self.actor_rollout_wg = generator

    with pytest.raises(UnsupportedTrainerError, match=r"it has no generate_sequences, which RolloutSkipMixin"):
        trainings.make("record", trainer=type("SkipRenamed", (RolloutSkipMixin, Renamed), {}))


def test_a_generating_call_with_other_parameters_is_an_error_that_shows_them(trainings: Trainings) -> None:
    class Streaming(VerlTrainer):  # type: ignore[misc, valid-type]
        def init_workers(self) -> None:
            super().init_workers()
            generator = SimpleNamespace(generate_sequences=lambda prompts, stream: None, update_actor=None)
            self.async_rollout_manager = self.actor_rollout_wg = generator

    with pytest.raises(UnsupportedTrainerError, match=r"its generate_sequences takes \(prompts, stream\), but"):
        trainings.make("record", trainer=type("SkipStreaming", (RolloutSkipMixin, Streaming), {}))


def test_a_trainer_that_generates_for_later_steps_is_refused(trainings: Trainings) -> None:
    class OneStepOff(VerlTrainer):  # type: ignore[misc, valid-type]
        async def fit(self) -> None:
            pass

    with pytest.raises(UnsupportedTrainerError, match="its fit is asynchronous"):
        trainings.make("record", trainer=type("SkipOneStepOff", (RolloutSkipMixin, OneStepOff), {}))


def test_a_trainer_without_the_object_that_generates_is_refused(trainings: Trainings) -> None:
    class Elsewhere(VerlTrainer):  # type: ignore[misc, valid-type]
        def init_workers(self) -> None:
            super().init_workers()
            self.async_rollout_manager = None
            if not self.async_rollout_mode:
                self.actor_rollout_wg = None

    with pytest.raises(UnsupportedTrainerError, match=r"of self\.\w+ after init_workers, it has no generate_sequences"):
        trainings.make("record", trainer=type("Nowhere", (RolloutSkipMixin, Elsewhere), {}))


@pytest.mark.skipif(VERL != (0, 8, 0), reason="0.8.0 has its own skip there")
def test_verl_s_own_skip_beside_this_one_is_refused(trainings: Trainings) -> None:
    with pytest.raises(ConfigError, match=r"actor_rollout_ref\.rollout\.skip\.enable is True"):
        trainings.make("record", "actor_rollout_ref.rollout.skip.enable=True")


@pytest.mark.skipif(VERL >= (0, 7), reason="from verl 0.7.1 on it can")
def test_dynamic_sampling_is_refused_where_rollouts_come_without_rewards(trainings: Trainings) -> None:
    class SkipDapo(DynamicSampling, RolloutSkipMixin, VerlTrainer):  # type: ignore[misc, valid-type]
        pass

    with pytest.raises(
        UnsupportedTrainerError, match=r"cannot sample dynamically: .*_update_actor.*verl 0\.7\.1 on.*recipe/dapo"
    ):
        trainings.make("record", "algorithm.filter_groups.enable=True", trainer=SkipDapo)
