"""Probes of the installed verl and TransferQueue, and the trainer that a class extends."""

from __future__ import annotations

import logging
from types import SimpleNamespace
from typing import Any

import pytest
import transfer_queue
import verl
from omegaconf import OmegaConf
from verl.trainer.ppo.v1 import PPOTrainer, PPOTrainerSync, get_trainer_cls, register_trainer
from verl.trainer.ppo.v1.trainer_base import TRAINER_REGISTRY

from verl_rollout_skip import v1
from verl_rollout_skip.errors import UnsupportedTrainerError
from verl_rollout_skip.fingerprint.fingerprint import difference, make_fingerprint
from verl_rollout_skip.trainers.v1.compat import (
    NEEDS,
    base_mode,
    check_replay_buffer,
    check_trainer,
    use_skip_trainer,
)
from verl_rollout_skip.v1 import RolloutSkipMixin

NAMES = {
    "sync": "SkipPPOTrainerSync",
    "colocate_async": "SkipPPOTrainerColocateAsync",
    "separate_async": "SkipPPOTrainerSeparateAsync",
}


@pytest.mark.parametrize("mode", NAMES)
def test_verl_finds_the_trainers_under_their_modes(mode: str) -> None:
    trainer = getattr(v1, NAMES[mode])
    assert get_trainer_cls(f"skip_{mode}") is trainer
    assert base_mode(trainer) == mode
    assert issubclass(trainer, get_trainer_cls(mode))


