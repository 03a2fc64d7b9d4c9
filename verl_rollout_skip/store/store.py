"""``RolloutStore``: the rollouts of one run, on disk or on an object store, by key."""

from __future__ import annotations

import contextlib
import json
import logging
import os
import time
import weakref
from collections.abc import Iterator
from pathlib import Path
from types import TracebackType
from typing import Any

from verl_rollout_skip.errors import (
    ChangedBatchError,
    CorruptEntryError,
    DiskLimitError,
    DumpError,
    RolloutSkipError,
    StoreError,
)
from verl_rollout_skip.key import RolloutKey
from verl_rollout_skip.sizes import format_size, parse_size
from verl_rollout_skip.store import commit, committed, leftovers, names
from verl_rollout_skip.store.codec.batch import BatchKind
from verl_rollout_skip.store.codec.decoder import Reader
from verl_rollout_skip.store.codec.prepared import Prepared, Proof, TakenBatch, prepare, take
from verl_rollout_skip.store.codec.snapshot import Copy
from verl_rollout_skip.store.committed import Committed
from verl_rollout_skip.store.loaded import LoadedEntry
from verl_rollout_skip.store.prefetch import Prefetcher
from verl_rollout_skip.store.reader import StoreReader
from verl_rollout_skip.store.record import MAX_RECORD_BYTES, EntryRecord
from verl_rollout_skip.store.storage import FileInfo, Storage
from verl_rollout_skip.store.storage.local import LocalStorage, free_bytes
from verl_rollout_skip.store.storage.locations import open_storage
from verl_rollout_skip.store.writer import BackgroundWriter, Job

logger = logging.getLogger(__name__)

_RESCAN_SECONDS = 60.0


