"""Finds the recorded rollouts that a training can use: the run folder, its variants, and the one that matches.

A run folder has one variant folder per fingerprint. Fingerprints are compared field by field, so that a mismatch can be
explained; the folder's name is only the start of the hash.
"""

from __future__ import annotations

import logging
import shlex
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

from omegaconf import DictConfig, OmegaConf

from verl_rollout_skip.config.modes import Mode, OnMismatch, Prompts, Reward
from verl_rollout_skip.config.run_names import run_name
from verl_rollout_skip.config.skip_config import BLOCK, SkipConfig
from verl_rollout_skip.errors import ConfigError, ManifestError, MismatchError
from verl_rollout_skip.fingerprint.fingerprint import Fingerprint, difference, make_fingerprint
from verl_rollout_skip.runs.manifest import (
    CONFIG_HASH,
    Manifest,
    list_variants,
    read_manifest,
    restore_manifest,
    write_manifest,
)
from verl_rollout_skip.runs.mismatch import explain_no_match, indented, refuse_variants, report_differences
from verl_rollout_skip.runs.neighbors import Neighbors, check_level, find_neighbors
from verl_rollout_skip.runs.paths import MANIFEST, variant_name
from verl_rollout_skip.store.reader import StoreReader, Unreadable
from verl_rollout_skip.store.storage import HERE, join, open_storage

logger = logging.getLogger(__name__)

# Settings that may change the order of the data from run to run.
_UNREPEATABLE = {
    "data.sampler.class_path": "a custom sampler",
    "data.sampler.class_name": "a custom sampler",
    "data.datagen.path": "data that is generated while training",
    "data.curriculum": "a curriculum",
    "data.streaming": "streamed data",
}


@dataclass(frozen=True)
class Source:
    """A variant whose entries may be loaded.

    ``informational``: recorded with different settings, which the user accepted. ``other_reward``: recorded with a
    reward function other than the one that now scores the responses.
    """

    folder: str
    manifest: Manifest
    informational: bool = False
    other_reward: bool = False


@dataclass(frozen=True)
class Run:
    """Where a training reads and writes rollouts; determined before any worker starts.

    ``sources`` are read in this order. There are two if rollouts come from another variant and the steps missing there
    are recorded in the training's own variant, ``write_folder``.
    """

    settings: SkipConfig
    name: str
    fingerprint: Fingerprint
    config: DictConfig
    sources: tuple[Source, ...] = ()
    write_folder: str | None = None
    trainer: str | None = None


def open_run(config: DictConfig | Mapping[str, Any], trainer: type | None = None) -> Run:
    """Read the settings, compute the fingerprint and find the matching rollouts.

    Raises if the mode needs recorded rollouts and none match, or if ``on_mismatch`` does not allow a new variant.
    """
    tree = config if isinstance(config, DictConfig) else OmegaConf.create(dict(config))
    settings = SkipConfig.from_config(tree)
    if settings.mode is Mode.OFF:
        return Run(settings, "", Fingerprint({}, {}), tree)
    name, fingerprint = run_name(tree), make_fingerprint(tree, trainer)
    trainer_name = None if trainer is None else f"{trainer.__module__}.{trainer.__qualname__}"
    own = write_folder = None
    if settings.dump_dir is not None:
        write_folder = join(settings.dump_dir, name, variant_name(fingerprint.config_hash))
        with _as_config_error("dump_dir", settings.dump_dir):
            own = own_source(write_folder, fingerprint)
            if own is None:
                own = _restored_source(write_folder, Manifest.make(name, tree, fingerprint, trainer_name), settings)
            if own is None:
                check_level(settings.dump_dir)
    if settings.source:
        with _as_config_error("source", settings.source):
            given = _given_source(settings, settings.source, fingerprint)
        is_own = own is not None and own.folder == given.folder
        sources = [given] if own is None or is_own or not settings.mode.generates else [given, own]
    else:
        assert settings.dump_dir is not None
        sources = _matching_variants(settings, join(settings.dump_dir, name), fingerprint, own)
    if settings.mode.reads:
        for source in sources:
            report_differences(source.manifest, fingerprint, tree)
    return Run(settings, name, fingerprint, tree, tuple(sources), write_folder, trainer_name)


def own_source(folder: str, fingerprint: Fingerprint) -> Source | None:
    """The training's own variant, if anything is recorded there. Raises if it belongs to different settings."""
    manifest = read_manifest(open_storage(folder))
    if manifest is None:
        return None
    lines = difference(manifest.fingerprint, fingerprint.rollout)
    if lines:
        raise MismatchError(
            f"{manifest.path} belongs to different settings, although its folder is named after the hash of the "
            f"current ones: it was moved there, or two hashes start the same.\n{indented(lines)}\n"
            f"Use another {BLOCK}.dump_dir."
        )
    return Source(folder, manifest)


