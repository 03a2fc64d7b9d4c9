"""Read-only access to recorded rollouts: keys, records, columns and cells, without torch.

``StoreReader`` reads a folder of entries, ``EntryReader`` one open entry. The command line, the report, statistics and
exports use only these two; ``RolloutStore`` builds whole batches on top of the same files.
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