class RolloutStore:
    """The recorded rollouts of one run.

    Args:
        path: a local folder (made by the first ``put``) or an fsspec URL such as ``s3://bucket/run``.
        background: write on a thread of its own; ``put`` then returns as soon as it has taken a snapshot.
        max_pending_bytes: how much tensor data may wait for the background writer before ``put`` waits.
        max_disk: refuse to make the run folder larger than this, e.g. ``"200GB"``.
        max_load_bytes: the most memory that loading one entry may take; by default what the machine has free.
        part_bytes: write an entry as several files if it takes more memory than this. For tests and benchmarks.
        storage_options: arguments for the fsspec file system, e.g. credentials or an endpoint.

    A store may be used by several processes at once, each with its own ``RolloutStore``; it can be pickled.
    Use it as a context manager, or call ``close``: that waits for the background writer and raises what failed.
    """

    def __init__(
        self,
        path: str | os.PathLike[str],
        *,
        background: bool = True,
        max_pending_bytes: int | str = "8GiB",
        max_disk: int | str | None = None,
        max_load_bytes: int | str | None = None,
        part_bytes: int | str = commit.PART_BYTES,
        storage_options: dict[str, Any] | None = None,
    ) -> None:
        self._arguments = {
            "background": background,
            "max_pending_bytes": max_pending_bytes,
            "max_disk": max_disk,
            "max_load_bytes": max_load_bytes,
            "part_bytes": part_bytes,
            "storage_options": storage_options,
        }
        self.path = os.fspath(path)
        self.written_bytes = 0
        self._storage = open_storage(self.path, storage_options)
        self._reader = StoreReader(self._storage)
        self._part_bytes = parse_size(part_bytes, "part_bytes")
        self._background = background
        self._copy = Copy.CHEAP
        self._writer = BackgroundWriter(parse_size(max_pending_bytes, "max_pending_bytes"))
        weakref.finalize(self, self._writer.stop)
        self._prefetcher: Prefetcher[LoadedEntry] = Prefetcher()
        self._usage = _DiskUsage(self._storage, None if max_disk is None else parse_size(max_disk, "max_disk"))
        self._max_load_bytes = None if max_load_bytes is None else parse_size(max_load_bytes, "max_load_bytes")

    def put(
        self,
        key: RolloutKey,
        batch: Any,
        *,
        inputs: Any = None,
        info: dict[str, Any] | None = None,
        replace: bool = False,
        proof: Proof | None = None,
    ) -> None:
        """Record the output of a rollout step, and its input, under a key.

        What is recorded is what the batch holds now, whatever is done to it once this returns. Containers, cells,
        rewards and small tensors are copied. Large tensors are shared, and compared before the commit: one that was
        written into fails the dump with its name, and from then on everything is copied (see ``store.codec.snapshot``).

        A key that is taken keeps its entry: the same rollout is no error, another one is ``EntryExistsError``;
        ``replace`` replaces it at once and atomically. ``info`` goes into the entry's record and must be JSON.
        ``batch`` and ``inputs`` may have been taken before, by ``snapshot_output`` and ``snapshot``. ``proof`` is given
        the columns of the output before they are committed, and names those that are not what was generated.

        In the background an error is raised by a later call; this batch is accepted even if this call raises
        ``DumpError`` for an earlier one.
        """
        if not isinstance(key, RolloutKey):
            raise TypeError(f"The key of a rollout is a RolloutKey(step, gen_batch), not {key!r}")
        details = _json_copy(info or {})
        prepared = prepare(batch, inputs, self._copy_now, proof)
        self._prefetcher.drop(key)
        if self._background:
            size = sum(batch.held_bytes for batch in prepared.batches)
            self._writer.submit(Job(key, size, lambda: self._write(key, prepared, details, replace)))
        else:
            self._writer.raise_if_closed(key)
            self._write(key, prepared, details, replace)

    def snapshot(self, inputs: Any) -> TakenBatch:
        """An input as it is now, to be put with its output: generating may change it meanwhile."""
        return take(inputs, self._copy, "the input's ")

    def snapshot_output(self, batch: Any) -> TakenBatch:
        """The output of a rollout step as it is now, to be put as soon as what else belongs to it is known."""
        return take(batch, self._copy_now)

    @property
    def _copy_now(self) -> Copy:
        return self._copy if self._background else Copy.NOTHING

    def get(self, key: RolloutKey, kind: BatchKind | str | None = None) -> Any:
        """The recorded batch, after its digest was checked.

        It comes back as it was put: a DataProto or a TensorDict. Where verl is not installed a recorded DataProto
        comes as the TensorDict that its ``to_tensordict`` would give. ``kind`` asks for one of the two.
        """
        return self.load(key).batch(kind)

    def inputs(self, key: RolloutKey, kind: BatchKind | str | None = None) -> Any:
        """The recorded input of the rollout step, or None if it was put without."""
        return self.load(key).inputs(kind)

    def load(self, key: RolloutKey) -> LoadedEntry:
        """An entry whose bytes are in memory and checked: batch, input and record from one read."""
        ahead = self._prefetcher.take(key)
        return ahead if ahead is not None and self._is_current(ahead) else self._load(key)

    def prefetch(self, key: RolloutKey, *, inputs: bool = False) -> None:
        """Start to load an entry in the background; the next ``get`` or ``load`` of this key then takes no time.

        ``inputs``: the recorded input will be asked for too. One entry is held at most. An error shows at ``get``.
        """
        self._prefetcher.start(key, lambda: self._load_ahead(key, inputs))

    def drop_prefetched(self) -> None:
        """Let go of what was prefetched, if it is not wanted any more."""
        self._prefetcher.drop()

    def record(self, key: RolloutKey) -> EntryRecord:
        """What is known of an entry without opening it: rows, tokens, size, mean score, ``info`` …"""
        self._writer.wait(key)
        return self._reader.record(key)

    def keys(self) -> list[RolloutKey]:
        """The committed keys in order."""
        return self._reader.keys()

    def __contains__(self, key: object) -> bool:
        """Whether an entry is committed under this key; what still waits to be written is not yet."""
        return key in self._reader

    def __iter__(self) -> Iterator[RolloutKey]:
        return iter(self.keys())

    def __len__(self) -> int:
        return len(self.keys())

    def verify(self, key: RolloutKey) -> EntryRecord:
        """Check everything about an entry: digest, record, page checksums, and that it decodes. Returns the record."""
        self._writer.wait(key)
        entry = self._load(key)
        entry.batch()
        entry.inputs()
        return entry.record

    def delete(self, key: RolloutKey) -> None:
        """Remove an entry."""
        self._writer.wait(key)
        self._prefetcher.drop(key)
        commit.delete(self._storage, key)

    def set_aside(self, key: RolloutKey) -> str:
        """Rename an unreadable entry to ``*.corrupt``, so that the key is free again; returns the new path.

        An entry that can be read is left alone with a ``StoreError``: another process may have recorded it again.
        """
        self._prefetcher.drop(key)
        return commit.set_aside(self._storage, key, check=lambda: self.verify(key))

    def prune(self, older_than_s: float = 86400.0) -> list[str]:
        """Remove what crashed writers left behind; returns the paths.

        Temporary files go if their process on this machine is gone, or if they are older than ``older_than_s``
        seconds; so do parts that no record lists. Committed entries are never touched.
        """
        removed = []
        for folder in self._storage.folders():
            if names.parse_folder(folder) is not None:
                for file in leftovers.find_leftovers(self._storage, folder, older_than_s):
                    self._storage.delete(folder, file.name)
                    removed.append(self._storage.where(folder, file.name))
        return removed

    def flush(self) -> None:
        """Return when everything that was put is committed; raises ``DumpError`` for what failed."""
        self._writer.flush()

    def raise_failures(self) -> None:
        """Raise ``DumpError`` for dumps that have failed in the background and were not reported yet; does not wait."""
        self._writer.raise_failures()

    def close(self) -> None:
        """``flush``, and end the background thread. Reading goes on working; ``put`` does not."""
        self._prefetcher.drop()
        self._writer.close()

    def __enter__(self) -> RolloutStore:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        try:
            self.close()
        except DumpError as failed:
            if error is None:
                raise
            logger.error("while %s was on its way: %s", type(error).__name__, failed)

    def __reduce__(self) -> Any:
        return _reopen, (self._storage.where(), self._arguments)

    def __repr__(self) -> str:
        return f"RolloutStore({self._storage.where()!r})"

    def _write(self, key: RolloutKey, prepared: Prepared, info: dict[str, Any], replace: bool) -> None:
        try:
            record = commit.commit(
                self._storage, key, prepared, info, replace, self._load_limit(), self._part_bytes, self._usage.admit
            )
        except ChangedBatchError as error:
            if self._copy is not Copy.ALL:
                logger.warning("the trainer changes its batches in place: every tensor is copied from now on")
            self._copy = Copy.ALL
            raise DumpError(f"{key} was not written to {self._storage.where()}: {error}") from error
        except RolloutSkipError:
            raise
        except Exception as error:
            raise DumpError(_dump_message(self._storage, key, error)) from error
        self.written_bytes += record.bytes
        logger.debug("%s: committed %s", key, format_size(record.bytes))

    def _load(self, key: RolloutKey) -> LoadedEntry:
        self._writer.wait(key)
        found = committed.load(self._storage, key, self._load_limit())
        return LoadedEntry(found.record, self._open(key, found))

    def _is_current(self, entry: LoadedEntry) -> bool:
        """Whether an entry is still the one under its key: another process may have replaced or deleted it."""
        with contextlib.suppress(StoreError, OSError):
            return committed.read_record(self._storage, entry.record.key) == entry.record
        return False

    def _load_ahead(self, key: RolloutKey, inputs: bool) -> LoadedEntry:
        entry = self._load(key)
        entry.prepare(inputs)
        return entry

    def _open(self, key: RolloutKey, found: Committed) -> Reader:
        try:
            reader = Reader(found.parts, self._load_limit())
            if reader.rows != found.record.rows:
                raise CorruptEntryError(f"It holds {reader.rows} rows, its record says {found.record.rows}.")
        except StoreError as error:
            where = committed.where(self._storage, key)
            raise type(error)(f"The entry of {key} cannot be used: {where}. {error}") from error
        return reader

    def _load_limit(self) -> int:
        return _free_memory() if self._max_load_bytes is None else self._max_load_bytes


