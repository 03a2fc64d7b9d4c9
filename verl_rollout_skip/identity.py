"""What a file or folder *is*, by its content: the same wherever it is mounted, and quick for hundreds of gigabytes.

Small files are digested whole. Of large ones the size, both ends and blocks in between are: two checkpoints of one
architecture have the same size and differ in nearly every block. What cannot be read from here is known by its name
only, and that is said.
"""

from __future__ import annotations

import fnmatch
import os
from collections.abc import Iterable
from pathlib import Path

import xxhash

from verl_rollout_skip.sizes import format_size

_WHOLE_BYTES = 8 << 20
_WHOLE_DATA_BYTES = 2 << 30
_END_BYTES = 1 << 20
_BLOCKS, _BLOCK_BYTES = 16, 64 << 10
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
        return _name_identity(path)


def _folder_identity(path: str, tokenizer: bool | None) -> str:
    folder = Path(os.path.expanduser(path))
    if not folder.is_dir():
        return file_identity(path) if folder.is_file() else _name_identity(path)
    files = sorted(_relevant(folder, tokenizer))
    digest = xxhash.xxh3_128()
    total = 0
    for file in files:
        size = file.stat().st_size
        total += size
        digest.update(f"{file.relative_to(folder).as_posix()}\0{size}\0{_digest(file, _WHOLE_BYTES)}\0".encode())
    return f"{len(files)} files, {format_size(total)}, digest {digest.hexdigest()}"


def _relevant(folder: Path, tokenizer: bool | None) -> Iterable[Path]:
    for parent, folders, names in os.walk(folder, followlinks=True):
        folders[:] = [name for name in folders if not _matches(name, _IRRELEVANT)]
        for name in names:
            if _matches(name, _IRRELEVANT) or (tokenizer is not None and _matches(name, _TOKENIZER) is not tokenizer):
                continue
            yield Path(parent, name)


def _matches(name: str, patterns: Iterable[str]) -> bool:
    return any(fnmatch.fnmatchcase(name, pattern) for pattern in patterns)


def _digest(file: Path, whole_up_to: int) -> str:
    digest = xxhash.xxh3_128()
    with open(file, "rb") as stream:
        size = os.fstat(stream.fileno()).st_size
        if size <= whole_up_to:
            while piece := stream.read(_READ_BYTES):
                digest.update(piece)
        else:
            inner = size - 2 * _END_BYTES
            places = [(0, _END_BYTES), (size - _END_BYTES, _END_BYTES)]
            places += [(_END_BYTES + inner * block // _BLOCKS, _BLOCK_BYTES) for block in range(_BLOCKS)]
            for start, length in places:
                stream.seek(start)
                digest.update(stream.read(length))
    return digest.hexdigest()


def _name_identity(path: str) -> str:
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
