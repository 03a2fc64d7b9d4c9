"""Masks secrets in a configuration (tokens, keys, passwords), so that they are never written to disk."""

from __future__ import annotations

import functools
import re
from collections.abc import Mapping
from typing import Any

MASK = "***"
# Names of secrets, in snake_case, kebab-case or camelCase. The pattern does not match similar names: token counts and
# lengths, prompt_key, image_key, and a tokenizer's special tokens. Any other kind of token (answer_token, turn_token …)
# is masked only if its value looks like a credential, because the rollout may depend on it.
_SECRET_KEY = re.compile(
    r"(?i)(^|[_\-.])(api[_\-]?key|access[_\-]?key([_\-]?id)?|account[_\-]?key|secret([_\-]?(access[_\-]?)?key)?|"
    r"private[_\-]?key|password|passwd|pwd|passphrase|credentials?|auth|authorization|bearer|cookie|"
    r"(hf|hub|face|api|access|auth|session|security|bearer|refresh|id|bot|login|oauth|jwt|personal|service|deploy|github|"
    r"gitlab|wandb|openai|registry)[_\-]?token)$|^token$"
)
_TOKEN_KEY = re.compile(r"(?i)[a-z0-9]token$|[_\-]token$")
_CREDENTIAL = re.compile(r"(?=[^\d]*\d)(?=[^A-Za-z]*[A-Za-z])[A-Za-z0-9._~+/=\-]{16,}")
_CAMEL = re.compile(r"(?<=[a-z0-9])(?=[A-Z])")
_SPECIAL_TOKEN = re.compile(
    r"(?i)(^|[_\-.])(eos|bos|pad|unk|sep|cls|mask|stop|start|begin|end|special|image|video|audio|vision|think|tool|"
    r"prefix|suffix|boi|eoi|per|max|min|num|new|by|to)[_\-]?token$"
)
# Repetitions are bounded where matching could otherwise take quadratic time.
_URL = re.compile(r"(?P<scheme>[a-zA-Z][a-zA-Z0-9+.\-]{0,40}://)(?P<user>[^/\s:@]*):(?P<password>[^/\s]+)@")
_URL_TOKEN = re.compile(r"(?P<scheme>(?:https?|git\+https?)://)[^/\s:@]{16,}@")
_QUERY = re.compile(
    r"(?i)(?P<name>[?&][^=&?\s]{0,64}(?:key|token|secret|password|signature|sig|credential)[^=&?\s]{0,64}=)[^&\s#]+"
)
# Secrets in command lines, environment assignments, headers and connection strings.
_ASSIGNED = re.compile(
    r"(?P<name>\b[A-Z0-9_]*(?:API_KEY|ACCESS_KEY|TOKEN|SECRET|PASSWORD)=|"
    r"--[a-z\-]{0,64}(?:api-key|token|secret|password)[= ]|"
    r"\bAccountKey=|\bSharedAccessKey=|\b(?:[Bb]earer|[Bb]asic) (?=[A-Za-z0-9._~+/\-]{16}))[^\s;,'\"&]+"
)
_KNOWN = re.compile(
    r"\b(hf_[A-Za-z0-9]{20,}|sk-[A-Za-z0-9_\-]{20,}|gh[pousr]_[A-Za-z0-9]{20,}|github_pat_[A-Za-z0-9_]{20,}|"
    r"AKIA[0-9A-Z]{16}|xox[abprs]-[A-Za-z0-9\-]{10,}|glpat-[A-Za-z0-9_\-]{20,}|AIza[A-Za-z0-9_\-]{35})"
)
_PRIVATE_KEY = re.compile(r"-----BEGIN [A-Z ]*PRIVATE KEY-----.*?(-----END [A-Z ]*PRIVATE KEY-----|$)", re.DOTALL)


def mask(value: Any, key: str = "") -> Any:
    """A copy of a configuration with its secrets masked, including everything below a secret key."""
    return _mask(value, is_secret_key(key), is_token_key(key))


def _mask(value: Any, secret: bool, token: bool) -> Any:
    if isinstance(value, Mapping):
        return {
            name: _mask(item, secret or is_secret_key(str(name)), token or is_token_key(str(name)))
            for name, item in value.items()
        }
    if isinstance(value, list | tuple):
        return [_mask(item, secret, token) for item in value]
    if secret and value is not None and not isinstance(value, bool) and value != "":
        return MASK
    if not isinstance(value, str):
        return value
    return MASK if token and _CREDENTIAL.fullmatch(value) else _mask_text(value)


@functools.lru_cache(maxsize=4096)
def is_secret_key(key: str) -> bool:
    """Whether a name, or a component of a dotted name, is the name of a secret."""
    names = _CAMEL.sub("_", key).split(".")
    return any(_SECRET_KEY.search(name) for name in names)


@functools.lru_cache(maxsize=4096)
def is_token_key(key: str) -> bool:
    """Whether a name, or a component of a dotted name, is the name of a token that may be a secret."""
    names = _CAMEL.sub("_", key).split(".")
    return any(_TOKEN_KEY.search(name) and not _SPECIAL_TOKEN.search(name) for name in names)


def masked_keys(value: Any, path: str = "") -> list[str]:
    """The dotted keys whose values are masked in a configuration."""
    if isinstance(value, Mapping):
        return [
            found for name, item in value.items() for found in masked_keys(item, f"{path}.{name}" if path else name)
        ]
    if isinstance(value, list):
        return [found for item in value for found in masked_keys(item, path)]
    return [path] if isinstance(value, str) and MASK in value else []


def _mask_text(text: str) -> str:
    text = _URL.sub(rf"\g<scheme>\g<user>:{MASK}@", text)
    text = _URL_TOKEN.sub(rf"\g<scheme>{MASK}@", text)
    text = _QUERY.sub(rf"\g<name>{MASK}", text)
    text = _ASSIGNED.sub(rf"\g<name>{MASK}", text)
    return _PRIVATE_KEY.sub(MASK, _KNOWN.sub(MASK, text))
