"""Secrets are masked anywhere in a configuration, and nothing else is."""

from __future__ import annotations

from typing import Any

import pytest
from omegaconf import OmegaConf

from tests.verl_configs import compose_ppo
from verl_rollout_skip.fingerprint.fingerprint import make_fingerprint, resolve_config
from verl_rollout_skip.fingerprint.redact import MASK, is_secret_key, mask, masked_keys


@pytest.mark.parametrize(
    "key",
    [
        *("WANDB_API_KEY", "OPENAI_API_KEY", "api_key", "apiKey", "api-key", "HF_TOKEN", "HUGGING_FACE_HUB_TOKEN"),
        *("token", "hf_token", "access_token", "accessToken", "auth_token", "AWS_SECRET_ACCESS_KEY", "secret"),
        *("AWS_ACCESS_KEY_ID", "AWS_SESSION_TOKEN", "client_secret", "clientSecret", "secret_key", "private_key"),
        *("password", "DB_PASSWORD", "passwd", "passphrase", "credentials", "Authorization", "cookie", "account_key"),
        "reward.reward_kwargs.judge.api_key",
    ],
)
def test_value_of_a_secret_key_is_masked(key: str) -> None:
    assert is_secret_key(key)
    assert mask({key: "hunter2"}) == {key: MASK}
    assert mask({"a": [{key: "hunter2"}]}) == {"a": [{key: MASK}]}


@pytest.mark.parametrize(
    "key",
    [
        *("prompt_key", "reward_fn_key", "image_key", "video_key", "teacher_key", "key", "key_file_name", "keys"),
        *("max_token_len_per_gpu", "ppo_max_token_len_per_gpu", "max_num_batched_tokens", "num_speculative_tokens"),
        *("tokenizer", "tokenizer_path", "skip_tokenizer_init", "token2text", "loss_per_token", "token_level_scores"),
        *("eos_token", "bos_token", "pad_token", "stop_token", "image_token", "eosToken", "think_end_token"),
        *("author", "authors", "secretary", "passing_score", "loss_agg_mode", "monkey"),
    ],
)
def test_keys_that_only_look_like_secrets_are_not_masked(key: str) -> None:
    assert not is_secret_key(key)
    assert mask({key: "</s>"}) == {key: "</s>"}


@pytest.mark.parametrize(
    ("text", "masked"),
    [
        ("https://user:hunter2@host/path", "https://user:***@host/path"),
        ("postgresql+psycopg://me:p@ss:w@rd@db:5432/x", "postgresql+psycopg://me:***@db:5432/x"),
        ("redis://:hunter2@host:6379", "redis://:***@host:6379"),
        ("https://0123456789abcdef0123@github.com/a/b", "https://***@github.com/a/b"),
        ("https://h/x?api_key=abc&n=3#top", "https://h/x?api_key=***&n=3#top"),
        ("https://b.s3/x?X-Amz-Signature=f00&X-Amz-Date=1", "https://b.s3/x?X-Amz-Signature=***&X-Amz-Date=1"),
        ("s3://bucket/x?sig=f00%2B", "s3://bucket/x?sig=***"),
        ("WANDB_API_KEY=abc123 python train.py", "WANDB_API_KEY=*** python train.py"),
        ("serve --api-key=abc --port 80", "serve --api-key=*** --port 80"),
        ("serve --hf-token abc --port 80", "serve --hf-token *** --port 80"),
        ("Bearer eyJhbGciOiJIUzI1NiJ9.e30.abc", "Bearer ***"),
        ("DefaultEndpoints=https;AccountKey=abc==;Suffix=x", "DefaultEndpoints=https;AccountKey=***;Suffix=x"),
        ("token hf_abcdefghijklmnopqrstuvwxyz here", "token *** here"),
        ("sk-proj-abcdefghijklmnopqrstuvwxyz", "***"),
        ("AKIAIOSFODNN7EXAMPLE", "***"),
        ("-----BEGIN RSA PRIVATE KEY-----\nMIIE\n-----END RSA PRIVATE KEY-----\n", "***\n"),
    ],
)
def test_secrets_inside_strings_are_masked_but_not_the_rest(text: str, masked: str) -> None:
    assert mask({"anything": text}) == {"anything": masked}
    assert mask([text]) == [masked]