class _DiskUsage:
    """The size of the run folder against ``max_disk``: counted once, then kept up, and counted again from time to
    time because other processes write and prune too."""

    def __init__(self, storage: Storage, limit: int | None) -> None:
        self._storage = storage
        self._limit = limit
        self._used = 0
        self._counted_at = float("-inf")

    def admit(self, size: int) -> None:
        """Count so many more bytes, or raise ``DiskLimitError`` if they would be too many."""
        if self._limit is None:
            return
        if time.monotonic() - self._counted_at > _RESCAN_SECONDS or self._used + size > self._limit:
            self._used = sum(file.size for file in self._files())
            self._counted_at = time.monotonic()
        if self._used + size > self._limit:
            raise DiskLimitError(
                f"Not written: {self._storage.where()} holds {format_size(self._used)}, and {format_size(size)} more "
                f"would exceed max_disk of {format_size(self._limit)}. Raise max_disk, delete entries, or record fewer "
                "steps."
            )
        self._used += size

    def _files(self) -> Iterator[FileInfo]:
        for folder in self._storage.folders():
            for file in self._storage.files(folder):
                if not file.name.startswith(names.TEMPORARY):
                    yield file


def _reopen(path: str, arguments: dict[str, Any]) -> RolloutStore:
    return RolloutStore(path, **arguments)


def _json_copy(info: dict[str, Any]) -> dict[str, Any]:
    try:
        text = json.dumps(info, allow_nan=False)
    except (TypeError, ValueError) as error:
        raise TypeError(f"info must be JSON (dict, list, str, finite numbers, bool, None): {error}") from error
    if len(text) > MAX_RECORD_BYTES // 4:
        raise ValueError(f"info is {format_size(len(text))} of JSON; a record is read at once, keep it below 4 MB.")
    copy: dict[str, Any] = json.loads(text)
    return copy


def _dump_message(storage: Storage, key: RolloutKey, error: Exception) -> str:
    message = f"{key} was not written to {storage.where()}: {error}."
    if isinstance(storage, LocalStorage):
        message += f" {format_size(free_bytes(storage.root))} are free there."
    return f"{message} Training is not affected; the step will have to be generated again."


def _free_memory() -> int:
    """Memory that can be had without swapping."""
    try:
        for line in Path("/proc/meminfo").read_text().splitlines():
            if line.startswith("MemAvailable:"):
                return int(line.split()[1]) * 1024
    except OSError:
        pass
    return os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
