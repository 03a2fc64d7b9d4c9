"""Which recorded rollouts a training may use: the run folder, its variants, and the one that fits.

A run folder has one variant folder for each fingerprint. They are compared field by field, so that a mismatch can be
explained; the folder's name is only the beginning of the hash.
"""

from __future__ import annotations

import logging
import shlex
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

from omegaconf import DictConfig, OmegaConf

from verl_rollout_skip.config import BLOCK, SkipConfig, run_name
from verl_rollout_skip.errors import ConfigError, EntryNotFoundError, ManifestError, MismatchError
from verl_rollout_skip.fingerprint import Fingerprint, difference, make_fingerprint
from verl_rollout_skip.layout import gpu_layout, layout_difference, versions
from verl_rollout_skip.manifest import (
    CONFIG_HASH,
    NAME,
    Manifest,
    list_variants,
    read_manifest,
    restore_manifest,
    variant_name,
    write_manifest,
)
from verl_rollout_skip.modes import Mode, OnMismatch, Prompts, Reward
from verl_rollout_skip.neighbors import Neighbors, check_level, find_neighbors
from verl_rollout_skip.store.reader import StoreReader, Unreadable
from verl_rollout_skip.store.storage import HERE, join, open_storage

logger = logging.getLogger(__name__)

_SHOWN = 8
_SHOWN_NEIGHBORS = 3


@dataclass(frozen=True)
class Source:
    """A folder whose entries may be loaded. ``informational``: made with other settings, which the user allowed.

    ``other_reward``: recorded with another reward function than the one that scores the responses anew.
    """

    folder: str
    manifest: Manifest
    informational: bool = False
    other_reward: bool = False


@dataclass(frozen=True)
class Run:
    """Where a training reads and writes rollouts, settled before any worker starts.

    ``sources`` are read in this order; there are two if some rollouts come from elsewhere and what was missing there
    has been recorded in a variant of its own. ``writes`` is the folder for new ones.
    """

    settings: SkipConfig
    name: str
    fingerprint: Fingerprint
    config: DictConfig
    sources: tuple[Source, ...] = ()
    writes: str | None = None
    trainer: str | None = None


def open_run(config: DictConfig | Mapping[str, Any], trainer: type | None = None) -> Run:
    """Read the settings, take the fingerprint and find the rollouts that fit; raise if a wish cannot be met."""
    tree = config if isinstance(config, DictConfig) else OmegaConf.create(dict(config))
    settings = SkipConfig.from_config(tree)
    if settings.mode is Mode.OFF:
        return Run(settings, "", Fingerprint({}, {}), tree)
    name, fingerprint = run_name(tree), make_fingerprint(tree, trainer)
    trainer_name = None if trainer is None else f"{trainer.__module__}.{trainer.__qualname__}"
    own = writes = None
    if settings.dump_dir is not None:
        writes = join(settings.dump_dir, name, variant_name(fingerprint.config_hash))
        with _naming("dump_dir", settings.dump_dir):
            own = own_source(writes, fingerprint)
            if own is None:
                own = _restored_source(writes, Manifest.make(name, tree, fingerprint, trainer_name), settings)
            if own is None:
                check_level(settings.dump_dir)
    if settings.source:
        with _naming("source", settings.source):
            given = _from_source(settings, fingerprint)
        is_own = own is not None and own.folder == given.folder
        sources = [given] if own is None or is_own or not settings.mode.generates else [given, own]
    else:
        assert settings.dump_dir is not None
        sources = _from_variants(settings, join(settings.dump_dir, name), fingerprint, own)
    if settings.mode.reads:
        for source in sources:
            _report(source, fingerprint, tree)
    return Run(settings, name, fingerprint, tree, tuple(sources), writes, trainer_name)


@contextmanager
def _naming(key: str, path: str) -> Iterator[None]:
    """Say of a place that does not answer which setting names it."""
    try:
        yield
    except OSError as error:
        raise ConfigError(f"{BLOCK}.{key} is {path}, and what is there cannot be read: {error}") from error


def own_source(folder: str, fingerprint: Fingerprint) -> Source | None:
    """Today's own variant, if something is recorded there. One that belongs to other settings is an error."""
    manifest = read_manifest(open_storage(folder))
    if manifest is None:
        return None
    lines = difference(manifest.fingerprint, fingerprint.rollout)
    if lines:
        raise MismatchError(
            f"{manifest.path} belongs to other settings, although the name of its folder is the short hash of today's: "
            f"it was moved there, or two hashes begin alike.\n{_listed(lines)}\nUse another {BLOCK}.dump_dir."
        )
    return Source(folder, manifest)


