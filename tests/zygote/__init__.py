"""Starts Python processes, Ray's workers among them, without the nine seconds of imports that each of them needs.

``run`` starts a module as ``python -m`` would, by forking a process that has the heavy libraries imported already; the
Ray workers of that process are forked in the same way. With ``ROLLOUT_SKIP_TESTS_ZYGOTE=0`` all are plain processes.
"""

from tests.zygote.client import ForkedProcess, Process, Zygote, close_all, enabled, ready, run

__all__ = ["ForkedProcess", "Process", "Zygote", "close_all", "enabled", "ready", "run"]
