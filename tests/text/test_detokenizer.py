from __future__ import annotations

import random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from slotwise.text.detokenizer import MarkingDetokenizer, detokenizer
from slotwise.text.tokenizer import Tokenizer

EXACT = ["byte_level", "sentence_pieces", "metaspace"]


def pieces(tokenizer: Tokenizer, ids: list[int], prompt: list[int] | None = None) -> list[str]:
    stream = detokenizer(tokenizer, prompt or [])
    return [*(stream.feed([token_id]) for token_id in ids), stream.flush()]


@pytest.mark.parametrize("family", ["byte_level", "sentence_pieces"])
@given(text=st.text(max_size=60))
@settings(max_examples=150, deadline=None)
def test_any_text_comes_back_in_whole_characters(
    tokenizers_by_family: dict[str, Tokenizer], family: str, text: str
) -> None:
    tokenizer = tokenizers_by_family[family]
    ids = tokenizer.encode(text, add_special_tokens=False)
    parts = pieces(tokenizer, ids)
    assert "".join(parts) == tokenizer.decode(ids)
    if "�" not in text:
        assert all("�" not in part for part in parts)


@given(ids=st.lists(st.integers(0, 620), max_size=40))
@settings(max_examples=300, deadline=None)
def test_random_tokens_of_a_byte_level_vocabulary(tokenizers_by_family: dict[str, Tokenizer], ids: list[int]) -> None:
    tokenizer = tokenizers_by_family["byte_level"]
    assert "".join(pieces(tokenizer, ids)) == tokenizer.decode(ids)


@given(parts=st.lists(st.lists(st.integers(3, 620), max_size=8), min_size=1, max_size=5), at_once=st.booleans())
@settings(max_examples=100, deadline=None)
def test_marked_tokens_stand_between_texts(
    tokenizers_by_family: dict[str, Tokenizer], parts: list[list[int]], at_once: bool,
) -> None:
    tokenizer = tokenizers_by_family["byte_level"]
    stream = MarkingDetokenizer(lambda: detokenizer(tokenizer, [300]), {2: "\udc00"})
    ids = [token for part in parts for token in (*part, 2)][:-1]
    text = stream.feed(ids) if at_once else "".join([stream.feed([token]) for token in ids])
    assert (text + stream.flush()).split("\udc00") == [tokenizer.decode(part) for part in parts]


@given(ids=st.lists(st.integers(0, 400), max_size=30))
@settings(max_examples=200, deadline=None)
def test_random_tokens_of_a_metaspace_vocabulary(tokenizers_by_family: dict[str, Tokenizer], ids: list[int]) -> None:
    tokenizer = tokenizers_by_family["metaspace"]
    assert "".join(pieces(tokenizer, ids)) == tokenizer.decode(ids)


@given(ids=st.lists(st.integers(0, 480), max_size=30))
@settings(max_examples=200, deadline=None)
def test_random_tokens_with_byte_fallback(tokenizers_by_family: dict[str, Tokenizer], ids: list[int]) -> None:
    tokenizer = tokenizers_by_family["sentence_pieces"]
    data = b"".join(tokenizer.token_bytes(i) for i in ids if i not in tokenizer.special_ids)
    assert "".join(pieces(tokenizer, ids)) == data.removeprefix(b" ").decode("utf-8", errors="replace")
    if "�" not in tokenizer.decode(ids):
        assert "".join(pieces(tokenizer, ids)) == tokenizer.decode(ids)


@pytest.mark.parametrize("family", ["byte_level", "sentence_pieces", "metaspace", "word_pieces"])
def test_a_continuation_follows_its_prompt(tokenizers_by_family: dict[str, Tokenizer], family: str) -> None:
    tokenizer = tokenizers_by_family[family]
    ids = tokenizer.encode("the quick brown fox jumps over the lazy dog", add_special_tokens=False)
    whole = tokenizer.decode(ids)
    for cut in range(1, len(ids)):
        text = "".join(pieces(tokenizer, ids[cut:], prompt=ids[:cut]))
        assert tokenizer.decode(ids[:cut]) + text == whole


def test_a_prompt_of_special_tokens_is_no_text_before(tokenizers_by_family: dict[str, Tokenizer]) -> None:
    tokenizer = tokenizers_by_family["sentence_pieces"]
    ids = tokenizer.encode("the fox", add_special_tokens=False)
    assert "".join(pieces(tokenizer, ids, prompt=[1])) == "the fox"


def test_many_tokens_at_once_give_the_same_text(tokenizers_by_family: dict[str, Tokenizer]) -> None:
    randomly = random.Random(1)
    for family in EXACT:
        tokenizer = tokenizers_by_family[family]
        ids = [randomly.randrange(400) for _ in range(300)]
        stream, text = detokenizer(tokenizer), ""
        for start in range(0, 300, 7):
            text += stream.feed(ids[start : start + 7])
        assert text + stream.flush() == "".join(pieces(tokenizer, ids))


def test_special_tokens_have_no_text(tokenizers_by_family: dict[str, Tokenizer]) -> None:
    tokenizer = tokenizers_by_family["byte_level"]
    ids = tokenizer.encode("fox", add_special_tokens=False)
    assert "".join(pieces(tokenizer, [0, 2, *ids, 1])) == "fox"


def test_a_character_without_its_end_becomes_one_replacement(tokenizers_by_family: dict[str, Tokenizer]) -> None:
    tokenizer = tokenizers_by_family["sentence_pieces"]
    first_bytes = [tokenizer.inner.token_to_id(token) for token in ("<0xF0>", "<0x9F>", "<0x99>")]
    assert pieces(tokenizer, first_bytes) == ["", "", "", "�"]


def test_other_decoders_give_their_own_text_in_the_end(tokenizers_by_family: dict[str, Tokenizer]) -> None:
    tokenizer = tokenizers_by_family["word_pieces"]
    assert tokenizer.bytes_by_id is None
    ids = tokenizer.encode("the fox, the dog. jumps over!").__iter__()
    ids = list(ids)
    assert "".join(pieces(tokenizer, ids)) == tokenizer.decode(ids)


@pytest.mark.parametrize("family", [*EXACT, "word_pieces"])
def test_special_tokens_are_shown_where_wanted(tokenizers_by_family: dict[str, Tokenizer], family: str) -> None:
    tokenizer = tokenizers_by_family[family]
    special = min(tokenizer.special_ids)
    ids = [*tokenizer.encode("the fox", add_special_tokens=False), special]
    stream = detokenizer(tokenizer, (), shows_special=True)
    text = "".join([stream.feed([token_id]) for token_id in ids]) + stream.flush()
    assert text == tokenizer.decode(ids, skip_special_tokens=False) != tokenizer.decode(ids)
