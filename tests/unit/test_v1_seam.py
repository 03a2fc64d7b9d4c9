"""Which trainer a class is made of, and what that means for recordings."""

from __future__ import annotations

import pytest
import verl
from omegaconf import OmegaConf
from verl.trainer.ppo.v1 import PPOTrainer, PPOTrainerSync, get_trainer_cls, register_trainer
from verl.trainer.ppo.v1.trainer_base import TRAINER_REGISTRY

from verl_rollout_skip import v1
from verl_rollout_skip.errors import UnsupportedTrainerError
from verl_rollout_skip.fingerprint import difference, make_fingerprint
from verl_rollout_skip.trainers.v1.compat import base_mode, use_skip_trainer
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


def test_a_trainer_of_ones_own_keeps_the_settings_of_its_base(monkeypatch: pytest.MonkeyPatch) -> None:
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


def test_a_class_without_one_of_verls_trainers_is_refused() -> None:
    class Nothing(RolloutSkipMixin, PPOTrainer):
        pass

    with pytest.raises(UnsupportedTrainerError, match=r"Nothing has none of verl's V1 trainers .*separate_async"):
        base_mode(Nothing)


def test_another_version_of_verl_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(verl, "__version__", "0.10.0")
    with pytest.raises(UnsupportedTrainerError, match=r"verl 0\.10\.0 is installed"):
        base_mode(v1.SkipPPOTrainerSync)


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


def test_recipes_choose_the_trainer_by_the_mode_that_the_user_gave() -> None:
    config = OmegaConf.create({"trainer": {"v1": {"trainer_mode": "colocate_async"}}})
    for _ in range(2):
        use_skip_trainer(config)
        assert config.trainer.v1.trainer_mode == "skip_colocate_async"


def test_recipes_leave_the_mode_of_a_trainer_of_ones_own_alone() -> None:
    config = OmegaConf.create({"trainer": {"v1": {"trainer_mode": "my_mode"}}})
    use_skip_trainer(config)
    assert config.trainer.v1.trainer_mode == "my_mode"
