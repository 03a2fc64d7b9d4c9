"""``RolloutStore``: the rollouts in one folder, by key, on disk or on an object store."""

from __future__ import annotations

import contextlib
import json
import logging
import os
import time
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
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
from verl_rollout_skip.store import commit, committed, leftovers, names
from verl_rollout_skip.store.codec.batch import BatchKind
from verl_rollout_skip.store.codec.decoder import Reader
from verl_rollout_skip.store.codec.encoder import Summary
from verl_rollout_skip.store.codec.snapshot import BatchSnapshot, Copy, Prepared, Proof, prepare, take_snapshot
from verl_rollout_skip.store.committed import CommittedEntry
from verl_rollout_skip.store.loaded import LoadedEntry
from verl_rollout_skip.store.prefetch import Prefetcher
from verl_rollout_skip.store.reader import StoreReader
from verl_rollout_skip.store.record import MAX_RECORD_BYTES, EntryRecord, RecordedPart
from verl_rollout_skip.store.sizes import format_size, parse_size
from verl_rollout_skip.store.storage import Storage
from verl_rollout_skip.store.storage.local import LocalStorage, free_bytes
from verl_rollout_skip.store.storage.locations import open_storage
from verl_rollout_skip.store.writer import BackgroundWriter, Job

logger = logging.getLogger(__name__)

_RESCAN_SECONDS = 60.0


