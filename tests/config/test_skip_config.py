"""The ``rollout_skip`` block in verl's real configuration: what each setting means, and which are errors."""

from __future__ import annotations

import math
import os
from pathlib import Path
from typing import Any

import pytest
from omegaconf import DictConfig, OmegaConf

from tests.verl_configs import compose_ppo, installed_configs
from verl_rollout_skip.config.modes import Engine, Mode, OnDumpError, OnMismatch, Prompts, Reward, Weights
from verl_rollout_skip.config.run_names import run_name
from verl_rollout_skip.config.skip_config import SkipConfig, Steps, parse_steps, remove_skip_keys
from verl_rollout_skip.errors import ConfigError
from verl_rollout_skip.store.sizes import format_size, parse_size


@pytest.fixture(scope="module")
def verl_config() -> DictConfig:
    return compose_ppo()


@pytest.fixture
def train(verl_config: DictConfig) -> Any:
    """The relevant blocks of verl's configuration with our settings. Composing the whole configuration is slow."""
    rollout = OmegaConf.to_container(verl_config.actor_rollout_ref.rollout, resolve=True)
    skip = OmegaConf.to_container(verl_config.skip, resolve=True)

    def configure(**settings: Any) -> DictConfig:
        blocks = {"actor_rollout_ref": {"rollout": rollout}, "skip": skip}
        return OmegaConf.create({**blocks, "rollout_skip": settings} if settings else blocks)

    return configure


def refusal(config: DictConfig) -> str:
    with pytest.raises(ConfigError) as caught:
        SkipConfig.from_config(config)
    return str(caught.value)


def test_without_the_block_nothing_is_skipped(verl_config: DictConfig) -> None:
    settings = SkipConfig.from_config(verl_config)
    assert settings == SkipConfig()
    assert settings.mode is Mode.OFF


@pytest.mark.parametrize(
    ("overrides", "words"),
    [
        (["+rolout_skip.mode=cache"], "Nothing reads rolout_skip: did you mean 'rollout_skip'"),
        (["+rollout_skp.mod=cach"], "did you mean 'rollout_skip'"),
        (["+rollout-skip.dump_dir=/data"], "Nothing reads rollout-skip"),
        (["+skip_rollout.mode=replay"], "Nothing reads skip_rollout"),
        (["+RolloutSkip.mode=off"], "Nothing reads RolloutSkip"),
        (["+trainer.rollout_skip.mode=cache"], "Nothing reads trainer.rollout_skip"),
        (["+actor_rollout_ref.rollout.rollout_skip.dump_dir=/data"], "at the top level"),
        (["+rollout_skip.mode=cache", "+rolout_skip.dump_dir=/data"], "It contains rolout_skip.dump_dir=/data"),
        (["+actor_rollout_ref.rollout.skip_rolout=True"], "did you mean actor_rollout_ref.rollout.skip_rollout?"),
        (["+actor_rollout_ref.rollout.skip_dumpdir=/d"], "did you mean actor_rollout_ref.rollout.skip_dump_dir?"),
        (["+actor_rollout_ref.skip_rollout=True"], "did you mean actor_rollout_ref.rollout.skip_rollout?"),
        (["+skip_rollout=True"], "did you mean actor_rollout_ref.rollout.skip_rollout?"),
    ],
)
def test_misspelled_block_is_an_error_that_suggests_the_right_name(overrides: list[str], words: str) -> None:
    message = refusal(compose_ppo(*overrides))
    assert words in message
    assert "nothing would be recorded or replayed" in message


