"""``LoadedEntry``: one recorded rollout in memory. Its batches can be decoded in advance."""

from __future__ import annotations

import importlib.util
from typing import Any, Protocol

from verl_rollout_skip.store import codec
from verl_rollout_skip.store.codec.batch import Batch, BatchKind, unflatten
from verl_rollout_skip.store.codec.part import decoding
from verl_rollout_skip.store.record import EntryRecord


class Entry(Protocol):
    """A recorded rollout that can be compared with the current step and used in its place."""

    record: EntryRecord

    @property
    def input_kind(self) -> BatchKind | None: ...

    def prompt_digests(self) -> list[str] | None: ...

    def batch(self, kind: BatchKind | str | None = None) -> Any: ...

    def inputs(self, kind: BatchKind | str | None = None) -> Any: ...


class LoadedEntry:
    """One recorded rollout in memory, whose bytes have been verified."""

    def __init__(self, record: EntryRecord, reader: codec.Reader) -> None:
        self.record = record
        self._reader = reader
        self._decoded: Batch | None = None
        self._prompt_digests: list[str] | None = None
        self._prepared: dict[str, Any] = {}

    def prepare(self, inputs: bool) -> None:
        """Decode the batch, the prompt digests and, optionally, the input in advance. The next call returns them."""
        self.prompt_digests()
        self._prepared = {"batch": self.batch(), **({"inputs": self.inputs()} if inputs else {})}

    def decode(self) -> Batch:
        """The recorded batch in its neutral form, decoded on the first call."""
        if self._decoded is None:
            self._decoded = self._reader.output()
        return self._decoded

    def batch(self, kind: BatchKind | str | None = None) -> Any:
        """The recorded batch. All calls return the same tensors, not copies."""
        if kind is None and "batch" in self._prepared:
            return self._prepared.pop("batch")  # only once, because the caller may add columns to it
        return self._unflatten(self.decode(), kind)

    def inputs(self, kind: BatchKind | str | None = None) -> Any:
        """The recorded input of the rollout step, or None if it was not recorded."""
        if kind is None and "inputs" in self._prepared:
            return self._prepared.pop("inputs")
        return self._unflatten(self._reader.input(), kind) if self._reader.has_input else None

    @property
    def input_kind(self) -> BatchKind | None:
        """The type of the input, known without decoding it; None if it was not recorded."""
        return self._reader.input_kind

    def prompt_digests(self) -> list[str] | None:
        """One digest per row of the input (see ``codec.prompt_digests``), or None if it was not recorded."""
        if self._prompt_digests is None and self._reader.has_input:
            self._prompt_digests = self._reader.prompt_digests()
        return self._prompt_digests

    def _unflatten(self, batch: Batch, kind: BatchKind | str | None) -> Any:
        target = None if kind is None else BatchKind(kind)
        if target is None and batch.kind is BatchKind.DATAPROTO and importlib.util.find_spec("verl") is None:
            target = BatchKind.TENSORDICT
        with decoding(self._reader.error_prefix):
            return unflatten(batch, target)
