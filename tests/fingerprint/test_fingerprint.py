"""Two fingerprints are equal if and only if their rollouts are interchangeable, and differences are readable."""

from __future__ import annotations

import json
import logging
import os
import random
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from omegaconf import OmegaConf

from tests.verl_configs import compose_ppo
from verl_rollout_skip.errors import ConfigError
from verl_rollout_skip.fingerprint.fingerprint import (
    BASELINE,
    difference,
    flat_hash,
    flatten,
    make_fingerprint,
    resolve_config,
)

ROOT = Path(__file__).resolve().parents[2]
TEMPERATURE = "actor_rollout_ref.rollout.temperature"
VALUES = st.recursive(
    st.none() | st.booleans() | st.integers(-3, 3) | st.sampled_from([0.0, -0.0, 1.0, 0.5, -2.0]) | st.text(max_size=2),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=2), inner, max_size=3),
    max_leaves=6,
)


def shuffled(tree: Any, seed: int = 0) -> Any:
    if not isinstance(tree, dict):
        return tree
    items = list(tree.items())
    random.Random(seed).shuffle(items)
    return {key: shuffled(value, seed) for key, value in items}


def test_difference_shows_the_old_and_new_value() -> None:
    recorded = make_fingerprint(OmegaConf.create({"actor_rollout_ref": {"rollout": {"temperature": 1.0}}}))
    current = make_fingerprint(OmegaConf.create({"actor_rollout_ref": {"rollout": {"temperature": 0.7}}}))
    assert difference(recorded.rollout, current.rollout) == ["actor_rollout_ref.rollout.temperature: 1.0 → 0.7"]
    assert recorded.config_hash != current.config_hash
    assert recorded.training_hash == current.training_hash


@pytest.mark.parametrize(
    ("old", "new", "line"),
    [
        ({"k": "vllm"}, {"k": "sglang"}, "k: vllm → sglang"),
        ({}, {"k": 1}, "k: not set → 1"),
        ({"k": [1, 2]}, {}, "k: [1, 2] → not set"),
        ({"k": True}, {"k": 1}, "k: true → 1"),
        ({"k": [True]}, {"k": [1]}, "k: [true] → [1]"),
        ({"k": "1"}, {"k": 1}, "k: 1 → 1"),
        ({"k": "größer"}, {"k": "größer "}, "k: größer → größer "),
    ],
)
def test_each_kind_of_difference_is_one_line(old: dict[str, Any], new: dict[str, Any], line: str) -> None:
    assert difference(old, new) == [line]
    assert flat_hash(old) != flat_hash(new)


def test_1_and_1_0_are_the_same_setting() -> None:
    pairs = [(1, 1.0), ([1, 2.0], [1.0, 2]), (0, -0.0), ({"a": 3}, {"a": 3.0}), (10**17, 1e17)]
    for old, new in pairs:
        assert difference({"k": old}, {"k": new}) == []
        assert flat_hash({"k": old}) == flat_hash({"k": new})


@given(VALUES, VALUES)
def test_hashes_differ_exactly_if_a_difference_is_shown(old: Any, new: Any) -> None:
    assert (flat_hash({"k": old}) == flat_hash({"k": new})) == (difference({"k": old}, {"k": new}) == [])


def test_null_and_missing_settings_are_the_same() -> None:
    assert make_fingerprint({"data": {"seed": None}}).config_hash == make_fingerprint({"data": {}}).config_hash


def test_unknown_setting_is_a_miss() -> None:
    known = make_fingerprint({"data": {"seed": 1}})
    for unknown in ({"data": {"seed": 1, "brand_new": 2}}, {"data": {"seed": 1}, "brand": {"new": 2}}):
        assert len(difference(known.rollout, make_fingerprint(unknown).rollout)) == 1


def test_order_of_keys_does_not_matter() -> None:
    config = resolve_config(compose_ppo())
    assert make_fingerprint(shuffled(config)) == make_fingerprint(config)
    assert list(make_fingerprint(config).rollout) == sorted(make_fingerprint(config).rollout)