@pytest.mark.parametrize(
    "own",
    [
        {"rollout": {"mode": "async", "n": 4, "steps": 3}},
        {"skip": {"rollout": {"enable": False, "dump_dir": "/d", "steps": [], "action": "cache"}}},
        {"rollout_stats": {"mode": "cache", "dump_dir": "/d"}},
        {"rollout_skipper": {"mode": "greedy", "threshold": 0.5, "window": 8}},
        {"skip_rollouts": False},
        {"rollout_clip": {"mode": "token", "weights": 1.0}, "algorithm": {"rollout_is": {"mode": "token", "steps": 3}}},
        {"trainer": {"rollout_stop": {"mode": "max", "steps": 4}}},
        {"skip_rollout_steps": 3, "skip_dump": "/d", "actor_rollout_ref": {"rollout": {"skip_rollout_eval": True}}},
        {"rollout_skip_a": {"mode": "cache", "dump_dir": "/d"}, "my_rollout_skip": {"mode": "cache"}},
        {"presets": {"rollout_skip": {"mode": "cache", "dump_dir": "/d"}}},
        {"my_cache": {"mode": "cache", "dump_dir": "/d", "steps": "all"}},
        {"actor_rollout_ref": {"rollout": {"skip_tokenizer_init": True, "skip": {"enable": False}}}},
    ],
)
def test_blocks_of_other_packages_are_ignored(own: dict[str, Any]) -> None:
    assert SkipConfig.from_config(OmegaConf.create(own)) == SkipConfig()


def test_no_setting_of_verl_is_mistaken_for_a_misspelled_one() -> None:
    files = sorted(installed_configs().parents[1].rglob("*.yaml"))
    configs = [config for config in map(OmegaConf.load, files) if isinstance(config, DictConfig)]
    assert len(configs) > 20
    for config in configs:
        assert SkipConfig.from_config(config) == SkipConfig()


def test_every_setting_can_be_given_on_verls_command_line(tmp_path: Path) -> None:
    settings = SkipConfig.from_config(
        compose_ppo(
            "+rollout_skip.mode=cache",
            f"+rollout_skip.dump_dir={tmp_path}",
            '+rollout_skip.steps=[1,2,"10-20"]',
            "+rollout_skip.max_dump_steps=5",
            "+rollout_skip.on_mismatch=error",
            "+rollout_skip.prompts=check",
            "+rollout_skip.source=s3://bucket/run/variant/manifest.json",
            "+rollout_skip.reward=recompute",
            "+rollout_skip.engine=on",
            "+rollout_skip.weights=sampled",
            "+rollout_skip.background=false",
            "+rollout_skip.on_dump_error=fail",
            "+rollout_skip.max_disk=200GB",
        )
    )
    assert settings == SkipConfig(
        mode=Mode.CACHE,
        dump_dir=str(tmp_path),
        steps=Steps(((1, 1), (2, 2), (10, 20))),
        max_dump_steps=5,
        on_mismatch=OnMismatch.ERROR,
        prompts=Prompts.CHECK,
        source="s3://bucket/run/variant/manifest.json",
        reward=Reward.RECOMPUTE,
        engine=Engine.ON,
        weights=Weights.SAMPLED,
        background=False,
        on_dump_error=OnDumpError.FAIL,
        max_disk=200 * 10**9,
    )


def test_bare_off_and_on_in_yaml_are_words_not_booleans(tmp_path: Path) -> None:
    config = OmegaConf.create(f"rollout_skip: {{mode: off, engine: on, dump_dir: {tmp_path}}}")
    settings = SkipConfig.from_config(config)
    assert settings.mode is Mode.OFF
    assert settings.engine is Engine.ON


@pytest.mark.parametrize("mode", [mode.value for mode in Mode])
def test_every_mode_can_be_selected(train: Any, tmp_path: Path, mode: str) -> None:
    assert SkipConfig.from_config(train(mode=mode, dump_dir=str(tmp_path))).mode is Mode(mode)


def test_failed_dump_stops_only_mode_record_by_default(train: Any, tmp_path: Path) -> None:
    def fails(**settings: Any) -> bool:
        return SkipConfig.from_config(train(dump_dir=str(tmp_path), **settings)).fails_on_dump_error

    assert fails(mode="record")
    assert not fails(mode="cache")
    assert not fails(mode="record", on_dump_error="warn")
    assert fails(mode="cache", on_dump_error="fail")


