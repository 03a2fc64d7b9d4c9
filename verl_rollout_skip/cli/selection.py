"""Finds the recordings at the path that the user passes.

The path can be a dump_dir, a run folder, a variant, a manifest, a step folder, or a file in a step folder.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING

from verl_rollout_skip.config.skip_config import Steps, describe_steps, parse_steps
from verl_rollout_skip.errors import EntryNotFoundError, ManifestError, StoreError
from verl_rollout_skip.key import RolloutKey
from verl_rollout_skip.runs.manifest import Manifest, read_manifest
from verl_rollout_skip.runs.paths import MANIFEST, variant_folder
from verl_rollout_skip.store.reader import StoreReader, split_path
from verl_rollout_skip.store.storage import HERE, Storage, is_url, join, open_storage

if TYPE_CHECKING:
    from verl_rollout_skip.store.store import RolloutStore

ALL_STEPS = Steps()
_DEPTH = 2


@dataclass(frozen=True)
class Variant:
    """A folder with entries. ``manifest`` is None if it is missing or unreadable; then ``manifest_error`` says why."""

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
        """The store, to read whole batches. This imports torch."""
        from verl_rollout_skip.store.store import RolloutStore

        return RolloutStore(self.path, background=False)


@dataclass(frozen=True)
class Selection:
    """The variants at a path, and the steps of them that the user selected.

    ``root`` is the folder that contains the variants. If the path is a step or a file, it is the variant folder.
    """

    path: str
    root: str
    variants: list[Variant]
    steps: Steps = ALL_STEPS
    gen_batch: int | None = None

    def keys(self, variant: Variant) -> list[RolloutKey]:
        """The selected entries of a variant."""
        return [key for key in variant.entries if self.includes(key)]

    def includes(self, key: RolloutKey) -> bool:
        return key.step in self.steps and self.gen_batch in (None, key.gen_batch)

    def includes_step(self, key: RolloutKey) -> bool:
        """Whether the step of a key is selected, e.g. of training columns, which have no generation batch."""
        return key.step in self.steps

    @property
    def is_partial(self) -> bool:
        """Whether only some steps are selected."""
        return self.steps.ranges is not None

    def single_variant(self) -> Variant:
        """The selected variant; more than one is an error."""
        if len(self.variants) > 1:
            paths = ", ".join(variant.path for variant in self.variants)
            raise StoreError(f"{self.path} contains {len(self.variants)} variants. Choose one: {paths}")
        return self.variants[0]

    def required_keys(self, variant: Variant) -> list[RolloutKey]:
        """Same as ``keys``, but an empty selection is an error."""
        found = self.keys(variant)
        if not found:
            raise self._not_found([variant])
        return found

    def check_not_empty(self) -> None:
        """Raise if steps are selected and no variant contains any of them."""
        if self.is_partial and not any(self.keys(variant) for variant in self.variants):
            raise self._not_found(self.variants)

    def _not_found(self, variants: list[Variant]) -> EntryNotFoundError:
        keys = {key for variant in variants for key in variant.entries}
        batches = sorted(key.gen_batch for key in keys if key.step in self.steps)
        wanted, present = f"steps {self.steps}" if self.is_partial else "any steps", "nothing"
        if self.gen_batch is not None and batches:
            wanted, present = f"generation batch {self.gen_batch} of step {self.steps}", f"generation batches {batches}"
        elif keys:
            present = f"steps {describe_steps({key.step for key in keys})}"
        if len(variants) == 1:
            return EntryNotFoundError(f"{variants[0].path} does not contain {wanted}; it contains {present}.")
        return EntryNotFoundError(
            f"None of the {len(variants)} variants in {self.path} contains {wanted}; they contain {present}."
        )


def select(path: str, steps: str | None = None) -> Selection:
    """The recordings at or below a path. No recording is an error. ``steps`` is the value of ``--steps``."""
    folder, step, gen_batch = split_path(path)
    selected = ALL_STEPS if steps is None else parse_steps(steps, "--steps")
    if step is not None:
        if steps is not None:
            raise StoreError(f"{path} is the path of a single step, so --steps cannot be used. Pass only one of them.")
        selected = Steps(((step, step),))
    root = variant_folder(folder)
    return Selection(path, open_storage(root).where().rstrip("/"), find_variants(root), selected, gen_batch)


def find_variants(path: str) -> list[Variant]:
    """All variants at or below a path. No variant is an error."""
    found = [open_variant(folder) for folder in _walk(variant_folder(path), _DEPTH)]
    if not found:
        raise StoreError(_explain_no_recording(path))
    return sorted(found, key=lambda variant: (variant.run_path, _created_at(variant), variant.path))


def open_variant(folder: str) -> Variant:
    storage = open_storage(folder)
    path = storage.where().rstrip("/")
    try:
        return Variant(path, read_manifest(storage), None)
    except ManifestError as error:
        return Variant(path, None, str(error))


def _walk(folder: str, depth: int) -> Iterator[str]:
    storage = open_storage(folder)
    if StoreReader(storage).has_steps() or storage.info(HERE, MANIFEST) is not None:
        yield folder
    elif depth:
        for name in sorted(storage.folders()):
            yield from _walk(join(folder, name), depth - 1)


def _explain_no_recording(path: str) -> str:
    if not is_url(path) and not os.path.lexists(os.path.expanduser(path)):
        return f"{path} does not exist."
    return (
        f"No recorded rollouts in {path}. Pass a dump_dir, a run folder or a variant folder: DUMP_DIR/RUN_NAME/VARIANT."
    )


def _created_at(variant: Variant) -> str:
    return "" if variant.manifest is None else variant.manifest.created_at