class RolloutStore:
    """The recorded rollouts in one folder, such as a variant.

    Args:
        path: a local folder (created by the first ``put``) or an fsspec URL such as ``s3://bucket/run``.
        background: write on another thread. ``put`` then returns as soon as it has taken a snapshot.
        max_pending_bytes: how much tensor data may be queued for the background writer before ``put`` blocks.
        max_disk: the maximum size of the folder, e.g. ``"200GB"``. A dump that would exceed it is rejected.
        max_load_bytes: the maximum memory for loading one entry; by default, the free memory of the machine.
        part_bytes: split an entry that takes more memory than this into several files. For tests and benchmarks.
        storage_options: arguments for the fsspec file system, e.g. credentials or an endpoint.

    Several processes can use the same folder at once, each with its own ``RolloutStore``. A store can be pickled.
    Use it as a context manager, or call ``close``, which waits for the background writer and raises its errors.
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
        self._arguments: dict[str, Any] = {
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
        """Record the output of a rollout step, and optionally its input, under a key.

        The batch is recorded as it is now, even if you change it after ``put`` returns. Containers, cells, rewards and
        small tensors are copied. Large tensors are shared and checked before the commit: if one has been modified, the
        dump fails with an error that names it, and everything is copied from then on (see ``store.codec.snapshot``).

        If the key is taken, putting the same rollout again does nothing, and putting a different one raises
        ``EntryExistsError``. With ``replace``, the entry is replaced atomically. ``info`` must be JSON and is stored in
        the entry's record. ``batch`` and ``inputs`` may be snapshots from ``snapshot_output`` and ``snapshot``.
        ``proof`` is called with the columns of the output before the commit, and returns the names of those that differ
        from what was generated, or None.

        A later call raises the errors of background writes. This batch is accepted even if this call raises
        ``DumpError`` for an earlier one.
        """
        if not isinstance(key, RolloutKey):
            raise TypeError(f"The key of a rollout must be a RolloutKey(step, gen_batch), not {key!r}")
        details = _json_copy(info or {})
        prepared = prepare(batch, inputs, self._copy_on_put, proof)
        self._prefetcher.drop(key)
        if self._background:
            size = sum(batch.held_bytes for batch in prepared.batches)
            self._writer.submit(Job(key, size, lambda: self._write(key, prepared, details, replace)))
        else:
            self._writer.raise_if_closed(key)
            self._write(key, prepared, details, replace)

    def put_parts(
        self,
        key: RolloutKey,
        write_parts: Callable[[], tuple[Summary, list[RecordedPart]]],
        *,
        info: dict[str, Any],
        size: int = 0,
        replace: bool = False,
    ) -> None:
        """Record a rollout step whose parts other processes write (see ``commit.commit_parts``).

        ``write_parts`` is called on the background writer's thread. ``size`` is the memory that the step holds.
        """
        details = _json_copy(info)
        self._prefetcher.drop(key)
        if self._background:
            self._writer.submit(Job(key, size, lambda: self._write_parts(key, write_parts, details, replace)))
        else:
            self._writer.raise_if_closed(key)
            self._write_parts(key, write_parts, details, replace)

    def snapshot(self, inputs: Any) -> BatchSnapshot:
        """Take a snapshot of an input before generation, which may change it. Pass it to ``put`` with the output."""
        return take_snapshot(inputs, self._copy, "the input's ")

    def snapshot_output(self, batch: Any) -> BatchSnapshot:
        """Take a snapshot of the output of a rollout step. Pass it to ``put`` once its ``info`` is known."""
        return take_snapshot(batch, self._copy_on_put)

    @property
    def _copy_on_put(self) -> Copy:
        return self._copy if self._background else Copy.NOTHING

    def get(self, key: RolloutKey, kind: BatchKind | str | None = None) -> Any:
        """Load the recorded batch and check its digest.

        Returns a DataProto or a TensorDict, whichever was recorded. If verl is not installed, you get the result of
        ``DataProto.to_tensordict`` instead of a DataProto. ``kind`` selects one of the two types.
        """
        return self.load(key).batch(kind)

    def inputs(self, key: RolloutKey, kind: BatchKind | str | None = None) -> Any:
        """The recorded input of the rollout step, or None if no input was recorded."""
        return self.load(key).inputs(kind)

    def load(self, key: RolloutKey) -> LoadedEntry:
        """Read and check an entry once, to use its batch, input and record."""
        prefetched = self._prefetcher.take(key)
        return prefetched if prefetched is not None and self._is_current(prefetched) else self._load(key)

    def prefetch(self, key: RolloutKey, *, inputs: bool = False) -> None:
        """Start loading an entry in the background for the next ``get`` or ``load`` of this key.

        With ``inputs``, the recorded input is decoded, too. At most one entry is prefetched. ``get`` raises any error.
        """
        self._prefetcher.start(key, lambda: self._load_and_prepare(key, inputs))

    def drop_prefetched(self) -> None:
        """Release the prefetched entry."""
        self._prefetcher.drop()

    def record(self, key: RolloutKey) -> EntryRecord:
        """The metadata of an entry (rows, tokens, size, mean score, ``info``, etc.), without opening its parts."""
        self._writer.wait(key)
        return self._reader.record(key)

    def keys(self) -> list[RolloutKey]:
        """The committed keys in order."""
        return self._reader.keys()

    def __contains__(self, key: object) -> bool:
        """Whether an entry is committed under this key. A queued entry does not count."""
        return key in self._reader

    def __iter__(self) -> Iterator[RolloutKey]:
        return iter(self.keys())

    def __len__(self) -> int:
        return len(self.keys())

    def verify(self, key: RolloutKey) -> EntryRecord:
        """Check the record, the digests and the page checksums of an entry, and decode it. Returns the record."""
        entry = self._load(key)
        entry.batch()
        entry.inputs()
        return entry.record

    def delete(self, key: RolloutKey) -> None:
        """Delete an entry."""
        self._writer.wait(key)
        self._prefetcher.drop(key)
        commit.delete(self._storage, key)

    def set_aside(self, key: RolloutKey, readable: bool = False) -> str:
        """Rename an unreadable entry to ``*.corrupt`` to free its key, and return the new path.

        Raises ``StoreError`` if the entry can be read, because another process may have recorded it again. With
        ``readable``, such an entry is renamed too.
        """
        self._prefetcher.drop(key)
        return commit.set_aside(self._storage, key, check=None if readable else lambda: self.verify(key))

    def prune(self, older_than_s: float = leftovers.DAY) -> list[str]:
        """Delete the leftover files of crashed writers, and return their paths.

        These are temporary files whose process on this machine has ended or that are older than ``older_than_s``
        seconds, and parts that no record lists. Committed entries are never touched.
        """
        deleted = []
        for folder in self._storage.folders():
            if names.parse_folder(folder) is not None:
                for file in leftovers.find_leftovers(self._storage, folder, older_than_s):
                    if self._storage.delete(folder, file):
                        deleted.append(self._storage.where(folder, file.name))
        return deleted

    def flush(self) -> None:
        """Wait until all queued dumps have ended. Raises ``DumpError`` for those that failed."""
        self._writer.flush()

    def raise_failures(self) -> None:
        """Raise ``DumpError`` for failed background dumps that have not been reported yet. Does not wait."""
        self._writer.raise_failures()

    def close(self) -> None:
        """Flush, and stop the background thread. You can still read from the store, but not ``put``."""
        self._prefetcher.drop()
        self._writer.close()

    def __enter__(self) -> RolloutStore:
        return self

    def __exit__(self, error_type: object, error: object, traceback: object) -> None:
        try:
            self.close()
        except DumpError as dump_error:
            if error is None:
                raise
            logger.error("while handling %s: %s", type(error).__name__, dump_error)

    def __reduce__(self) -> Any:
        return partial(RolloutStore, **self._arguments), (self._storage.where(),)

    def __repr__(self) -> str:
        return f"RolloutStore({self._storage.where()!r})"

    def _write(self, key: RolloutKey, prepared: Prepared, info: dict[str, Any], replace: bool) -> None:
        def write() -> EntryRecord:
            return commit.commit(
                self._storage, key, prepared, info, replace, self.load_limit, self._part_bytes, self._usage.admit
            )

        try:
            self._commit(key, write)
        except ChangedBatchError as error:
            if self._copy is not Copy.ALL:
                logger.warning("the trainer modifies its batches in place, so every tensor is copied from now on")
            self._copy = Copy.ALL
            raise DumpError(f"{key} was not written to {self._storage.where()}: {error}") from error

    def _write_parts(
        self,
        key: RolloutKey,
        write_parts: Callable[[], tuple[Summary, list[RecordedPart]]],
        info: dict[str, Any],
        replace: bool,
    ) -> None:
        self._commit(
            key,
            lambda: commit.commit_parts(
                self._storage, key, write_parts, info, replace, self.load_limit, self._usage.admit
            ),
        )

    def _commit(self, key: RolloutKey, write: Callable[[], EntryRecord]) -> None:
        try:
            record = write()
        except RolloutSkipError:
            raise
        except Exception as error:
            raise DumpError(_failure_message(self._storage, key, error)) from error
        self.written_bytes += record.bytes
        logger.debug("%s: committed %s", key, format_size(record.bytes))

    def _load(self, key: RolloutKey) -> LoadedEntry:
        self._writer.wait(key)
        entry = committed.load(self._storage, key, self.load_limit)
        return LoadedEntry(entry.record, self._open_reader(key, entry))

    def _is_current(self, entry: LoadedEntry) -> bool:
        """Whether an entry is still committed under its key: another process may have replaced or deleted it."""
        with contextlib.suppress(StoreError, OSError):
            return committed.read_record(self._storage, entry.record.key) == entry.record
        return False

    def _load_and_prepare(self, key: RolloutKey, inputs: bool) -> LoadedEntry:
        entry = self._load(key)
        entry.prepare(inputs)
        return entry

    def _open_reader(self, key: RolloutKey, entry: CommittedEntry) -> Reader:
        files = [self._storage.where(names.folder_name(key), part.file) for part in entry.record.parts]
        reader = Reader(entry.parts, self.load_limit, f"The entry of {key} cannot be used", files)
        if reader.rows != entry.record.rows:
            raise CorruptEntryError(
                f"{reader.error_prefix} It has {reader.rows} rows, but its record says {entry.record.rows}."
            )
        return reader

    @property
    def load_limit(self) -> int:
        """The maximum memory for loading an entry now."""
        return _free_memory() if self._max_load_bytes is None else self._max_load_bytes


class _DiskUsage:
    """Compares the size of the store's folder with ``max_disk``. Rescans the folder from time to time, because other
    processes write and prune too."""

    def __init__(self, storage: Storage, limit: int | None) -> None:
        self._storage = storage
        self._limit = limit
        self._used = 0
        self._counted_at = float("-inf")

    def admit(self, size: int) -> None:
        """Count ``size`` more bytes, or raise ``DiskLimitError`` if the folder would become too large."""
        if self._limit is None:
            return
        if time.monotonic() - self._counted_at > _RESCAN_SECONDS or self._used + size > self._limit:
            files = (file for folder in self._storage.folders() for file in self._storage.files(folder))
            self._used = sum(file.size for file in files if not file.name.startswith(names.TEMPORARY))
            self._counted_at = time.monotonic()
        if self._used + size > self._limit:
            raise DiskLimitError(
                f"Not written: {self._storage.where()} has {format_size(self._used)}, and {format_size(size)} more "
                f"would exceed max_disk of {format_size(self._limit)}. Raise max_disk, delete entries, or record fewer "
                "steps."
            )
        self._used += size


def _json_copy(info: dict[str, Any]) -> dict[str, Any]:
    try:
        text = json.dumps(info, allow_nan=False)
    except (TypeError, ValueError) as error:
        raise TypeError(f"info must be JSON (dict, list, str, finite numbers, bool, None): {error}") from error
    if len(text) > MAX_RECORD_BYTES // 4:
        raise ValueError(
            f"info is {format_size(len(text))} of JSON. It must be below 4 MB, because records are read as a whole."
        )
    copy: dict[str, Any] = json.loads(text)
    return copy


def _failure_message(storage: Storage, key: RolloutKey, error: Exception) -> str:
    message = f"{key} was not written to {storage.where()}: {str(error).rstrip('.')}."
    if isinstance(storage, LocalStorage):
        message += f" The disk has {format_size(free_bytes(storage.root))} free."
    return f"{message} The training is not affected, but the step is not recorded and must be generated again."


def _free_memory() -> int:
    """The memory that is available without swapping."""
    with contextlib.suppress(OSError):
        for line in Path("/proc/meminfo").read_text().splitlines():
            if line.startswith("MemAvailable:"):
                return int(line.split()[1]) * 1024
    return os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