def test_fingerprint_does_not_depend_on_the_hash_seed(tmp_path: Path) -> None:
    config = resolve_config(compose_ppo())
    file = tmp_path / "config.json"
    file.write_text(json.dumps(shuffled(config, 1)))
    script = (
        "import json, sys; from verl_rollout_skip.fingerprint.fingerprint import make_fingerprint\n"
        "found = make_fingerprint(json.load(open(sys.argv[1]))); print(found.config_hash, found.training_hash)"
    )
    environment = {**os.environ, "PYTHONHASHSEED": "4711", "PYTHONPATH": str(ROOT), "TZ": "Asia/Tokyo", "LC_ALL": "C"}
    output = subprocess.run(
        [sys.executable, "-c", script, str(file)], env=environment, cwd=tmp_path, check=True, capture_output=True
    ).stdout.decode()
    found = make_fingerprint(config)
    assert output.split() == [found.config_hash, found.training_hash]


def test_fingerprint_survives_json() -> None:
    found = make_fingerprint(compose_ppo())
    assert flat_hash(json.loads(json.dumps(found.rollout))) == found.config_hash
    assert flat_hash(json.loads(json.dumps(found.training))) == found.training_hash


def test_interpolated_settings_are_resolved() -> None:
    base = make_fingerprint(compose_ppo())
    longer = make_fingerprint(compose_ppo("data.max_response_length=1024"))
    keys = [line.split(":")[0] for line in difference(base.rollout, longer.rollout)]
    assert {"data.max_response_length", "actor_rollout_ref.rollout.response_length"} <= set(keys)


def test_remax_adds_rollouts_but_other_estimators_do_not() -> None:
    def take(estimator: str) -> Any:
        return make_fingerprint({"algorithm": {"adv_estimator": estimator}})

    gae, grpo, remax = take("gae"), take("grpo"), take("remax")
    assert gae.config_hash == grpo.config_hash
    assert gae.training_hash != grpo.training_hash
    assert difference(grpo.rollout, remax.rollout) == [f"{BASELINE}: not set → true"]


def test_reward_can_be_excluded_from_the_comparison(tmp_path: Path) -> None:
    def take(source: str, temperature: float) -> Any:
        file = tmp_path / f"{len(source)}.py"
        file.write_text(source)
        config = {
            "reward": {
                "custom_reward_function": {"path": str(file)},
                "sandbox_fusion": {"memory_limit_mb": len(source)},
            },
            "custom_reward_function": {"name": source},
            "actor_rollout_ref": {"rollout": {"temperature": temperature}},
        }
        return make_fingerprint(config).rollout

    recorded, current = take("old", 1.0), take("newer", 0.7)
    assert len(difference(recorded, current)) == 4
    assert difference(recorded, current, without_reward=True) == [f"{TEMPERATURE}: 1.0 → 0.7"]


def test_files_are_compared_by_content_wherever_they_are(tmp_path: Path) -> None:
    def take(folder: str, row: str) -> Any:
        (tmp_path / folder).mkdir()
        names = [tmp_path / folder / name for name in ("a.parquet", "b.parquet")]
        for name in names:
            name.write_text(f"{name.name} {row}")
        return make_fingerprint({"data": {"train_files": [str(name) for name in names]}})

    assert take("here", "1").config_hash == take("there", "1").config_hash
    assert take("third", "2").config_hash != take("fourth", "1").config_hash


def test_order_of_data_files_counts(tmp_path: Path) -> None:
    files = [tmp_path / name for name in ("a", "b")]
    for file in files:
        file.write_text(file.name)
    one, other = (
        make_fingerprint({"data": {"train_files": [str(f) for f in order]}}) for order in (files, files[::-1])
    )
    assert one.config_hash != other.config_hash


def test_unreadable_content_is_logged(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.WARNING, logger="verl_rollout_skip"):
        make_fingerprint({"data": {"train_files": "hdfs://cluster/train.parquet"}})
    assert caplog.messages == [
        "data.train_files: hdfs://cluster/train.parquet (content not readable from here); "
        "a change to its content will not be noticed"
    ]


def test_sandbox_may_change_its_address_but_not_be_removed() -> None:
    def take(url: str | None) -> str:
        return make_fingerprint({"reward": {"sandbox_fusion": {"url": url}}}).config_hash

    assert take("http://one:8080") == take("http://two:8080")
    assert take("http://one:8080") != take(None)


