from __future__ import annotations

import threading
import time
from pathlib import Path

import pytest

from slotwise.text.tokenizer import TextTooLong, Tokenizer, TokenizerError


def test_loads_a_checkpoints_files(folder: Path) -> None:
    tokenizer = Tokenizer.load(folder)
    assert tokenizer.special_tokens == {"bos_token": "<s>", "eos_token": "</s>"}
    assert tokenizer.special_ids == {0, 1, 2}
    assert tokenizer.decode([tokenizer.vocab_size - 1]) == "<plain added>"


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


def test_short_and_long_texts_are_encoded_alike(folder: Path) -> None:
    tokenizer = Tokenizer.load(folder)
    text = "the quick brown fox, naïve café\n" * 400
    assert tokenizer.encode(text) == tokenizer.inner.encode(text).ids


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
    assert ticks > 20  # held back by the lock, this loop would turn once or twice


def test_a_token_by_itself(folder: Path) -> None:
    tokenizer = Tokenizer.load(folder)
    first, *_ = tokenizer.encode("日", add_special_tokens=False)
    assert tokenizer.token_bytes(0) == b"<s>"
    assert tokenizer.token_bytes(tokenizer.vocab_size - 1) == b"<plain added>"
    assert tokenizer.token_bytes(first) and tokenizer.token_text(10_000) == ""
