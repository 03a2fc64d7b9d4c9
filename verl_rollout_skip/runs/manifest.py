"""``manifest.json``: how the rollouts of a variant were recorded. It is written once, and again only if deleted.

Reading a manifest also reads ``trainings/``.
"""

from __future__ import annotations

import logging
import shlex
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any

from omegaconf import DictConfig

from verl_rollout_skip.errors import ManifestError, RolloutSkipError
from verl_rollout_skip.fingerprint.fingerprint import Fingerprint, Flat, flat_hash, resolve_config
from verl_rollout_skip.fingerprint.layout import gpu_layout, versions
from verl_rollout_skip.fingerprint.redact import mask
from verl_rollout_skip.runs import checked_json
from verl_rollout_skip.runs.paths import MANIFEST, variant_folder, variant_name
from verl_rollout_skip.runs.trainings import readable_trainings
from verl_rollout_skip.store.format import FORMAT_VERSION, explain_version
from verl_rollout_skip.store.reader import EntryRecord, StoreReader
from verl_rollout_skip.store.storage import HERE, Storage, open_storage

logger = logging.getLogger(__name__)

CONFIG_HASH = "config_hash"
TRAINING_HASH = "training_hash"
"""The key in an entry's record for the hash of the settings that it was recorded with, as in the manifest."""
_NOT_STORED = ("trainings", "path")


@dataclass(frozen=True)
class Manifest:
    """The settings that a variant was recorded with, and the trainings that recorded it.

    ``config`` is the resolved configuration with secrets masked, ``trainer`` the name of the trainer class.
    ``trainings`` has one item per training that recorded here: when, on which layout, with which versions, and which
    steps. ``restored_at`` is set if the file was deleted and a later training with the same fingerprint wrote it again;
    ``config`` and ``training`` are then those of the later training.
    """

    run_name: str
    created_at: str
    config_hash: str
    fingerprint: Flat
    training_hash: str
    training: Flat
    config: dict[str, Any]
    gpu_layout: dict[str, Any]
    versions: dict[str, str]
    trainer: str | None = None
    restored_at: str | None = None
    trainings: list[dict[str, Any]] = field(default_factory=list)
    path: str = ""

    @property
    def folder(self) -> str:
        """The variant folder that the manifest was read from."""
        return self.path.removesuffix(f"/{MANIFEST}")

    @property
    def devices(self) -> str | None:
        """Nodes × devices per node, e.g. ``2 × 8``; None if unknown."""
        nodes, devices = self.gpu_layout.get("nnodes"), self.gpu_layout.get("n_gpus_per_node")
        return None if nodes is None or devices is None else f"{nodes} × {devices}"

    @classmethod
    def make(
        cls,
        run_name: str,
        config: DictConfig | Mapping[str, Any],
        fingerprint: Fingerprint,
        trainer: str | None = None,
    ) -> Manifest:
        """The manifest of a training that is about to record."""
        return cls(
            run_name=run_name,
            created_at=checked_json.timestamp(),
            config_hash=fingerprint.config_hash,
            fingerprint=fingerprint.rollout,
            training_hash=fingerprint.training_hash,
            training=fingerprint.training,
            config=mask(resolve_config(config)),
            gpu_layout=gpu_layout(config),
            versions=versions(),
            trainer=trainer,
        )

    @classmethod
    def load(cls, path: str, storage_options: dict[str, Any] | None = None) -> Manifest:
        """Read a manifest, given its path or the path of its folder."""
        folder = variant_folder(path)
        manifest = read_manifest(open_storage(folder, storage_options))
        if manifest is None:
            raise ManifestError(f"There is no {MANIFEST} in {folder}. {_suggest_path(folder)}")
        return manifest


def read_manifest(storage: Storage, folder: str = HERE) -> Manifest | None:
    """The manifest in a folder, or None if there is none. Raises ``ManifestError`` if it cannot be trusted."""
    try:
        fields = checked_json.read(storage, folder, MANIFEST)
    except FileNotFoundError:
        return None
    path = storage.where(folder, MANIFEST)
    version = fields.pop("format_version", None)
    if version != FORMAT_VERSION:
        raise ManifestError(f"{path} has {explain_version(version)}")
    try:
        manifest = Manifest(**fields, path=path)
    except TypeError as error:
        raise ManifestError(f"{path} is not a manifest: {error}. Restore it from a copy.") from error
    for name, flat in ((CONFIG_HASH, manifest.fingerprint), ("training_hash", manifest.training)):
        if getattr(manifest, name) != flat_hash(flat):
            raise ManifestError(f"{path} was edited: {name} does not match the settings in it.")
    if folder == HERE:
        manifest.trainings.extend(readable_trainings(storage))
    return manifest


