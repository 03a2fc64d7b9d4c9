"""Removes recorded steps, whole variants and leftover files: ``plan.py`` decides, ``removal.py`` executes a plan."""

from verl_rollout_skip.tools.prune.plan import (
    Conditions,
    Plan,
    RecordedStep,
    RecordedVariant,
    UnusedFile,
    find_set_aside,
    inspect_columns,
    inspect_variant,
    make_plans,
    parse_age,
    to_timestamp,
)
from verl_rollout_skip.tools.prune.removal import Kept, execute

__all__ = [
    "Conditions",
    "Kept",
    "Plan",
    "RecordedStep",
    "RecordedVariant",
    "UnusedFile",
    "execute",
    "find_set_aside",
    "inspect_columns",
    "inspect_variant",
    "make_plans",
    "parse_age",
    "to_timestamp",
]
