"""SHA-256 digests of files: read in parallel, with progress in the log, and cached for the next training.

A cached digest is valid while the file's path, size, modification time, change time, inode and device stay the same,
and only on the machine that wrote it. Each digest is a small file in the user's cache folder, so any number of
processes can write at the same time. Large files in the Hugging Face cache are not read: their blobs are named after
their SHA-256.
"""

from __future__ import annotations

import hashlib
import json
import logging
import os
import platform
import re
import threading
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

from verl_rollout_skip.store.new_files import new_file
from verl_rollout_skip.store.sizes import format_size
from verl_rollout_skip.store.threads import worker_count

logger = logging.getLogger(__name__)

CACHE_VARIABLE = "VERL_ROLLOUT_SKIP_CACHE"
_READ_BYTES = 8 << 20
# Reading a smaller file is as fast as looking up its digest.
_CACHED_BYTES = 1 << 20
# A file that changes twice within the resolution of its timestamps looks unchanged, so the digest of a file that was
# just written is not cached.
_SETTLED_NS = 2 * 10**9
_PROGRESS_S = 5.0
_SHA256 = re.compile(r"[0-9a-f]{64}")


def digest_files(files: Sequence[Path]) -> list[str | None]:
    """The SHA-256 of each file; None for a file that cannot be read."""
    found = {file: _known_digest(file) for file in files}
    unknown = [file for file, digest in found.items() if digest is None]
    sizes = {file: _size(file) for file in unknown}
    readable = sorted((file for file in unknown if sizes[file] is not None), key=lambda file: -(sizes[file] or 0))
    found.update(zip(readable, _read_all(readable, sum(sizes[file] or 0 for file in readable)), strict=True))
    return [found[file] for file in files]


def blob_digest(file: Path) -> str | None:
    """The SHA-256 that a file in the Hugging Face cache is named after; None for any other file."""
    if not os.path.islink(file):
        return None
    target = Path(os.path.realpath(file))
    is_blob = target.parent.name == "blobs" and _SHA256.fullmatch(target.name) and os.path.isfile(target)
    return target.name if is_blob else None


def cache_folder() -> Path:
    """The folder of cached digests: ``$VERL_ROLLOUT_SKIP_CACHE``, or the user's cache folder."""
    given = os.environ.get(CACHE_VARIABLE)
    folder = given or os.path.join(os.environ.get("XDG_CACHE_HOME") or "~/.cache", "verl_rollout_skip")
    try:
        return Path(folder).expanduser()
    except RuntimeError as error:
        raise FileNotFoundError(f"{folder} does not exist, because this user has no home directory") from error


def _size(file: Path) -> int | None:
    """The size of a file; None if it is missing, or a device or named pipe, which never ends."""
    try:
        return file.stat().st_size if file.is_file() else None
    except OSError:
        return None


def _known_digest(file: Path) -> str | None:
    digest = blob_digest(file)
    if digest is not None:
        return digest
    try:
        stat = file.stat()
    except OSError:
        return None
    return _cached(file, stat) if stat.st_size >= _CACHED_BYTES else None


def _read_all(files: Sequence[Path], total: int) -> list[str | None]:
    if not files:
        return []
    progress = _Progress(total)
    try:
        if len(files) == 1 or total < _CACHED_BYTES:  # not worth a thread pool
            return [_read(file, progress) for file in files]
        with ThreadPoolExecutor(min(worker_count(), len(files)), "rollout-skip-digest") as pool:
            try:
                return list(pool.map(lambda file: _read(file, progress), files))
            except BaseException:
                progress.stop()
                raise
    finally:
        progress.finish()


def _read(file: Path, progress: _Progress) -> str | None:
    try:
        for _ in range(2):
            digest, before, after = _read_once(file, progress)
            if _attributes(before) == _attributes(after):
                break
        else:
            logger.warning("%s changes while it is being read, so its digest does not identify a complete file", file)
            return digest
    except OSError as error:
        logger.debug("%s cannot be read: %s", file, error)
        return None
    if after.st_size >= _CACHED_BYTES and time.time_ns() - max(after.st_mtime_ns, after.st_ctime_ns) > _SETTLED_NS:
        try:
            _cache(file, after, digest)
        except OSError as error:
            progress.cannot_cache(error)
    return digest


