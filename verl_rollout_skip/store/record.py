"""The record of one entry: its parts, and metadata of the rollout that is available without opening them.

The record is also the commit: an entry exists if and only if its record does (``commit.py``). A record is readable JSON
with a checksum at its end, so any changed byte is detected.
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterable
from dataclasses import asdict, dataclass, field
from dataclasses import fields as dataclass_fields
from datetime import datetime, timezone
from typing import TYPE_CHECKING, Any

from verl_rollout_skip._version import __version__
from verl_rollout_skip.errors import CorruptEntryError, UnreadableEntryError
from verl_rollout_skip.key import RolloutKey
from verl_rollout_skip.store import names
from verl_rollout_skip.store.format import FORMAT_VERSION, check_version
from verl_rollout_skip.store.new_files import is_sealed, sealed_json

if TYPE_CHECKING:
    from verl_rollout_skip.store.codec.encoder import Summary

MAX_RECORD_BYTES = 16 << 20


@dataclass(frozen=True)
class RecordedPart:
    """A Parquet file of an entry: its name, number of rows, size, and digest."""

    file: str
    rows: int
    bytes: int
    digest: str


@dataclass(frozen=True)
class EntryRecord:
    """What was recorded under a key: the rows of its ``parts``, in order. ``info`` is the caller's metadata.

    ``content`` is a digest of the recorded values without timings and uids: two entries with equal ``content`` contain
    the same rollout.
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
        """The size of the parts on disk. A file that is listed more than once counts once."""
        return sum({part.file: part.bytes for part in self.parts}.values())


def make_record(
    key: RolloutKey, summary: Summary, parts: Iterable[RecordedPart], encode_s: float, info: dict[str, Any]
) -> EntryRecord:
    """Make the record for parts that were just written."""

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
    """Encode a record as a JSON file."""
    return sealed_json({"format_version": FORMAT_VERSION, **asdict(record)}, allow_nan=False)


def parse_record(data: bytes, key: RolloutKey) -> EntryRecord:
    """Parse and check the record of ``key`` from untrusted bytes. The inverse of ``record_bytes``."""
    try:
        fields = json.loads(data)
        check_version(fields["format_version"])
        if not is_sealed(data):
            raise CorruptEntryError("Its checksum is wrong: it was damaged or edited.")
        del fields["format_version"]
        arguments = {field.name: fields[field.name] for field in dataclass_fields(EntryRecord)}
        arguments |= {"key": RolloutKey(**fields["key"]), "parts": tuple(_parse_part(part) for part in fields["parts"])}
        record = EntryRecord(**arguments)
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
    """Check the counts, and that each part is named after key and digest, so that a record cannot list other files."""
    for part in record.parts:
        if not names.is_digest(part.digest) or part.file != names.part_name(record.key, part.digest):
            raise CorruptEntryError(f"It lists {part.file!r}, which is not the name of a part of {record.key}.")
        if any(type(number) is not int or number < 0 for number in (part.rows, part.bytes)):
            raise CorruptEntryError(f"It lists {part.file} with {part.rows!r} rows and {part.bytes!r} bytes.")
    if not record.parts or sum(part.rows for part in record.parts) != record.rows:
        part_rows = [part.rows for part in record.parts]
        raise CorruptEntryError(
            f"It says that the entry has {record.rows!r} rows, but the parts that it lists have {part_rows}."
        )
