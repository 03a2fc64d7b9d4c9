"""Registers the CPU platform, engines and rollout; verl imports this in every process (VERL_USE_EXTERNAL_MODULES)."""

from __future__ import annotations

import os

import recipes.cpu.platform
import recipes.cpu.rollout

# Only verl's workers train, and this import is slow.
if "WG_BACKEND" in os.environ:
    import recipes.cpu.engines  # noqa: F401
