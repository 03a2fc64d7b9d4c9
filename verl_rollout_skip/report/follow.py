"""Follows a variant for the live view while a training records into it.

A thread polls the folder and reads new entries, newest first. Each change gets a revision, so a page requests only the
changes after the last revision it has. Memory is bounded: the text of the oldest steps is dropped first. The page can
load it again.
"""

from __future__ import annotations

import json
import logging
import threading
from collections.abc import Callable
from dataclasses import dataclass, field

from verl_rollout_skip.key import RolloutKey
from verl_rollout_skip.report.collect import OpenVariant, left_out, script_json
from verl_rollout_skip.report.entry_view import Counted, EntryView
from verl_rollout_skip.report.sampling import Sampling
from verl_rollout_skip.store.reader import Stamp

logger = logging.getLogger(__name__)

LIVE_GROUPS = 8
_MAX_HELD_BYTES = 64 << 20
_MAX_RESPONSE_BYTES = 4 << 20
_POLLS_BEFORE_RETRY = 5


@dataclass
class _Held:
    """A rollout step kept in memory: its JSON, with and without the text of its groups."""

    revision: int
    stamp: Stamp
    bare: str
    full: str | None
    counted: Counted
    broken: bool
    polls: int = 0


@dataclass
class _State:
    revision: int = 0
    held: dict[RolloutKey, _Held] = field(default_factory=dict)
    removed: dict[RolloutKey, int] = field(default_factory=dict)
    waiting: int = 0
    problem: str | None = None


class Follower:
    """Reads a variant in the background. ``wanted`` decides which rollout steps are read."""

    def __init__(
        self,
        variant: OpenVariant,
        sampling: Sampling,
        wanted: Callable[[RolloutKey], bool] = lambda key: True,
        interval_s: float = 1.0,
    ) -> None:
        self.variant = variant
        self.sampling = sampling
        self.views = variant.views(sampling)
        self._groups = LIVE_GROUPS if sampling.groups is None else sampling.groups
        self._wanted = wanted
        self._interval_s = interval_s
        self._state = _State()
        self._lock = threading.Lock()
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._follow, name="rollout-skip-view", daemon=True)

    def start(self) -> None:
        self._thread.start()

    def stop(self) -> None:
        """Stop the thread and wait for it. It finishes the rollout step that it is reading."""
        self._stop.set()
        if self._thread.ident is not None:
            self._thread.join()

    def poll(self) -> None:
        """Read entries that have changed since the last call."""
        try:
            stamps = self.variant.entries.stamps(self._wanted)
        except OSError as error:  # an object store may be unreachable for a while
            logger.warning("the folder cannot be listed: %s", error)
            with self._lock:
                self._state.problem = f"The folder cannot be listed at the moment: {error}"
            return
        with self._lock:
            self._state.problem = None
            for key in [key for key in self._state.held if key not in stamps]:
                del self._state.held[key]
                self._state.revision += 1
                self._state.removed[key] = self._state.revision
            new = [key for key, stamp in stamps.items() if self._is_new(key, stamp)]
        new.sort(reverse=True)
        for index, key in enumerate(new):
            if self._stop.is_set():
                return
            with self._lock:
                self._state.waiting = len(new) - index
            self._hold(self.views.view(key, self._groups), stamps[key])
        with self._lock:
            self._state.waiting = 0

    def changes(self, after: int) -> str:
        """The changes after a revision, as JSON. ``more`` is true if they do not all fit into one response."""
        with self._lock:
            state = self._state
            changed = sorted((held.revision, key) for key, held in state.held.items() if held.revision > after)
            texts: list[str] = []
            reached, size = state.revision, 0
            for revision, key in changed:
                held = state.held[key]
                texts.append(held.bare if held.full is None else held.full)
                size += len(texts[-1])
                if size > _MAX_RESPONSE_BYTES and len(texts) < len(changed):
                    reached = revision
                    break
            removed = [f"{key.step}.{key.gen_batch}" for key, at in state.removed.items() if after < at <= reached]
            summary = {
                "revision": reached,
                "more": reached < state.revision,
                "reading": state.waiting,
                "removed": removed,
                "problems": [text for text in (self.variant.manifest_error, state.problem) if text is not None],
                "left_out": self._left_out(),
            }
        return f'{json.dumps(summary)[:-1]},"entries":[{",".join(texts)}]}}'

    def _follow(self) -> None:
        while True:
            try:
                self.poll()
            except Exception as error:  # file systems can raise anything, and the thread must keep running
                logger.exception("reading %s failed", self.variant.entries.storage.where())
                with self._lock:
                    self._state.problem = f"The recording cannot be read at the moment: {error}"
            if self._stop.wait(self._interval_s):
                return

    def _is_new(self, key: RolloutKey, stamp: Stamp) -> bool:
        held = self._state.held.get(key)
        if held is None or held.stamp != stamp:
            return True
        # Retry entries that could not be read: the cause may disappear without a change to the files.
        held.polls += held.broken
        return held.polls >= _POLLS_BEFORE_RETRY

    def _hold(self, view: EntryView, stamp: Stamp) -> None:
        full = script_json(view.json)
        bare = script_json({**view.json, "groups": [], "vocabulary": []})
        with self._lock:
            known = self._state.held.get(view.key)
            if known is not None and known.broken and known.bare == bare:
                known.polls, known.stamp = 0, stamp
                return
            self._state.revision += 1
            self._state.removed.pop(view.key, None)
            broken = view.broken is not None
            self._state.held[view.key] = _Held(self._state.revision, stamp, bare, full, view.counted, broken)
            self._drop_old_text()

    def _drop_old_text(self) -> None:
        """Drop the text of the oldest steps if the total is too large. The newest step keeps its text."""
        with_text = sorted(key for key, held in self._state.held.items() if held.full is not None)
        total = sum(len(self._state.held[key].full or "") for key in with_text)
        for key in with_text[:-1]:
            if total <= _MAX_HELD_BYTES:
                return
            held = self._state.held[key]
            total -= len(held.full or "")
            held.full = None
            self._state.revision += 1
            held.revision = self._state.revision
            held.counted = Counted(rows=held.counted.rows, groups=held.counted.groups)

    def _left_out(self) -> list[str]:
        counted = Counted()
        for held in self._state.held.values():
            counted.add(held.counted)
        total = len(self._state.held)
        notes = left_out(counted, self.sampling, total, total, sum(held.broken for held in self._state.held.values()))
        dropped = sum(held.full is None for held in self._state.held.values())
        if dropped:
            notes.append(
                f"The text of the oldest {dropped:,} rollout steps is no longer in memory. Reload it from the table."
            )
        return notes
