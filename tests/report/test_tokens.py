"""Tokens as pieces of text: no token is lost or repaired, and special tokens are named."""

from __future__ import annotations

import logging
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers

from tests.arithmetic_run import make_tokenizer, token_of_byte
from verl_rollout_skip.errors import StoreError
from verl_rollout_skip.report.tokens import PieceKind, TokenTexts, find_token_texts
from verl_rollout_skip.store.storage.locations import open_storage

TOKENIZER = make_tokenizer()
TEXTS = TokenTexts(TOKENIZER, "here")


def words_of(texts: TokenTexts, ids: list[int]) -> list[str]:
    return [piece.text for piece in texts.pieces(ids)]


@given(st.text(st.characters(exclude_categories=["Cs"]), max_size=60))
def test_the_joined_pieces_equal_the_text(text: str) -> None:
    ids = TOKENIZER.encode(text).ids
    pieces = TEXTS.pieces(ids)
    assert "".join(piece.text for piece in pieces) == text
    assert [token for piece in pieces for token in piece.tokens] == ids


@given(st.lists(st.integers(0, TOKENIZER.get_vocab_size() + 3), max_size=40))
def test_no_token_is_lost_and_valid_text_equals_decode(ids: list[int]) -> None:
    pieces = TEXTS.pieces(ids)
    assert [token for piece in pieces for token in piece.tokens] == ids
    assert all("\ufffd" not in piece.text for piece in pieces)
    if all(piece.kind in (PieceKind.TEXT, PieceKind.SPECIAL) for piece in pieces):
        assert "".join(piece.text for piece in pieces) == TOKENIZER.decode(ids, skip_special_tokens=False)


@given(st.binary(max_size=30))
def test_invalid_bytes_are_escaped(data: bytes) -> None:
    pieces = TEXTS.pieces([token_of_byte(TOKENIZER, byte) for byte in data])
    restored = b""
    for piece in pieces:
        if piece.kind is PieceKind.BYTES:
            assert piece.text.startswith("\\x")
            restored += bytes.fromhex(piece.text.removeprefix("\\x"))
        else:
            restored += piece.text.encode()
    assert restored == data


def test_a_character_of_several_tokens_is_one_piece() -> None:
    ids = [token_of_byte(TOKENIZER, byte) for byte in "a🙃b".encode()]
    pieces = TEXTS.pieces(ids)
    assert [piece.text for piece in pieces] == ["a", "🙃", "b"]
    assert pieces[1].tokens == tuple(ids[1:5])


def test_an_incomplete_character_does_not_swallow_the_following_text() -> None:
    start = [token_of_byte(TOKENIZER, byte) for byte in "🙃".encode()[:3]]
    end = TOKENIZER.token_to_id("<|im_end|>")
    pieces = TEXTS.pieces([*start, end, *TOKENIZER.encode("ok").ids, *start])
    kinds = [piece.kind for piece in pieces]
    assert kinds[:4] == [PieceKind.BYTES] * 3 + [PieceKind.SPECIAL]
    assert kinds[-3:] == [PieceKind.BYTES] * 3
    assert "".join(piece.text for piece in pieces[4:-3]) == "ok"


def test_incomplete_characters_are_flushed() -> None:
    tokenizer = make_tokenizer()
    assert len(TokenTexts(tokenizer).pieces([token_of_byte(tokenizer, 0xF0)] * 10_000)) == 10_000


def test_special_tokens_are_named_and_unknown_ids_are_numbers() -> None:
    end, beyond = TOKENIZER.token_to_id("<|im_end|>"), TOKENIZER.get_vocab_size() + 7
    pieces = TEXTS.pieces([end, beyond, -1, 2**40])
    assert [(piece.text, piece.kind) for piece in pieces] == [
        ("<|im_end|>", PieceKind.SPECIAL),
        (str(beyond), PieceKind.NUMBER),
        ("-1", PieceKind.NUMBER),
        (str(2**40), PieceKind.NUMBER),
    ]


def test_an_added_token_is_shown_as_it_was_added() -> None:
    tokenizer = make_tokenizer()
    tokenizer.add_tokens([AddedToken("<think> é"), AddedToken("\x00")])
    assert words_of(TokenTexts(tokenizer), [tokenizer.token_to_id("<think> é"), tokenizer.token_to_id("\x00")]) == [
        "<think> é",
        "\x00",
    ]


