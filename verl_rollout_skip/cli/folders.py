"""From the path that a user gives to what is recorded there.

It may be a dump_dir, a run folder, a variant, its manifest, a step of it, or a file of a step.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING

from verl_rollout_skip.config import Steps, describe_steps, parse_steps
from verl_rollout_skip.errors import EntryNotFoundError, ManifestError, StoreError
from verl_rollout_skip.key import RolloutKey
from verl_rollout_skip.manifest import NAME, Manifest, folder_of, read_manifest
from verl_rollout_skip.store.reader import StoreReader, split_path
from verl_rollout_skip.store.storage import HERE, Storage, is_url, join, open_storage

if TYPE_CHECKING:
    from verl_rollout_skip.store.store import RolloutStore

ALL_STEPS = Steps()
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
        return self.run_path.rsplit("/", 1)[-1] or self.path

    @property
    def run_path(self) -> str:
        return self.path.rsplit("/", 1)[0]

    @property
    def name(self) -> str:
        return self.path.rsplit("/", 1)[-1]

    @cached_property
    def storage(self) -> Storage:
        return open_storage(self.path)

    @property
    def entries(self) -> StoreReader:
        return StoreReader(self.storage)

    @property
    def store(self) -> RolloutStore:
        """For whole batches. This imports torch."""
        from verl_rollout_skip.store.store import RolloutStore

        return RolloutStore(self.path, background=False)


@dataclass(frozen=True)
class Place:
    """The variants at a path, and which of their entries it means.

    ``root`` is the folder: of the path of a step, a manifest or another file, that of its variant.
    """

    path: str
    root: str
    variants: list[Variant]
    steps: Steps = ALL_STEPS
    gen_batch: int | None = None

    def keys(self, variant: Variant) -> list[RolloutKey]:
        """The entries of a variant that are meant."""
        return [key for key in variant.entries if self.means(key)]

    def means(self, key: RolloutKey) -> bool:
        return key.step in self.steps and self.gen_batch in (None, key.gen_batch)

    @property
    def is_part(self) -> bool:
        """Whether only some steps are meant."""
        return self.steps.ranges is not None

    def only_variant(self) -> Variant:
        """The variant, where only one can be meant."""
        if len(self.variants) > 1:
            listed = ", ".join(variant.path for variant in self.variants)
            raise StoreError(f"There are {len(self.variants)} variants, choose one: {listed}")
        return self.variants[0]

    def chosen_keys(self, variant: Variant) -> list[RolloutKey]:
        """The same as ``keys``; none is an error that says what there is."""
        found = self.keys(variant)
        if not found:
            raise self._not_found([variant])
        return found

    def check_chosen(self) -> None:
        """Raise if some steps are meant and no variant holds any of them."""
        if self.is_part and not any(self.keys(variant) for variant in self.variants):
            raise self._not_found(self.variants)

    def _not_found(self, variants: list[Variant]) -> EntryNotFoundError:
        keys = {key for variant in variants for key in variant.entries}
        batches = sorted(key.gen_batch for key in keys if key.step in self.steps)
        wanted, held = f"steps {self.steps}" if self.is_part else "anything", "nothing"
        if self.gen_batch is not None and batches:
            wanted, held = f"generation batch {self.gen_batch} of step {self.steps}", f"generation batches {batches}"
        elif keys:
            held = f"steps {describe_steps({key.step for key in keys})}"
        if len(variants) == 1:
            return EntryNotFoundError(f"{variants[0].path} does not hold {wanted}; it holds {held}.")
        return EntryNotFoundError(
            f"None of the {len(variants)} variants in {self.path} holds {wanted}; they hold {held}."
        )


def find_place(path: str, steps: str | None = None) -> Place:
    """What is recorded at or below a path; nothing is an error. ``steps`` is what ``--steps`` gave."""
    folder, step, gen_batch = split_path(path)
    selected = ALL_STEPS if steps is None else parse_steps(steps, "--steps")
    if step is not None:
        if steps is not None:
            raise StoreError(f"{path} is a step already: give either a step's path or --steps.")
        selected = Steps(((step, step),))
    root = folder_of(folder)
    return Place(path, open_storage(root).where().rstrip("/"), find_variants(root), selected, gen_batch)


def find_variants(path: str) -> list[Variant]:
    """All variants at or below a path; none is an error."""
    found = [open_variant(folder) for folder in _walk(folder_of(path), _DEPTH)]
    if not found:
        raise StoreError(_nothing_there(path))
    return sorted(found, key=lambda variant: (variant.run_path, _age(variant), variant.path))


def open_variant(folder: str) -> Variant:
    """The variant in a folder."""
    storage = open_storage(folder)
    path = storage.where().rstrip("/")
    try:
        return Variant(path, read_manifest(storage), None)
    except ManifestError as error:
        return Variant(path, None, str(error))


def _walk(folder: str, depth: int) -> Iterator[str]:
    storage = open_storage(folder)
    if StoreReader(storage).has_steps() or storage.info(HERE, NAME) is not None:
        yield folder
    elif depth:
        for name in sorted(storage.folders()):
            yield from _walk(join(folder, name), depth - 1)


def _nothing_there(path: str) -> str:
    if not is_url(path) and not os.path.lexists(os.path.expanduser(path)):
        return f"{path} does not exist."
    return (
        f"No recorded rollouts in {path}. Give a dump_dir, a run folder in it, or a variant in that: "
        "DUMP_DIR/RUN_NAME/VARIANT."
    )


def _age(variant: Variant) -> str:
    return "" if variant.manifest is None else variant.manifest.created_at
