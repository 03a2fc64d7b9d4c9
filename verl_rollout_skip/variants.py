"""Which recorded rollouts a training may use: the run folder, its variants, and the one that fits.

A run folder has one variant folder for each fingerprint. They are compared field by field, so that a mismatch can be
explained; the folder's name is only the beginning of the hash.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from omegaconf import DictConfig, OmegaConf

from verl_rollout_skip.config import BLOCK, SkipConfig, run_name
from verl_rollout_skip.errors import ManifestError, MismatchError
from verl_rollout_skip.fingerprint import Fingerprint, difference, make_fingerprint
from verl_rollout_skip.layout import gpu_layout, layout_difference
from verl_rollout_skip.manifest import Manifest, read_manifest
from verl_rollout_skip.modes import Mode, OnMismatch, Prompts, Reward
from verl_rollout_skip.store.locations import join, open_storage

logger = logging.getLogger(__name__)

_HASH_LETTERS = 12
_SHOWN = 8


@dataclass(frozen=True)
class Run:
    """Where a training reads and writes rollouts, settled before any worker starts.

    ``reads`` is the folder whose entries may be loaded (None: nothing fits), ``recorded`` its manifest, ``writes`` the
    folder for new ones. ``informational``: the rollouts were made with other settings, which the user allowed.
    """

    settings: SkipConfig
    name: str
    fingerprint: Fingerprint
    config: DictConfig
    reads: str | None
    writes: str | None
    recorded: Manifest | None
    informational: bool = False

    @property
    def training_difference(self) -> list[str]:
        """What is learned otherwise than in the recording; from its second step on the rollouts are off-policy then."""
        return [] if self.recorded is None else difference(self.recorded.training, self.fingerprint.training)

    @property
    def layout_difference(self) -> list[str]:
        """What runs elsewhere than in the recording."""
        return [] if self.recorded is None else layout_difference(self.recorded.gpu_layout, gpu_layout(self.config))


def open_run(config: DictConfig | Mapping[str, Any]) -> Run:
    """Read the settings, take the fingerprint and find the rollouts that fit; raise if a wish cannot be met."""
    tree = config if isinstance(config, DictConfig) else OmegaConf.create(dict(config))
    settings = SkipConfig.from_config(tree)
    name = run_name(tree)
    if settings.mode is Mode.OFF:
        return Run(settings, name, Fingerprint({}, {}), tree, None, None, None)
    fingerprint = make_fingerprint(tree)
    writes = None
    if settings.dump_dir is not None:
        writes = join(settings.dump_dir, name, fingerprint.config_hash[:_HASH_LETTERS])
    found = _from_source(settings, fingerprint) if settings.source else _from_variants(settings, name, fingerprint)
    recorded, informational = found
    reads = None if recorded is None else recorded.path.rsplit("/", 1)[0]
    run = Run(settings, name, fingerprint, tree, reads, writes, recorded, informational)
    _report(run)
    return run


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


def list_variants(run_folder: str) -> dict[str, Manifest]:
    """The manifests of a run folder by variant. One that cannot be read is left out with a warning."""
    storage = open_storage(run_folder)
    found = {}
    for folder in sorted(storage.folders()):
        try:
            manifest = read_manifest(storage, folder)
        except ManifestError as error:
            logger.warning("left out: %s", error)
            continue
        if manifest is not None:
            found[folder] = manifest
    return found


def _from_source(settings: SkipConfig, fingerprint: Fingerprint) -> tuple[Manifest | None, bool]:
    assert settings.source is not None
    recorded = Manifest.load(settings.source)
    lines = _difference(recorded, fingerprint, settings)
    if lines and settings.on_mismatch is not OnMismatch.REUSE:
        raise MismatchError(
            f"The rollouts of {BLOCK}.source={settings.source} were made with other settings:\n{_listed(lines)}\n"
            f"Use the same settings, or take them knowingly with {BLOCK}.on_mismatch=reuse."
        )
    return recorded, bool(lines)


def _from_variants(settings: SkipConfig, name: str, fingerprint: Fingerprint) -> tuple[Manifest | None, bool]:
    assert settings.dump_dir is not None
    folder = join(settings.dump_dir, name)
    own = fingerprint.config_hash[:_HASH_LETTERS]
    own_manifest = read_manifest(open_storage(join(folder, own)))  # a broken one of our own is an error
    variants = list_variants(folder)
    differences = {variant: _difference(manifest, fingerprint, settings) for variant, manifest in variants.items()}
    if own_manifest is not None and not differences.get(own):
        return variants[own], False
    fitting = [variant for variant, lines in differences.items() if not lines]
    if fitting:
        return variants[fitting[0]], False
    return _without_fit(settings, folder, variants, differences)


def _without_fit(
    settings: SkipConfig, folder: str, variants: dict[str, Manifest], differences: dict[str, list[str]]
) -> tuple[Manifest | None, bool]:
    if settings.on_mismatch is OnMismatch.REUSE and len(variants) == 1:
        variant, manifest = next(iter(variants.items()))
        logger.warning("reusing rollouts made with other settings:\n%s", _listed(differences[variant]))
        return manifest, True
    explained = "\n".join(f"{variant}:\n{_listed(lines)}" for variant, lines in _nearest(differences))
    if settings.on_mismatch is OnMismatch.REUSE and variants:
        raise MismatchError(
            f"{BLOCK}.on_mismatch is 'reuse' and {folder} has {len(variants)} variants, none with today's settings. "
            f"Choose one with {BLOCK}.source={folder}/VARIANT/manifest.json:\n{explained}"
        )
    if settings.on_mismatch is OnMismatch.ERROR and variants:
        raise MismatchError(
            f"{folder} holds rollouts made with other settings, and {BLOCK}.on_mismatch is 'error':\n{explained}"
        )
    if not settings.mode.generates:
        if not variants:
            raise MismatchError(
                f"Mode {settings.mode.value!r} loads recorded rollouts, and nothing is recorded in {folder}. Record "
                f"first ({BLOCK}.mode=cache), or check dump_dir, the experiment and project name and the batch sizes, "
                "which make up the folder's name."
            )
        raise MismatchError(
            f"Mode {settings.mode.value!r} loads recorded rollouts, and those in {folder} were made with other "
            f"settings:\n{explained}\nUse the same settings, or take them knowingly with {BLOCK}.on_mismatch=reuse."
        )
    if variants:
        logger.info("no recorded rollouts fit; what differs:\n%s", explained)
    return None, False


def _difference(manifest: Manifest, fingerprint: Fingerprint, settings: SkipConfig) -> list[str]:
    without_reward = settings.reward is Reward.RECOMPUTE
    return difference(manifest.fingerprint, fingerprint.rollout, without_reward=without_reward)


def _nearest(differences: dict[str, list[str]]) -> list[tuple[str, list[str]]]:
    return sorted(differences.items(), key=lambda item: len(item[1]))


def _listed(lines: list[str]) -> str:
    more = [f"  … and {len(lines) - _SHOWN} more"] if len(lines) > _SHOWN else []
    return "\n".join([f"  {line}" for line in lines[:_SHOWN]] + more)


def _report(run: Run) -> None:
    if run.layout_difference:
        logger.info("recorded on another layout, which makes no difference:\n%s", _listed(run.layout_difference))
    if run.training_difference:
        logger.warning(
            "the training differs from the recorded one, so the rollouts are off-policy from its second step on:\n%s",
            _listed(run.training_difference),
        )