def test_only_replay_starts_no_engine_by_default(train: Any, tmp_path: Path) -> None:
    def starts(**settings: Any) -> bool:
        return SkipConfig.from_config(train(dump_dir=str(tmp_path), **settings)).starts_engine

    assert {mode.value: starts(mode=mode.value) for mode in Mode} == {
        mode.value: mode is not Mode.REPLAY for mode in Mode
    }
    assert starts(mode="replay", engine="on")
    assert not starts(mode="repeat", engine="off")


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        (
            {"mode": "cahce"},
            "rollout_skip.mode is 'cahce'. Did you mean 'cache'? "
            "Choose one of: off, record, cache, replay, repeat, repeat_last, refresh, shadow.",
        ),
        ({"mode": True}, "rollout_skip.mode is True. Choose one of: off, record, cache"),
        ({"mode": None}, "rollout_skip.mode is None. Choose one of: off, record, cache"),
        (
            {"mode": ["cache"]},
            "rollout_skip.mode is ['cache']. Did you mean 'cache'? Choose one of: off, record, cache",
        ),
        (
            {"dumpdir": "/x"},
            "rollout_skip.dumpdir is not a setting. Did you mean 'dump_dir'? Choose one of: mode, dump_dir,",
        ),
        (
            {"xyz": 1},
            "rollout_skip.xyz is not a setting. Choose one of: mode, dump_dir, steps, max_dump_steps, on_mismatch,",
        ),
        (
            {"on_mismatch": "nwe"},
            "rollout_skip.on_mismatch is 'nwe'. Did you mean 'new'? Choose one of: new, error, reuse.",
        ),
        (
            {"prompts": "chekc"},
            "rollout_skip.prompts is 'chekc'. Did you mean 'check'? Choose one of: auto, check, recorded",
        ),
        ({"reward": "again"}, "rollout_skip.reward is 'again'. Choose one of: recorded, recompute."),
        ({"engine": "maybe"}, "rollout_skip.engine is 'maybe'. Choose one of: auto, on, off."),
        (
            {"on_dump_error": "fial"},
            "rollout_skip.on_dump_error is 'fial'. Did you mean 'fail'? Choose one of: auto, warn,",
        ),
        ({"background": "yes"}, "rollout_skip.background is 'yes'; it must be true or false."),
        ({"max_dump_steps": 0}, "rollout_skip.max_dump_steps is 0; it must be an integer of 1 or more, or null"),
        ({"max_dump_steps": -3}, "rollout_skip.max_dump_steps is -3; it must be an integer of 1 or more"),
        ({"max_dump_steps": 2.5}, "rollout_skip.max_dump_steps is 2.5; it must be an integer of 1 or more"),
        ({"max_dump_steps": True}, "rollout_skip.max_dump_steps is True; it must be an integer of 1 or more"),
        ({"max_disk": "-5GB"}, "rollout_skip.max_disk is '-5GB'; give a number of bytes or a size such as \"200GB\""),
        ({"max_disk": -5}, "rollout_skip.max_disk is -5; give a number of bytes or a size such as"),
        ({"max_disk": "200 bananas"}, "rollout_skip.max_disk is '200 bananas'; give a number of bytes or a size"),
        ({"max_disk": 0}, "rollout_skip.max_disk is 0, so nothing could be recorded. Set a size, or null"),
        ({"steps": "5-3"}, "rollout_skip.steps has '5-3': the range ends before it begins."),
        ({"steps": [0]}, "rollout_skip.steps has 0: steps start at 1."),
        ({"steps": [-1]}, 'rollout_skip.steps has -1; use "all", or steps and ranges such as [1, 2, "10-20"].'),
        ({"steps": "some"}, "rollout_skip.steps has 'some'; use \"all\", or steps and ranges"),
        ({"steps": []}, 'rollout_skip.steps is empty, so no step would be recorded or replayed. Use "all"'),
        ({"steps": [True]}, 'rollout_skip.steps has True; use "all", or steps and ranges'),
        ({"dump_dir": 7}, "rollout_skip.dump_dir is 7; use an absolute path or a URL such as s3://bucket/folder."),
        ({"dump_dir": " "}, "rollout_skip.dump_dir is ' '; use an absolute path or a URL"),
        ({"dump_dir": None}, "rollout_skip.dump_dir is not set and mode is 'cache'. Set it to an absolute path"),
        ({"source": "run/manifest.json"}, "rollout_skip.source is the relative path 'run/manifest.json'."),
        ({"mode": "replay", "steps": [1, 2]}, "rollout_skip.steps is 1, 2 and mode is 'replay': the other steps need"),
        ({"engine": "off"}, "rollout_skip.engine is 'off', but mode 'cache' generates steps that are not recorded."),
        ({"mode": "shadow", "engine": "off"}, "rollout_skip.engine is 'off', but mode 'shadow' generates every step"),
        (
            {"mode": "replay", "shadow_min_match": 1},
            "rollout_skip.shadow_min_match is 1, but mode is 'replay', which compares nothing with the recording.",
        ),
        *(
            (
                {"mode": "shadow", "shadow_min_match": value},
                f"rollout_skip.shadow_min_match is {value!r}; it must be a number from 0 to 1, or null for no limit.",
            )
            for value in (1.5, -0.1, True, "all", math.nan)
        ),
    ],
    ids=lambda value: str(value) if isinstance(value, dict) else "",
)
def test_invalid_value_is_an_error_with_key_value_and_allowed_values(
    train: Any, tmp_path: Path, settings: dict[str, Any], message: str
) -> None:
    assert refusal(train(**{"mode": "cache", "dump_dir": str(tmp_path), **settings})).startswith(message)


