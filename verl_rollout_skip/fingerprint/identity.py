"""Identifies files and folders by content, so that their identity does not depend on where they are mounted.

By default, every byte is hashed. On request, large model files are only sampled: their size, both ends, some blocks in
between, and a piece of each tensor in safetensors files. A file that the driver cannot read is identified by its name.
In both cases the identity says so.
"""

from __future__ import annotations

import fnmatch
import hashlib
import json
import os
import struct
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import BinaryIO

from verl_rollout_skip.fingerprint.file_digests import blob_digest, digest_files
from verl_rollout_skip.store.sizes import format_size

_WHOLE_BYTES = 8 << 20
_END_BYTES = 1 << 20
_BLOCKS, _BLOCK_BYTES = 16, 64 << 10
_TENSORS, _TENSOR_BYTES = 256, 4 << 10
_MAX_HEADER_BYTES = 64 << 20
_DIGEST_LETTERS = 32
_TOKENIZER = (
    *("tokenizer*", "vocab*", "merges*", "special_tokens_map.json", "added_tokens.json"),
    *("chat_template*", "*.jinja", "*.model", "*.tiktoken"),
)
_WEIGHTS = (
    *("*.safetensors", "*.safetensors.index.json", "*.bin", "*.bin.index.json", "*.pt", "*.pth", "*.ckpt"),
    *("*.gguf", "*.h5", "*.msgpack", "*.onnx", "*.onnx_data"),
)
_HIDDEN = (".*", "__pycache__")
# Files in a model folder that are not read to load the model, with the reason.
NON_MODEL_FILES = {
    ".*": "hidden: locks, download caches, version control",
    "__pycache__": "compiled from the sources, which are compared",
    "*.md": "documentation",
    "LICENSE*": "documentation",
    "USE_POLICY*": "documentation",
    "*.pdf": "documentation",
    "*.png": "an image in the model card",
    "*.jpg": "an image in the model card",
    "*.log": "a log",
    "nohup.out": "a log",
    "slurm-*.out": "a log",
    "events.out.tfevents.*": "a TensorBoard log",
    "training_args.bin": "settings of the training that produced the model",
    "trainer_state.json": "state of the training that produced the model",
    "optimizer.pt": "state of the training that produced the model",
    "scheduler.pt": "state of the training that produced the model",
    "rng_state*.pth": "state of the training that produced the model",
}
UNREADABLE = "content not readable from here"
SAMPLED = "only sampled"


def model_identity(path: str) -> str:
    """Configuration, code and weights of a model folder, or its name on the Hub."""
    return _folder_identity(path, _is_model_file)


def sampled_model_identity(path: str) -> str:
    """The same, but files over 8 MiB are only sampled."""
    return _folder_identity(path, _is_model_file, sampled=True)


def tokenizer_identity(path: str) -> str:
    """Tokenizer and chat template of a model folder, or its name on the Hub."""
    return _folder_identity(path, is_tokenizer_file)


def processing_identity(path: str) -> str:
    """Tokenizer, chat template, processor and code of a folder (everything but weights), or its name on the Hub."""
    return _folder_identity(path, _is_not_weights)


def data_identity(path: str) -> str:
    """A training data file."""
    return _file_identity(path, sampled=False)


def file_identity(path: str) -> str:
    """A source or configuration file."""
    return _file_identity(path, sampled=False)


def _file_identity(path: str, sampled: bool) -> str:
    file = Path(os.path.expanduser(path))
    if os.path.isdir(file):
        return _folder_identity(path, lambda name: not _matches(name, _HIDDEN))
    try:
        size = file.stat().st_size
    except OSError:
        return name_identity(path)
    (digest,) = _digests([file], sampled)
    if digest is None:
        return name_identity(path)
    note = f", {SAMPLED}" if digest.of_samples else ""
    return f"{format_size(size)}{note}, digest {digest.text[:_DIGEST_LETTERS]}"


def _folder_identity(path: str, counts: Callable[[str], bool], sampled: bool = False) -> str:
    folder = Path(os.path.expanduser(path))
    if not os.path.isdir(folder):
        return _file_identity(path, sampled) if os.path.isfile(folder) else name_identity(path)
    files = sorted(_files(folder, counts))
    names = [file.relative_to(folder).as_posix() for file in files]
    sizes = [_size(file) for file in files]
    digests = _digests(files, sampled)
    whole = hashlib.sha256()
    for name, size, digest in zip(names, sizes, digests, strict=True):
        content = "unreadable" if digest is None else digest.text
        whole.update(f"{name}\0{size}\0{content}\0".encode("utf-8", "surrogateescape"))
    samples = sum(digest is not None and digest.of_samples for digest in digests)
    note = f", {samples} of them {SAMPLED}" if samples else ""
    unreadable = [name for name, digest in zip(names, digests, strict=True) if digest is None]
    lost = f" ({', '.join(unreadable)}: {UNREADABLE})" if unreadable else ""
    text = whole.hexdigest()[:_DIGEST_LETTERS]
    return f"{len(files)} files, {format_size(sum(sizes))}{note}, digest {text}{lost}"


