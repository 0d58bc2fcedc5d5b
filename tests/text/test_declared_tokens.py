"""Tokens that only `tokenizer_config.json` declares, beside transformers'."""

from __future__ import annotations

import json
import logging
from pathlib import Path
from typing import Any

import pytest

from slotwise.text import declared_tokens
from slotwise.text.tokenizer import Tokenizer, TokenizerError

TEXTS = (
    "<|im_start|>user\nthe fox<|im_end|>\n", "a <|im_start|> b", "x<|im_end|>y<|im_end|>", "<image><|a b|> <tool>z",
    "  <strip>  the", "<word>s <word> <word>", "</s><s><pad>", "<plain added> <unk>", "THE FOX <Lower>",
    "日本<|im_end|>🙂",
)


def special(**rules: bool) -> dict[str, bool]:
    return {"lstrip": False, "rstrip": False, "single_word": False, "normalized": False, "special": True} | rules


def token(content: str, **rules: bool) -> dict[str, Any]:
    return {"content": content} | special(**rules)


FILES: dict[str, dict[str, dict[str, Any]]] = {
    "added_tokens_decoder": {"tokenizer_config.json": {"added_tokens_decoder": {
        "602": token("<|im_end|>"), "601": token("<|im_start|>"), "0": token("<s>")}}},
    "rules of matching": {"tokenizer_config.json": {"added_tokens_decoder": {
        "601": token("<strip>", lstrip=True, rstrip=True), "602": token("<word>", single_word=True),
        "603": token("<tool>", special=False), "604": token("<Lower>", special=False, normalized=True)}}},
    "other rules for a known token": {"tokenizer_config.json": {"added_tokens_decoder": {
        "0": token("<s>", rstrip=True), "600": token("<plain added>", special=True)}}},
    "a token of the vocabulary": {"tokenizer_config.json": {"added_tokens_decoder": {"9": token("the")}}},
    "ids that the vocabulary does not give": {"tokenizer_config.json": {"added_tokens_decoder": {
        "9000": token("<|im_start|>"), "8000": token("<|im_end|>")}}},
    "additional_special_tokens": {"tokenizer_config.json": {
        "additional_special_tokens": ["<|im_start|>", "<|im_end|>", "<s>"]}},
    "extra_special_tokens": {"tokenizer_config.json": {
        "extra_special_tokens": ["<|im_end|>"], "additional_special_tokens": ["<|im_start|>"]}},
    "extra_special_tokens by name": {"tokenizer_config.json": {"extra_special_tokens": {"image_token": "<image>"}}},
    "named tokens": {"tokenizer_config.json": {
        "eos_token": "<|im_end|>", "pad_token": "<pad>", "image_token": "<image>", "unk_token": "<unk>"}},
    "a named token that is not marked as special": {"tokenizer_config.json": {
        "added_tokens_decoder": {"601": token("<|im_end|>", special=False)}, "eos_token": "<|im_end|>"}},
    "a named token of tokenizer.json": {"tokenizer_config.json": {"pad_token": "<plain added>"}},
    "all of them": {"tokenizer_config.json": {
        "added_tokens_decoder": {"601": token("<tool>", special=False)}, "additional_special_tokens": ["<|im_start|>"],
        "eos_token": "<|im_end|>", "image_token": "<image>"}},
    "special_tokens_map.json": {"special_tokens_map.json": {"eos_token": "<|im_end|>", "pad_token": token("<pad>")}},
    "a map beside a decoder": {
        "special_tokens_map.json": {"eos_token": "<|im_end|>"},
        "tokenizer_config.json": {"added_tokens_decoder": {"601": token("<|im_start|>")}}},
    "nothing": {"tokenizer_config.json": {}},
}  # fmt: skip


def write(folder: Path, files: dict[str, dict[str, Any]]) -> Path:
    (folder / "tokenizer_config.json").unlink()
    for name, fields in files.items():
        named = {"tokenizer_class": "PreTrainedTokenizerFast"} if name == "tokenizer_config.json" else {}
        (folder / name).write_text(json.dumps(fields | named))
    return folder


@pytest.mark.parametrize("name", FILES)
def test_texts_become_the_tokens_of_transformers(folder: Path, name: str) -> None:
    from transformers import PreTrainedTokenizerFast

    write(folder, FILES[name])
    theirs, ours = PreTrainedTokenizerFast.from_pretrained(folder), Tokenizer.load(folder)
    for text in TEXTS:
        assert ours.encode(text, add_special_tokens=False) == theirs.encode(text, add_special_tokens=False), text
    assert ours.vocab_size == len(theirs)
    marked = {token_id for token_id, known in theirs.added_tokens_decoder.items() if known.special}
    assert ours.special_ids == marked
    ids = list(range(ours.vocab_size - 8, ours.vocab_size))
    assert ours.decode(ids) == theirs.decode(ids, skip_special_tokens=True)
    assert ours.decode(ids, skip_special_tokens=False) == theirs.decode(ids)