def _read_once(file: Path, progress: _Progress) -> tuple[str, os.stat_result, os.stat_result]:
    digest = hashlib.sha256()
    with open(file, "rb", buffering=0) as stream:
        before = os.fstat(stream.fileno())
        buffer = memoryview(bytearray(min(_READ_BYTES, before.st_size)))
        left = before.st_size  # bytes appended in the meantime are not read
        while left and (count := stream.readinto(buffer[: min(left, len(buffer))])):
            digest.update(buffer[:count])
            progress.add(count)
            left -= count
        return digest.hexdigest(), before, os.fstat(stream.fileno())


class _Progress:
    """Logs a line every few seconds while large files are read, and one at the end."""

    def __init__(self, total: int) -> None:
        self._total = total
        self._done = 0
        self._stopped = False
        self._unwritable: OSError | None = None
        self._lock = threading.Lock()
        self._started = self._reported = time.monotonic()

    def add(self, count: int) -> None:
        with self._lock:
            if self._stopped:
                raise InterruptedError("another file could not be read, or the training is being stopped")
            self._done += count
            now = time.monotonic()
            if now - self._reported < _PROGRESS_S:
                return
            self._reported = now
            done, speed = self._done, self._done / (now - self._started)
        logger.info(
            "reading weights and data to identify them by content: %s of %s (%s/s)",
            *(format_size(size) for size in (done, self._total, speed)),
        )

    def stop(self) -> None:
        with self._lock:
            self._stopped = True

    def cannot_cache(self, error: OSError) -> None:
        with self._lock:
            self._unwritable = error

    def finish(self) -> None:
        seconds = time.monotonic() - self._started
        if self._unwritable is not None:
            logger.warning(
                "digests cannot be cached, so the same files are read again next time: %s. Set %s to a writable folder",
                self._unwritable,
                CACHE_VARIABLE,
            )
        elif seconds >= _PROGRESS_S and not self._stopped:
            logger.info(
                "read %s in %.0f s; unchanged files are not read again (digests in %s)",
                format_size(self._done),
                seconds,
                cache_folder(),
            )


def _attributes(stat: os.stat_result) -> dict[str, int]:
    """The attributes that change with the content of a file."""
    return {
        "size": stat.st_size,
        "modified_ns": stat.st_mtime_ns,
        "changed_ns": stat.st_ctime_ns,
        "inode": stat.st_ino,
        "device": stat.st_dev,
    }


def _machine() -> str:
    """An ID of this machine that survives a restart. Containers of one image share a machine-id but not a host name."""
    try:
        identifier = Path("/etc/machine-id").read_text().strip()
    except OSError:
        identifier = ""
    return hashlib.sha256(f"{identifier}\0{platform.node()}".encode()).hexdigest()[:16]


def _entry(path: str) -> Path:
    name = hashlib.sha256(os.fsencode(path)).hexdigest()[:32]
    return cache_folder() / "digests" / _machine() / f"{name}.json"


def _cached(file: Path, stat: os.stat_result) -> str | None:
    path = os.path.realpath(file)
    try:
        entry = _entry(path)
        fields = json.loads(entry.read_bytes())
        digest = fields["sha256"]
        if fields != _fields(path, stat, digest):
            if fields.get("checksum") != _checksum(fields):
                raise ValueError("its checksum is wrong")
            return None  # the file has changed
        return str(digest)
    except FileNotFoundError:
        return None
    except (OSError, ValueError, TypeError, KeyError, AttributeError, RecursionError) as error:
        logger.warning("%s is read again, because its cached digest in %s cannot be used: %s", file, entry, error)
        return None


def _cache(file: Path, stat: os.stat_result, digest: str) -> None:
    path = os.path.realpath(file)
    entry = _entry(path)
    entry.parent.mkdir(parents=True, exist_ok=True)
    with new_file(entry) as temporary:
        temporary.write_text(json.dumps(_fields(path, stat, digest), indent=2))


def _fields(path: str, stat: os.stat_result, digest: str) -> dict[str, Any]:
    fields: dict[str, Any] = {"machine": _machine(), "path": path, **_attributes(stat), "sha256": digest}
    return {**fields, "checksum": _checksum(fields)}


def _checksum(fields: dict[str, Any]) -> str:
    body = {key: value for key, value in fields.items() if key != "checksum"}
    return hashlib.sha256(json.dumps(body, sort_keys=True).encode()).hexdigest()[:16]
