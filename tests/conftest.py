"""Shared settings of all tests."""

from __future__ import annotations

import os

# Before torch, verl and datasets are imported: the tests run on a shared machine and never reach for the network.
os.environ.setdefault("OMP_NUM_THREADS", "1")
os.environ.setdefault("HF_HUB_OFFLINE", "1")
os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