def _restored_source(folder: str, today: Manifest, settings: SkipConfig) -> Source | None:
    """Today's own variant without its manifest: usable only if every record proves that it has today's settings."""
    storage = open_storage(folder)
    found = list(StoreReader(storage).records())
    records = [record for record in found if not isinstance(record, Unreadable)]
    if not records and found:
        unreadable = next(record for record in found if isinstance(record, Unreadable))
        raise ManifestError(
            f"{storage.where(HERE, NAME)} is missing, and no record beside it can be read, so nothing is recorded "
            f"among them. The first of {len(found)}: {unreadable.error} Move the folder away to record again: "
            f"{shlex.join(['mv', folder, f'{folder}.without-manifest'])}"
        )
    if not records:
        return None
    restored = restore_manifest(storage, today, records)
    if restored is None:
        others = [str(record.key) for record in records if record.info.get(CONFIG_HASH) != today.config_hash]
        raise ManifestError(
            f"{storage.where(HERE, NAME)} is missing, and {len(others)} of the {len(records)} entries beside it do not "
            f"say that they were recorded with today's settings (the first is {others[0]}), so none is used, and "
            "nothing is recorded among them. Restore it from a copy, or move the folder away, which keeps the entries: "
            f"{shlex.join(['mv', folder, f'{folder}.without-manifest'])}"
        )
    logger.warning(
        "%s is missing. All %d records beside it prove that they were made with today's settings, so %s",
        restored.path,
        len(records),
        "it is written again" if settings.mode.writes else "they are used without it; mode cache writes it again",
    )
    return Source(folder, write_manifest(storage, restored) if settings.mode.writes else restored)


def resolve_prompts(config: DictConfig, wish: Prompts) -> Prompts:
    """What ``prompts: auto`` means for this training: the recorded batch where the order of data does not repeat."""
    if wish is not Prompts.AUTO:
        return wish
    for key, what in _UNREPEATABLE.items():
        value = OmegaConf.select(config, key)
        if value:
            logger.info("prompts: auto means recorded, because %s is set (%s): its order may not repeat", key, what)
            return Prompts.RECORDED
    return Prompts.CHECK


_UNREPEATABLE = {
    "data.sampler.class_path": "a custom sampler",
    "data.sampler.class_name": "a custom sampler",
    "data.datagen.path": "data that is generated while training",
    "data.curriculum": "a curriculum",
    "data.streaming": "streamed data",
}


def _from_source(settings: SkipConfig, fingerprint: Fingerprint) -> Source:
    assert settings.source is not None
    manifest = Manifest.load(settings.source)
    lines = _difference(manifest, fingerprint, settings)
    if lines and settings.on_mismatch is not OnMismatch.REUSE:
        raise MismatchError(
            f"The rollouts of {BLOCK}.source={settings.source} were made with other settings:\n{_listed(lines)}\n"
            f"Use the same settings, or take them knowingly with {BLOCK}.on_mismatch=reuse."
        )
    return _source(manifest, lines, fingerprint, settings)


def _from_variants(settings: SkipConfig, folder: str, fingerprint: Fingerprint, own: Source | None) -> list[Source]:
    """Today's own variant, and at most one other: two recordings of one step are two different trainings."""
    others = list(list_variants(folder, besides=variant_name(fingerprint.config_hash)).values())
    others.sort(key=lambda manifest: (manifest.created_at, manifest.path))
    differences = {manifest.path: _difference(manifest, fingerprint, settings) for manifest in others}
    sources = [] if own is None else [own]
    fitting = [manifest for manifest in others if not differences[manifest.path]]
    if fitting:
        return [*sources, _source(fitting[0], [], fingerprint, settings)]
    if settings.on_mismatch is OnMismatch.REUSE and len(others) == 1:
        return [*sources, _source(others[0], differences[others[0].path], fingerprint, settings)]
    if own is None:
        _explain_nothing_fits(settings, folder, differences, _neighbors(settings, folder, fingerprint))
    return sources


def _neighbors(settings: SkipConfig, folder: str, fingerprint: Fingerprint) -> Neighbors:
    if not settings.mode.reads:
        return Neighbors()
    dump_dir, _, run = folder.rpartition("/")
    return find_neighbors(dump_dir, run, fingerprint.config_hash, lambda it: _difference(it, fingerprint, settings))