def test_one_token_instead_of_pieces(folder: Path) -> None:
    pieces = Tokenizer.load(folder).encode("<|im_start|>", add_special_tokens=False)
    assert len(pieces) > 5
    write(folder, FILES["added_tokens_decoder"])
    tokenizer = Tokenizer.load(folder)
    (found,) = tokenizer.encode("<|im_start|>", add_special_tokens=False)
    assert found in tokenizer.special_ids and tokenizer.token_bytes(found) == b"<|im_start|>"


def test_lists_of_objects_are_read_as_well(folder: Path) -> None:
    """As older versions of transformers wrote them into `special_tokens_map.json`."""
    write(folder, {"tokenizer_config.json": {}, "special_tokens_map.json": {
        "additional_special_tokens": [token("<|im_start|>"), token("<|im_end|>", special=False)]}})
    tokenizer = Tokenizer.load(folder)
    start, end = tokenizer.encode("<|im_start|><|im_end|>", add_special_tokens=False)
    assert start in tokenizer.special_ids and end not in tokenizer.special_ids


def test_an_id_that_the_vocabulary_does_not_give_is_told(folder: Path, caplog: pytest.LogCaptureFixture) -> None:
    size = Tokenizer.load(folder).vocab_size
    caplog.clear()
    assert Tokenizer.load(write(folder, FILES["ids that the vocabulary does not give"])).vocab_size == size + 2
    (record,) = [record for record in caplog.records if record.levelno == logging.WARNING]
    told = record.getMessage()
    assert "added_tokens_decoder has other ids" in told and f"'<|im_end|>' is {size}, not 8000" in told


BAD: dict[str, dict[str, Any]] = {
    "added_tokens_decoder must be an object": {"added_tokens_decoder": [token("a")]},
    "must have ids for names, not 'x'": {"added_tokens_decoder": {"x": token("a")}},
    "must have ids for names, not '-1'": {"added_tokens_decoder": {"-1": token("a")}},
    "must have ids for names, not '99999999999": {"added_tokens_decoder": {"9" * 5000: token("a")}},
    "added_tokens_decoder: 7 must be a text": {"added_tokens_decoder": {"7": {"content": 3}}},
    "added_tokens_decoder: 8 must be a text": {"added_tokens_decoder": {"8": None}},
    "lstrip must be true or false, not 'yes'": {"added_tokens_decoder": {"7": token("a") | {"lstrip": "yes"}}},
    "extra_special_tokens must be a text, or an object with one in content": {"extra_special_tokens": ["\ud800"]},
    "must have at most 1024 characters, not 1025": {"extra_special_tokens": ["a" * 1025]},
    "must be a list or an object of at most 16384 tokens, not 7": {"extra_special_tokens": 7},
    "must be a list or an object of at most 16384 tokens, not": {"additional_special_tokens": ["a"] * 16385},
    "must be an object of at most 16384 tokens": {"added_tokens_decoder": {
        str(number): token(f"<{number}>") for number in range(16385)}},
    "1048576 characters of tokens, are declared": {"extra_special_tokens": [
        f"{number:04}" + "x" * 1020 for number in range(1025)]},
    "more than 16384 tokens, or": {f"{number}_token": f"<{number}>" for number in range(16385)},
}  # fmt: skip


@pytest.mark.parametrize("told", BAD)
def test_what_is_malformed_or_too_much_is_refused_by_name(folder: Path, told: str) -> None:
    write(folder, {"tokenizer_config.json": BAD[told]})
    with pytest.raises(TokenizerError, match=r"tokenizer_config\.json") as refused:
        Tokenizer.load(folder)
    assert told in str(refused.value) and str(refused.value).isprintable()


def test_as_many_as_are_allowed_load_in_seconds(folder: Path) -> None:
    write(folder, {"tokenizer_config.json": {"added_tokens_decoder": {
        str(number): token(f"<{number}>") for number in range(declared_tokens.MAX_TOKENS)}}})
    tokenizer = Tokenizer.load(folder)
    assert len(tokenizer.encode("<7><16383>", add_special_tokens=False)) == 2