def test_a_custom_trainer_keeps_the_settings_of_its_base(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("verl.trainer.ppo.v1.trainer_base.TRAINER_REGISTRY", dict(TRAINER_REGISTRY))

    @register_trainer("mine")
    class Mine(PPOTrainerSync):
        pass

    class OfMine(RolloutSkipMixin, Mine):
        pass

    class OfVerl(RolloutSkipMixin, PPOTrainerSync):
        pass

    assert base_mode(OfMine) == "mine"
    assert base_mode(OfVerl) == "sync"


def test_a_class_without_one_of_verls_trainers_is_rejected() -> None:
    class Nothing(RolloutSkipMixin, PPOTrainer):
        pass

    with pytest.raises(UnsupportedTrainerError, match=r"Nothing has none of verl's V1 trainers .*separate_async"):
        base_mode(Nothing)


def test_an_untested_version_is_a_warning_that_names_the_tested_versions(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(logging.getLogger("verl_rollout_skip"), "propagate", True)
    monkeypatch.setattr(verl, "__version__", "0.10.0")
    check_trainer(v1.SkipPPOTrainerSync)
    (message,) = {record.getMessage() for record in caplog.records if record.name.startswith("verl_rollout_skip")}
    assert "verl 0.10.0 has everything that the V1 trainers need" in message
    assert "(tested: 0.9.1, 0.9.0)" in message


@pytest.mark.parametrize("mode", NAMES)
def test_the_installed_verl_has_what_is_needed(mode: str) -> None:
    check_trainer(getattr(v1, NAMES[mode]))


@pytest.mark.parametrize("name", [need.name for need in NEEDS])
def test_a_missing_method_is_an_error_that_names_it(monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    for kind in PPOTrainerSync.__mro__:
        if name in vars(kind):
            monkeypatch.delattr(kind, name)
    with pytest.raises(UnsupportedTrainerError, match=rf"it has no {name}, which RolloutSkipMixin needs to"):
        check_trainer(v1.SkipPPOTrainerSync)


def test_a_method_with_other_parameters_is_an_error_that_shows_them() -> None:
    class Planned(RolloutSkipMixin, PPOTrainerSync):
        pass

    class Other(PPOTrainerSync):
        def _submit_batch_to_rollout(self, batch: Any, priority: int) -> int:
            return 0

    check_trainer(Planned)
    message = r"its _submit_batch_to_rollout takes \(batch.*priority.*needs \(batch\) to .*argument: 'priority'"
    with pytest.raises(UnsupportedTrainerError, match=message):
        check_trainer(type("Skip", (RolloutSkipMixin, Other), {}))


def test_a_renamed_sampling_call_is_an_error_that_names_it() -> None:
    with pytest.raises(UnsupportedTrainerError, match=r"SimpleNamespace .* it has no sample, which RolloutSkipMixin"):
        check_replay_buffer(SimpleNamespace(draw=lambda global_steps, partition_id, batch_size: None))


def test_a_sampling_call_with_other_parameters_is_an_error_that_shows_them() -> None:
    with pytest.raises(UnsupportedTrainerError, match=r"its sample takes \(step, partition_id, batch_size\), but"):
        check_replay_buffer(SimpleNamespace(sample=lambda step, partition_id, batch_size: None))


@pytest.mark.parametrize("name", ["kv_batch_put", "get_client"])
def test_a_function_that_transfer_queue_lacks_is_an_error_that_names_it(
    monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    monkeypatch.delattr(transfer_queue, name)
    with pytest.raises(UnsupportedTrainerError, match=rf"TransferQueue .* it has no {name}, which RolloutSkipMixin"):
        check_trainer(v1.SkipPPOTrainerSync)


@pytest.mark.parametrize("name", ["kv_retrieve_meta", "_get_partition_meta", "_run_coroutine"])
def test_a_method_that_the_client_of_transfer_queue_lacks_is_an_error_that_names_it(
    monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    # _run_coroutine comes from a base class and cannot be deleted, so None stands for a missing method.
    monkeypatch.setattr(transfer_queue.TransferQueueClient, name, None)
    with pytest.raises(UnsupportedTrainerError, match=rf"TransferQueueClient .* it has no {name}, which RolloutSkip"):
        check_trainer(v1.SkipPPOTrainerSync)


def test_a_function_of_transfer_queue_with_other_parameters_is_an_error_that_shows_them(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(transfer_queue, "kv_clear", lambda names, partition: None)
    with pytest.raises(UnsupportedTrainerError, match=r"its kv_clear takes \(names, partition\), but RolloutSkipMixin"):
        check_trainer(v1.SkipPPOTrainerSync)


def test_an_asynchronous_fit_is_rejected() -> None:
    class Later(PPOTrainerSync):
        async def fit(self, agent_loop_manager: Any) -> None:
            pass

    with pytest.raises(UnsupportedTrainerError, match="its fit is asynchronous"):
        check_trainer(type("Skip", (RolloutSkipMixin, Later), {}))


def test_the_mixin_must_be_named_first() -> None:
    with pytest.raises(TypeError, match=r"class Wrong\(RolloutSkipMixin, PPOTrainerSync\)"):
        type("Wrong", (PPOTrainerSync, RolloutSkipMixin), {})


def test_a_recording_belongs_to_the_trainer_and_not_to_the_name_of_its_mode() -> None:
    fingerprints = {
        mode: make_fingerprint(OmegaConf.create({"trainer": {"v1": {"trainer_mode": mode}}}))
        for mode in ("sync", "skip_sync", "skip_colocate_async")
    }
    assert fingerprints["sync"] == fingerprints["skip_sync"]
    lines = difference(fingerprints["sync"].rollout, fingerprints["skip_colocate_async"].rollout)
    assert lines == ["trainer.v1.trainer_mode: sync → colocate_async"]


def test_recipes_choose_the_trainer_by_the_users_trainer_mode() -> None:
    config = OmegaConf.create({"trainer": {"v1": {"trainer_mode": "colocate_async"}}})
    for _ in range(2):
        use_skip_trainer(config)
        assert config.trainer.v1.trainer_mode == "skip_colocate_async"


def test_recipes_keep_the_mode_of_a_custom_trainer() -> None:
    config = OmegaConf.create({"trainer": {"v1": {"trainer_mode": "my_mode"}}})
    use_skip_trainer(config)
    assert config.trainer.v1.trainer_mode == "my_mode"
