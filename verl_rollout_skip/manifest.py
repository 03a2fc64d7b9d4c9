"""``manifest.json``: what the rollouts of a variant folder were made from. Written once, and again only if it is gone.

Each process that records into the folder has a file of its own under ``trainings/``, which it alone rewrites; so any
number of processes on any storage can record at once, and nothing is lost or half-written. Reading a manifest brings
both together.
"""

from __future__ import annotations

import json
import logging
import secrets as tokens
import shlex
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from datetime import datetime, timezone
from typing import Any

import xxhash
from omegaconf import DictConfig

from verl_rollout_skip.errors import ManifestError, RolloutSkipError
from verl_rollout_skip.fingerprint import Fingerprint, Flat, flat_hash, plain
from verl_rollout_skip.layout import gpu_layout, host, versions
from verl_rollout_skip.secrets import mask
from verl_rollout_skip.store.format import FORMAT_VERSION, explain_version
from verl_rollout_skip.store.reader import EntryRecord, StoreReader
from verl_rollout_skip.store.storage import HERE, Storage, open_storage

logger = logging.getLogger(__name__)

NAME = "manifest.json"
CONFIG_HASH = "config_hash"
"""Where the record of an entry says with which settings it was recorded: the ``config_hash`` of its manifest."""
TRAININGS = "trainings"
"""The folder of a variant that says which training recorded what, when and where."""
_MAX_BYTES = 64 << 20