def test_environment_variables_of_workers_count_unless_known_to_be_harmless() -> None:
    def take(**variables: str) -> str:
        return make_fingerprint({"ray_kwargs": {"ray_init": {"runtime_env": {"env_vars": variables}}}}).config_hash

    assert (
        take(NCCL_DEBUG="INFO", WANDB_API_KEY="a", VLLM_LOGGING_LEVEL="WARN", TOKENIZERS_PARALLELISM="true") == take()
    )
    assert take(VLLM_ATTENTION_BACKEND="FLASHINFER") != take()
    for name in ("JUDGE_MODEL", "JUDGE_HOST", "JUDGE_TIMEOUT"):
        assert take(**{name: "1"}) != take(**{name: "2"})


def test_flatten_returns_leaves_by_dotted_key() -> None:
    tree = {"a": {"b": 1, "c": [{"d": 2}], "e": {}}, "f": None}
    assert dict(flatten(tree)) == {"a.b": 1, "a.c": [{"d": 2}], "a.e": {}, "f": None}
    assert dict(flatten({})) == {}


def test_infinities_become_strings_so_that_any_json_reader_can_read_a_manifest() -> None:
    assert resolve_config({"a": [float("inf"), float("-inf")], "b": float("nan")}) == {
        "a": ["Infinity", "-Infinity"],
        "b": "NaN",
    }


def test_configuration_that_cannot_be_resolved_is_an_error_that_names_the_key() -> None:
    config = OmegaConf.create({"data": {"seed": "${oc.env:A_VARIABLE_THAT_NOBODY_SET}"}})
    with pytest.raises(
        ConfigError, match=r"cannot be resolved: .*A_VARIABLE_THAT_NOBODY_SET(.|\n)*full_key: data\.seed"
    ):
        make_fingerprint(config)


OPTIM = {"lr": 1e-6, "lr_warmup_steps": -1, "lr_warmup_steps_ratio": 0.0}


@pytest.mark.parametrize(
    ("optim", "counts"),
    [
        ({"lr_scheduler_type": "constant"}, False),
        ({"lr_decay_style": "constant"}, False),
        ({"warmup_style": "constant"}, False),
        ({"lr_scheduler_type": "constant", "lr_warmup_steps_ratio": 0.1, "lr_warmup_steps": 10}, False),
        ({"lr_scheduler_type": "constant", "lr_warmup_steps_ratio": 0.1}, True),
        ({"lr_scheduler_type": "cosine"}, True),
        ({"lr_scheduler_type": "constant", "warmup_style": "cosine"}, True),
        ({}, True),
    ],
)
def test_longer_training_is_different_only_if_its_learning_rate_depends_on_the_length(
    optim: dict[str, Any], counts: bool
) -> None:
    short, long = (
        make_fingerprint(
            {
                "actor_rollout_ref": {"actor": {"optim": {**OPTIM, **optim}}},
                "trainer": {"total_training_steps": steps, "total_epochs": steps},
            }
        )
        for steps in (2, 4)
    )
    assert short.config_hash == long.config_hash
    assert (short.training_hash != long.training_hash) is counts


@pytest.mark.parametrize(
    ("trainer", "counts"),
    [
        ({"resume_mode": "resume_path", "resume_from_path": "/runs/a/global_step_2"}, False),
        ({"resume_mode": "resume_path", "resume_from_path": "/runs/ab/global_step_2"}, True),
        ({"resume_mode": "auto", "resume_from_path": "/runs/b/global_step_2"}, False),
    ],
)
def test_starting_from_another_trainings_checkpoint_counts(trainer: dict[str, str], counts: bool) -> None:
    plain, resumed = (
        make_fingerprint({"trainer": {"default_local_dir": "/runs/a", **more}}).training_hash for more in ({}, trainer)
    )
    assert (plain != resumed) is counts


@pytest.mark.parametrize("block", ["reward.custom_reward_function.reward_kwargs", "data.apply_chat_template_kwargs"])
def test_null_argument_of_a_users_function_differs_from_a_missing_one(block: str) -> None:
    """The function gets None instead of its own default."""
    given, left_out = ({f"{block}.x": 1, f"{block}.limit": None}, {f"{block}.x": 1})
    assert make_fingerprint(given).config_hash != make_fingerprint(left_out).config_hash
