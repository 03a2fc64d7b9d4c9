"""The enums of the configuration, with the meaning of each value."""

from __future__ import annotations

import difflib
from enum import Enum
from typing import Any, TypeVar

from verl_rollout_skip.errors import ConfigError

Choice = TypeVar("Choice", bound=Enum)


class Mode(str, Enum):
    """What to do with a rollout step."""

    OFF = "off"
    """Generate, as without this package."""
    RECORD = "record"
    """Generate and dump; an existing entry is an error and never overwritten."""
    CACHE = "cache"
    """Load recorded steps, generate and dump the rest; the meaning of ``skip_rollout=True``."""
    REPLAY = "replay"
    """Load every step; a step that is not recorded is an error. Starts no inference engine."""
    REPEAT = "repeat"
    """Load recorded steps; for other steps, cycle through the recorded ones."""
    REPEAT_LAST = "repeat_last"
    """Load recorded steps; for other steps, load the last recorded one again."""
    REFRESH = "refresh"
    """Generate and dump, replacing recorded entries."""
    SHADOW = "shadow"
    """Generate every step, compare it with the recorded one, and train on the recorded one. A step that is not recorded
    is an error."""

    @property
    def reads(self) -> bool:
        """Whether recorded entries are loaded."""
        return self in (Mode.CACHE, Mode.REPLAY, Mode.REPEAT, Mode.REPEAT_LAST, Mode.SHADOW)

    @property
    def loads_own_steps(self) -> bool:
        """Whether a step loads its own entry, never that of another step."""
        return self in (Mode.CACHE, Mode.REPLAY, Mode.SHADOW)

    @property
    def needs_all_steps(self) -> bool:
        """Whether every selected step must be recorded."""
        return self in (Mode.REPLAY, Mode.SHADOW)

    @property
    def writes(self) -> bool:
        """Whether generated rollouts are dumped."""
        return self in (Mode.RECORD, Mode.CACHE, Mode.REFRESH)

    @property
    def generates(self) -> bool:
        """Whether a step that is not recorded is generated."""
        return self not in (Mode.REPLAY, Mode.REPEAT, Mode.REPEAT_LAST, Mode.SHADOW)


class Audit(str, Enum):
    """Whether a training writes a ledger and is compared with that of its recording."""

    AUTO = "auto"
    """In every mode but ``off``."""
    OFF = "off"
    """Never."""

    @property
    def is_on(self) -> bool:
        return self is Audit.AUTO


class OnMismatch(str, Enum):
    """What to do if all rollouts in the run folder were recorded with different settings."""

    NEW = "new"
    """Start a new variant."""
    ERROR = "error"
    """Stop and say what differs."""
    REUSE = "reuse"
    """Use them anyway; every hit is marked as off-policy."""


class Prompts(str, Enum):
    """Which prompts a loaded rollout belongs to."""

    AUTO = "auto"
    """``check``, or ``recorded`` if the data order is known not to repeat."""
    CHECK = "check"
    """The current batch must equal the recorded one, row by row."""
    RECORDED = "recorded"
    """The recorded batch replaces the current one, except for the uids."""


class Reward(str, Enum):
    """Where the rewards of a loaded rollout come from."""

    RECORDED = "recorded"
    """From the recording."""
    RECOMPUTE = "recompute"
    """From the current reward function, applied to the recorded responses."""


class Engine(str, Enum):
    """Whether the inference engine is started."""

    AUTO = "auto"
    """In every mode except replay."""
    ON = "on"
    """Always."""
    OFF = "off"
    """Never."""


class Tasks(str, Enum):
    """Whether Ray tasks move the rows of V1 rollouts between TransferQueue and the store."""

    AUTO = "auto"
    """For large rollouts; the driver moves small ones, because it is faster."""
    ON = "on"
    """For all rollouts."""
    OFF = "off"
    """Never."""


class Weights(str, Enum):
    """How much of a model's weights is read to identify it by content."""

    FULL = "full"
    """Every byte, once: digests of unchanged files are cached."""
    SAMPLED = "sampled"
    """A few megabytes of each large file. A change elsewhere goes unnoticed."""


class OnDumpError(str, Enum):
    """What a failed dump does to the training."""

    AUTO = "auto"
    """``fail`` in mode record, ``warn`` otherwise."""
    WARN = "warn"
    """Log it, count it, continue."""
    FAIL = "fail"
    """Stop the training."""


def choose(kind: type[Choice], value: Any, key: str) -> Choice:
    """The member for a configured value. YAML parses a bare ``off`` as false and ``on`` as true."""
    words = [str(member.value) for member in kind]
    word = {False: "off", True: "on"}.get(value, value) if isinstance(value, bool) else value
    if isinstance(word, kind):
        return word
    if word in words:
        return kind(word)
    raise ConfigError(f"{key} is {value!r}. {suggest(str(word), words)}")


def suggest(word: str, words: list[str]) -> str:
    """Suggest the nearest valid word and list all of them."""
    near = difflib.get_close_matches(word, words, n=1)
    hint = f"Did you mean {near[0]!r}? " if near else ""
    return f"{hint}Choose one of: {', '.join(words)}."
