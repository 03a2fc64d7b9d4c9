"""What a live view shows: a variant that is looked at again and again while a training records into it.

A thread reads what is new, newest first. Each change has a revision, so that a page asks only for what came after the
last one that it has. What is held is bounded: the text of the oldest steps goes first, and can be asked for again.
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
_HELD_BYTES = 64 << 20
_ANSWER_BYTES = 4 << 20
_LOOKS_BEFORE_RETRY = 5


@dataclass
class _Held:
    """A rollout step that was read: its JSON, with and without the text of its groups."""

    revision: int
    stamp: Stamp
    bare: str
    full: str | None
    counted: Counted
    broken: bool
    looks: int = 0


@dataclass
class _State:
    revision: int = 0
    held: dict[RolloutKey, _Held] = field(default_factory=dict)
    removed: dict[RolloutKey, int] = field(default_factory=dict)
    waiting: int = 0
    problem: str | None = None


class Follower:
    """Reads a variant in the background. ``wanted`` tells which of its rollout steps are meant."""

    def __init__(
        self,
        variant: OpenVariant,
        sampling: Sampling,
        wanted: Callable[[RolloutKey], bool] = lambda key: True,
        every_s: float = 1.0,
    ) -> None:
        self.variant = variant
        self.sampling = sampling
        self.views = variant.views(sampling)
        self._groups = LIVE_GROUPS if sampling.groups is None else sampling.groups
        self._wanted = wanted
        self._every_s = every_s
        self._state = _State()
        self._lock = threading.Lock()
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._follow, name="rollout-skip-view", daemon=True)

    def start(self) -> None:
        self._thread.start()

    def stop(self) -> None:
        """Return when the thread has ended; it finishes the rollout step that it is reading."""
        self._stop.set()
        if self._thread.ident is not None:
            self._thread.join()

    def look(self) -> None:
        """Read what is new since the last look."""
        try:
            stamps = self.variant.entries.stamps(self._wanted)
        except OSError as error:  # an object store may be out of reach for a while
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
        for place, key in enumerate(new):
            if self._stop.is_set():
                return
            with self._lock:
                self._state.waiting = len(new) - place
            self._hold(self.views.view(key, self._groups), stamps[key])
        with self._lock:
            self._state.waiting = 0

    def news(self, after: int) -> str:
        """As JSON, what has changed after a revision; ``more`` if there is more than one answer should carry."""
        with self._lock:
            state = self._state
            changed = sorted((held.revision, key) for key, held in state.held.items() if held.revision > after)
            texts: list[str] = []
            reached, size = state.revision, 0
            for revision, key in changed:
                held = state.held[key]
                texts.append(held.bare if held.full is None else held.full)
                size += len(texts[-1])
                if size > _ANSWER_BYTES and len(texts) < len(changed):
                    reached = revision
                    break
            # One that was removed before the revision that this answer reaches is told now, later ones later.
            removed = [f"{key.step}.{key.gen_batch}" for key, at in state.removed.items() if after < at <= reached]
            told = {
                "revision": reached,
                "more": reached < state.revision,
                "reading": state.waiting,
                "removed": removed,
                "problems": [text for text in (self.variant.manifest_error, state.problem) if text is not None],
                "left_out": self._left_out(),
            }
        return f'{json.dumps(told)[:-1]},"entries":[{",".join(texts)}]}}'

    def _follow(self) -> None:
        while True:
            try:
                self.look()
            except Exception as error:  # the thread must outlive whatever a file system comes up with
                logger.exception("looking at %s failed", self.variant.entries.storage.where())
                with self._lock:
                    self._state.problem = f"The recording cannot be read at the moment: {error}"
            if self._stop.wait(self._every_s):
                return

    def _is_new(self, key: RolloutKey, stamp: Stamp) -> bool:
        held = self._state.held.get(key)
        if held is None or held.stamp != stamp:
            return True
        # What could not be read is tried again from time to time: not every cause changes the files.
        held.looks += held.broken
        return held.looks >= _LOOKS_BEFORE_RETRY

    def _hold(self, view: EntryView, stamp: Stamp) -> None:
        full = script_json(view.json)
        bare = script_json({**view.json, "groups": [], "vocabulary": []})
        with self._lock:
            known = self._state.held.get(view.key)
            if known is not None and known.broken and known.bare == bare:
                known.looks, known.stamp = 0, stamp
                return
            self._state.revision += 1
            self._state.removed.pop(view.key, None)
            broken = view.broken is not None
            self._state.held[view.key] = _Held(self._state.revision, stamp, bare, full, view.counted, broken)
            self._let_go()

    def _let_go(self) -> None:
        """Drop the text of the oldest steps if all together is too much; the newest keeps its text."""
        with_text = sorted(key for key, held in self._state.held.items() if held.full is not None)
        total = sum(len(self._state.held[key].full or "") for key in with_text)
        for key in with_text[:-1]:
            if total <= _HELD_BYTES:
                return
            held = self._state.held[key]
            total -= len(held.full or "")
            held.full = None
            self._state.revision += 1
            held.revision = self._state.revision
            all_of_it = held.counted
            held.counted = Counted(rows=all_of_it.rows, groups=all_of_it.groups)

    def _left_out(self) -> list[str]:
        counted = Counted()
        for held in self._state.held.values():
            counted.add(held.counted)
        total = len(self._state.held)
        said = left_out(counted, self.sampling, total, total, sum(held.broken for held in self._state.held.values()))
        let_go = sum(held.full is None for held in self._state.held.values())
        if let_go:
            said.append(f"The text of the oldest {let_go:,} rollout steps was let go: load it from the table.")
        return said
