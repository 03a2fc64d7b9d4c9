"""The version of the file format, and the names that it reserves: the metadata key and the added columns."""

from __future__ import annotations

from enum import Enum
from typing import Any, Final

from verl_rollout_skip.errors import CorruptEntryError, NewerFormatError, OldFormatError

FORMAT_VERSION = 2
METADATA_KEY = b"rollout_skip"
"""The metadata key under which a Parquet file stores its description as JSON."""
PROMPT_LENGTH: Final = "skip__prompt_length"
RESPONSE_LENGTH: Final = "skip__response_length"
INPUT_LENGTH: Final = "skip__input_length"
INPUT_RESPONSE_LENGTH: Final = "skip__input_response_length"
SCORE: Final = "skip__score"
PROMPT_DIGEST: Final = "skip__prompt_digest"
BLOBS: Final = "skip__blobs"
BLOB_SIZES: Final = "skip__blob_sizes"
BLOBS_OF: Final = "skip__blobs_of__"
OBJECT: Final = "skip__object__"
SHAPE: Final = "skip__shape__"
"""``BLOBS_OF``, ``OBJECT`` and ``SHAPE`` are prefixes of the name of the column that they describe."""
SAME_IN_ALL_PARTS = ("kind", "nodes", "order", "device", "arrays", "meta")
"""The fields in the description of a batch that must be the same in all parts of an entry."""


class Side(str, Enum):
    """The two batches of an entry: the output of the rollout step, and its input."""

    OUTPUT = "output"
    INPUT = "input"


def check_version(version: Any) -> None:
    """Raise if a file has a different format version or an invalid one."""
    if type(version) is not int or version < 1:
        raise CorruptEntryError(f"Its format version is {version!r}, which is not a valid version.")
    if version > FORMAT_VERSION:
        raise NewerFormatError(f"It has {explain_version(version)}")
    if version < FORMAT_VERSION:
        raise OldFormatError(f"It has {explain_version(version)}")


def explain_version(version: Any) -> str:
    """Explain why a file with another format version cannot be read, and what to do. Continues "It has …"."""
    if isinstance(version, int) and version < FORMAT_VERSION:
        return (
            f"format version {version}, but this version of verl-rollout-skip reads only version {FORMAT_VERSION}. "
            "Record again into another folder, or rename or delete the old one; the version of verl-rollout-skip that "
            "wrote it can still read it."
        )
    return (
        f"format version {version}, but this version of verl-rollout-skip reads up to version {FORMAT_VERSION}. "
        "Upgrade verl-rollout-skip to read it."
    )