def test_without_a_tokenizer_tokens_are_numbers() -> None:
    pieces = TokenTexts().pieces([5, 7])
    assert [(piece.text, piece.kind) for piece in pieces] == [("5", PieceKind.NUMBER), ("7", PieceKind.NUMBER)]


def sentencepiece() -> Tokenizer:
    words = {"▁Hello": 0, "▁w": 1, "orld": 2, "<0xC3>": 3, "<0xA9>": 4, "!": 5}
    tokenizer = Tokenizer(models.BPE(words, []))
    tokenizer.decoder = decoders.Sequence([decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse()])
    return tokenizer


def wordpiece() -> Tokenizer:
    tokenizer = Tokenizer(models.WordPiece({"he": 0, "##llo": 1, "you": 2}, unk_token="he"))
    tokenizer.decoder = decoders.WordPiece()
    return tokenizer


def metaspace() -> Tokenizer:
    tokenizer = Tokenizer(models.Unigram([("▁Hi", -1.0), ("▁you", -2.0)], unk_id=0))
    tokenizer.decoder = decoders.Metaspace()
    return tokenizer


def words() -> Tokenizer:
    tokenizer = Tokenizer(models.WordLevel({"one": 0, "two": 1}, unk_token="one"))
    tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
    return tokenizer


@pytest.mark.parametrize(
    ("tokenizer", "ids", "shown"),
    [
        (sentencepiece(), [0, 1, 2, 3, 4, 5], [" Hello", " w", "orld", "é", "!"]),
        (wordpiece(), [0, 1, 2], [" he", "llo", " you"]),
        (metaspace(), [0, 1], [" Hi", " you"]),
        (words(), [1, 0], [" two", " one"]),
    ],
    ids=["sentencepiece", "wordpiece", "metaspace", "words"],
)
def test_other_kinds_of_tokenizers(tokenizer: Tokenizer, ids: list[int], shown: list[str]) -> None:
    assert words_of(TokenTexts(tokenizer), ids) == shown
    assert "".join(shown).strip() == tokenizer.decode(ids).strip()


def test_the_recorded_tokenizer_is_found_on_any_storage(tmp_path: Path) -> None:
    (tmp_path / "tokenizer").mkdir()
    TOKENIZER.save(str(tmp_path / "tokenizer" / "tokenizer.json"))
    found = find_token_texts(str(tmp_path), None)
    assert found.source == str(tmp_path / "tokenizer")
    remote = open_storage("memory://report-tokens")
    with remote.stage("tokenizer") as staged:
        staged.write((tmp_path / "tokenizer" / "tokenizer.json").read_bytes())
        remote.publish(staged, "tokenizer.json", True)
    assert words_of(find_token_texts("memory://report-tokens", None), TOKENIZER.encode("So 7").ids) == words_of(
        TEXTS, TOKENIZER.encode("So 7").ids
    )


def test_an_unreadable_recorded_tokenizer_is_a_warning_and_tokens_are_numbers(tmp_path: Path, caplog: Any) -> None:
    (tmp_path / "tokenizer").mkdir()
    (tmp_path / "tokenizer" / "tokenizer.json").write_text("{}")
    with caplog.at_level(logging.WARNING):
        found = find_token_texts(str(tmp_path), None)
    assert found.source is None
    assert str(tmp_path / "tokenizer") in caplog.text
    assert words_of(found, [3]) == ["3"]


def test_a_missing_or_damaged_tokenizer_option_is_an_error(tmp_path: Path) -> None:
    with pytest.raises(StoreError, match="is not a tokenizer folder"):
        find_token_texts(str(tmp_path), None, str(tmp_path / "nowhere"))
    (tmp_path / "tokenizer.json").write_text("[]")
    with pytest.raises(StoreError, match="cannot be loaded"):
        find_token_texts(str(tmp_path), None, str(tmp_path))


def test_a_tokenizer_without_tokenizer_json_is_loaded_with_transformers(tmp_path: Path) -> None:
    from transformers import PreTrainedTokenizerFast

    PreTrainedTokenizerFast(tokenizer_object=TOKENIZER).save_pretrained(tmp_path)
    found = find_token_texts(str(tmp_path / "none"), None, str(tmp_path))
    assert words_of(found, TOKENIZER.encode("So").ids) == words_of(TEXTS, TOKENIZER.encode("So").ids)
