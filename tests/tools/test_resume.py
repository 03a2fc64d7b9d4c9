"""The configuration that continues a training, from its manifest."""

from __future__ import annotations

import shlex
from pathlib import Path

import pytest
from hydra.core.override_parser.overrides_parser import OverridesParser
from omegaconf import OmegaConf

from tests.trainings import Engine, Training, inputs_of, never
from verl_rollout_skip import RolloutKey
from verl_rollout_skip.errors import ConfigError, UnsupportedTrainerError
from verl_rollout_skip.replay.rollout import RolloutSkip
from verl_rollout_skip.tools.resume import _trainer_class, plan_resumption


@pytest.fixture
def training(tmp_path: Path) -> Training:
    return Training(tmp_path)


def manifest_of(training: Training) -> str:
    return str(training.variants()[0] / "manifest.json")


def test_resumed_training_has_the_recorded_configuration_with_the_run_as_source(training: Training) -> None:
    training.record(RolloutKey(1), skip={"max_disk": "1GB"}, reward__reward_model={"name": "???"})
    config = plan_resumption(manifest_of(training), ["trainer.total_training_steps=9", "+new.key=[1,2]"]).config
    assert config.rollout_skip == {"mode": "cache", "source": manifest_of(training), "max_disk": "1GB"}
    assert config.trainer.total_training_steps == 9
    assert config.new.key == [1, 2]
    recorded = training.config("record")
    assert config.data == recorded.data
    assert config.actor_rollout_ref == recorded.actor_rollout_ref


def test_settings_with_the_same_old_path_change_with_an_override(training: Training) -> None:
    model = str(training.folder / "inputs" / "model")
    training.record(RolloutKey(1), critic={"model": {"path": model}, "tokenizer": model})
    given = ["actor_rollout_ref.model.path=/elsewhere/model", "critic.tokenizer=/kept"]
    resumption = plan_resumption(manifest_of(training), given)
    assert resumption.config.critic.model.path == "/elsewhere/model"
    assert resumption.config.critic.tokenizer == "/kept"
    assert resumption.remapped == {"critic.model.path": "/elsewhere/model"}


def test_masked_secrets_must_be_given_again(training: Training) -> None:
    training.record(RolloutKey(1), trainer__api_key="do-not-store")
    with pytest.raises(ConfigError, match=r"trainer\.api_key.*Add to the command: trainer\.api_key=…"):
        plan_resumption(manifest_of(training), [])
    config = plan_resumption(manifest_of(training), ["trainer.api_key=again"]).config
    assert OmegaConf.select(config, "trainer.api_key") == "again"


def test_masked_secrets_in_lists_must_be_given_again_too(training: Training) -> None:
    packages = ["numpy", "git+https://me:hunter2@host/repository"]
    training.record(RolloutKey(1), ray_kwargs={"ray_init": {"runtime_env": {"pip": packages}}})
    with pytest.raises(ConfigError, match=r"you must give them again: ray_kwargs\.ray_init\.runtime_env\.pip"):
        plan_resumption(manifest_of(training), [])
    given = "ray_kwargs.ray_init.runtime_env.pip=[numpy]"
    assert plan_resumption(manifest_of(training), [given]).config.ray_kwargs.ray_init.runtime_env.pip == ["numpy"]


@pytest.mark.parametrize("text", ["trainer.total_training_steps", "=3", "a=[1"])
def test_invalid_override_is_an_error_that_quotes_it(training: Training, text: str) -> None:
    training.record(RolloutKey(1))
    with pytest.raises(ConfigError, match=r"is not a setting|cannot be parsed"):
        plan_resumption(manifest_of(training), [text])


def test_trainer_that_cannot_be_imported_is_an_error_that_says_what_to_do(training: Training) -> None:
    training.record(RolloutKey(1))
    manifest = plan_resumption(manifest_of(training), []).manifest
    for name in (None, "__main__.MyTrainer", "no.such.module.MyTrainer"):
        object.__setattr__(manifest, "trainer", name)
        with pytest.raises(UnsupportedTrainerError, match=r"rollout_skip\.source="):
            _trainer_class(manifest)