@dataclass(frozen=True)
class Manifest:
    """What a variant was recorded from, and by whom.

    ``config`` is the whole resolved configuration with secrets masked, ``trainer`` the class that trained.
    ``trainings`` has one item for each training that recorded here: when, on which layout, with which versions, and
    which steps. ``restored_at``: the file was deleted, and a later training with the same fingerprint wrote it again;
    ``config`` and ``training`` are those of that training.
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
            created_at=_now(),
            config_hash=fingerprint.config_hash,
            fingerprint=fingerprint.rollout,
            training_hash=fingerprint.training_hash,
            training=fingerprint.training,
            config=mask(plain(config)),
            gpu_layout=gpu_layout(config),
            versions=versions(),
            trainer=trainer,
        )

    @classmethod
    def load(cls, path: str, storage_options: dict[str, Any] | None = None) -> Manifest:
        """Read a manifest by the path of its file or of the folder that it is in."""
        folder = folder_of(path)
        manifest = read_manifest(open_storage(folder, storage_options))
        if manifest is None:
            raise ManifestError(f"There is no {NAME} in {folder}. {_where_to_look(folder)}")
        return manifest


def variant_name(config_hash: str) -> str:
    """The name of the folder for rollouts with this fingerprint."""
    return config_hash[:12]


def folder_of(path: str) -> str:
    """The folder that a path means: itself, or that of the manifest that it names."""
    folder, _, name = path.rstrip("/").rpartition("/")
    if name == NAME:
        return folder or ("/" if path.startswith("/") else ".")
    return path.rstrip("/") or "/"


class TrainingFile:
    """What a training says about itself: written at the first dump, and again at the end with all recorded steps."""

    def __init__(self, storage: Storage, layout: dict[str, Any]) -> None:
        self._storage = storage
        stamp = datetime.now(timezone.utc).strftime("%Y%m%dT%H%M%SZ")
        self._name = f"{stamp}-{tokens.token_hex(4)}.json"
        self._item: dict[str, Any] = {"started_at": _now(), "host": host()}
        self._item |= {"gpu_layout": layout, "versions": versions()}

    def save(self, steps: list[int]) -> None:
        """Write down which steps this training has recorded."""
        self._item = {**self._item, "updated_at": _now(), "steps": sorted(set(steps))}
        _publish(self._storage, TRAININGS, self._name, _render(self._item), replace=True)


def write_manifest(storage: Storage, manifest: Manifest) -> Manifest:
    """Write a manifest unless one is there; returns the one that is there then, which must be of the same rollouts."""
    found = read_manifest(storage)
    if found is None:
        fields = {key: value for key, value in vars(manifest).items() if key not in ("trainings", "path")}
        try:
            _publish(storage, HERE, NAME, _render({"format_version": FORMAT_VERSION, **fields}), replace=False)
        except FileExistsError:
            pass  # another process was first
        except OSError as error:
            raise ManifestError(
                f"{storage.where(HERE, NAME)} cannot be written, and nothing is recorded without it: {error}. Make "
                "room there, or choose another rollout_skip.dump_dir."
            ) from error
        found = read_manifest(storage)
    if found is None or found.config_hash != manifest.config_hash:
        raise _not_ours(storage)
    return found


def restore_manifest(storage: Storage, today: Manifest, records: list[EntryRecord]) -> Manifest | None:
    """The manifest of a folder that lost it, or None if its records do not prove that it was the one of ``today``.

    Nothing is written. What can be known of the recording comes from its own files.
    """
    if {record.info.get(CONFIG_HASH) for record in records} != {today.config_hash}:
        return None
    trainings = _trainings(storage)
    restored = replace(
        today,
        created_at=min(record.created_at for record in records),
        restored_at=_now(),
        trainings=trainings,
        path=storage.where(HERE, NAME),
    )
    if not trainings:
        return restored
    return replace(restored, gpu_layout=trainings[0]["gpu_layout"], versions=trainings[0]["versions"])


def explain_foreign(info: Mapping[str, Any], manifest: Manifest) -> str | None:
    """Why an entry does not belong to the manifest beside it; None if it does, or does not say."""
    recorded = info.get(CONFIG_HASH)
    if recorded in (None, manifest.config_hash):
        return None
    return (
        f"was recorded with other settings than the manifest beside it (config_hash {recorded}, the manifest has "
        f"{manifest.config_hash}): it was moved or copied here from another variant. Move it back to the folder "
        f"{variant_name(str(recorded))}."
    )


def check_manifest(storage: Storage, manifest: Manifest) -> None:
    """Raise what ``write_manifest`` would raise if the manifest that is there is one of other rollouts."""
    found = read_manifest(storage)
    if found is not None and found.config_hash != manifest.config_hash:
        raise _not_ours(storage)


def _not_ours(storage: Storage) -> ManifestError:
    return ManifestError(
        f"{storage.where(HERE, NAME)} belongs to rollouts made with other settings, or was deleted by someone else "
        "while this training started. Nothing is written beside it: use another dump_dir, or move that folder away."
    )


def read_manifest(storage: Storage, folder: str = HERE) -> Manifest | None:
    """The manifest of a folder, or None if it has none. A bad one is a ``ManifestError``."""
    try:
        data = storage.read(folder, NAME, _MAX_BYTES)
    except FileNotFoundError:
        return None
    where = storage.where(folder, NAME)
    fields = _parse(data, where)
    version = fields.pop("format_version", None)
    if version != FORMAT_VERSION:
        raise ManifestError(f"{where} is of {explain_version(version)}")
    try:
        manifest = Manifest(**fields, path=where)
    except TypeError as error:
        raise ManifestError(f"{where} is no manifest: {error}. Restore it from a copy.") from error
    for name, flat in (("config_hash", manifest.fingerprint), ("training_hash", manifest.training)):
        if getattr(manifest, name) != flat_hash(flat):
            raise ManifestError(f"{where} was edited: {name} does not belong to the settings beside it.")
    if folder == HERE:
        manifest.trainings.extend(_trainings(storage))
    return manifest


def _where_to_look(folder: str) -> str:
    """What to do about a folder without a manifest."""
    storage = open_storage(folder)
    if StoreReader(storage).has_steps():
        advice = f"rollout-skip verify {shlex.quote(storage.where().rstrip('/'))}"
        return f"It has rollouts, so the manifest was deleted, or not copied with them; {advice} says what can be done."
    text = "Give the path of a manifest, or of the folder with the dumps: DUMP_DIR/RUN_NAME/VARIANT."
    variants = list(list_variants(folder))
    return f"{text} Here are {', '.join(variants)}." if variants else text


def list_variants(run_folder: str, besides: str = "") -> dict[str, Manifest]:
    """The manifests of a run folder by variant, without that of the variant ``besides``.

    One that cannot be read, or is missing, is left out with a warning.
    """
    storage = open_storage(run_folder)
    found = {}
    for folder in sorted({*storage.folders()} - {besides}):
        try:
            manifest = read_manifest(storage, folder)
            if manifest is not None:
                found[folder] = manifest
            elif StoreReader.at(storage.where(folder)).has_steps():
                where = storage.where(folder)
                advice = f"rollout-skip verify {shlex.quote(where)}"
                logger.warning("left out: %s has rollouts and no %s; %s says what can be done", where, NAME, advice)
        except (RolloutSkipError, PermissionError) as error:  # a folder may be another user's
            logger.warning("left out: %s", error)
    return found


def _trainings(storage: Storage) -> list[dict[str, Any]]:
    found, damaged = read_trainings(storage)
    for error in damaged:
        logger.warning("left out, the rollouts themselves do not depend on it: %s", error)
    return found


def read_trainings(storage: Storage) -> tuple[list[dict[str, Any]], list[ManifestError]]:
    """What each training that recorded here has written down, and what is wrong with those that cannot be read."""
    found, damaged = [], []
    for name in sorted(storage.names(TRAININGS)):
        if name.endswith(".json") and not name.startswith("."):
            try:
                found.append(_parse(storage.read(TRAININGS, name, _MAX_BYTES), storage.where(TRAININGS, name)))
            except ManifestError as error:
                damaged.append(error)
    return found, damaged


def _publish(storage: Storage, folder: str, name: str, data: bytes, replace: bool) -> None:
    with storage.stage(folder) as staged:
        staged.write(data)
        storage.publish(staged, name, replace)


def _render(fields: dict[str, Any]) -> bytes:
    body = json.dumps(fields, indent=2, ensure_ascii=False)
    checksum = xxhash.xxh3_128(body.encode("utf-8", "surrogatepass")).hexdigest()
    text = json.dumps({**fields, "checksum": checksum}, indent=2, ensure_ascii=False) + "\n"
    return text.encode("utf-8", "surrogatepass")


def _parse(data: bytes, where: str) -> dict[str, Any]:
    try:
        fields = json.loads(data.decode("utf-8", "surrogatepass"))
        if not isinstance(fields, dict):
            raise ValueError(f"it holds a {type(fields).__name__}")
    except (ValueError, RecursionError) as error:
        raise ManifestError(f"{where} is damaged, it is no JSON object ({error}). Restore it from a copy.") from error
    version = fields.get("format_version", FORMAT_VERSION)
    if isinstance(version, int) and version != FORMAT_VERSION:
        return fields  # another version may have another checksum; the caller refuses it
    checksum = fields.pop("checksum", None)
    if checksum is None:
        raise ManifestError(f"{where} was not written by this package, or was edited: it has no checksum.")
    if _render(fields) != data:
        raise ManifestError(
            f"{where} was edited or damaged: its checksum is wrong, so it cannot be trusted to say what the rollouts "
            "beside it were made from. Restore it from a copy, or move its folder away and record anew."
        )
    return fields


def _now() -> str:
    return datetime.now(timezone.utc).isoformat(timespec="seconds")