def test_block_that_is_a_string_is_an_error(verl_config: DictConfig) -> None:
    config = verl_config.copy()
    OmegaConf.update(config, "rollout_skip", "cache", force_add=True)
    assert refusal(config) == "rollout_skip is 'cache'; it must be a block of settings, e.g. rollout_skip.mode=cache."


# dump_dir and source.


def test_relative_dump_dir_is_an_error_because_ray_changes_the_working_directory(train: Any) -> None:
    message = refusal(train(mode="cache", dump_dir="dumps"))
    assert message.startswith("rollout_skip.dump_dir is the relative path 'dumps'. Ray runs the trainer in a different")
    assert message.endswith(f"Use an absolute path, e.g. {os.path.abspath('dumps')}")
    assert "relative path" in refusal(train(mode="cache", dump_dir="file://dumps"))


def test_tilde_is_expanded_and_file_url_is_a_path(train: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOME", str(tmp_path))
    assert SkipConfig.from_config(train(mode="cache", dump_dir="~/dumps")).dump_dir == str(tmp_path / "dumps")
    url = f"file://{tmp_path}/a/../dumps/"
    assert SkipConfig.from_config(train(mode="cache", dump_dir=url)).dump_dir == str(tmp_path / "dumps")


def test_url_is_unchanged(train: Any) -> None:
    assert SkipConfig.from_config(train(mode="cache", dump_dir="s3://bucket/dumps")).dump_dir == "s3://bucket/dumps"


@pytest.mark.parametrize("session", ["session_latest", "session_2026-11-16_03-34-47_123456_4711"])
def test_ray_session_folder_is_an_error_because_ray_deletes_it(train: Any, session: str) -> None:
    message = refusal(train(mode="cache", dump_dir=f"/tmp/ray/{session}/dumps"))
    assert message == (
        f"rollout_skip.dump_dir is '/tmp/ray/{session}/dumps', inside a Ray session folder, which Ray deletes. "
        "Choose another folder."
    )


def test_link_into_a_ray_session_is_an_error(train: Any, tmp_path: Path) -> None:
    session = tmp_path / "session_2026-11-16_03-34-47_123456_4711"
    session.mkdir()
    (tmp_path / "innocent").symlink_to(session)
    assert "inside a Ray session folder" in refusal(train(mode="cache", dump_dir=str(tmp_path / "innocent" / "dumps")))


def test_folder_with_a_name_similar_to_a_ray_session_is_fine(train: Any, tmp_path: Path) -> None:
    SkipConfig.from_config(train(mode="cache", dump_dir=str(tmp_path / "session_2026-11-16_mine")))


@pytest.mark.parametrize("mode", ["cache", "replay"])
def test_dump_dir_that_is_a_file_is_an_error(train: Any, tmp_path: Path, mode: str) -> None:
    file = tmp_path / "dumps"
    file.write_text("not a folder")
    for path in (file, file / "deeper"):
        message = refusal(train(mode=mode, dump_dir=str(path)))
        assert message == f"rollout_skip.dump_dir is {str(path)!r}, but {str(file)!r} is a file. Choose a folder."


def test_read_only_file_system_is_an_error_only_in_modes_that_write(
    train: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    real = os.statvfs(tmp_path)
    flags = real[:8] + (real.f_flag | os.ST_RDONLY,) + real[9:]
    # Tests cannot mount file systems everywhere, so the system call is replaced.
    monkeypatch.setattr(os, "statvfs", lambda path: os.statvfs_result(flags))
    message = refusal(train(mode="cache", dump_dir=str(tmp_path / "dumps")))
    assert message == (
        f"rollout_skip.dump_dir is '{tmp_path}/dumps', but '{tmp_path}' is not writable: its file system is "
        "mounted read-only."
    )
    assert SkipConfig.from_config(train(mode="replay", dump_dir=str(tmp_path / "dumps"))).mode is Mode.REPLAY


def test_folder_without_write_permission_is_an_error(
    train: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    # These tests may run as root, which can write everywhere.
    monkeypatch.setattr(os, "access", lambda path, kind: False)
    assert refusal(train(mode="record", dump_dir=str(tmp_path))).endswith("this user has no write permission.")


def test_reading_the_settings_creates_nothing(train: Any, tmp_path: Path) -> None:
    SkipConfig.from_config(train(mode="cache", dump_dir=str(tmp_path / "a" / "b")))
    assert list(tmp_path.iterdir()) == []


def test_replay_from_a_source_needs_no_dump_dir(train: Any, tmp_path: Path) -> None:
    source = str(tmp_path / "manifest.json")
    assert SkipConfig.from_config(train(mode="replay", source=source)).source == source
    assert "dump_dir is not set and mode is 'record'" in refusal(train(mode="record", source=source))


@pytest.mark.parametrize(
    "source",
    ["/data/imported", "/imported", "/data/archive/0123456789ab", "/exp_proj_TrainGBS4__InferGBS4__N2/0123456789ab"],
)
def test_source_outside_a_run_folder_needs_a_dump_dir(train: Any, source: str) -> None:
    message = refusal(train(mode="cache", source=source))
    assert f"{source} is not at DUMP_DIR/RUN/" in message
    assert "Set rollout_skip.dump_dir." in message
    assert SkipConfig.from_config(train(mode="replay", source=source)).dump_dir is None


def test_cache_from_a_source_writes_into_the_same_run(train: Any, tmp_path: Path) -> None:
    source = tmp_path / "dumps" / "exp_proj_TrainGBS4__InferGBS4__N2" / "variant" / "manifest.json"
    for given in (source, source.parent):
        settings = SkipConfig.from_config(train(mode="cache", source=str(given)))
        assert settings.dump_dir == str(tmp_path / "dumps")
    elsewhere = SkipConfig.from_config(train(mode="cache", source=str(source), dump_dir=str(tmp_path / "other")))
    assert elsewhere.dump_dir == str(tmp_path / "other")


# The two old keys.


def with_old_keys(config: DictConfig, switch: Any, folder: Any) -> DictConfig:
    OmegaConf.update(config, "actor_rollout_ref.rollout.skip_rollout", switch, force_add=True)
    OmegaConf.update(config, "actor_rollout_ref.rollout.skip_dump_dir", folder, force_add=True)
    return config


def test_skip_rollout_means_cache(train: Any, tmp_path: Path) -> None:
    settings = SkipConfig.from_config(with_old_keys(train(), True, str(tmp_path)))
    assert settings == SkipConfig(mode=Mode.CACHE, dump_dir=str(tmp_path))
    assert SkipConfig.from_config(with_old_keys(train(), False, str(tmp_path))).mode is Mode.OFF


def test_old_and_new_keys_may_agree(train: Any, tmp_path: Path) -> None:
    config = with_old_keys(train(mode="cache", dump_dir=str(tmp_path)), True, str(tmp_path))
    assert SkipConfig.from_config(config) == SkipConfig(mode=Mode.CACHE, dump_dir=str(tmp_path))


def test_old_switch_enables_a_block_with_mode_off(train: Any, tmp_path: Path) -> None:
    for off in ("off", False):
        config = with_old_keys(train(mode=off, dump_dir=None), True, str(tmp_path))
        assert SkipConfig.from_config(config).mode is Mode.CACHE


def test_old_and_new_keys_that_contradict_are_an_error(train: Any, tmp_path: Path) -> None:
    message = refusal(with_old_keys(train(mode="replay"), True, str(tmp_path)))
    assert message == (
        "actor_rollout_ref.rollout.skip_rollout means rollout_skip.mode='cache', but rollout_skip.mode is 'replay'. "
        "Set only one of the two."
    )
    message = refusal(with_old_keys(train(mode="cache", dump_dir="/data/a"), True, "/data/b"))
    assert message == (
        "actor_rollout_ref.rollout.skip_dump_dir means rollout_skip.dump_dir='/data/b', but rollout_skip.dump_dir is "
        "'/data/a'. Set only one of the two."
    )


def test_old_switch_must_be_a_boolean(train: Any) -> None:
    message = refusal(with_old_keys(train(), "yes", "/data"))
    assert message == "actor_rollout_ref.rollout.skip_rollout is 'yes'; it must be True (mode cache) or False."


def test_default_folder_of_verl_0_6_and_0_7_is_ignored(train: Any, tmp_path: Path) -> None:
    default = "/tmp/rollout_dump"
    config = with_old_keys(train(mode="record", dump_dir=str(tmp_path)), False, default)
    assert SkipConfig.from_config(config).dump_dir == str(tmp_path)
    config = with_old_keys(train(dump_dir=str(tmp_path)), True, default)
    assert SkipConfig.from_config(config).dump_dir == str(tmp_path)
    assert SkipConfig.from_config(with_old_keys(train(), True, default)).dump_dir == default
    assert "dump_dir is not set" in refusal(with_old_keys(train(mode="record"), False, default))


# verl's own skip.


@pytest.mark.parametrize("block", ["rollout", "rollout_tq", "async_rollout"])
def test_verl_0_9s_own_skip_is_an_error_that_names_the_equivalent_keys(tmp_path: Path, block: str) -> None:
    config = compose_ppo(f"skip.{block}.enable=true", "+rollout_skip.mode=cache", f"+rollout_skip.dump_dir={tmp_path}")
    assert refusal(config) == (
        f"skip.{block}.enable is True: verl's own skip would hide rollouts from this package. Set skip.{block}.enable="
        f"False. The equivalent settings: skip.{block}.dump_dir is rollout_skip.dump_dir, skip.{block}.action is "
        f"rollout_skip.mode, skip.{block}.steps is rollout_skip.steps."
    )


def test_verl_0_8s_own_skip_is_an_error_too(train: Any, tmp_path: Path) -> None:
    config = train(mode="cache", dump_dir=str(tmp_path))
    own = {"enable": True, "dump_dir": "~/.verl/rollout_dump", "max_dump_step": 1, "action": "cache"}
    OmegaConf.update(config, "actor_rollout_ref.rollout.skip", own, force_add=True)
    message = refusal(config)
    assert message.startswith("actor_rollout_ref.rollout.skip.enable is True: verl's own skip would hide rollouts")
    assert "actor_rollout_ref.rollout.skip.max_dump_step is rollout_skip.max_dump_steps" in message


def test_verls_own_skip_is_allowed_in_mode_off() -> None:
    assert SkipConfig.from_config(compose_ppo("skip.rollout.enable=true")).mode is Mode.OFF


# Steps and sizes.


@pytest.mark.parametrize(
    ("value", "inside", "outside"),
    [
        ("all", [1, 10**9], []),
        (None, [1, 10**9], []),
        (5, [5], [4, 6]),
        ([1, 2, "10-20"], [1, 2, 10, 15, 20], [3, 9, 21]),
        ("1, 3-4", [1, 3, 4], [2, 5]),
        (" 7 - 8 ", [7, 8], [6, 9]),
    ],
)
def test_steps_can_be_all_numbers_or_ranges(value: Any, inside: list[int], outside: list[int]) -> None:
    steps = parse_steps(value, "steps")
    assert all(step in steps for step in inside)
    assert not any(step in steps for step in outside)
    assert parse_steps(str(steps), "steps") == steps


@pytest.mark.parametrize(
    ("text", "size"),
    [(5, 5), ("1000", 1000), ("200GB", 200 * 10**9), ("1.5 TiB", 3 * 2**39), ("7kb", 7000), ("0", 0)],
)
def test_sizes_can_have_units(text: int | str, size: int) -> None:
    assert parse_size(text, "size") == size


@pytest.mark.parametrize("text", ["-5GB", -1, "", "GB", "5 XB", "1e9", True, "inf", "nan", "5GB5"])
def test_invalid_size_is_an_error(text: int | str) -> None:
    with pytest.raises(ValueError, match=r"size is .*; give a number of bytes"):
        parse_size(text, "size")


def test_sizes_are_shown_with_units() -> None:
    assert [format_size(size) for size in (12, 1500, 23_400_000, 5e12)] == ["12 B", "1.5 KB", "23.4 MB", "5.0 TB"]


# The run folder, and what verl sees.


def test_run_folder_has_the_name_of_verls_own_skip() -> None:
    overrides = ("trainer.experiment_name=exp", "trainer.project_name=proj", "data.train_batch_size=64")
    config = compose_ppo(*overrides, "data.gen_batch_size=192", "actor_rollout_ref.rollout.n=8")
    assert run_name(config) == "exp_proj_TrainGBS64__InferGBS192__N8"
    assert run_name(compose_ppo(*overrides, "data.gen_batch_size=null")) == "exp_proj_TrainGBS64__InferGBS64__N1"


@pytest.mark.parametrize("key", ["data.train_batch_size", "actor_rollout_ref.rollout.n"])
def test_batch_sizes_in_the_folder_name_are_required(verl_config: DictConfig, key: str) -> None:
    config = verl_config.copy()
    OmegaConf.update(config, key, None)
    with pytest.raises(ConfigError) as caught:
        run_name(config)
    assert str(caught.value) == f"{key} is None; it must be a number, because it is part of the run folder's name."


@pytest.mark.parametrize("name", ["a/b", "..", "../../etc", ".hidden", "a\\b", "line\nbreak", "nul\0", "", None])
@pytest.mark.parametrize("key", ["experiment_name", "project_name"])
def test_name_that_would_leave_the_dump_dir_is_an_error(verl_config: DictConfig, key: str, name: str | None) -> None:
    config = verl_config.copy()
    OmegaConf.update(config, f"trainer.{key}", name)
    with pytest.raises(ConfigError) as caught:
        run_name(config)
    assert str(caught.value).startswith(f"trainer.{key} is {name!r}, which cannot be part of a folder name. Use")


def test_name_too_long_for_the_file_system_is_an_error(verl_config: DictConfig) -> None:
    config = verl_config.copy()
    OmegaConf.update(config, "trainer.experiment_name", "ü" * 120)
    with pytest.raises(ConfigError, match=r"file systems allow 255: .*Shorten trainer\.experiment_name"):
        run_name(config)


def test_names_may_be_in_any_language(verl_config: DictConfig) -> None:
    config = verl_config.copy()
    OmegaConf.update(config, "trainer.experiment_name", "größer 实验 v1.0")
    assert run_name(config).startswith("größer 实验 v1.0_verl_examples_TrainGBS")


def test_verls_workers_accept_the_configuration_without_our_keys(tmp_path: Path) -> None:
    from verl.utils.config import omega_conf_to_dataclass

    config = compose_ppo(
        "+rollout_skip.mode=cache",
        f"+rollout_skip.dump_dir={tmp_path}",
        "+actor_rollout_ref.rollout.skip_rollout=true",
        f"+actor_rollout_ref.rollout.skip_dump_dir={tmp_path}",
    )
    with pytest.raises(Exception, match=r"skip_rollout|skip_dump_dir"):
        omega_conf_to_dataclass(config.actor_rollout_ref.rollout)
    remove_skip_keys(config)
    assert omega_conf_to_dataclass(config.actor_rollout_ref.rollout).n == 1
    assert config == compose_ppo()


def test_removing_keys_that_are_not_set_changes_nothing(verl_config: DictConfig) -> None:
    config = verl_config.copy()
    remove_skip_keys(config)
    assert config == verl_config
    assert OmegaConf.is_struct(config) == OmegaConf.is_struct(verl_config)
