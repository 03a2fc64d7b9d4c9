"""A training that would record and replay nothing is an error, and the message says what to do."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import verl
from verl import DataProto
from verl.trainer.ppo.ray_trainer import RayPPOTrainer

from tests.trainers.v0.stand_ins import SYNCS_BY_ITSELF, VERL
from tests.trainers.v0.training import DriverOnly, SkipTrainer, Trainings, VerlTrainer
from verl_rollout_skip import RolloutSkipMixin
from verl_rollout_skip.errors import ConfigError, InertError, UnsupportedTrainerError
from verl_rollout_skip.trainers.v0.compat import DYNAMIC_SAMPLING_NEEDS, NEEDS, TESTED, check_dynamic_sampling
from verl_rollout_skip.trainers.v0.dapo import DynamicSampling

ONE_STEP = "trainer.total_training_steps=1"


class OwnGeneration(VerlTrainer):  # type: ignore[misc, valid-type]
    """Generates in its own way, like a trainer with a remote engine."""

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


def test_a_loop_that_generates_differently_is_stopped_before_it_trains(trainings: Trainings) -> None:
    class OwnLoop(RolloutSkipMixin, OwnGeneration):
        pass

    failed = trainings.run("record", ONE_STEP, trainer=OwnLoop, fails=True)
    assert isinstance(failed.error, InertError)
    message = str(failed.error)
    assert "Step 1 has no rollout step that goes through OwnLoop" in message
    assert "generate_sequences" in message
    assert "call RolloutSkip.step in your own loop" in message
    assert "update" not in failed.events


def test_a_misspelled_block_is_rejected_before_anything_starts(trainings: Trainings) -> None:
    with pytest.raises(ConfigError, match=r"Nothing reads rolout_skip: did you mean 'rollout_skip'"):
        trainings.make(None, "rolout_skip.mode=cache", f"rolout_skip.dump_dir={trainings.dumps}", trainer=SkipTrainer)
    assert not trainings.dumps.exists()


def test_a_loop_that_also_updates_differently_is_an_error_at_the_end_of_its_training(trainings: Trainings) -> None:
    class OwnLoop(RolloutSkipMixin, OwnGeneration):
        def _step(self, batch: DataProto) -> None:
            pass

    failed = trainings.run("cache", trainer=OwnLoop, fails=True)
    assert isinstance(failed.error, InertError)
    assert "Step 1 has no rollout step" in str(failed.error)


def test_a_loop_that_generates_differently_is_fine_if_the_mode_is_off(trainings: Trainings) -> None:
    class OwnLoop(RolloutSkipMixin, OwnGeneration):
        def _step(self, batch: DataProto) -> None:
            pass

    trainings.run("off", trainer=OwnLoop)


def test_naming_the_mixin_after_the_trainer_is_an_error_when_the_class_is_defined() -> None:
    with pytest.raises(UnsupportedTrainerError, match=r"Write class Wrong\(RolloutSkipMixin, RayPPOTrainer\)"):
        type("Wrong", (DriverOnly, RayPPOTrainer, RolloutSkipMixin), {})


def test_a_subclass_of_a_skip_trainer_works(trainings: Trainings) -> None:
    class Derived(SkipTrainer):
        """Adds nothing."""

    trainings.run("record", trainer=Derived)
    assert trainings.run("cache").generated == 0


@pytest.mark.parametrize("version", ["0.10.0", "0.9.1.dev0", "1.0.0+gabc123"])
def test_an_untested_version_trains_with_one_warning_that_names_the_tested_versions(
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


def test_the_installed_version_is_tested_or_causes_the_warning(trainings: Trainings) -> None:
    assert trainings.run("record").said("is not a tested version") is (verl.__version__ not in TESTED)


def test_a_class_that_is_not_a_verl_trainer_is_an_error_that_names_everything_missing(trainings: Trainings) -> None:
    class Foreign(RolloutSkipMixin):
        def fit(self) -> None:
            pass

    with pytest.raises(UnsupportedTrainerError, match="Foreign cannot be recorded or replayed: it has no init_w") as no:
        Foreign(trainings.config("record"))
    message = str(no.value)
    assert "it has no _get_gen_batch, which RolloutSkipMixin needs to record the ground truths" in message
    assert f"Supported trainers: RayPPOTrainer of verl {', '.join(TESTED)}" in message
    assert not trainings.dumps.exists()


@pytest.mark.parametrize("name", [need.name for need in NEEDS if need.name not in ("init_workers", "fit")])
def test_a_missing_method_is_an_error_before_anything_starts(
    trainings: Trainings, monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    monkeypatch.delattr(RayPPOTrainer, name)
    with pytest.raises(UnsupportedTrainerError, match=f"it has no {name}, which RolloutSkipMixin needs to"):
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


def test_a_method_may_have_additional_optional_parameters(trainings: Trainings) -> None:
    class Planned(VerlTrainer):  # type: ignore[misc, valid-type]
        def _get_gen_batch(self, prompts: DataProto, plan: str = "none") -> DataProto:
            return super()._get_gen_batch(prompts)

    planned = type("SkipPlanned", (RolloutSkipMixin, Planned), {})
    trainings.run("record", trainer=planned)
    assert trainings.run("cache", trainer=planned).generated == 0


def test_batches_of_another_kind_are_rejected_before_workers_start(trainings: Trainings) -> None:
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


def test_a_renamed_update_of_the_actor_is_an_error_that_names_it(trainings: Trainings) -> None:
    class Renamed(VerlTrainer):  # type: ignore[misc, valid-type]
        def init_workers(self) -> None:
            super().init_workers()
            self.actor_rollout_wg.update_actor = None

    with pytest.raises(UnsupportedTrainerError, match=r"it has no update_actor, which RolloutSkipMixin needs to stop"):
        trainings.make("record", trainer=type("SkipRenamed", (RolloutSkipMixin, Renamed), {}))


@pytest.mark.skipif(SYNCS_BY_ITSELF, reason="verl 0.6.1 syncs weights as part of each generation")
def test_a_renamed_weight_sync_is_an_error_that_names_it(trainings: Trainings) -> None:
    class Renamed(VerlTrainer):  # type: ignore[misc, valid-type]
        def init_workers(self) -> None:
            super().init_workers()
            self.checkpoint_manager.update_weights = None

    renamed = type("SkipRenamed", (RolloutSkipMixin, Renamed), {})
    with pytest.raises(
        UnsupportedTrainerError, match="it has no update_weights, which RolloutSkipMixin needs to defer"
    ):
        trainings.make("cache", trainer=renamed)


def test_a_trainer_that_generates_for_later_steps_is_rejected(trainings: Trainings) -> None:
    class OneStepOff(VerlTrainer):  # type: ignore[misc, valid-type]
        async def fit(self) -> None:
            pass

    with pytest.raises(UnsupportedTrainerError, match="its fit is asynchronous"):
        trainings.make("record", trainer=type("SkipOneStepOff", (RolloutSkipMixin, OneStepOff), {}))


def test_a_trainer_without_the_object_that_generates_is_rejected(trainings: Trainings) -> None:
    class Elsewhere(VerlTrainer):  # type: ignore[misc, valid-type]
        def init_workers(self) -> None:
            super().init_workers()
            self.async_rollout_manager = None
            if not self.async_rollout_mode:
                self.actor_rollout_wg = None

    with pytest.raises(UnsupportedTrainerError, match=r"self\.\w+ cannot be used, .* it has no generate_sequences"):
        trainings.make("record", trainer=type("Nowhere", (RolloutSkipMixin, Elsewhere), {}))


@pytest.mark.skipif(VERL != (0, 8, 0), reason="0.8.0 has its own skip there")
def test_turning_on_verls_own_skip_as_well_is_an_error(trainings: Trainings) -> None:
    with pytest.raises(ConfigError, match=r"actor_rollout_ref\.rollout\.skip\.enable is True"):
        trainings.make("record", "actor_rollout_ref.rollout.skip.enable=True")


@pytest.mark.skipif(VERL < (0, 7), reason="verl 0.6.1 lacks these methods")
@pytest.mark.parametrize("name", [need.name for need in DYNAMIC_SAMPLING_NEEDS])
def test_a_missing_method_that_dynamic_sampling_needs_is_an_error_that_names_it(
    monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    trainer = type("SkipDapo", (DynamicSampling, RolloutSkipMixin, RayPPOTrainer), {})
    check_dynamic_sampling(trainer)
    monkeypatch.delattr(RayPPOTrainer, name)
    with pytest.raises(UnsupportedTrainerError, match=f"cannot sample dynamically: it has no {name}, which Dynamic"):
        check_dynamic_sampling(trainer)


@pytest.mark.skipif(VERL < (0, 7), reason="verl 0.6.1 lacks this method")
def test_a_method_with_other_parameters_that_dynamic_sampling_needs_is_an_error_that_shows_them() -> None:
    class Scheduled(RayPPOTrainer):
        def _update_actor(self, batch: DataProto, schedule: str) -> DataProto:
            return super()._update_actor(batch)

    message = (
        r"its _update_actor takes \(batch.*schedule.*but DynamicSampling needs \(batch\) to .*argument: 'schedule'"
    )
    with pytest.raises(UnsupportedTrainerError, match=message):
        check_dynamic_sampling(type("SkipScheduled", (DynamicSampling, RolloutSkipMixin, Scheduled), {}))


@pytest.mark.skipif(VERL >= (0, 7), reason="from verl 0.7.1 on it can")
def test_dynamic_sampling_is_rejected_if_rollouts_come_without_rewards(trainings: Trainings) -> None:
    class SkipDapo(DynamicSampling, RolloutSkipMixin, VerlTrainer):  # type: ignore[misc, valid-type]
        pass

    with pytest.raises(
        UnsupportedTrainerError, match=r"cannot sample dynamically: .*_update_actor.*verl 0\.7\.1 on.*recipe/dapo"
    ):
        trainings.make("record", "algorithm.filter_groups.enable=True", trainer=SkipDapo)
