"""The record of one entry: what is known of a recorded rollout without opening its Parquet file.

It is JSON for people, written in one fixed way and closed by a checksum of its own, so that any changed byte shows.
"""

from __future__ import annotations

import json
import math
from dataclasses import asdict, dataclass, field
from dataclasses import fields as dataclass_fields
from datetime import datetime, timezone
from typing import TYPE_CHECKING, Any

import xxhash

from verl_rollout_skip._version import __version__
from verl_rollout_skip.errors import CorruptEntryError, UnreadableEntryError
from verl_rollout_skip.key import RolloutKey
from verl_rollout_skip.store.format import FORMAT_VERSION, check_version

if TYPE_CHECKING:
    from verl_rollout_skip.store.codec.encoder import Summary

MAX_RECORD_BYTES = 16 << 20
_CHECKSUM = b',\n  "checksum": "'


@dataclass(frozen=True)
class EntryRecord:
    """What was recorded under a key. ``digest`` and ``bytes`` are of the Parquet file; ``info`` is the caller's.

    ``content`` is a digest of the recorded values alone: two entries with the same content hold the same rollout,
    even if their timings and uids differ.
    """

    key: RolloutKey
    rows: int
    prompt_tokens: int | None
    response_tokens: int | None
    mean_prompt_length: float | None
    mean_response_length: float | None
    mean_score: float | None
    digest: str
    bytes: int
    content: str
    encode_s: float
    created_at: str
    written_by: str
    info: dict[str, Any] = field(default_factory=dict)


def make_record(
    key: RolloutKey, summary: Summary, digest: str, size: int, encode_s: float, info: dict[str, Any]
) -> EntryRecord:
    """The record of a Parquet file that was just written."""

    def mean(total: int | None) -> float | None:
        return None if total is None or not summary.rows else total / summary.rows

    score = summary.mean_score
    return EntryRecord(
        key=key,
        rows=summary.rows,
        prompt_tokens=summary.prompt_tokens,
        response_tokens=summary.response_tokens,
        mean_prompt_length=mean(summary.prompt_tokens),
        mean_response_length=mean(summary.response_tokens),
        mean_score=score if score is not None and math.isfinite(score) else None,
        digest=digest,
        bytes=size,
        content=summary.content_digest,
        encode_s=round(encode_s, 6),
        created_at=datetime.now(timezone.utc).isoformat(timespec="seconds"),
        written_by=f"verl-rollout-skip {__version__}",
        info=info,
    )


def record_bytes(record: EntryRecord) -> bytes:
    """The record as a JSON file."""
    return _render({"format_version": FORMAT_VERSION, **asdict(record)})


def parse_record(data: bytes, key: RolloutKey) -> EntryRecord:
    """The inverse of ``record_bytes`` for bytes that cannot be trusted; it must be the record of ``key``."""
    try:
        fields = json.loads(data)
        check_version(fields["format_version"])
        if not _is_untouched(data):
            raise CorruptEntryError("Its checksum is wrong: it was damaged or edited.")
        del fields["format_version"]
        known = {field.name: fields[field.name] for field in dataclass_fields(EntryRecord)}
        record = EntryRecord(**{**known, "key": RolloutKey(**fields["key"])})
    except UnreadableEntryError:
        raise
    except (ValueError, TypeError, KeyError, RecursionError) as error:
        raise CorruptEntryError(f"It is no record of an entry ({type(error).__name__}: {error}).") from error
    if record.key != key:
        raise CorruptEntryError(f"It is the record of {record.key}: the file was moved or renamed.")
    return record


def _is_untouched(data: bytes) -> bool:
    """Whether the checksum at the end belongs to the bytes before it; rendering all anew takes ten times longer."""
    body, _, end = data.rpartition(_CHECKSUM)
    return end == xxhash.xxh3_128(body + b"\n}").hexdigest().encode() + b'"\n}\n'


def _render(fields: dict[str, Any]) -> bytes:
    body = json.dumps(fields, indent=2, allow_nan=False)
    checksum = xxhash.xxh3_128(body.encode()).hexdigest()
    return (json.dumps({**fields, "checksum": checksum}, indent=2, allow_nan=False) + "\n").encode()
