"""The closed sets of words that the configuration is made of, each with what it means."""

from __future__ import annotations

import difflib
from enum import Enum
from typing import Any, TypeVar

from verl_rollout_skip.errors import ConfigError

Choice = TypeVar("Choice", bound=Enum)


class Mode(str, Enum):
    """What to do with a rollout step."""

    OFF = "off"
    """Generate, as if this package were not there."""
    RECORD = "record"
    """Generate and dump; an entry that is already there is an error, never overwritten."""
    CACHE = "cache"
    """Load what is recorded, generate and dump the rest; what ``skip_rollout=True`` means."""
    REPLAY = "replay"
    """Load everything; what is not recorded is an error. No inference engine is started."""
    REPEAT = "repeat"
    """Load what is recorded; for other steps load the recorded steps in turn, over and over."""
    REPEAT_LAST = "repeat_last"
    """Load what is recorded; for other steps load the last recorded step again."""
    REFRESH = "refresh"
    """Generate and dump, replacing what is recorded."""

    @property
    def reads(self) -> bool:
        """Whether recorded entries are loaded."""
        return self in (Mode.CACHE, Mode.REPLAY, Mode.REPEAT, Mode.REPEAT_LAST)

    @property
    def writes(self) -> bool:
        """Whether generated rollouts are dumped."""
        return self in (Mode.RECORD, Mode.CACHE, Mode.REFRESH)

    @property
    def generates(self) -> bool:
        """Whether a step that is not recorded is generated."""
        return self not in (Mode.REPLAY, Mode.REPEAT, Mode.REPEAT_LAST)


class OnMismatch(str, Enum):
    """What to do if the run folder holds rollouts that depend on other settings than today's."""

    NEW = "new"
    """Start another variant beside them."""
    ERROR = "error"
    """Stop and say what differs."""
    REUSE = "reuse"
    """Use them all the same; the run is marked as informational."""


class Prompts(str, Enum):
    """Which prompts a loaded rollout belongs to."""

    AUTO = "auto"
    """``check``, or ``recorded`` where the order of the data is known not to repeat."""
    CHECK = "check"
    """The current batch must be the recorded one, row by row."""
    RECORDED = "recorded"
    """The recorded batch replaces the current one whole; only the uids stay."""


class Reward(str, Enum):
    """Where the rewards of a loaded rollout come from."""

    RECORDED = "recorded"
    """From the recording."""
    RECOMPUTE = "recompute"
    """From today's reward function, applied to the recorded responses."""


class Engine(str, Enum):
    """Whether the inference engine is started."""

    AUTO = "auto"
    """Not in replay, otherwise yes."""
    ON = "on"
    """Always."""
    OFF = "off"
    """Never."""


class Weights(str, Enum):
    """How much of the weights is read to know a model by its content."""

    FULL = "full"
    """Every byte, once: digests of unchanged files are remembered."""
    SAMPLED = "sampled"
    """A few megabytes of each large file. A change elsewhere is not noticed."""


class OnDumpError(str, Enum):
    """What a failed dump does to the training."""

    AUTO = "auto"
    """``fail`` in mode record, ``warn`` otherwise."""
    WARN = "warn"
    """Log it, count it, go on."""
    FAIL = "fail"
    """Stop the training."""


def choose(kind: type[Choice], value: Any, key: str) -> Choice:
    """The member that a configured value names. YAML reads a bare ``off`` as false and ``on`` as true."""
    words = [str(member.value) for member in kind]
    word = {False: "off", True: "on"}.get(value, value) if isinstance(value, bool) else value
    if isinstance(word, kind):
        return word
    if word in words:
        return kind(word)
    raise ConfigError(f"{key} is {value!r}. {suggest(str(word), words)}")


def suggest(word: str, words: list[str]) -> str:
    """The nearest valid word, and all of them."""
    near = difflib.get_close_matches(word, words, n=1)
    hint = f"Did you mean {near[0]!r}? " if near else ""
    return f"{hint}Valid are: {', '.join(words)}."