@pytest.mark.parametrize(
    "text",
    [
        *(
            "https://host:8080/path?page=3",
            "s3://bucket/key@2",
            "abfs://containerofmydata@account.dfs.core.windows.net/x",
        ),
        *("git@github.com:a/b", "{%- set bos_token = '<s>' %}{{ bos_token + message['content'] }}", "sk-learn"),
        *("The secret of basic arithmetic is: token by token", "~/models/hf_small", "12:30@noon", "Answer: "),
    ],
)
def test_harmless_strings_are_unchanged(text: str) -> None:
    assert mask({"anything": text}) == {"anything": text}


@pytest.mark.timeout(60)
@pytest.mark.parametrize(
    "piece", ["n", "-", "?", "?key", "&token", "--token", "TOKEN", "a://", "a://:", "sk-", "BEGIN "]
)
def test_masking_long_strings_is_fast(piece: str) -> None:
    """A configuration may contain a chat template or system prompt; a quadratic search would take minutes."""
    text = piece * (200_000 // len(piece))
    masked = mask({"template": f"https://me:hunter2@host {text}"})["template"]
    assert masked.startswith(f"https://me:{MASK}@host ")


def test_lists_numbers_and_blocks_below_a_secret_key_are_masked() -> None:
    settings = {"password": 1234, "tokens": [1], "api_key": ["a", "b"], "credentials": {"user": "me", "pin": 7}}
    masked = mask(settings)
    assert masked == {
        "password": MASK,
        "tokens": [1],
        "api_key": [MASK, MASK],
        "credentials": {"user": MASK, "pin": MASK},
    }
    assert masked_keys(masked) == ["password", "api_key", "api_key", "credentials.user", "credentials.pin"]
    assert settings["password"] == 1234


def test_secrets_that_are_not_set_are_not_masked() -> None:
    assert mask({"api_key": None, "token": "", "auth": False}) == {"api_key": None, "token": "", "auth": False}


@pytest.mark.parametrize("use_v1", ["true", "false"])
def test_nothing_in_verls_default_configuration_is_masked(use_v1: str) -> None:
    config = resolve_config(compose_ppo(f"trainer.use_v1={use_v1}"))
    assert mask(config) == config


def test_secrets_in_environment_variables_of_workers_are_masked() -> None:
    env: dict[str, Any] = {"WANDB_API_KEY": "abc", "HF_TOKEN": "def", "JUDGE_URL": "https://me:pw@judge", "N": "1"}
    config = OmegaConf.create({"ray_kwargs": {"ray_init": {"runtime_env": {"env_vars": env}}}})
    shown = mask(resolve_config(config))["ray_kwargs"]["ray_init"]["runtime_env"]["env_vars"]
    assert shown == {"WANDB_API_KEY": MASK, "HF_TOKEN": MASK, "JUDGE_URL": "https://me:***@judge", "N": "1"}


def test_rotated_secret_is_not_a_miss_and_not_in_the_fingerprint() -> None:
    def take(key: str) -> Any:
        return make_fingerprint({"reward": {"reward_kwargs": {"api_key": key, "model": "judge-1"}}})

    assert take("abc").config_hash == take("def").config_hash
    assert take("abc").rollout == {"reward.reward_kwargs.api_key": MASK, "reward.reward_kwargs.model": "judge-1"}


@pytest.mark.parametrize(
    "name", ["answer_token", "bonus_token", "end_of_thought_token", "turnToken", "separator_token"]
)
@pytest.mark.parametrize("value", ["<answer>", "<|end_of_thought|>", "SEP", 0.5, 7])
def test_token_that_is_not_a_credential_is_compared(name: str, value: Any) -> None:
    key = f"reward.custom_reward_function.reward_kwargs.{name}"
    assert mask({key: value}) == {key: value}
    assert make_fingerprint({key: value}) != make_fingerprint({key: "another"})


def test_unknown_token_that_looks_like_a_credential_is_masked() -> None:
    assert mask({"judge_token": "a1b2c3d4e5f6a7b8c9d0"}) == {"judge_token": MASK}


def test_masked_setting_that_would_count_is_logged(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level("INFO"):
        make_fingerprint({"reward": {"reward_kwargs": {"api_key": "hunter2"}}})
    assert "reward.reward_kwargs.api_key looks like a secret and is not compared" in caplog.text
