from __future__ import annotations

import json
import os
import threading
import time
from pathlib import Path
from typing import Any

import pytest
import tokenizers
from text.conftest import FAMILIES

from slotwise.text.tokenizer import TextTooLong, Tokenizer, TokenizerError


def test_loads_a_checkpoints_files(folder: Path) -> None:
    tokenizer = Tokenizer.load(folder)
    assert tokenizer.special_tokens == {"bos_token": "<s>", "eos_token": "</s>"}
    assert tokenizer.special_ids == {0, 1, 2}
    assert tokenizer.decode([tokenizer.vocab_size - 1]) == "<plain added>"


def test_a_text_that_is_cut_keeps_its_special_tokens() -> None:
    """As in transformers: a vector may be pooled from one of them."""
    vocabulary = {"[CLS]": 0, "[SEP]": 1, "a": 2, "b": 3, "c": 4}
    inner = tokenizers.Tokenizer(tokenizers.models.WordLevel(vocabulary, unk_token="c"))
    inner.pre_tokenizer = tokenizers.pre_tokenizers.Whitespace()
    inner.post_processor = tokenizers.processors.TemplateProcessing(
        single="[CLS] $A [SEP]", special_tokens=[("[CLS]", 0), ("[SEP]", 1)])
    tokenizer = Tokenizer(inner)
    ids = tokenizer.encode("a b c")
    for keeps_last, side in ((False, "right"), (True, "left")):
        for most in (5, 4, 3):
            inner.enable_truncation(most, direction=side)
            assert tokenizer.marks.cut(ids, most, keeps_last=keeps_last) == inner.encode("a b c").ids
            inner.no_truncation()
    assert tokenizer.marks.cut(ids, 2, keeps_last=False) == [0, 2]
    assert tokenizer.marks.cut(ids, 1, keeps_last=True) == [1]


def test_the_post_processor_decides_about_the_beginning_token(folder: Path) -> None:
    tokenizer = Tokenizer.load(folder)
    bare = tokenizer.encode("the fox", add_special_tokens=False)
    assert tokenizer.encode("the fox") == [0, *bare]
    assert tokenizer.decode([0, *bare]) == "the fox"
    assert tokenizer.decode([0, *bare], skip_special_tokens=False) == "<s>the fox"


@pytest.mark.parametrize("content", [None, "", "{", "[]", '{"model": {"type": "BPE"}}', "\x00\xff"])
def test_a_missing_or_broken_tokenizer_is_a_clear_error(tmp_path: Path, content: str | None) -> None:
    if content is not None:
        (tmp_path / "tokenizer.json").write_text(content)
    with pytest.raises(TokenizerError, match=r"tokenizer\.json"):
        Tokenizer.load(tmp_path)


@pytest.mark.parametrize("content", ["{", "[1]", "\x00"])
def test_a_broken_tokenizer_config_is_a_clear_error(folder: Path, content: str) -> None:
    (folder / "tokenizer_config.json").write_text(content)
    with pytest.raises(TokenizerError, match=r"tokenizer_config\.json"):
        Tokenizer.load(folder)


def test_a_hopelessly_long_text_is_refused_unread(folder: Path) -> None:
    tokenizer = Tokenizer.load(folder)
    text = "the fox " * 10_000
    with pytest.raises(TextTooLong, match="80000 characters"):
        tokenizer.encode(text, max_tokens=100)
    assert len(tokenizer.encode(text, max_tokens=80_000)) > 10_000


LONG = [" " * 5000, "A" * 5000, "hello" + " " * 20_000 + "world " + "A" * 5000, "\u03b1\u0313\u0300\u0345" * 2000,
        "\n" * 5000, "\u200b" * 5000, "<s>" * 3000, "<s>" + " " * 9000, "\u65e5\u672c" * 3000]


@pytest.mark.parametrize("change", ["", "nfc", "strip", "stripping token", "removed"])
@pytest.mark.parametrize("family", list(FAMILIES))
def test_no_text_is_refused_that_has_few_tokens(family: str, change: str) -> None:
    inner = FAMILIES[family]()
    if change in ("nfc", "strip"):
        own = [inner.normalizer] if inner.normalizer is not None else []
        first = tokenizers.normalizers.NFC() if change == "nfc" else tokenizers.normalizers.Strip()
        inner.normalizer = tokenizers.normalizers.Sequence([first, *own])
    if change == "stripping token":
        inner.add_special_tokens([tokenizers.AddedToken("<s>", rstrip=True)])
    if change == "removed":
        own = [inner.pre_tokenizer] if inner.pre_tokenizer is not None else []
        first = tokenizers.pre_tokenizers.Split(" ", "removed")
        inner.pre_tokenizer = tokenizers.pre_tokenizers.Sequence([first, *own])
    tokenizer = Tokenizer(inner)
    for text in LONG:
        number = len(inner.encode(text).ids)
        assert len(tokenizer.encode(text, max_tokens=number)) == number


def test_short_and_long_texts_are_encoded_alike(folder: Path) -> None:
    tokenizer = Tokenizer.load(folder)
    text = "the quick brown fox, naïve café\n" * 400
    assert tokenizer.encode(text) == tokenizer.inner.encode(text).ids
    together = tokenizer.encode_batch([text, "the fox", text, ""])
    assert together == [tokenizer.encode(one) for one in (text, "the fox", text, "")]
    assert together[0] is not together[2]  # a caller may change what it gets


