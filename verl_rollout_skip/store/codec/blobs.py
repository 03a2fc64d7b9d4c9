"""Bulk data of cells (arrays, tensors, images, bytes): one pool per part, in which each content is stored once.

Torch is not imported here: where nobody imported it, nothing is a tensor.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Hashable, Iterable, Sequence
from typing import Any

import numpy as np
import pyarrow as pa
import xxhash

from verl_rollout_skip.errors import CorruptEntryError, EntryTooLargeError
from verl_rollout_skip.sizes import format_size
from verl_rollout_skip.store.codec import images
from verl_rollout_skip.store.codec.part import PartFile
from verl_rollout_skip.store.format import BLOB_SIZES, BLOBS
from verl_rollout_skip.store.threads import map_in_threads

Blob = Any
"""Bulk data by reference: bytes, a numpy array, a tensor or an image; ``blob_view`` gives its bytes."""
LARGE = 64 << 10
"""Blobs of so many bytes come back as one object for all cells that hold them; smaller ones are copied."""


def is_tensor(value: Any) -> bool:
    torch = sys.modules.get("torch")
    return torch is not None and isinstance(value, torch.Tensor)


def blob_view(blob: Blob) -> Any:
    """The bytes of a blob, without a copy where that is possible."""
    if isinstance(blob, bytes):
        return blob
    if is_tensor(blob):
        from verl_rollout_skip.store.codec.tensors import tensor_bits

        blob = tensor_bits(blob)
    if not isinstance(blob, np.ndarray):
        return blob.tobytes()
    return np.ascontiguousarray(blob).reshape(-1).view(np.uint8) if blob.nbytes else b""


def blob_size(blob: Blob) -> int:
    """How many bytes ``blob_view`` gives, without making them."""
    if isinstance(blob, bytes):
        return len(blob)
    if isinstance(blob, np.ndarray) or is_tensor(blob):
        return int(blob.nbytes)
    return images.image_bytes(blob)


class BlobPool:
    """The blobs of all cells of a rollout step, numbered; equal ones have one number."""

    def __init__(self, blobs: Iterable[Blob]) -> None:
        self.blobs: list[Blob] = []
        self.sizes: list[int] = []
        self.digests: list[bytes] = []
        # By identity first: the samples of a prompt usually hold the very same objects.
        self._distinct = {id(blob): blob for blob in blobs}
        self._numbers: dict[int, int] = {}
        equal: dict[bytes, list[int]] = {}
        large = [blob for blob in self._distinct.values() if blob_size(blob) >= LARGE]
        digests = dict(zip(map(id, large), map_in_threads(_digest, large), strict=True))
        for blob in self._distinct.values():
            digest = digests.get(id(blob)) or _digest(blob)
            candidates = equal.setdefault(digest, [])
            number = next((number for number in candidates if _same_bytes(self.blobs[number], blob)), len(self.blobs))
            if number == len(self.blobs):
                candidates.append(number)
                self.blobs.append(blob)
                self.sizes.append(blob_size(blob))
                self.digests.append(digest)
            self._numbers[id(blob)] = number

    def numbers(self, blobs: Sequence[Blob]) -> list[int]:
        return [self._numbers[id(blob)] for blob in blobs]


class StoredBlobs:
    """The blobs of a part, read when one is asked for. ``limit`` bounds the memory of what is made of them."""

    def __init__(self, read: Callable[[], list[Any]], limit: int) -> None:
        self._read = read
        self._limit = limit
        self._made_bytes = 0
        self._data: list[Any] | None = None
        self._shared: dict[Hashable, Any] = {}

    def make(self, number: int, kind: Hashable, make: Callable[[Any], Any]) -> Any:
        """What ``make`` makes of a blob: an object of its own, or one for all who ask for a large one of this kind."""
        if (number, kind) in self._shared:
            return self._shared[number, kind]
        data = self._bytes(number)
        self._made_bytes += len(data)
        if self._made_bytes > self._limit:
            raise EntryTooLargeError(
                f"The bulk data in its cells would take more than {format_size(self._limit)} of memory. Load it on a "
                "larger machine or raise max_load_bytes."
            )
        made = make(data)
        if len(data) >= LARGE and self._data is not None:
            self._shared[number, kind] = made
            self._data[number] = None  # so that what Arrow read is freed
        return made

    def _bytes(self, number: int) -> Any:
        if self._data is None:
            self._data = self._read()
        if not 0 <= number < len(self._data):
            raise ValueError(f"there is no blob {number}")
        if self._data[number] is None:  # it was asked for as something else before
            self._data = self._read()
        return self._data[number]


class CellBlobs:
    """The blobs of one cell, as its JSON text counts them."""

    def __init__(self, stored: StoredBlobs, numbers: Sequence[int]) -> None:
        self.numbers = numbers
        self._stored = stored

    @classmethod
    def of(cls, blobs: Sequence[bytes]) -> CellBlobs:
        """Blobs that belong to one cell alone."""
        return cls(StoredBlobs(lambda: list(blobs), 1 << 62), range(len(blobs)))

    def make(self, index: int, kind: Hashable, make: Callable[[Any], Any]) -> Any:
        """As ``StoredBlobs.make``."""
        return self._stored.make(self.numbers[index], kind, make)


def part_blobs(part: PartFile, limit: int) -> StoredBlobs:
    """The blobs of a part."""
    return StoredBlobs(lambda: _read_blobs(part), limit)


def row_blobs(part: PartFile, column: str | None, stored: StoredBlobs) -> Callable[[int], CellBlobs]:
    """A function that gives the blobs of a row; ``column`` holds their numbers, None if there are none."""
    if column is None:
        return lambda row: CellBlobs(stored, ())
    lengths, numbers = part.all_lists(column, pa.int32())
    ends, listed = [0, *np.cumsum(lengths).tolist()], numbers.tolist()
    return lambda row: CellBlobs(stored, listed[ends[row] : ends[row + 1]])


def _read_blobs(part: PartFile) -> list[Any]:
    """Large blobs as views of what Arrow read, small ones as copies: they do not keep the large ones in memory."""
    counts, sizes = part.all_lists(BLOB_SIZES, pa.int64())
    blobs: list[Any] = []
    position = 0
    for joined, count in zip(part.buffers(BLOBS), counts.tolist(), strict=True):
        start = 0
        for size in sizes[position : position + count].tolist():
            if not 0 <= size <= len(joined) - start:
                raise CorruptEntryError("The blobs of a row do not have the sizes that the file says.")
            blob = joined[start : start + size]
            blobs.append(blob if size >= LARGE else bytes(blob))
            start += size
        if start != len(joined):
            raise CorruptEntryError("The blobs of a row do not have the sizes that the file says.")
        position += count
    return blobs


def _digest(blob: Blob) -> bytes:
    return xxhash.xxh3_128(blob_view(blob)).digest()


def _same_bytes(left: Blob, right: Blob) -> bool:
    ours, theirs = (np.frombuffer(blob_view(blob), np.uint8) for blob in (left, right))
    return np.array_equal(ours, theirs)
