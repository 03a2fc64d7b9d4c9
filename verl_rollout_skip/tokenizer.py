"""A copy of the tokenizer beside the dumps, so that they can be read as text anywhere, without the model."""

from __future__ import annotations

import logging
from pathlib import Path

from omegaconf import DictConfig, OmegaConf

from verl_rollout_skip.identity import is_tokenizer_file
from verl_rollout_skip.store.storage import Storage

logger = logging.getLogger(__name__)

FOLDER = "tokenizer"
_PLACES = ("data.tokenizer", "actor_rollout_ref.model.tokenizer_path", "actor_rollout_ref.model.path")
_MAX_BYTES = 64 << 20


def copy_tokenizer(config: DictConfig, storage: Storage) -> None:
    """Copy the tokenizer files of a training's model into a variant folder, unless they are there.

    Only what the driver can read is copied; a model that is known by its name on a hub is not.
    """
    present = set(storage.names(FOLDER))
    for file in _tokenizer_files(config):
        if file.name in present or file.stat().st_size > _MAX_BYTES:
            continue
        with storage.stage(FOLDER) as staged:
            staged.write(file.read_bytes())
            try:
                storage.publish(staged, file.name)
            except FileExistsError:
                pass  # another process copies it too
    if not storage.names(FOLDER):
        logger.info("no tokenizer files were found to copy beside the dumps")


def _tokenizer_files(config: DictConfig) -> list[Path]:
    for key in _PLACES:
        value = OmegaConf.select(config, key)
        folder = Path(str(value)).expanduser() if value else None
        if folder is not None and folder.is_dir():
            # transformers finds the class of some tokenizers in the model's config.
            found = [file for file in sorted(folder.iterdir()) if is_tokenizer_file(file.name) and file.is_file()]
            config_file = folder / "config.json"
            return [*found, config_file] if found and config_file.is_file() else found
    return []
