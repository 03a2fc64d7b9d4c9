"""Decodes recorded tokens with the tokenizer that was recorded, or another one. A tokenizer's own code is never run.

The package ``tokenizers`` reads a plain ``tokenizer.json`` in a tenth of a second. Other tokenizers need
``transformers``.
"""

from __future__ import annotations

import json
import logging
import os
import tempfile
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from verl_rollout_skip.errors import StoreError
from verl_rollout_skip.runs.manifest import Manifest
from verl_rollout_skip.runs.paths import TOKENIZER
from verl_rollout_skip.store.storage import HERE, Storage
from verl_rollout_skip.store.storage.locations import join, open_storage

logger = logging.getLogger(__name__)

_MAX_BYTES = 256 << 20
_FAST, _CONFIG = "tokenizer.json", "tokenizer_config.json"
_NOT_INSTALLED = "is not installed (pip install {})"


@dataclass(frozen=True)
class TextDecoder:
    """Decodes tokens; ``source`` says where the tokenizer came from."""

    source: str
    _decode: Callable[[list[int], bool], str]
    tokenizer: Any = None
    """The underlying ``tokenizers.Tokenizer``, to decode single tokens; None for a tokenizer written in Python."""

    def text(self, tokens: Sequence[int], skip_special_tokens: bool = False) -> str:
        return self._decode([int(token) for token in tokens], skip_special_tokens)


def find_decoder(folder: str, manifest: Manifest | None, given: str | None = None) -> tuple[TextDecoder | None, str]:
    """The decoder for the entries of a variant folder, or None and the reason. A given tokenizer must work."""
    if given is not None:
        return _given_decoder(given), ""
    problems = []
    for candidate in _candidates(folder, manifest):
        try:
            decoder = _open_decoder(candidate)
        except Exception as error:  # whatever is wrong with one tokenizer, another one may work
            problems.append(f"The tokenizer in {candidate} cannot be used: {str(error).rstrip('.')}.")
            logger.warning("%s", problems[-1])
            continue
        if decoder is not None:
            return decoder, ""
    return None, " ".join(problems) or f"There is no tokenizer in {folder}."


def need_decoder(folder: str, manifest: Manifest | None, given: str | None = None) -> TextDecoder:
    """Like ``find_decoder``, but raise if there is none."""
    decoder, why = find_decoder(folder, manifest, given)
    if decoder is None:
        raise StoreError(f"{why} Choose one with --tokenizer DIR.")
    return decoder


def _given_decoder(folder: str) -> TextDecoder:
    try:
        decoder = _open_decoder(folder)
    except Exception as error:
        raise StoreError(f"The tokenizer in {folder} cannot be loaded: {error}") from error
    if decoder is None:
        raise StoreError(f"{folder} is not a tokenizer folder: it has no {_FAST} or {_CONFIG}.")
    return decoder


def _candidates(folder: str, manifest: Manifest | None) -> Iterator[str]:
    yield join(folder, TOKENIZER)
    model = {} if manifest is None else manifest.config.get("actor_rollout_ref", {}).get("model", {})
    for path in (model.get("tokenizer_path"), model.get("path")) if isinstance(model, dict) else ():
        if isinstance(path, str) and os.path.isabs(os.path.expanduser(path)):
            yield path


def _open_decoder(folder: str) -> TextDecoder | None:
    storage = open_storage(folder)
    names = set(storage.names(HERE))
    if _FAST in names:
        tokenizer = _plain_tokenizer(storage, names)
        if tokenizer is not None:
            source = storage.where().rstrip("/")
            return TextDecoder(source, lambda ids, skip: str(tokenizer.decode(ids, skip)), tokenizer)
    if _FAST in names or _CONFIG in names:
        return _full_decoder(storage, names)
    return None


def _plain_tokenizer(storage: Storage, names: set[str]) -> Any:
    """The tokenizer in ``tokenizer.json``; None if other files change what its tokens mean."""
    try:
        from tokenizers import Tokenizer
    except ImportError as error:
        raise StoreError(f"it needs the package tokenizers, which {_NOT_INSTALLED.format('tokenizers')}") from error
    tokenizer: Any = Tokenizer.from_buffer(bytes(storage.read(HERE, _FAST, _MAX_BYTES)))
    config = json.loads(storage.read(HERE, _CONFIG, _MAX_BYTES)) if _CONFIG in names else {}
    added = config.get("added_tokens_decoder") or {}
    if any(tokenizer.id_to_token(int(token)) is None for token in added):
        return None
    # With this setting, transformers 4 removes spaces for every tokenizer, transformers 5 for all but BPE.
    if config.get("clean_up_tokenization_spaces"):
        is_bpe = type(tokenizer.model).__name__ == "BPE"
        return tokenizer if is_bpe and find_spec("transformers") is None else None
    return tokenizer


def _full_decoder(storage: Storage, names: set[str]) -> TextDecoder:
    os.environ.setdefault("TRANSFORMERS_VERBOSITY", "error")
    try:
        from transformers import AutoTokenizer
    except ImportError as error:
        raise StoreError(
            f"it is not a plain {_FAST}, so it needs the package transformers, which "
            f"{_NOT_INSTALLED.format('transformers')}"
        ) from error
    with tempfile.TemporaryDirectory() as folder:
        for name in names:
            Path(folder, name).write_bytes(storage.read(HERE, name, _MAX_BYTES))
        tokenizer = AutoTokenizer.from_pretrained(folder, local_files_only=True, trust_remote_code=False)
    return TextDecoder(
        storage.where().rstrip("/"),
        lambda ids, skip: str(tokenizer.decode(ids, skip_special_tokens=skip)),
        getattr(tokenizer, "backend_tokenizer", None),
    )
