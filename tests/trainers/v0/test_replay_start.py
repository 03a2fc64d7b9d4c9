"""A replay starts no inference engine: verl's own ``init_workers``, on Ray, with stand-ins for the training workers."""

from __future__ import annotations

import asyncio
import inspect
import sys
from collections.abc import Iterator
from types import SimpleNamespace

import pytest
import ray
from omegaconf import DictConfig
from ray._private import state
from verl.experimental.agent_loop import AgentLoopManager
from verl.single_controller.base import Worker
from verl.trainer.ppo.ray_trainer import RayPPOTrainer
from verl.trainer.ppo.utils import Role
from verl.utils.config import omega_conf_to_dataclass
from verl.workers.config import HFModelConfig
from verl.workers.rollout.base import get_rollout_class

from tests.trainers.v0.stand_ins import VERL
from tests.trainers.v0.training import SkipTrainer, Trainings, VerlTrainer, assert_same_training
from verl_rollout_skip import RolloutSkipMixin
from verl_rollout_skip.errors import ConfigError, UnsupportedTrainerError
from verl_rollout_skip.trainers.engine import NoAgentLoops
from verl_rollout_skip.trainers.v0.compat import Settings, find_generator, known_settings

# More devices than the replay has.
LARGE_SERVERS = "actor_rollout_ref.rollout.tensor_model_parallel_size=4"


class RealStart(VerlTrainer):  # type: ignore[misc, valid-type]
    """Starts everything as verl does, except for the workers that need GPUs and those that compute rewards."""

    def init_workers(self) -> None:
        pool = SimpleNamespace()
        self.resource_pool_manager = SimpleNamespace(
            create_resource_pool=lambda: None,
            resource_pool_dict={"global_pool": "the pool"},
            get_resource_pool=lambda role: "the pool",
            get_n_gpus=lambda: 1,
        )
        pool.spawn = lambda prefix_set: dict.fromkeys(prefix_set, self.workers.actor)
        self.ray_worker_group_cls = lambda **arguments: pool
        RayPPOTrainer.init_workers(self)


class SkipRealStart(RolloutSkipMixin, RealStart):
    pass


@pytest.fixture
def own_ray(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    if VERL >= (0, 7):
        monkeypatch.setattr(
            "verl.experimental.reward_loop.RewardLoopManager", lambda **_: SimpleNamespace(reward_loop_workers=[])
        )
    ray.init(address="local", num_cpus=1, include_dashboard=False, log_to_driver=False)
    yield
    ray.shutdown()


def test_no_server_and_no_agent_loop_is_started(trainings: Trainings, own_ray: None) -> None:
    recording = trainings.run("record", LARGE_SERVERS)
    roles = {Role.ActorRollout: ray.remote(Worker)}
    replayed = trainings.run("replay", LARGE_SERVERS, trainer=SkipRealStart, roles=roles)
    actors = {actor["ActorClassName"] for actor in state.actors().values()}
    assert actors <= {"GlobalRequestLoadBalancer"}
    assert "sync" not in " ".join(replayed.events)
    assert_same_training(recording, replayed)


@pytest.fixture
def without_engine(trainings: Trainings) -> DictConfig:
    trainings.run("record")
    return trainings.make("replay").config


def test_the_workers_know_every_setting_that_they_get(without_engine: DictConfig) -> None:
    rollout = omega_conf_to_dataclass(without_engine.actor_rollout_ref.rollout)
    assert (rollout.tensor_model_parallel_size, rollout.data_parallel_size) == (1, 1), "no server, no devices for it"
    model = omega_conf_to_dataclass(without_engine.actor_rollout_ref.model, dataclass_type=HFModelConfig)
    kind = get_rollout_class(rollout.name, rollout.mode)
    engine = kind(config=rollout, model_config=model, device_mesh=None)
    gathered = []
    weights = (gathered.append(number) for number in range(3))
    asyncio.run(engine.update_weights(weights))
    asyncio.run(engine.resume(["weights"]))
    asyncio.run(engine.release())
    assert gathered == []
    assert inspect.getgeneratorstate(weights) == inspect.GEN_CLOSED


def test_the_configuration_of_the_trainer_has_no_settings_of_this_package(without_engine: DictConfig) -> None:
    assert "rollout_skip" not in without_engine
    assert not without_engine.trainer.val_before_train


@pytest.mark.skipif(VERL >= (0, 9), reason="verl 0.9 imports as many as are named")
def test_a_users_external_library_needs_the_engine_on_older_versions(trainings: Trainings) -> None:
    library = "actor_rollout_ref.model.external_lib=json"
    recording = trainings.run("record", library)
    with pytest.raises(
        ConfigError, match=r"external_lib is 'json', but this version of verl imports only one.*engine=on"
    ):
        trainings.make("replay", library)
    assert_same_training(recording, trainings.run("replay", library, "rollout_skip.engine=on"))


def test_the_settings_that_verl_knows_are_found_without_its_version() -> None:
    expected = Settings(weight_sync=VERL >= (0, 9), agent_loop_manager=VERL >= (0, 7), several_libraries=VERL >= (0, 9))
    assert known_settings() == expected


def test_an_engine_with_unknown_methods_is_rejected_before_anything_starts(
    trainings: Trainings, monkeypatch: pytest.MonkeyPatch
) -> None:
    recording = trainings.run("record")
    monkeypatch.delattr(AgentLoopManager, "_init_agent_loop_workers")
    message = r"AgentLoopManager of verl .* it has no _init_agent_loop_workers, which RolloutSkipMixin needs.*engine=on"
    monkeypatch.delattr(NoAgentLoops, "_init_agent_loop_workers")
    with pytest.raises(UnsupportedTrainerError, match=message):
        trainings.make("replay")
    assert_same_training(recording, trainings.run("replay", "rollout_skip.engine=on"))


def test_a_verl_that_cannot_register_an_engine_is_rejected_before_anything_starts(
    trainings: Trainings, monkeypatch: pytest.MonkeyPatch
) -> None:
    trainings.run("record")
    monkeypatch.setitem(sys.modules, "verl_rollout_skip.trainers.engine", None)
    with pytest.raises(UnsupportedTrainerError, match=r"replay without an inference engine is not possible"):
        trainings.make("replay")


def test_the_object_that_generates_is_found(trainings: Trainings) -> None:
    trainer = trainings.make("off", trainer=SkipTrainer)
    attribute = "async_rollout_manager" if trainer.async_rollout_mode else "actor_rollout_wg"
    assert find_generator(trainer) is getattr(trainer, attribute)
