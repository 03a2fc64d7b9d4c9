"""Read-only access to recorded rollouts: keys, records, columns and cells, without torch.

``StoreReader`` is a folder of entries, ``EntryReader`` an open entry. Command line, report, statistics and exports use
these and nothing below them; ``RolloutStore`` builds whole batches on top.
"""

from verl_rollout_skip.store.format import PROMPT_DIGEST, PROMPT_LENGTH, RESPONSE_LENGTH, SCORE, Side
from verl_rollout_skip.store.reader.entry import EntryReader
from verl_rollout_skip.store.reader.folder import Stamp, StoreReader, Unreadable, split_path
from verl_rollout_skip.store.record import EntryRecord

__all__ = [
    "PROMPT_DIGEST",
    "PROMPT_LENGTH",
    "RESPONSE_LENGTH",
    "SCORE",
    "EntryReader",
    "EntryRecord",
    "Side",
    "Stamp",
    "StoreReader",
    "Unreadable",
    "split_path",
]
