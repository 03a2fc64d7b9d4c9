"""Pins protect steps, or a whole variant, from ``prune``.

Each pin is a small JSON file under ``pins/`` in the variant folder. Only its existence counts; its content is
informational. So any number of processes can pin and unpin at once, a crash leaves a complete pin or none, and a
damaged pin still protects.
"""

from __future__ import annotations

import json
import re
from dataclasses import dataclass

from verl_rollout_skip.errors import StoreError
from verl_rollout_skip.runs.checked_json import timestamp
from verl_rollout_skip.runs.paths import PINS
from verl_rollout_skip.store.new_files import publish
from verl_rollout_skip.store.storage import Storage

_WHOLE = "variant.json"
_STEP = re.compile(r"step_(\d{6,})\.json")
_MAX_BYTES = 1 << 20


@dataclass(frozen=True)
class Pin:
    """A pinned step with all its generation batches, or a pinned variant if ``step`` is None."""

    step: int | None
    note: str | None = None
    pinned_at: str | None = None

    @property
    def name(self) -> str:
        return _WHOLE if self.step is None else f"step_{self.step:06d}.json"

    def __str__(self) -> str:
        return "the whole variant" if self.step is None else f"step {self.step}"


def read_pins(storage: Storage) -> list[Pin]:
    """The pins of a variant: the whole variant first, then steps in order."""
    found = []
    for name in storage.names(PINS):
        match = _STEP.fullmatch(name)
        if match is not None or name == _WHOLE:
            found.append(_read(storage, name, None if match is None else int(match[1])))
    return sorted(found, key=lambda pin: -1 if pin.step is None else pin.step)


def add_pin(storage: Storage, step: int | None, note: str | None = None) -> Pin:
    """Pin a step, or the whole variant. Pinning again replaces the note."""
    pin = Pin(step, note, timestamp())
    data = json.dumps({"step": step, "note": note, "pinned_at": pin.pinned_at}, indent=2, ensure_ascii=False) + "\n"
    publish(storage, PINS, pin.name, data.encode("utf-8", "surrogateescape"), replace=True)
    return pin


def remove_pin(storage: Storage, step: int | None) -> bool:
    """Remove a pin; return whether there was one."""
    name = Pin(step).name
    existed = storage.info(PINS, name) is not None
    storage.delete(PINS, name)
    return existed


def is_pinned(storage: Storage, step: int) -> bool:
    """Whether a step is pinned, directly or through its variant."""
    return any(storage.info(PINS, Pin(which).name) is not None for which in (None, step))


def _read(storage: Storage, name: str, step: int | None) -> Pin:
    try:
        fields = json.loads(storage.read(PINS, name, _MAX_BYTES))
        note, pinned_at = (fields.get(key) for key in ("note", "pinned_at"))
        return Pin(step, *(None if value is None else str(value) for value in (note, pinned_at)))
    except (ValueError, AttributeError, RecursionError, StoreError, FileNotFoundError):
        return Pin(step, "(the pin file could not be read)")
