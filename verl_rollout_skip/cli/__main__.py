"""``python -m verl_rollout_skip.cli``, the same as ``rollout-skip``."""

from __future__ import annotations

import sys

from verl_rollout_skip.cli.program import main

if __name__ == "__main__":
    sys.exit(main())