def write_manifest(storage: Storage, manifest: Manifest) -> Manifest:
    """Write a manifest unless there is one; return the one that is there. Its rollouts must have the same settings."""
    found = read_manifest(storage)
    if found is None:
        fields = {name: value for name, value in vars(manifest).items() if name not in _NOT_STORED}
        try:
            checked_json.publish(storage, HERE, MANIFEST, {"format_version": FORMAT_VERSION, **fields}, replace=False)
        except FileExistsError:
            pass  # another process was first
        except OSError as error:
            raise ManifestError(
                f"{storage.where(HERE, MANIFEST)} cannot be written, and nothing is recorded without it: {error}. Free "
                "some space, or choose another rollout_skip.dump_dir."
            ) from error
        found = read_manifest(storage)
    if found is None or found.config_hash != manifest.config_hash:
        raise _other_settings_error(storage)
    return found


def check_manifest(storage: Storage, manifest: Manifest) -> None:
    """Raise if ``write_manifest`` would find a manifest with different settings."""
    found = read_manifest(storage)
    if found is not None and found.config_hash != manifest.config_hash:
        raise _other_settings_error(storage)


def restore_manifest(storage: Storage, current: Manifest, records: list[EntryRecord]) -> Manifest | None:
    """Rebuild a deleted manifest; None unless every record proves that it had the settings of ``current``.

    Nothing is written. As far as possible, the manifest describes the recording, not the current training.
    """
    if {record.info.get(CONFIG_HASH) for record in records} != {current.config_hash}:
        return None
    trainings = readable_trainings(storage)
    restored = replace(
        current,
        created_at=min(record.created_at for record in records),
        restored_at=checked_json.timestamp(),
        trainings=trainings,
        path=storage.where(HERE, MANIFEST),
    )
    if not trainings:
        return restored
    return replace(restored, gpu_layout=trainings[0]["gpu_layout"], versions=trainings[0]["versions"])


def explain_foreign(info: Mapping[str, Any], manifest: Manifest) -> str | None:
    """Why an entry does not belong to the variant that it is in; None if it does, or if its record does not say."""
    recorded = info.get(CONFIG_HASH)
    if recorded in (None, manifest.config_hash):
        return None
    return (
        f"was recorded with different settings than its manifest says (config_hash {recorded}, in the manifest "
        f"{manifest.config_hash}): it was moved or copied here from another variant. Move it back to the folder "
        f"{variant_name(str(recorded))}."
    )


def list_variants(run_folder: str, exclude: str = "") -> dict[str, Manifest]:
    """The manifests in a run folder by variant, except that of the variant ``exclude``.

    A variant whose manifest is missing or unreadable is ignored with a warning.
    """
    storage = open_storage(run_folder)
    found = {}
    for folder in sorted({*storage.folders()} - {exclude}):
        try:
            manifest = read_manifest(storage, folder)
            if manifest is not None:
                found[folder] = manifest
            elif StoreReader.at(storage.where(folder)).has_steps():
                path = storage.where(folder)
                logger.warning(
                    "ignored: %s has rollouts but no %s; run %s to see what to do", path, MANIFEST, _verify(path)
                )
        except (RolloutSkipError, PermissionError) as error:  # the folder may belong to another user
            logger.warning("ignored: %s", error)
    return found


def _other_settings_error(storage: Storage) -> ManifestError:
    return ManifestError(
        f"{storage.where(HERE, MANIFEST)} belongs to rollouts with different settings, or was deleted while this "
        "training started. Nothing is written there. Use another dump_dir, or move that folder away."
    )


def _suggest_path(folder: str) -> str:
    """What to do about a folder without a manifest."""
    storage = open_storage(folder)
    if StoreReader(storage).has_steps():
        path = storage.where().rstrip("/")
        return f"It has rollouts, so the manifest was deleted or not copied. Run {_verify(path)} to see what to do."
    text = "Give the path of a manifest, or of the folder with the dumps: DUMP_DIR/RUN_NAME/VARIANT."
    variants = list(list_variants(folder))
    return f"{text} This folder contains the variants {', '.join(variants)}." if variants else text


def _verify(path: str) -> str:
    return f"rollout-skip verify {shlex.quote(path)}"
