"""What a file or folder *is*, by its content: the same wherever it is mounted, and quick for hundreds of gigabytes.

Small files are digested whole. Of large ones the size, both ends and blocks in between are, and in safetensors files a
piece of every tensor: a checkpoint that was trained on differs in nearly every number of the tensors that were trained.
What cannot be read from here is known by its name only, and that is said.
"""

from __future__ import annotations

import fnmatch
import json
import os
import struct
from collections.abc import Iterable
from pathlib import Path
from typing import BinaryIO

import xxhash

from verl_rollout_skip.sizes import format_size

_WHOLE_BYTES = 8 << 20
_WHOLE_DATA_BYTES = 2 << 30
_END_BYTES = 1 << 20
_BLOCKS, _BLOCK_BYTES = 16, 64 << 10
_TENSORS, _TENSOR_BYTES = 256, 4 << 10
_MAX_HEADER_BYTES = 64 << 20
_READ_BYTES = 16 << 20
_TOKENIZER = (
    *("tokenizer*", "vocab*", "merges*", "special_tokens_map.json", "added_tokens.json"),
    *("chat_template*", "*.jinja", "*.model", "*.tiktoken"),
)
_IRRELEVANT = (".*", "*.md", "LICENSE*", "USE_POLICY*", "*.png", "*.jpg", "*.pdf", "__pycache__")
UNREADABLE = "content not readable from here"


def model_identity(path: str) -> str:
    """Configuration, code and weights of a model folder, or its name on the hub."""
    return _folder_identity(path, tokenizer=False)


def tokenizer_identity(path: str) -> str:
    """Tokenizer and chat template of a model folder, or its name on the hub."""
    return _folder_identity(path, tokenizer=True)


def data_identity(path: str) -> str:
    """A file of training data; digested whole up to 2 GiB, because a single changed row matters."""
    return _file_or_name(path, _WHOLE_DATA_BYTES)


def file_identity(path: str) -> str:
    """A source or configuration file."""
    return _file_or_name(path, _WHOLE_BYTES)


def _file_or_name(path: str, whole_up_to: int) -> str:
    file = Path(os.path.expanduser(path))
    try:
        if file.is_dir():
            return _folder_identity(path, tokenizer=None)
        size = file.stat().st_size
        return f"{format_size(size)}, digest {_digest(file, whole_up_to)}"
    except OSError:
        return name_identity(path)


def _folder_identity(path: str, tokenizer: bool | None) -> str:
    folder = Path(os.path.expanduser(path))
    if not folder.is_dir():
        return file_identity(path) if folder.is_file() else name_identity(path)
    files = sorted(_relevant(folder, tokenizer))
    digest = xxhash.xxh3_128()
    total, unreadable = 0, []
    for file in files:
        name = file.relative_to(folder).as_posix()
        try:
            size, content = file.stat().st_size, _digest(file, _WHOLE_BYTES)
        except OSError:
            unreadable.append(name)
            size, content = 0, "unreadable"
        total += size
        digest.update(f"{name}\0{size}\0{content}\0".encode("utf-8", "surrogateescape"))
    lost = f" ({', '.join(unreadable)}: {UNREADABLE})" if unreadable else ""
    return f"{len(files)} files, {format_size(total)}, digest {digest.hexdigest()}{lost}"


def _relevant(folder: Path, tokenizer: bool | None) -> Iterable[Path]:
    seen: set[str] = set()
    for parent, folders, names in os.walk(folder, followlinks=True):
        real = os.path.realpath(parent)
        if real in seen:
            folders.clear()  # a link that leads back
            continue
        seen.add(real)
        folders[:] = sorted(name for name in folders if not _matches(name, _IRRELEVANT))
        for name in names:
            if _matches(name, _IRRELEVANT) or (tokenizer is not None and _matches(name, _TOKENIZER) is not tokenizer):
                continue
            yield Path(parent, name)


def _matches(name: str, patterns: Iterable[str]) -> bool:
    return any(fnmatch.fnmatchcase(name, pattern) for pattern in patterns)


def _digest(file: Path, whole_up_to: int) -> str:
    digest = xxhash.xxh3_128()
    with open(file, "rb", buffering=0) as stream:
        size = os.fstat(stream.fileno()).st_size
        if size <= whole_up_to:
            while piece := stream.read(_READ_BYTES):
                digest.update(piece)
        else:
            places = _blocks(size)
            if file.suffix == ".safetensors":
                places += _tensor_pieces(stream)
            for start, length in places:
                stream.seek(start)
                digest.update(stream.read(length))
    return digest.hexdigest()


def _blocks(size: int) -> list[tuple[int, int]]:
    """Both ends of a file and blocks spread over the rest."""
    inner = size - 2 * _END_BYTES
    places = [(0, _END_BYTES), (size - _END_BYTES, _END_BYTES)]
    return places + [(_END_BYTES + inner * block // _BLOCKS, _BLOCK_BYTES) for block in range(_BLOCKS)]


def _tensor_pieces(stream: BinaryIO) -> list[tuple[int, int]]:
    """The middle of each tensor of a safetensors file, or of evenly chosen ones if they are very many."""
    length = struct.unpack("<Q", stream.read(8))[0]
    if length > _MAX_HEADER_BYTES:
        return []
    try:
        header = json.loads(stream.read(length))
        spans = sorted(tuple(item["data_offsets"]) for name, item in header.items() if name != "__metadata__")
        spans = spans[:: -(-len(spans) // _TENSORS)] if spans else []
        return [(8 + length + max(first, (first + last - _TENSOR_BYTES) // 2), _TENSOR_BYTES) for first, last in spans]
    except (ValueError, TypeError, KeyError, AttributeError):
        return []  # not what its name says: the blocks have to do


def name_identity(path: str) -> str:
    """What cannot be read from here: its name, with the commit if the hub's local cache knows it."""
    commit = _hub_commit(path)
    if commit is not None:
        return f"{path} at commit {commit}"
    return f"{path} ({UNREADABLE})"


def _hub_commit(name: str) -> str | None:
    """The commit of a model or dataset name in the local cache of the hub."""
    if name.count("/") != 1 or name.startswith(("/", "~", ".")):
        return None
    home = os.environ.get("HF_HOME", os.path.expanduser("~/.cache/huggingface"))
    cache = Path(os.environ.get("HF_HUB_CACHE", os.path.join(home, "hub")))
    for kind in ("models", "datasets"):
        reference = cache / f"{kind}--{name.replace('/', '--')}" / "refs" / "main"
        if reference.is_file():
            return reference.read_text().strip()
    return None


def is_tokenizer_file(name: str) -> bool:
    """Whether a file of a model folder belongs to its tokenizer or chat template."""
    return _matches(name, _TOKENIZER)
