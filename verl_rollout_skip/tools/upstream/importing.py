"""Imports dumps of verl's own rollout skip into a variant, with a manifest of what is known about them.

verl records neither the settings nor the files that a dump was made from. A user who has the configuration of that
training can vouch for it. Otherwise the manifest says that the settings are unknown, and a training uses the rollouts
only if it is configured to accept different settings.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field, replace
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np
from omegaconf import DictConfig, OmegaConf
from tensordict import NonTensorData, NonTensorStack, TensorDict

from verl_rollout_skip._version import __version__
from verl_rollout_skip.config.run_names import run_name
from verl_rollout_skip.errors import ConfigError, DumpError, ManifestError, RolloutSkipError
from verl_rollout_skip.fingerprint.fingerprint import Fingerprint, make_fingerprint
from verl_rollout_skip.key import RolloutKey
from verl_rollout_skip.replay.prompts import SAMPLING, sampling_of
from verl_rollout_skip.runs.manifest import Manifest, check_manifest, write_manifest
from verl_rollout_skip.runs.paths import variant_name
from verl_rollout_skip.runs.tokenizer import copy_tokenizer
from verl_rollout_skip.store import codec
from verl_rollout_skip.store.storage.locations import join, open_storage
from verl_rollout_skip.store.store import RolloutStore
from verl_rollout_skip.tools.upstream.batches import DataProtoParts
from verl_rollout_skip.tools.upstream.layouts import Dump, Layout
from verl_rollout_skip.tools.upstream.pickles import DamagedDumpError, UnsafePickleError, shortened
from verl_rollout_skip.tools.upstream.torch_files import read_dump_file

# No setting of verl has this name, and it comes first in every list of differences.
_SETTINGS = "(settings)"


@dataclass(frozen=True)
class ImportedEntry:
    """A dump that became an entry. Without its input, a training cannot tell which prompts the responses belong to."""

    key: RolloutKey
    rows: int
    has_input: bool
    path: str


@dataclass
class Imported:
    """The outcome of each dump."""

    entries: list[ImportedEntry] = field(default_factory=list)
    skipped: list[tuple[str, str]] = field(default_factory=list)
    problems: list[tuple[str, str]] = field(default_factory=list)


def read_config(path: Path) -> DictConfig:
    """Read the configuration of the training that made the dumps, as Hydra writes it."""
    try:
        config = OmegaConf.load(path)
    except OSError:
        raise
    except Exception as error:  # YAML raises its own errors
        raise ConfigError(f"{path} cannot be read as a YAML configuration: {error}") from error
    if not isinstance(config, DictConfig):
        raise ConfigError(f"{path} is not the configuration of a training: it contains a list.")
    return config


class Destination:
    """The variant folder that the dumps go into. Nothing is written there before the first dump.

    With a configuration, it is the variant in a dump_dir that a training would create; without one, the destination
    itself.
    """

    def __init__(self, destination: str, source: Path, layout: Layout, config: DictConfig | None) -> None:
        origin = f"imported from {source.absolute()}, a dump of verl {layout.value}"
        known = {"verl": f"not known ({origin})", "verl_rollout_skip": __version__}
        if config is None:
            unknown = Fingerprint({_SETTINGS: f"not known ({origin})"}, {_SETTINGS: f"not known ({origin})"})
            name = "".join(letter if letter.isprintable() else "?" for letter in source.absolute().name)
            manifest, folder = Manifest.make(name, {}, unknown), destination
        else:
            manifest = Manifest.make(run_name(config), config, make_fingerprint(config))
            folder = join(destination, manifest.run_name, variant_name(manifest.config_hash))
        self._manifest, self._config = replace(manifest, versions=known), config
        self._storage = open_storage(folder)
        self.folder = self._storage.where().rstrip("/")
        check_manifest(self._storage, self._manifest)

    @property
    def is_open(self) -> bool:
        """Whether anything was written there."""
        return "store" in self.__dict__

    @cached_property
    def store(self) -> RolloutStore:
        """The store for the entries; the manifest is written before them."""
        write_manifest(self._storage, self._manifest)
        if self._config is not None:
            copy_tokenizer(self._config, self._storage)
        return RolloutStore(self.folder, background=False)


def import_dumps(dumps: list[Dump], destination: Destination) -> Imported:
    """Put each dump into the store. A dump that cannot be read or stored is a problem; the others are still imported.

    A file that contains anything but data stops the import.
    """
    done = Imported()
    calls: Counter[int] = Counter()
    for dump in dumps:
        where = str(dump.output)
        try:
            inputs = None if dump.input is None else _data_proto(dump.input)
            if inputs is not None and inputs.meta_info.get("validate"):
                done.skipped.append((where, "a validation rollout"))
                continue
            step = _step_of(dump, inputs)
            # Counted before it is read, so that a damaged dump keeps its number within the step.
            key = RolloutKey(step, dump.number if dump.layout is Layout.SAMPLED else calls[step])
            calls[step] += 1
            done.entries.append(_import(destination, key, dump, inputs))
        except UnsafePickleError as error:
            raise UnsafePickleError(
                f"{where} is rejected. {error} {len(done.entries)} dumps were imported before it."
            ) from error
        except (DumpError, ManifestError):
            raise  # the destination is not writable, so the next dump would fail too
        except RolloutSkipError as error:
            done.problems.append((where, str(error)))
        except (TypeError, ValueError, RuntimeError) as error:
            text = f"It cannot be stored as a rollout ({type(error).__name__}: {shortened(error)})."
            done.problems.append((where, text))
    return done


def _import(destination: Destination, key: RolloutKey, dump: Dump, inputs: DataProtoParts | None) -> ImportedEntry:
    if dump.layout is Layout.SAMPLED:
        batch: Any = _sampled(read_dump_file(str(dump.output)))
    else:
        batch = _data_proto(dump.output)
        inputs = None if inputs is None else _aligned(inputs, _rows(batch))
    info = {"imported_from": str(dump.output.absolute()), "upstream": dump.layout.value, SAMPLING: sampling_of(inputs)}
    if not destination.is_open:
        codec.prepare(batch, inputs)  # fail before the folder is created
    store = destination.store
    store.put(key, batch, inputs=inputs, info=info)
    return ImportedEntry(key, store.record(key).rows, inputs is not None, str(dump.output))


def _data_proto(path: Path) -> DataProtoParts:
    found = read_dump_file(str(path))
    if not isinstance(found, DataProtoParts):
        raise DamagedDumpError(f"It contains a {type(found).__name__}, not a DataProto.")
    return found


def _sampled(payload: Any) -> TensorDict:
    """The fields of a sampled batch; the keys and tags of TransferQueue become columns."""
    if not isinstance(payload, dict) or not isinstance(payload.get("tensordict"), TensorDict):
        raise DamagedDumpError("It does not contain a sampled batch.")
    batch: TensorDict = payload["tensordict"]
    for name, column in (("tq_key", payload.get("keys")), ("tq_tag", payload.get("tags"))):
        if isinstance(column, list) and column and len(column) == len(batch):
            batch.set(name, NonTensorStack.from_list([NonTensorData(cell) for cell in column]))
    return batch


def _step_of(dump: Dump, inputs: DataProtoParts | None) -> int:
    """verl 0.8 counts generate calls including validation, so the training's step is taken from the input."""
    step = None if inputs is None else inputs.meta_info.get("global_steps")
    return step if type(step) is int and 0 <= step < 2**63 else dump.step


def _rows(batch: DataProtoParts) -> int:
    if batch.batch is not None:
        return int(batch.batch.batch_size[0])
    return len(next(iter(batch.non_tensor_batch.values()), ()))


def _aligned(inputs: DataProtoParts, rows: int) -> DataProtoParts:
    """The input with one row per trajectory: some trainers pass each prompt once and repeat it later."""
    given = _rows(inputs)
    if given == rows or not given or rows % given:
        return inputs
    indices = np.repeat(np.arange(given), rows // given)
    batch = None if inputs.batch is None else inputs.batch[indices.tolist()]
    columns = {name: array[indices] for name, array in inputs.non_tensor_batch.items()}
    return DataProtoParts(batch, columns, inputs.meta_info)