@pytest.mark.parametrize("settings", [{"reward": "recompute"}, {"on_mismatch": "reuse"}])
def test_training_that_loaded_rollouts_from_elsewhere_cannot_be_resumed_alone(
    training: Training, settings: dict[str, str]
) -> None:
    training.record(RolloutKey(3), skip=settings)
    ((key, value),) = settings.items()
    with pytest.raises(
        ConfigError, match=rf"started with rollout_skip\.{key}={value}: it loaded rollouts from elsewhere"
    ):
        plan_resumption(manifest_of(training), [])
    usual = {"reward": "recorded", "on_mismatch": "new"}[key]
    config = plan_resumption(manifest_of(training), [f"rollout_skip.{key}={usual}"]).config
    assert config.rollout_skip[key] == usual


def test_resume_command_is_logged_only_if_everything_is_in_one_variant(
    training: Training, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level("INFO")
    training.record(RolloutKey(1))
    assert caplog.text.count("to continue from here: rollout-skip resume") == 1
    (training.folder / "inputs" / "reward.py").write_text("v2")
    with training.open("cache", {"reward": "recompute"}) as skip:
        skip.step(RolloutKey(1), inputs_of(RolloutKey(1)), never)
        skip.step(RolloutKey(2), inputs_of(RolloutKey(2)), Engine())
    assert "1 dumped" in caplog.text
    assert caplog.text.count("to continue from here: rollout-skip resume") == 1


def test_logged_command_can_be_pasted_into_a_shell(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level("INFO")
    training = Training(tmp_path / "it's a test; $HOME")
    training.record(RolloutKey(1))
    [line] = [message for message in caplog.messages if message.startswith("to continue from here: ")]
    words = shlex.split(line.removeprefix("to continue from here: "))
    assert words == ["rollout-skip", "resume", manifest_of(training)]


def test_suggested_source_can_be_pasted_into_a_shell(tmp_path: Path) -> None:
    training = Training(tmp_path / "it's a test")
    training.record(RolloutKey(1))
    manifest = plan_resumption(manifest_of(training), []).manifest
    with pytest.raises(UnsupportedTrainerError) as caught:
        _trainer_class(manifest)
    [word] = shlex.split(str(caught.value).rpartition(" entry point with ")[2])
    override = OverridesParser.create().parse_override(word)
    assert (override.key_or_group, override.value()) == ("rollout_skip.source", manifest.path)


def record_asynchronously(training: Training) -> Path:
    """Record an asynchronous training; return its checkpoint folder, which is still empty."""
    checkpoints = training.folder / "checkpoints"
    training.record(
        RolloutKey(1),
        trainer__use_v1=True,
        trainer__v1={"trainer_mode": "skip_colocate_async"},
        trainer__resume_mode="auto",
        trainer__default_local_dir=str(checkpoints),
    )
    return checkpoints


def test_asynchronous_training_resumes_from_its_checkpoint_and_records_later_steps_again(training: Training) -> None:
    checkpoints = record_asynchronously(training)
    with pytest.raises(ConfigError, match=r"can only continue from a checkpoint, and there is none: .*mode=replay"):
        plan_resumption(manifest_of(training), [])
    (checkpoints / "global_step_1").mkdir(parents=True)
    (checkpoints / "latest_checkpointed_iteration.txt").write_text("1")
    config = plan_resumption(manifest_of(training), []).config
    assert config.rollout_skip == {
        "mode": "refresh",
        "source": manifest_of(training),
        "dump_dir": str(training.dumps),
    }
    with RolloutSkip.open(config) as skip:
        assert skip.run.write_folder == str(training.variants()[0])


def test_mode_can_be_overridden_for_an_asynchronous_training(training: Training) -> None:
    record_asynchronously(training)
    replay = plan_resumption(manifest_of(training), ["rollout_skip.mode=replay"]).config
    assert replay.rollout_skip == {"mode": "replay", "source": manifest_of(training)}
    refresh = plan_resumption(manifest_of(training), ["rollout_skip.mode=refresh"]).config
    assert (refresh.rollout_skip.mode, refresh.rollout_skip.dump_dir) == ("refresh", str(training.dumps))
