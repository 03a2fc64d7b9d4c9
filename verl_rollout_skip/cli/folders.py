"""From the path that a user gives to the variants below it: it may be a dump_dir, a run folder or a variant."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from verl_rollout_skip.errors import ManifestError, StoreError
from verl_rollout_skip.manifest import NAME, Manifest, read_manifest
from verl_rollout_skip.store import names
from verl_rollout_skip.store.locations import join, open_storage
from verl_rollout_skip.store.storage import HERE, Storage
from verl_rollout_skip.store.store import RolloutStore

_DEPTH = 2


@dataclass(frozen=True)
class Variant:
    """A folder with entries. ``manifest`` is None if there is none, or a bad one, whose error is then kept."""

    path: str
    manifest: Manifest | None
    manifest_error: str | None

    @property
    def run(self) -> str:
        if self.manifest is not None:
            return self.manifest.run_name
        return self.path.rstrip("/").rsplit("/", 2)[-2] if self.path.count("/") > 1 else self.path

    @property
    def name(self) -> str:
        return self.path.rstrip("/").rsplit("/", 1)[-1]

    @property
    def storage(self) -> Storage:
        return open_storage(self.path)

    @property
    def store(self) -> RolloutStore:
        return RolloutStore(self.path, background=False)


def find_variants(path: str) -> list[Variant]:
    """All variants at or below a path; none is an error."""
    root = path.rstrip("/").removesuffix(f"/{NAME}") or "/"
    found = [_open(open_storage(folder).where().rstrip("/")) for folder in _walk(root, _DEPTH)]
    if not found:
        raise StoreError(
            f"No recorded rollouts in {path}. Give a dump_dir, a run folder in it, or a variant in that: "
            "DUMP_DIR/RUN_NAME/VARIANT."
        )
    return sorted(found, key=lambda variant: (variant.run, _age(variant), variant.path))


def _walk(folder: str, depth: int) -> Iterator[str]:
    storage = open_storage(folder)
    folders = sorted(storage.folders())
    if any(names.parse_folder(name) is not None for name in folders) or storage.info(HERE, NAME) is not None:
        yield folder
    elif depth:
        for name in folders:
            yield from _walk(join(folder, name), depth - 1)


def _open(folder: str) -> Variant:
    try:
        return Variant(folder, read_manifest(open_storage(folder)), None)
    except ManifestError as error:
        return Variant(folder, None, str(error))


def _age(variant: Variant) -> str:
    return "" if variant.manifest is None else variant.manifest.created_at
