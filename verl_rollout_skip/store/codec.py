"""Rollouts to Parquet and back: ``prepare`` and ``write`` on the way in, ``Reader`` on the way out."""

from verl_rollout_skip.store.columns import Part, Prepared, Proof, prepare, take
from verl_rollout_skip.store.decoder import Reader
from verl_rollout_skip.store.encoder import Summary, prompt_digests, write
from verl_rollout_skip.store.format import FORMAT_VERSION, METADATA_KEY

__all__ = [
    "FORMAT_VERSION",
    "METADATA_KEY",
    "Part",
    "Prepared",
    "Proof",
    "Reader",
    "Summary",
    "prepare",
    "prompt_digests",
    "take",
    "write",
]
