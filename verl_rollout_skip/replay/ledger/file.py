"""Ledger files: ``LedgerFile`` writes one, ``read_ledger`` and ``StepFinder`` read it.

Only the training that a ledger is named after writes it, and only at its end. A crash can therefore tear no line but
the last; readers ignore such a line and say so. Nothing else in a ledger may be damaged.
"""

from __future__ import annotations

import re
import time
from collections.abc import Iterator
from dataclasses import dataclass

from verl_rollout_skip.errors import LedgerError, NoLedgerError, UnsafePathError
from verl_rollout_skip.replay.ledger.line import (
    MAX_LINE,
    LedgerEnd,
    LedgerHeader,
    LedgerStep,
    Line,
    LineError,
    NewerLedgerError,
    parse_line,
    render_line,
)
from verl_rollout_skip.runs.paths import LEDGERS
from verl_rollout_skip.store.sizes import format_size
from verl_rollout_skip.store.storage import Storage

MAX_BYTES = 256 << 20
"""The largest ledger that is written or read."""
_SUFFIX = ".jsonl"
_NAME = re.compile(r"[0-9A-Za-z][0-9A-Za-z.\-]{0,99}")
_PUBLISH_EVERY_S = 30.0


@dataclass(frozen=True)
class Ledger:
    """A ledger that was read. ``end`` is None if the training was killed or still runs, ``torn`` says why the last
    line was ignored."""

    header: LedgerHeader
    steps: tuple[LedgerStep, ...]
    end: str | None
    torn: str | None


def ledger_name(training: str) -> str:
    """The file name of a training's ledger."""
    if not _NAME.fullmatch(training):
        raise LedgerError(f"{training!r} is not the name of a training. ls ledgers/ shows the names.")
    return f"{training}{_SUFFIX}"


def ledger_names(storage: Storage) -> list[str]:
    """The trainings that have a ledger in this variant, oldest first."""
    names = (name.removesuffix(_SUFFIX) for name in storage.names(LEDGERS) if name.endswith(_SUFFIX))
    return sorted(name for name in names if _NAME.fullmatch(name))


def read_ledger(storage: Storage, training: str) -> Ledger:
    """Read a training's ledger. Raises ``LedgerError``."""
    reader = LedgerReader(storage, training)
    steps = tuple(reader)
    return Ledger(reader.header, steps, reader.end, reader.torn)


class LedgerReader:
    """Reads a ledger from its first to its last step, one line at a time. Raises ``LedgerError``."""

    def __init__(self, storage: Storage, training: str) -> None:
        self.path = storage.where(LEDGERS, ledger_name(training))
        self.end: str | None = None
        self.torn: str | None = None
        self._number = 0
        self._last_step = -1
        self._lines = self._split(storage, ledger_name(training))
        header = next(self._lines, None)
        if header is None:
            raise LedgerError(
                f"{self.path} has no complete first line: the training ended before it could write one. Delete it."
            )
        if not isinstance(header, LedgerHeader):
            raise self._error("it is not the header of a ledger")
        self.header = header

    def __iter__(self) -> Iterator[LedgerStep]:
        for line in self._lines:
            if self.end is not None:
                raise self._error("it follows the end of the training")
            if isinstance(line, LedgerHeader):
                raise self._error("it is a second header")
            if isinstance(line, LedgerEnd):
                self.end = line.end
                continue
            if line.step <= self._last_step:
                raise self._error(f"step {line.step} follows step {self._last_step}")
            self._last_step = line.step
            yield line

    def _split(self, storage: Storage, name: str) -> Iterator[Line]:
        """The parsed lines. The rest of a file after its last line break is torn."""
        rest, size = b"", 0
        try:
            for chunk in storage.chunks(LEDGERS, name):
                size += len(chunk)
                if size > MAX_BYTES:
                    raise LedgerError(
                        f"{self.path} has more than {format_size(MAX_BYTES)}, which no training writes. Delete it."
                    )
                *lines, rest = (rest + chunk).split(b"\n")
                for line in lines:
                    yield self._parse(line)
                if len(rest) > MAX_LINE:
                    self._number += 1
                    raise self._error(f"it has more than {format_size(MAX_LINE)}, which no training writes")
        except FileNotFoundError as error:
            raise NoLedgerError(f"There is no ledger {self.path}. Was it pruned, or written with audit=off?") from error
        except (OSError, UnsafePathError) as error:
            raise LedgerError(f"{self.path} cannot be read: {error}") from error
        if rest:
            self.torn = (
                f"line {self._number + 1} is incomplete ({len(rest)} bytes without a line break): the training ended "
                "while it was being written"
            )

    def _parse(self, line: bytes) -> Line:
        self._number += 1
        try:
            return parse_line(line)
        except NewerLedgerError as error:
            raise LedgerError(f"{self.path} cannot be read: {error}. Upgrade verl_rollout_skip.") from error
        except LineError as error:
            raise self._error(str(error)) from error

    def _error(self, problem: str) -> LedgerError:
        return LedgerError(
            f"{self.path} is damaged in line {self._number}: {problem}. Restore it from a copy, or delete it; the "
            "rollouts do not depend on it."
        )


class StepFinder:
    """Finds single steps of a ledger without keeping the others, best in ascending order. The ledger may grow."""

    def __init__(self, storage: Storage, training: str) -> None:
        self._storage = storage
        self._training = training
        self._reader = LedgerReader(storage, training)
        self._steps = iter(self._reader)
        self._next: LedgerStep | None = None
        self._passed = -1

    @property
    def header(self) -> LedgerHeader:
        return self._reader.header

    def find(self, step: int) -> LedgerStep | None:
        """The line of a step; None if the ledger has none."""
        if step <= self._passed:
            self._restart()
        found = self._advance(step)
        if found is None and self._next is None:
            self._restart()  # the training that writes it may have come further
            found = self._advance(step)
        return found

    def _advance(self, step: int) -> LedgerStep | None:
        while self._next is None or self._next.step < step:
            self._next = next(self._steps, None)
            if self._next is None:
                return None
            self._passed = self._next.step - 1
        return self._next if self._next.step == step else None

    def _restart(self) -> None:
        self._reader = LedgerReader(self._storage, self._training)
        self._steps, self._next, self._passed = iter(self._reader), None, -1


class LedgerFile:
    """The ledger of the current training. The file is created with the first line after the header.

    A storage that cannot append gets the whole file again from time to time.
    """

    def __init__(self, storage: Storage, header: LedgerHeader) -> None:
        self._storage = storage
        self._name = ledger_name(header.training)
        self._pending = render_line(header)
        self._size = 0
        self._published = -_PUBLISH_EVERY_S

    @property
    def path(self) -> str:
        return self._storage.where(LEDGERS, self._name)

    def append(self, line: LedgerStep | LedgerEnd) -> None:
        """Write a line. Raises ``OSError`` or ``LineError``; a line that could not be written is lost."""
        data = render_line(line)
        if self._size + len(self._pending) + len(data) > MAX_BYTES:
            raise LineError(f"the ledger would have more than {format_size(MAX_BYTES)}, the largest that is read")
        if self._storage.can_append:
            self._storage.append(LEDGERS, self._name, self._pending + data)
            self._size += len(self._pending) + len(data)
            self._pending = b""
            return
        self._pending += data
        if isinstance(line, LedgerEnd) or time.monotonic() - self._published >= _PUBLISH_EVERY_S:
            self._publish()

    def _publish(self) -> None:
        with self._storage.stage(LEDGERS) as staged:
            staged.write(self._pending)
            self._storage.publish(staged, self._name, replace=True)
        self._published = time.monotonic()