def _size(file: Path) -> int:
    try:
        return file.stat().st_size
    except OSError:
        return 0


def _files(folder: Path, counts: Callable[[str], bool]) -> Iterable[Path]:
    seen: set[str] = set()
    errors: list[OSError] = []
    for parent, folders, names in os.walk(folder, followlinks=True, onerror=errors.append):
        real = os.path.realpath(parent)
        if real in seen:
            folders.clear()  # a link back to a parent folder
            continue
        seen.add(real)
        folders[:] = sorted(name for name in folders if not _matches(name, _HIDDEN))
        yield from (Path(parent, name) for name in names if counts(name))
    yield from (Path(error.filename) for error in errors)


def is_tokenizer_file(name: str) -> bool:
    """Whether a file of a model folder belongs to its tokenizer or chat template."""
    return _matches(name, _TOKENIZER) and not _matches(name, NON_MODEL_FILES)


def _is_model_file(name: str) -> bool:
    return not _matches(name, NON_MODEL_FILES) and not _matches(name, _TOKENIZER)


def _is_not_weights(name: str) -> bool:
    return not _matches(name, NON_MODEL_FILES) and not _matches(name, _WEIGHTS)


def _matches(name: str, patterns: Iterable[str]) -> bool:
    return any(fnmatch.fnmatchcase(name, pattern) for pattern in patterns)


@dataclass(frozen=True)
class _Digest:
    text: str
    of_samples: bool = False


def _digests(files: list[Path], sampled: bool) -> list[_Digest | None]:
    """The digest of each file; None if it cannot be read."""
    large = {file for file in files if sampled and _size(file) > _WHOLE_BYTES and blob_digest(file) is None}
    whole = iter(digest_files([file for file in files if file not in large]))
    texts = [_sample(file) if file in large else next(whole) for file in files]
    return [None if text is None else _Digest(text, file in large) for file, text in zip(files, texts, strict=True)]


def _sample(file: Path) -> str | None:
    digest = hashlib.sha256()
    try:
        with open(file, "rb", buffering=0) as stream:
            spans = _blocks(os.fstat(stream.fileno()).st_size)
            if file.suffix == ".safetensors":
                spans += _tensor_pieces(stream)
            for start, length in spans:
                stream.seek(start)
                digest.update(stream.read(length))
    except OSError:
        return None
    return digest.hexdigest()


def _blocks(size: int) -> list[tuple[int, int]]:
    """Both ends of a file and blocks spread evenly over the rest."""
    inner = size - 2 * _END_BYTES
    spans = [(0, _END_BYTES), (size - _END_BYTES, _END_BYTES)]
    return spans + [(_END_BYTES + inner * block // _BLOCKS, _BLOCK_BYTES) for block in range(_BLOCKS)]


def _tensor_pieces(stream: BinaryIO) -> list[tuple[int, int]]:
    """The middle of each tensor in a safetensors file, or of evenly spaced tensors if there are too many."""
    length = struct.unpack("<Q", stream.read(8))[0]
    if length > _MAX_HEADER_BYTES:
        return []
    try:
        header = json.loads(stream.read(length))
        spans = sorted(tuple(item["data_offsets"]) for name, item in header.items() if name != "__metadata__")
        spans = spans[:: -(-len(spans) // _TENSORS)] if spans else []
        return [(8 + length + max(first, (first + last - _TENSOR_BYTES) // 2), _TENSOR_BYTES) for first, last in spans]
    except (ValueError, TypeError, KeyError, AttributeError):
        return []  # not a valid safetensors file: sample only the blocks


def name_identity(path: str) -> str:
    """The identity of something that cannot be read: its name, with the commit if the local Hub cache has it."""
    commit = _hub_commit(path)
    if commit is not None:
        return f"{path} at commit {commit}"
    return f"{path} ({UNREADABLE})"


def _hub_commit(name: str) -> str | None:
    """The commit of a model or dataset in the local Hub cache."""
    if name.count("/") != 1 or name.startswith(("/", "~", ".")):
        return None
    home = os.environ.get("HF_HOME", os.path.expanduser("~/.cache/huggingface"))
    cache = Path(os.environ.get("HF_HUB_CACHE", os.path.join(home, "hub")))
    for kind in ("models", "datasets"):
        reference = cache / f"{kind}--{name.replace('/', '--')}" / "refs" / "main"
        if reference.is_file():
            return reference.read_text().strip()
    return None
