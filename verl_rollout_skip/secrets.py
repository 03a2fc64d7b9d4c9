"""Secrets do not go to disk: tokens, keys and passwords in a configuration are masked wherever they stand."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

MASK = "***"
# A key whose name says that its value is a secret. Words of the field that only look like it are left out: token counts
# and lengths, prompt_key, image_key and the like.
_SECRET_KEY = re.compile(
    r"(?i)(^|[_\-.])(api[_\-]?key|access[_\-]?key([_\-]?id)?|secret([_\-]?(access[_\-]?)?key)?|private[_\-]?key|"
    r"password|passwd|pwd|passphrase|credentials?|auth([_\-]?token)?|authorization|bearer|cookie|"
    r"(hf|hub|wandb|github|access|refresh|session|auth|id|api|bot|slack|swanlab|mlflow)[_\-]?token|token)$"
)
_URL = re.compile(r"(?P<scheme>[a-zA-Z][a-zA-Z0-9+.\-]*://)(?P<user>[^/\s:@]*):(?P<password>[^/\s@]+)@")
_QUERY = re.compile(
    r"(?i)(?P<name>[?&][^=&\s]*(?:key|token|secret|password|signature|sig|credential)[^=&\s]*=)[^&\s#]+"
)
_KNOWN = re.compile(
    r"\b(hf_[A-Za-z0-9]{20,}|sk-[A-Za-z0-9_\-]{20,}|ghp_[A-Za-z0-9]{20,}|github_pat_[A-Za-z0-9_]{20,}|"
    r"AKIA[0-9A-Z]{16}|xox[abprs]-[A-Za-z0-9\-]{10,}|glpat-[A-Za-z0-9_\-]{20,})\b"
)


def mask(value: Any, key: str = "") -> Any:
    """A copy of a configuration with its secrets masked."""
    if isinstance(value, Mapping):
        return {name: mask(item, str(name)) for name, item in value.items()}
    if isinstance(value, list | tuple):
        return [mask(item, key) for item in value]
    if value is not None and not isinstance(value, bool | int | float) and is_secret_key(key):
        return MASK if str(value) else value
    return _mask_text(value) if isinstance(value, str) else value


def is_secret_key(key: str) -> bool:
    """Whether a name says that its value is a secret."""
    return _SECRET_KEY.search(key) is not None


def masked_keys(value: Any, path: str = "") -> list[str]:
    """The dotted keys of a masked configuration whose values are gone."""
    if isinstance(value, Mapping):
        return [
            found for name, item in value.items() for found in masked_keys(item, f"{path}.{name}" if path else name)
        ]
    if isinstance(value, list):
        return [found for item in value for found in masked_keys(item, path)]
    return [path] if isinstance(value, str) and MASK in value else []


def _mask_text(text: str) -> str:
    text = _URL.sub(rf"\g<scheme>\g<user>:{MASK}@", text)
    text = _QUERY.sub(rf"\g<name>{MASK}", text)
    return _KNOWN.sub(MASK, text)
