"""The version of the file format, what every file carries to describe itself, and the columns that are added to it."""

from __future__ import annotations

from typing import Any, Final

from verl_rollout_skip.errors import CorruptEntryError, NewerFormatError, OldFormatError

FORMAT_VERSION = 2
METADATA_KEY = b"rollout_skip"
"""Under this key a Parquet file holds the JSON description of what it holds."""
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
"""The last three go before the name of the column that they belong to."""


def check_version(version: Any) -> None:
    """Refuse what another version of this package wrote in another format."""
    if type(version) is not int or version < 1:
        raise CorruptEntryError(f"It gives {version!r} as its format version; that is not a version.")
    if version > FORMAT_VERSION:
        raise NewerFormatError(f"It is of {explain_version(version)}")
    if version < FORMAT_VERSION:
        raise OldFormatError(f"It is of {explain_version(version)}")


def explain_version(version: Any) -> str:
    """Why a file of another format version is not read, and what to do about it."""
    if isinstance(version, int) and version < FORMAT_VERSION:
        return (
            f"format version {version}, and this version of verl-rollout-skip reads version {FORMAT_VERSION} only. "
            "Record again into another folder, or rename or delete the old one; the version of verl-rollout-skip that "
            "wrote it can still read it."
        )
    return f"format version {version}, this package reads up to {FORMAT_VERSION}. Upgrade verl-rollout-skip to read it."
