"""Splits token ids into pieces of text: usually one per token, special tokens by name, invalid bytes as escapes.

Tokens that together form one character become one piece. Joined, the pieces of a response equal the output of the
tokenizer's own ``decode`` wherever that is valid text.
"""

from __future__ import annotations

import codecs
import json
import logging
import re
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from enum import IntEnum
from typing import TYPE_CHECKING, Any

from verl_rollout_skip.runs.manifest import Manifest
from verl_rollout_skip.tools.decoding import find_decoder

if TYPE_CHECKING:
    from tokenizers import Tokenizer

logger = logging.getLogger(__name__)

_MAX_JOINED = 8
_BYTE_TOKEN = re.compile(r"<0x([0-9A-Fa-f]{2})>")


class PieceKind(IntEnum):
    """The kind of a piece."""

    TEXT = 0
    """Text."""
    SPECIAL = 1
    """A special token, shown by its name in the vocabulary."""
    BYTES = 2
    """Bytes that are not valid UTF-8, shown as escapes."""
    NUMBER = 3
    """A token id that is not in the vocabulary, or any token id if there is no tokenizer."""


@dataclass(frozen=True)
class Piece:
    """A piece of a response's text, and its tokens."""

    text: str
    kind: PieceKind
    tokens: tuple[int, ...]


class TokenTexts:
    """Converts token ids to pieces. ``source`` is the tokenizer's folder.

    Without a tokenizer, the pieces are token ids, and ``no_tokenizer`` says why.
    """

    def __init__(
        self, tokenizer: Tokenizer | None = None, source: str | None = None, no_tokenizer: str | None = None
    ) -> None:
        self.source, self.no_tokenizer = source, no_tokenizer
        self._known: dict[int, Piece | bytes] = {}
        self._tokenizer = tokenizer
        if tokenizer is not None:
            self._added = tokenizer.get_added_tokens_decoder()
            self._bytes_of = _bytes_of_words(tokenizer)

    def pieces(self, ids: Iterable[int]) -> list[Piece]:
        """The pieces of a sequence of tokens."""
        found: list[Piece] = []
        pending: list[tuple[int, bytes]] = []
        for token in ids:
            known = self._known.get(token)
            if known is None:
                known = self._known[token] = self._look_up(token)
            if isinstance(known, Piece):
                if pending:
                    _flush_as_bytes(found, pending)
                found.append(known)
            elif pending or not _is_text(known):
                _join(found, pending, token, known)
            else:
                piece = self._known[token] = Piece(known.decode(), PieceKind.TEXT, (token,))
                found.append(piece)
        _flush_as_bytes(found, pending)
        return found

    def _look_up(self, token: int) -> Piece | bytes:
        if self._tokenizer is None:
            return Piece(str(token), PieceKind.NUMBER, (token,))
        added = self._added.get(token)
        if added is not None:
            kind = PieceKind.SPECIAL if added.special else PieceKind.TEXT
            return Piece(added.content, kind, (token,))
        word = self._tokenizer.id_to_token(token) if 0 <= token < 2**32 else None
        return Piece(str(token), PieceKind.NUMBER, (token,)) if word is None else self._bytes_of(word)


def find_token_texts(folder: str, manifest: Manifest | None, given: str | None = None) -> TokenTexts:
    """Use the tokenizer that ``find_decoder`` finds for a variant folder, if any."""
    decoder, why = find_decoder(folder, manifest, given)
    if decoder is None:
        return TokenTexts(no_tokenizer=why)
    if decoder.tokenizer is None:
        why = f"The tokenizer in {decoder.source} cannot decode single tokens. Save it as tokenizer.json."
        logger.warning("%s", why)
        return TokenTexts(no_tokenizer=why)
    return TokenTexts(decoder.tokenizer, decoder.source)


def _bytes_of_words(tokenizer: Tokenizer) -> Callable[[str], bytes]:
    """A function that converts a vocabulary word to bytes, depending on the tokenizer's decoder."""
    state = "null" if tokenizer.decoder is None else tokenizer.decoder.__getstate__()
    described = json.loads(state)
    kinds = _decoder_kinds(described)
    if "ByteLevel" in kinds:
        table = _byte_table()
        return lambda word: b"".join(table.get(letter) or letter.encode() for letter in word)
    if "Metaspace" in kinds or "ByteFallback" in kinds or "\u2581" in json.dumps(described, ensure_ascii=False):
        return _sentencepiece_bytes
    if "WordPiece" in kinds:
        return lambda word: word[2:].encode() if word.startswith("##") else f" {word}".encode()
    if described is None:
        return lambda word: f" {word}".encode()  # without a decoder, ``decode`` joins words with spaces
    return lambda word: word.encode()


def _decoder_kinds(described: Any) -> set[str]:
    if not isinstance(described, dict):
        return set()
    inner = (_decoder_kinds(decoder) for decoder in described.get("decoders", ()))
    return {str(described.get("type")), *(kind for kinds in inner for kind in kinds)}


def _sentencepiece_bytes(word: str) -> bytes:
    match = _BYTE_TOKEN.fullmatch(word)
    return bytes([int(match[1], 16)]) if match else word.replace("\u2581", " ").encode()


def _byte_table() -> dict[str, bytes]:
    """How byte-level vocabularies write bytes: printable ones as themselves, the rest as U+0100 and following."""
    plain = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    others = [byte for byte in range(256) if byte not in plain]
    table = {chr(byte): bytes([byte]) for byte in plain}
    return table | {chr(0x100 + index): bytes([byte]) for index, byte in enumerate(others)}


def _join(found: list[Piece], pending: list[tuple[int, bytes]], token: int, data: bytes) -> None:
    """Add a token's bytes to the pending bytes of an incomplete character."""
    joined = b"".join(waiting for _, waiting in pending) + data
    if _is_text(joined):
        found.append(Piece(joined.decode(), PieceKind.TEXT, (*(waiting for waiting, _ in pending), token)))
        pending.clear()
    elif _may_become_text(joined) and len(pending) < _MAX_JOINED:
        pending.append((token, data))
    elif pending:
        _flush_as_bytes(found, pending)
        _join(found, pending, token, data)
    else:
        pending.append((token, data))
        _flush_as_bytes(found, pending)


def _flush_as_bytes(found: list[Piece], pending: list[tuple[int, bytes]]) -> None:
    """Turn pending bytes that cannot become text into pieces of kind BYTES."""
    for token, data in pending:
        found.append(Piece(data.decode("utf-8", "backslashreplace"), PieceKind.BYTES, (token,)))
    pending.clear()


def _is_text(data: bytes) -> bool:
    try:
        data.decode()
    except UnicodeDecodeError:
        return False
    return True


def _may_become_text(data: bytes) -> bool:
    try:
        codecs.getincrementaldecoder("utf-8")().decode(data)
    except UnicodeDecodeError:
        return False
    return True
