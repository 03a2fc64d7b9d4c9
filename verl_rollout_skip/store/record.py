"""The record of one entry: its parts, and what is known of the rollout without opening them.

The record is also the commit: an entry exists if its record does (``commit.py``). It is readable JSON, written in one
fixed way and closed by a checksum of its own, so that any changed byte shows.
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterable
from dataclasses import asdict, dataclass, field
from dataclasses import fields as dataclass_fields
from datetime import datetime, timezone
from typing import TYPE_CHECKING, Any

import xxhash

from verl_rollout_skip._version import __version__
from verl_rollout_skip.errors import CorruptEntryError, UnreadableEntryError
from verl_rollout_skip.key import RolloutKey
from verl_rollout_skip.store import names
from verl_rollout_skip.store.format import FORMAT_VERSION, check_version

if TYPE_CHECKING:
    from verl_rollout_skip.store.codec.encoder import Summary

MAX_RECORD_BYTES = 16 << 20
_CHECKSUM = b',\n  "checksum": "'


@dataclass(frozen=True)
class RecordedPart:
    """A Parquet file of an entry: its name, how many rows and bytes it has, and the digest of its bytes."""

    file: str
    rows: int
    bytes: int
    digest: str


@dataclass(frozen=True)
class EntryRecord:
    """What was recorded under a key. The rows of ``parts``, in order, are those of the entry; ``info`` is the caller's.

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
    parts: tuple[RecordedPart, ...]
    content: str
    encode_s: float
    created_at: str
    written_by: str
    info: dict[str, Any] = field(default_factory=dict)

    @property
    def bytes(self) -> int:
        """The size of the parts on disk; equal parts are one file."""
        return sum({part.file: part.bytes for part in self.parts}.values())


def make_record(
    key: RolloutKey, summary: Summary, parts: Iterable[RecordedPart], encode_s: float, info: dict[str, Any]
) -> EntryRecord:
    """The record of parts that were just written."""

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
        parts=tuple(parts),
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
        known |= {"key": RolloutKey(**fields["key"]), "parts": tuple(_parse_part(part) for part in fields["parts"])}
        record = EntryRecord(**known)
    except UnreadableEntryError:
        raise
    except (ValueError, TypeError, KeyError, RecursionError) as error:
        raise CorruptEntryError(f"It is not the record of an entry ({type(error).__name__}: {error}).") from error
    if record.key != key:
        raise CorruptEntryError(f"It is the record of {record.key}: the file was moved or renamed.")
    _check_parts(record)
    return record


def _parse_part(fields: dict[str, Any]) -> RecordedPart:
    return RecordedPart(**{field.name: fields[field.name] for field in dataclass_fields(RecordedPart)})


def _check_parts(record: EntryRecord) -> None:
    """A part must have the name that follows from its key and digest: no other file can be named, here or elsewhere."""
    for part in record.parts:
        if not names.is_digest(part.digest) or part.file != names.part_name(record.key, part.digest):
            raise CorruptEntryError(f"It lists {part.file!r}, which is not the name of a part of {record.key}.")
        if any(type(number) is not int or number < 0 for number in (part.rows, part.bytes)):
            raise CorruptEntryError(f"It gives {part.file} {part.rows!r} rows and {part.bytes!r} bytes.")
    if not record.parts or sum(part.rows for part in record.parts) != record.rows:
        found = [part.rows for part in record.parts]
        raise CorruptEntryError(f"It says {record.rows!r} rows and lists parts of {found} rows.")


def _is_untouched(data: bytes) -> bool:
    """Whether the checksum at the end belongs to the bytes before it; rendering all again takes ten times longer."""
    body, _, end = data.rpartition(_CHECKSUM)
    return end == xxhash.xxh3_128(body + b"\n}").hexdigest().encode() + b'"\n}\n'


def _render(fields: dict[str, Any]) -> bytes:
    body = json.dumps(fields, indent=2, allow_nan=False)
    checksum = xxhash.xxh3_128(body.encode()).hexdigest()
    return (json.dumps({**fields, "checksum": checksum}, indent=2, allow_nan=False) + "\n").encode()
