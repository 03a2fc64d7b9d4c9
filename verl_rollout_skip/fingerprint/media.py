"""Identifies the image, video and audio files that rows of the training data name by path.

They are compared by path, size and modification time, because a dataset may name millions of files. Only columns that
can contain such paths are read. Media stored in the data file itself are covered by that file's digest.
"""

from __future__ import annotations

import hashlib
import json
import logging
import os
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq

from verl_rollout_skip.fingerprint.identity import SAMPLED, UNREADABLE
from verl_rollout_skip.store.sizes import format_size
from verl_rollout_skip.store.threads import map_in_threads

logger = logging.getLogger(__name__)

_MAX_FILES = 200_000
_MANY_FILES = 10_000
_AT_ONCE = 1000
_MAX_PATH = 4096
_MAX_SPACE = 64
_COLUMNS = {"data.image_key": "images", "data.video_key": "videos", "data.audio_key": "audios"}
_PROMPT = ("data.prompt_key", "prompt")
# The fields that name a file in a message or in an item of these columns; other strings in an item are options.
_FIELDS = {"image", "video", "audio", "path", "url", "image_url", "video_url", "audio_url"}


def media_identity(files: Sequence[Any], config: Mapping[str, Any]) -> str | None:
    """The identity of the files that the rows of data files name; None if there are none. ``config`` is flat."""
    columns = {str(config.get(key) or default) for key, default in _COLUMNS.items()}
    prompt = str(config.get(_PROMPT[0]) or _PROMPT[1])
    named: set[str] = set()
    unsearched: list[str] = []
    for file in files:
        try:
            named.update(path for text in _texts(str(file), columns, prompt) if (path := _local(text)) is not None)
        except OSError:
            continue  # the identity of the data file reports this
        except (ValueError, pa.ArrowException, RecursionError) as error:
            logger.debug("%s: %s", file, error)
            unsearched.append(f"{Path(str(file)).name} cannot be searched for more: {UNREADABLE}")
    if not named and not unsearched:
        return None
    paths = sorted(named)
    chosen = paths[:: -(-len(paths) // _MAX_FILES) or 1]
    if len(chosen) >= _MANY_FILES:
        logger.info("reading size and time of %d image, video and audio files named in the data", len(chosen))
    groups = [chosen[start : start + _AT_ONCE] for start in range(0, len(chosen), _AT_ONCE)]
    stats = [stat for group in map_in_threads(_stats, groups) for stat in group]
    digest = hashlib.sha256()
    for path, stat in zip(chosen, stats, strict=True):
        digest.update(f"{path}\0{stat}\0".encode("utf-8", "surrogatepass"))
    count = f"{len(paths)} files" if len(chosen) == len(paths) else f"{len(paths)} files, {SAMPLED}: {len(chosen)}"
    lost = stats.count(None)
    notes = [*([f"{lost} of them: {UNREADABLE}"] if lost else []), *unsearched]
    note = f" ({'; '.join(notes)})" if notes else ""
    total = sum(stat[0] for stat in stats if stat is not None)
    return f"{count}, {format_size(total)}, digest of paths, sizes and times {digest.hexdigest()[:32]}{note}"


def _stats(paths: Iterable[str]) -> list[tuple[int, int] | None]:
    """Size and modification time of each file; None if it is missing.

    Times are whole seconds, because not every copy that preserves times keeps fractions.
    """
    return [_stat(path) for path in paths]


def _stat(path: str) -> tuple[int, int] | None:
    try:
        stat = os.stat(path)
    except (OSError, ValueError):
        return None
    return stat.st_size, int(stat.st_mtime)


def _local(text: str) -> str | None:
    path = text.removeprefix("file://")
    if not path or len(path) > _MAX_PATH or "://" in path or path.startswith("data:"):
        return None
    return os.path.expanduser(path)


def _texts(file: str, columns: set[str], prompt: str) -> Iterator[str]:
    path = Path(os.path.expanduser(file))
    if path.suffix == ".parquet":
        yield from _texts_of_parquet(path, columns, prompt)
    elif path.suffix in (".json", ".jsonl"):
        for row in _rows_of_json(path, columns | _FIELDS):
            for name in columns & row.keys():
                yield from _texts_of_item(row[name], is_item=True)
            yield from _texts_of_item(row.get(prompt), is_item=False)


def _texts_of_parquet(path: Path, columns: set[str], prompt: str) -> Iterator[str]:
    with pq.ParquetFile(path) as file:
        leaves = [file.schema.column(index) for index in range(len(file.schema))]
        wanted = [leaf.path for leaf in leaves if _holds_paths(leaf, columns, prompt, leaves)]
        if not wanted:
            return
        for batch in file.iter_batches(columns=wanted):
            for column in batch.columns:
                yield from _texts_of_column(column)


def _holds_paths(leaf: Any, columns: set[str], prompt: str, leaves: Sequence[Any]) -> bool:
    if leaf.logical_type.type != "STRING" and leaf.converted_type != "UTF8":
        return False
    top, *inner = leaf.path.split(".")
    names = [name for name in inner if name not in ("list", "element", "item", "array")]
    if top == prompt:
        return bool(names) and names[-1] in _FIELDS
    # verl uses the bytes of an item if it has any, and then ignores its path.
    has_bytes = any(other.path == f"{leaf.path.rpartition('.')[0]}.bytes" for other in leaves)
    return top in columns and (not names or names[-1] in _FIELDS) and not has_bytes


def _texts_of_column(column: pa.Array) -> Iterator[str]:
    kind = column.type
    if pa.types.is_struct(kind):
        for index in range(kind.num_fields):
            yield from _texts_of_column(column.field(index))
    elif pa.types.is_list(kind) or pa.types.is_large_list(kind) or pa.types.is_fixed_size_list(kind):
        yield from _texts_of_column(column.flatten())
    else:
        yield from (text for text in column.unique().to_pylist() if isinstance(text, str))


def _rows_of_json(path: Path, names: set[str]) -> Iterator[dict[str, Any]]:
    """The rows that may contain one of these names, from JSON lines or a JSON list."""
    named = re.compile("|".join(re.escape(json.dumps(name)) for name in sorted(names)).encode())
    with open(path, "rb") as stream:
        is_list = stream.read(_MAX_SPACE).lstrip()[:1] == b"["
        stream.seek(0)
        if is_list:
            rows = json.load(stream)
        else:
            rows = (json.loads(line) for line in stream if named.search(line))
        yield from (row for row in rows if isinstance(row, dict))


def _texts_of_item(item: Any, is_item: bool) -> Iterator[str]:
    """With ``is_item``, a bare string is a path. Inside a message, only the fields that name files contain paths."""
    if isinstance(item, str):
        if is_item:
            yield item
    elif isinstance(item, list):
        for inner in item:
            yield from _texts_of_item(inner, is_item)
    elif isinstance(item, dict) and "bytes" not in item:
        for name, value in item.items():
            yield from _texts_of_item(value, is_item=name in _FIELDS)
