"""``LoadedEntry``: one recorded rollout in memory, and what was made of it ahead."""

from __future__ import annotations

import importlib.util
from typing import Any

from verl_rollout_skip.store import codec
from verl_rollout_skip.store.codec.batch import Batch, BatchKind, unflatten
from verl_rollout_skip.store.codec.part import damage_is_corruption
from verl_rollout_skip.store.record import EntryRecord


class LoadedEntry:
    """One recorded rollout in memory: its bytes were found to be those that were committed."""

    def __init__(self, record: EntryRecord, reader: codec.Reader) -> None:
        self.record = record
        self._reader = reader
        self._decoded: Batch | None = None
        self._prompt_digests: list[str] | None = None
        self._ready: dict[str, Any] = {}

    def prepare(self, inputs: bool) -> None:
        """Do now what the next calls of ``batch``, ``prompt_digests`` and, if it is wanted, ``inputs`` would do."""
        self.prompt_digests()
        self._ready = {"batch": self.batch(), **({"inputs": self.inputs()} if inputs else {})}

    def decode(self) -> Batch:
        """Decode the batch now rather than when it is asked for."""
        if self._decoded is None:
            self._decoded = self._reader.output()
        return self._decoded

    def batch(self, kind: BatchKind | str | None = None) -> Any:
        """The recorded batch. Each call gives the same tensors, not a copy."""
        if kind is None and "batch" in self._ready:
            return self._ready.pop("batch")  # once, because the caller may put other columns into it
        return _present(self.decode(), kind)

    def inputs(self, kind: BatchKind | str | None = None) -> Any:
        """The recorded input of the rollout step, or None if it was put without."""
        if kind is None and "inputs" in self._ready:
            return self._ready.pop("inputs")
        return _present(self._reader.input(), kind) if self._reader.has_input else None

    @property
    def input_kind(self) -> BatchKind | None:
        """What the input was, without decoding it; None if the batch was put without."""
        return self._reader.input_kind

    def prompt_digests(self) -> list[str] | None:
        """One digest for each row of the input (see ``codec.prompt_digests``), or None if it was put without."""
        if self._prompt_digests is None and self._reader.has_input:
            self._prompt_digests = self._reader.prompt_digests()
        return self._prompt_digests


def _present(batch: Batch, kind: BatchKind | str | None) -> Any:
    wanted = None if kind is None else BatchKind(kind)
    if wanted is None and batch.kind is BatchKind.DATAPROTO and importlib.util.find_spec("verl") is None:
        wanted = BatchKind.TENSORDICT
    with damage_is_corruption():
        return unflatten(batch, wanted)