def _source(manifest: Manifest, lines: list[str], fingerprint: Fingerprint, settings: SkipConfig) -> Source:
    if lines:
        logger.warning("using rollouts that were made with other settings (%s):\n%s", manifest.path, _listed(lines))
    reward = [line for line in difference(manifest.fingerprint, fingerprint.rollout) if line not in lines]
    if reward and settings.mode.reads:
        logger.warning(
            "the responses of %s are scored anew, and the reward is another one than it was recorded with, so those "
            "rollouts are off-policy from the second step on:\n%s",
            manifest.path,
            _listed(reward),
        )
    return Source(manifest.path.rsplit("/", 1)[0], manifest, informational=bool(lines), other_reward=bool(reward))


def _explain_nothing_fits(
    settings: SkipConfig, folder: str, differences: dict[str, list[str]], neighbors: Neighbors
) -> None:
    """Raise if the mode or ``on_mismatch`` asks for recorded rollouts; otherwise say why a new variant begins."""
    mode = settings.mode.value
    explained = _explained(differences)
    if settings.on_mismatch is OnMismatch.REUSE and differences:
        raise MismatchError(
            f"{BLOCK}.on_mismatch is 'reuse' and {folder} has {len(differences)} variants, none with today's settings. "
            f"Choose one by setting {BLOCK}.source to its manifest:\n{explained}"
        )
    if settings.on_mismatch is OnMismatch.ERROR and differences:
        raise MismatchError(
            f"{folder} holds rollouts made with other settings, and {BLOCK}.on_mismatch is 'error':\n{explained}\n"
            f"Use the same settings, or let {BLOCK}.on_mismatch=new begin another variant beside them."
        )
    # Of other runs only those that are near: a dump_dir may hold quite different trainings.
    near = {path: lines for path, lines in neighbors.others.items() if len(lines) <= _SHOWN}
    explained = "" if neighbors.same else _explained({**differences, **dict(_nearest(near)[:_SHOWN_NEIGHBORS])})
    beside = "\n".join(part for part in (explained, neighbors.describe()) if part)
    if not settings.mode.generates and not differences:
        raise EntryNotFoundError(
            f"Mode {mode!r} loads recorded rollouts, and nothing is recorded in {folder}."
            + (f" Beside it there is:\n{beside}\n" if beside else " ")
            + f"Record first ({BLOCK}.mode=cache), or check {BLOCK}.dump_dir and what makes up the folder's name: "
            "trainer.experiment_name, trainer.project_name, data.train_batch_size, data.gen_batch_size and "
            "actor_rollout_ref.rollout.n."
        )
    if not settings.mode.generates:
        raise MismatchError(
            f"Mode {mode!r} loads recorded rollouts, and those in {folder} were made with other settings:\n"
            f"{beside}\nUse the same settings, or take them knowingly with {BLOCK}.on_mismatch=reuse."
        )
    if explained:
        logger.info("no recorded rollouts fit, so a new variant begins; what differs:\n%s", explained)
    if neighbors.same or neighbors.notes:
        logger.warning(
            "nothing that is recorded in %s fits, so everything is generated. %s", folder, neighbors.describe()
        )


def _difference(manifest: Manifest, fingerprint: Fingerprint, settings: SkipConfig) -> list[str]:
    without_reward = settings.reward is Reward.RECOMPUTE
    return difference(manifest.fingerprint, fingerprint.rollout, without_reward=without_reward)


def _explained(differences: dict[str, list[str]]) -> str:
    return "\n".join(f"{path}:\n{_listed(lines)}" for path, lines in _nearest(differences))


def _nearest(differences: dict[str, list[str]]) -> list[tuple[str, list[str]]]:
    return sorted(differences.items(), key=lambda item: len(item[1]))


def _listed(lines: list[str]) -> str:
    more = [f"  … and {len(lines) - _SHOWN} more"] if len(lines) > _SHOWN else []
    return "\n".join([f"  {line}" for line in lines[:_SHOWN]] + more)


def _report(source: Source, fingerprint: Fingerprint, config: DictConfig) -> None:
    layout = layout_difference(source.manifest.gpu_layout, gpu_layout(config))
    if layout:
        logger.info("%s was recorded on another layout, which makes no difference:\n%s", source.folder, _listed(layout))
    software = difference(source.manifest.versions, versions())
    if software:
        logger.info("%s was recorded with other versions:\n%s", source.folder, _listed(software))
    training = difference(source.manifest.training, fingerprint.training)
    if training:
        logger.warning(
            "the training differs from the one that recorded %s, so those rollouts are off-policy from the second step "
            "on:\n%s",
            source.folder,
            _listed(training),
        )
