"""A training in which nothing would be recorded or replayed is refused, and the message says what can be done."""

from __future__ import annotations

import pytest
import verl
from verl import DataProto
from verl.trainer.ppo.ray_trainer import RayPPOTrainer

from tests.driver.stand_ins import VERL
from tests.driver.training import DriverOnly, SkipTrainer, Trainings, VerlTrainer
from verl_rollout_skip import RolloutSkipMixin
from verl_rollout_skip.errors import ConfigError, InertError, UnsupportedTrainerError
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


@pytest.mark.parametrize("version", ["0.5.0", "0.9.0", "0.10.0", "0.9.1.dev0"])
def test_another_version_is_an_error_that_names_the_supported_ones(
    trainings: Trainings, monkeypatch: pytest.MonkeyPatch, version: str
) -> None:
    monkeypatch.setattr(verl, "__version__", version)
    with pytest.raises(
        UnsupportedTrainerError, match=rf"verl {version} is installed.*0\.9\.1, 0\.8\.0, 0\.7\.1, 0\.6\.1 only"
    ):
        trainings.make("record")
    assert not trainings.dumps.exists()
    trainings.run("off")


def test_something_that_is_no_trainer_of_verl_is_an_error_that_names_the_supported_ones(trainings: Trainings) -> None:
    class Foreign(RolloutSkipMixin):
        def fit(self) -> None:
            pass

    message = (
        r"Foreign cannot be recorded or replayed: it has no init_workers. Supported are RayPPOTrainer of verl 0\.9\.1"
    )
    with pytest.raises(UnsupportedTrainerError, match=message):
        Foreign(trainings.config("record"))


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

    with pytest.raises(UnsupportedTrainerError, match=r"has no self\..*generate_sequences after init_workers"):
        trainings.make("record", trainer=type("Nowhere", (RolloutSkipMixin, Elsewhere), {}))


@pytest.mark.skipif(VERL != (0, 8, 0), reason="0.8.0 has its own skip there")
def test_verl_s_own_skip_beside_this_one_is_refused(trainings: Trainings) -> None:
    with pytest.raises(ConfigError, match=r"actor_rollout_ref\.rollout\.skip\.enable is True"):
        trainings.make("record", "actor_rollout_ref.rollout.skip.enable=True")


@pytest.mark.skipif(VERL >= (0, 7), reason="from verl 0.7.1 on it can")
def test_dynamic_sampling_is_refused_where_rollouts_come_without_rewards(trainings: Trainings) -> None:
    class SkipDapo(DynamicSampling, RolloutSkipMixin, VerlTrainer):  # type: ignore[misc, valid-type]
        pass

    with pytest.raises(UnsupportedTrainerError, match=r"samples dynamically from verl 0\.7\.1 on.*recipe/dapo"):
        trainings.make("record", "algorithm.filter_groups.enable=True", trainer=SkipDapo)