def resolve_prompts(config: DictConfig, prompts: Prompts) -> Prompts:
    """Resolve ``prompts: auto``: ``recorded`` if the order of the data may change from run to run."""
    if prompts is not Prompts.AUTO:
        return prompts
    for key, reason in _UNREPEATABLE.items():
        if OmegaConf.select(config, key):
            logger.info("prompts: auto means recorded, because %s is set (%s): its order may not repeat", key, reason)
            return Prompts.RECORDED
    return Prompts.CHECK


@contextmanager
def _as_config_error(key: str, path: str) -> Iterator[None]:
    """Turn an error of the file system or object store into one that names the setting."""
    try:
        yield
    except OSError as error:
        raise ConfigError(f"{BLOCK}.{key} is {path}, which cannot be read: {error}") from error


def _restored_source(folder: str, current: Manifest, settings: SkipConfig) -> Source | None:
    """The training's own variant without its manifest. Every record must prove that it has the current settings."""
    storage = open_storage(folder)
    path = storage.where(HERE, MANIFEST)
    move_away = shlex.join(["mv", folder, f"{folder}.without-manifest"])
    found = list(StoreReader(storage).records())
    records = [record for record in found if not isinstance(record, Unreadable)]
    if not records and found:
        unreadable = next(record for record in found if isinstance(record, Unreadable))
        raise ManifestError(
            f"{path} is missing and no record in its folder can be read, so nothing is recorded there. The first of "
            f"{len(found)}: {unreadable.error} Move the folder away to record again: {move_away}"
        )
    if not records:
        return None
    restored = restore_manifest(storage, current, records)
    if restored is None:
        others = [str(record.key) for record in records if record.info.get(CONFIG_HASH) != current.config_hash]
        raise ManifestError(
            f"{path} is missing, and {len(others)} of the {len(records)} entries in its folder do not prove that they "
            f"were recorded with the current settings (the first is {others[0]}). None of them is used, and nothing is "
            f"recorded there. Restore the manifest from a copy, or move the folder away, which keeps the entries: "
            f"{move_away}"
        )
    logger.warning(
        "%s is missing. All %d records in its folder prove that they were recorded with the current settings, so %s",
        path,
        len(records),
        "it is written again" if settings.mode.writes else "they are used without it; mode cache writes it again",
    )
    return Source(folder, write_manifest(storage, restored) if settings.mode.writes else restored)


def _given_source(settings: SkipConfig, path: str, fingerprint: Fingerprint) -> Source:
    manifest = Manifest.load(path)
    lines = _rollout_difference(manifest, fingerprint, settings)
    if lines and settings.on_mismatch is not OnMismatch.REUSE:
        raise MismatchError(
            f"The rollouts of {BLOCK}.source={path} were recorded with different settings:\n{indented(lines)}\n"
            f"Use the same settings, or use these rollouts anyway with {BLOCK}.on_mismatch=reuse."
        )
    return _make_source(manifest, lines, fingerprint, settings)


def _matching_variants(settings: SkipConfig, folder: str, fingerprint: Fingerprint, own: Source | None) -> list[Source]:
    """The training's own variant, and at most one other: steps of several variants would not form one training."""
    others = list(list_variants(folder, exclude=variant_name(fingerprint.config_hash)).values())
    others.sort(key=lambda manifest: (manifest.created_at, manifest.path))
    differences = {manifest.path: _rollout_difference(manifest, fingerprint, settings) for manifest in others}
    sources = [] if own is None else [own]
    matching = [manifest for manifest in others if not differences[manifest.path]]
    if matching:
        return [*sources, _make_source(matching[0], [], fingerprint, settings)]
    if settings.on_mismatch is OnMismatch.REUSE and len(others) == 1:
        return [*sources, _make_source(others[0], differences[others[0].path], fingerprint, settings)]
    if own is None:
        refuse_variants(settings, folder, differences)
        explain_no_match(settings, folder, differences, _neighbors(settings, folder, fingerprint))
    return sources


def _neighbors(settings: SkipConfig, folder: str, fingerprint: Fingerprint) -> Neighbors:
    if not settings.mode.reads:
        return Neighbors()
    dump_dir, _, run = folder.rpartition("/")
    return find_neighbors(
        dump_dir, run, fingerprint.config_hash, lambda other: _rollout_difference(other, fingerprint, settings)
    )


def _make_source(manifest: Manifest, lines: list[str], fingerprint: Fingerprint, settings: SkipConfig) -> Source:
    if lines:
        logger.warning(
            "using rollouts that were recorded with different settings (%s):\n%s", manifest.path, indented(lines)
        )
    reward = [line for line in difference(manifest.fingerprint, fingerprint.rollout) if line not in lines]
    if reward and settings.mode.reads:
        logger.warning(
            "the responses of %s are scored again with a different reward, so those rollouts are off-policy from the "
            "second step on:\n%s",
            manifest.path,
            indented(reward),
        )
    return Source(manifest.folder, manifest, informational=bool(lines), other_reward=bool(reward))


def _rollout_difference(manifest: Manifest, fingerprint: Fingerprint, settings: SkipConfig) -> list[str]:
    without_reward = settings.reward is Reward.RECOMPUTE
    return difference(manifest.fingerprint, fingerprint.rollout, without_reward=without_reward)