def test_text_without_a_utf8_form_is_refused(folder: Path) -> None:
    tokenizer = Tokenizer.load(folder)
    for length in (1, 5000):
        with pytest.raises(TokenizerError, match="Unicode"):
            tokenizer.encode("\ud800" * length)


def test_other_threads_run_while_a_long_text_is_encoded(folder: Path) -> None:
    tokenizer = Tokenizer.load(folder)
    text = "the quick brown fox jumps over the lazy dog " * 20_000
    worker = threading.Thread(target=tokenizer.encode, args=(text,))
    ticks = 0
    worker.start()
    while worker.is_alive():
        time.sleep(0.001)
        ticks += 1
    assert ticks > 5  # held back by the lock, this loop would turn once or twice


def test_a_token_by_itself(folder: Path) -> None:
    tokenizer = Tokenizer.load(folder)
    first, *_ = tokenizer.encode("日", add_special_tokens=False)
    assert tokenizer.token_bytes(0) == b"<s>"
    assert tokenizer.token_bytes(tokenizer.vocab_size - 1) == b"<plain added>"
    assert tokenizer.token_bytes(first) and tokenizer.token_text(10_000) == ""


def described(folder: Path, **changes: Any) -> str:
    """The text of the folder's `tokenizer.json` with other components."""
    return json.dumps(json.loads((folder / "tokenizer.json").read_text()) | changes)


def replaced(content: str) -> dict[str, Any]:
    return {"type": "Replace", "pattern": {"String": "a"}, "content": content}


BEGINNING = {"SpecialToken": {"id": "<s>", "type_id": 0}}
TEXT = {"Sequence": {"id": "A", "type_id": 0}}
STRIPPING = {"type": "Strip", "content": "a", "start": 2**64 - 1, "stop": 5}  # reads beyond "a"
BACKTRACKING = {"type": "Replace", "pattern": {"Regex": "^(([a-z])+.)+[A-Z]([a-z])+$"}, "content": "x"}
UNUSABLE: dict[str, dict[str, Any]] = {
    "a long prefix": {"normalizer": {"type": "Prepend", "prepend": "x" * 2_000_000}},
    "replacements of replacements": {"normalizer": {"type": "Sequence", "normalizers": [replaced("a" * 1000)] * 3}},
    "nested replacements": {"normalizer": {"type": "Sequence", "normalizers": [
        {"type": "Sequence", "normalizers": [replaced("a" * 100)]}, replaced("a" * 100)]}},
    "decoding by a regular expression": {"decoder": {"type": "Sequence", "decoders": [
        {"type": "Replace", "pattern": {"Regex": "(a|a)+$"}, "content": "a"}]}},
    "a thousand rules": {"decoder": {"type": "Sequence", "decoders": [replaced("b")] * 1000}},
    "long output": {"decoder": {"type": "Sequence", "decoders": [replaced("a" * 100)] * 5}},
    "many special tokens": {"post_processor": {
        "type": "TemplateProcessing", "single": [BEGINNING] * 10_000 + [TEXT], "pair": [TEXT, TEXT],
        "special_tokens": {"<s>": {"id": "<s>", "ids": [0], "tokens": ["<s>"]}}}},
    "a panic in encoding": {"pre_tokenizer": {"type": "FixedLength", "length": 0}},
    "a panic in decoding": {"decoder": {"type": "Sequence", "decoders": [STRIPPING]}},
    "texts without tokens": {"model": {"type": "WordLevel", "vocab": {"a": 0}, "unk_token": "[UNK]"},
                             "added_tokens": [], "post_processor": None},
}  # fmt: skip


@pytest.mark.parametrize("name", UNUSABLE)
def test_a_tokenizer_that_fails_on_short_texts_is_refused_in_one_line(folder: Path, name: str,
                                                                      capfd: pytest.CaptureFixture[str]) -> None:
    (folder / "tokenizer.json").write_text(described(folder, **UNUSABLE[name]))
    with pytest.raises(TokenizerError, match="not a usable tokenizer") as refused:
        Tokenizer.load(folder)
    assert str(refused.value).isprintable()
    assert capfd.readouterr() == ("", "")


def test_stderr_is_written_to_again_after_loading(folder: Path, capfd: pytest.CaptureFixture[str]) -> None:
    Tokenizer.load(folder)
    os.write(2, b"seen")
    assert capfd.readouterr().err == "seen"


def test_a_panic_on_a_text_is_an_error_of_that_text(folder: Path) -> None:
    (folder / "tokenizer.json").write_text(described(folder, normalizer=BACKTRACKING))
    tokenizer = Tokenizer.load(folder)
    for length in (4000, 5000):
        with pytest.raises(TokenizerError, match="cannot encode"):
            tokenizer.encode("a" * length)
    assert tokenizer.decode(tokenizer.encode("the fox")) == "the fox"


def test_a_panic_on_tokens_is_an_error(folder: Path) -> None:
    tokenizer = Tokenizer(tokenizers.Tokenizer.from_str(described(folder, decoder={
        "type": "Sequence", "decoders": [STRIPPING]})))
    ids = tokenizer.encode("a", add_special_tokens=False)
    with pytest.raises(TokenizerError, match="cannot decode"):
        tokenizer.decode(ids)
    with pytest.raises(TokenizerError, match="cannot decode"):
        tokenizer.token_bytes(ids[0])
