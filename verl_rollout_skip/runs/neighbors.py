"""Finds recordings under similar names, for a training without matching rollouts.

A run folder is named after experiment, project and batch sizes, and ``dump_dir`` is typed by hand, so the wanted
recording is often in a folder nearby. Only manifests are read, in a bounded number of folders, the most similar names
first.
"""

from __future__ import annotations

import contextlib
import difflib
import itertools
import logging
import shlex
import time
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field

from verl_rollout_skip.config.run_names import is_run_name
from verl_rollout_skip.config.skip_config import BLOCK, override
from verl_rollout_skip.errors import ConfigError, RolloutSkipError
from verl_rollout_skip.runs.manifest import Manifest, list_variants, read_manifest
from verl_rollout_skip.runs.paths import MANIFEST, variant_name
from verl_rollout_skip.store.storage import HERE, join, open_storage

logger = logging.getLogger(__name__)

_MAX_SEARCHED = 100
_MAX_COMPARED = 20
_MAX_SAME = 3
_MAX_SUBFOLDERS = 20
_MAX_LEVELS = 3
_MIN_SIMILARITY = 0.75
_SECONDS = 5.0
"""How long a training waits for this information: an object store may be slow."""

Compare = Callable[[Manifest], list[str]]
"""How the settings of a manifest differ from the current ones, one line per setting."""


@dataclass(frozen=True)
class Neighbors:
    """Variants of other runs: those with the ``same`` settings, and ``others`` with what differs, by manifest path.

    ``notes`` say where else rollouts are, or why that is unknown.
    """

    same: list[Manifest] = field(default_factory=list)
    others: dict[str, list[str]] = field(default_factory=dict)
    notes: list[str] = field(default_factory=list)

    def describe(self) -> str:
        """How to use the matching variants, and the notes; empty if there are none."""
        return "\n".join([*map(_how_to_use, self.same), *self.notes])


def find_neighbors(dump_dir: str, run: str, config_hash: str, compare: Compare) -> Neighbors:
    """Search the other runs in ``dump_dir``; without any runs, search for a folder that may have been meant instead."""
    try:
        runs = [folder for folder in open_storage(dump_dir).folders() if is_run_name(folder)]
        if not runs:
            return Neighbors(notes=list(_other_folders(dump_dir)))
        runs = sorted({*runs} - {run}, key=lambda other: (_similarity(other, run), other), reverse=True)
        folders = [join(dump_dir, other) for other in runs]
        deadline = time.monotonic() + _SECONDS
        same = list(_same(_until(deadline, folders[:_MAX_SEARCHED]), config_hash, compare))
        return Neighbors(same) if same else _compared(_until(deadline + _SECONDS, folders[:_MAX_COMPARED]), compare)
    except Exception as error:  # object store libraries raise all kinds of errors, and this is only information
        return Neighbors(notes=[f"The search for other recordings near {dump_dir} failed: {error}"])


def check_level(dump_dir: str) -> None:
    """Raise if ``dump_dir`` is a run folder, or inside one, instead of a folder for runs."""
    path = dump_dir.rstrip("/")
    for _ in range(_MAX_LEVELS):
        folder, _, name = path.rpartition("/")
        if is_run_name(name) and list_variants(path):
            raise ConfigError(
                f"{BLOCK}.dump_dir is {dump_dir}, which {'is' if path == dump_dir else 'is inside'} the run folder "
                f"{name}. Set it to the folder that contains the run folders: {override(f'{BLOCK}.dump_dir', folder)}"
            )
        path = folder
    if open_storage(dump_dir).info(HERE, MANIFEST) is not None:
        raise ConfigError(
            f"{BLOCK}.dump_dir is {dump_dir}, which is a variant folder: it has a {MANIFEST}. Set it to a folder for "
            f"runs; to read this variant, set {override(f'{BLOCK}.source', dump_dir)}"
        )


def _until(deadline: float, folders: Iterable[str]) -> Iterator[str]:
    return itertools.takewhile(lambda _: time.monotonic() < deadline, folders)


def _same(folders: Iterable[str], config_hash: str, compare: Compare) -> Iterator[Manifest]:
    """A variant with the current settings has the current name, so one file per run is enough to tell."""
    found = 0
    for folder in folders:
        try:
            manifest = read_manifest(open_storage(folder), variant_name(config_hash))
        except (RolloutSkipError, PermissionError):
            continue
        if manifest is not None and not compare(manifest):
            yield manifest
            found += 1
        if found == _MAX_SAME:
            return


def _compared(folders: Iterable[str], compare: Compare) -> Neighbors:
    manifests = [manifest for folder in folders for manifest in _readable_variants(folder)]
    manifests.sort(key=lambda manifest: manifest.created_at, reverse=True)
    differences = [(manifest, compare(manifest)) for manifest in manifests]
    return Neighbors(
        [manifest for manifest, lines in differences if not lines][:_MAX_SAME],
        {manifest.path: lines for manifest, lines in differences if lines},
    )


def _readable_variants(folder: str) -> list[Manifest]:
    """The variants of a run, which may belong to another user."""
    try:
        return list(list_variants(folder).values())
    except (RolloutSkipError, PermissionError) as error:
        logger.warning("ignored: %s", error)
        return []


def _other_folders(dump_dir: str) -> Iterator[str]:
    """Folders with runs, inside ``dump_dir`` or with a similar name."""
    below = (join(dump_dir, name) for name in sorted(open_storage(dump_dir).folders())[:_MAX_SUBFOLDERS])
    deadline = time.monotonic() + _SECONDS
    for where, folders in (("inside it", below), ("next to it", _near_names(dump_dir))):
        for folder in _until(deadline, folders):
            if any(map(is_run_name, _readable_folders(folder))):
                yield (
                    f"{dump_dir} contains no runs, but {where} {folder} does: {override(f'{BLOCK}.dump_dir', folder)}"
                )


def _near_names(path: str) -> Iterator[str]:
    """Variations of the path with one name replaced by a similar one that exists."""
    head, below = path.rstrip("/"), list[str]()
    for _ in range(_MAX_LEVELS):
        head, slash, name = head.rpartition("/")
        if not slash or head.endswith(("/", ":")):
            return
        names = list(_readable_folders(head or "/"))
        others = [other for other in names if other != name]
        for near in difflib.get_close_matches(name, others, cutoff=_MIN_SIMILARITY):
            yield join(head, near, *below)
        if name in names:
            return
        below.insert(0, name)


def _readable_folders(path: str) -> Iterator[str]:
    """The subfolders of a folder that may belong to another user."""
    with contextlib.suppress(PermissionError):
        yield from open_storage(path).folders()


def _similarity(name: str, other: str) -> float:
    return difflib.SequenceMatcher(None, name, other).ratio()


def _how_to_use(manifest: Manifest) -> str:
    folder = manifest.folder
    advice = f"Set {override(f'{BLOCK}.source', manifest.path)}"
    if folder.split("/")[-2] == manifest.run_name:
        trainer = manifest.config.get("trainer") or {}
        names = (f"trainer.{key}={trainer.get(key)}" for key in ("experiment_name", "project_name"))
        advice += f", or {shlex.join(names)},"
    return f"{folder} contains rollouts with the current settings. {advice} to use them."
