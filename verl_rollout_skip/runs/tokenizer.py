"""Copies the tokenizer into the variant folder, so that rollouts can be shown as text without the model."""

from __future__ import annotations

import contextlib
import logging
from pathlib import Path

from omegaconf import DictConfig, OmegaConf

from verl_rollout_skip.fingerprint.identity import is_tokenizer_file
from verl_rollout_skip.runs.paths import TOKENIZER
from verl_rollout_skip.store.new_files import publish
from verl_rollout_skip.store.storage import Storage

logger = logging.getLogger(__name__)

_PATH_KEYS = ("data.tokenizer", "actor_rollout_ref.model.tokenizer_path", "actor_rollout_ref.model.path")
_MAX_BYTES = 64 << 20


def copy_tokenizer(config: DictConfig, storage: Storage) -> None:
    """Copy the tokenizer files of a training's model into a variant folder, except those already there.

    The driver must be able to read them: nothing is copied for a model that is only a name on the Hub.
    """
    present = set(storage.names(TOKENIZER))
    for file in _tokenizer_files(config):
        if file.name in present or file.stat().st_size > _MAX_BYTES:
            continue
        with contextlib.suppress(FileExistsError):  # another process copied it too
            publish(storage, TOKENIZER, file.name, file.read_bytes())
    if not storage.names(TOKENIZER):
        logger.info("found no tokenizer files to copy into the variant folder")


def _tokenizer_files(config: DictConfig) -> list[Path]:
    for key in _PATH_KEYS:
        value = OmegaConf.select(config, key)
        folder = Path(str(value)).expanduser() if value else None
        if folder is not None and folder.is_dir():
            # For some tokenizers, transformers reads the class from the model's config.
            found = [file for file in sorted(folder.iterdir()) if is_tokenizer_file(file.name) and file.is_file()]
            config_file = folder / "config.json"
            return [*found, config_file] if found and config_file.is_file() else found
    return []
