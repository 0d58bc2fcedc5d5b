"""Tokens from the token cache are those of the whole text, wherever a text is cut and however it goes on."""

from __future__ import annotations

import os
import random
import re
import time
from collections.abc import Callable

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from support.real_weights import find
from text.conftest import CORPUS, byte_level, metaspace, sentence_pieces
from tokenizers import AddedToken, Regex, models, normalizers, pre_tokenizers, processors, trainers
from tokenizers import Tokenizer as Inner

from slotwise import builtin
from slotwise.text.gguf_tokenizer import DEEPSEEK3, DEEPSEEK_CODER, DIGIT, FALCON, GPT2, GPT4O, LLAMA3, QWEN35
from slotwise.text.token_cache import Boundaries, TokenCache, _any_of, _dividing
from slotwise.text.tokenizer import Tokenizer

CUTS = int(os.environ.get("SLOTWISE_CUTS", "300"))  # of texts of each tokenizer
MARKS = ("<s>", "</s>", "<|a b|>", "<unk>", "<plain added>", "<|im_start|>", "<|im_end|>", "[CLS]", "\n\n")
PARTS = (
    *MARKS, "\n", "\r\n", " ", "  ", "\t", " \n", "\n ", "the", "Fox", "return", "'s", "'RE", "12", "3456", ".", "/",
    "});", "-- ", "<", "|>", "é", "e\u0301", "\u0301", "ſ", "日本語", "🙂", "👨\u200d👩", "\u00a0", "\u2028", "x" * 20)


def split_by(*expressions: str) -> Inner:
    """A vocabulary of bytes whose words are split as GGUF files say."""
    inner = byte_level()
    splits = [pre_tokenizers.Split(Regex(one), "isolated") for one in expressions]
    inner.pre_tokenizer = pre_tokenizers.Sequence([*splits, pre_tokenizers.ByteLevel(False, use_regex=False)])
    inner.normalizer = normalizers.NFC()
    inner.add_tokens([AddedToken("<|im_start|>", normalized=False), AddedToken("<|im_end|>", normalized=False)])
    return inner


def llama2(scheme: str | None) -> Inner:
    inner = sentence_pieces()
    inner.add_special_tokens([AddedToken(token, normalized=False) for token in ("<unk>", "<s>", "</s>")])
    inner.post_processor = processors.TemplateProcessing(single="<s> $A </s>", special_tokens=[("<s>", 1), ("</s>", 2)])
    if scheme is not None:
        inner.normalizer = None
        inner.pre_tokenizer = pre_tokenizers.Metaspace("▁", prepend_scheme=scheme, split=False)
    return inner


def word_pieces() -> Inner:
    inner = Inner(models.WordPiece(unk_token="<unk>"))
    inner.normalizer = normalizers.BertNormalizer()
    inner.pre_tokenizer = pre_tokenizers.BertPreTokenizer()
    inner.train_from_iterator(CORPUS, trainers.WordPieceTrainer(
        vocab_size=300, special_tokens=["<unk>", "[CLS]"], show_progress=False))
    inner.post_processor = processors.TemplateProcessing(single="[CLS] $A", special_tokens=[("[CLS]", 1)])
    return inner


def unigrams() -> Inner:
    inner = Inner(models.Unigram([("<unk>", 0.0), ("▁", -2.0), ("the", -3.0), ("▁the", -3.5),
                                  *((one, -4.0) for one in "theFoxrun.\n")], 0))
    inner.pre_tokenizer = pre_tokenizers.Metaspace()
    inner.add_special_tokens(["</s>"])
    return inner


def awkward(*tokens: AddedToken) -> Callable[[], Inner]:
    """Added tokens that may be matched across what looks like a boundary."""
    def made() -> Inner:
        inner = byte_level()
        inner.add_tokens(list(tokens))
        return inner
    return made


KINDS: dict[str, Callable[[], Inner]] = {
    "smollm2": lambda: Tokenizer.load(find()).inner, "built-in": lambda: Tokenizer.load(builtin.path()).inner,
    "gpt2": lambda: split_by(GPT2), "llama3": lambda: split_by(LLAMA3), "smollm": lambda: split_by(DIGIT, GPT2),
    "qwen35": lambda: split_by(QWEN35), "gpt-4o": lambda: split_by(GPT4O), "deepseek3": lambda: split_by(*DEEPSEEK3),
    "deepseek-coder": lambda: split_by(*DEEPSEEK_CODER), "falcon": lambda: split_by(*FALCON),
    "byte level": byte_level, "metaspace": metaspace, "llama2": lambda: llama2(None),
    "first": lambda: llama2("first"), "always": lambda: llama2("always"), "word pieces": word_pieces,
    "unigrams": unigrams,
    "straddling": lambda: split_by(r"\n[a-z]", GPT2),
    "overlapping": awkward(AddedToken("the<s>", normalized=False), AddedToken("s><|im_start|>", normalized=False)),
    "single word": awkward(AddedToken("<|im_end|>", single_word=True, normalized=False)),
    "spaces": awkward(AddedToken("<|im_start|>", lstrip=True, normalized=False),
                      AddedToken("<|im_end|>", rstrip=True, normalized=False), AddedToken("Fox", lstrip=True)),
    "over lines": awkward(AddedToken(".\nthe", normalized=False), AddedToken("\n\n", normalized=False)),
}
FEW = dict.fromkeys(("straddling", "overlapping", "spaces", "over lines"),
                    ("the", "\n", ".", "<s>", "<|im_start|>", "<|im_end|>", "  ", "Fox"))
WITHOUT = {"single word"}  # tokenizers whose texts cannot be cut anywhere
"""Of the others, all are cut before special tokens, or lines, or both."""


@pytest.mark.parametrize("kind", KINDS)
def test_tokens_are_those_of_the_whole_text(kind: str) -> None:
    inner, rng = KINDS[kind](), random.Random(7)
    boundaries = Boundaries(inner)
    assert boundaries.exist is (kind not in WITHOUT)
    if not boundaries.exist:
        return
    cache, texts, known = TokenCache(boundaries, segment=6, max_bytes_of_one=200_000), [""], 0
    for _ in range(CUTS):
        before = rng.choice(texts[-20:])
        kept = before[: rng.randrange(len(before) + 1)] if len(before) < 300 else ""
        texts.append(kept + "".join(rng.choices(FEW.get(kind, PARTS), k=rng.randrange(1, 40))))
    for text, whole in zip(texts, inner.encode_batch(texts), strict=True):
        missing = cache.missing("a", text)
        known += bool(missing.ids)
        assert "".join(missing.segments) == text[len(text) - sum(map(len, missing.segments)) :]
        ids = cache.add("a", missing, [
            inner.encode(segment, add_special_tokens=False).ids for segment in missing.segments])
        assert [*boundaries.before, *ids, *boundaries.after] == whole.ids, text
    assert known > CUTS // 50


MARKED = st.lists(st.text("ab<>[ ", min_size=1, max_size=5), min_size=1, max_size=8, unique=True)


@settings(max_examples=200, deadline=None)
@given(MARKED, st.text("ab<>[ ", max_size=30))
def test_added_tokens_are_boundaries_that_no_other_reaches_into(contents: list[str], text: str) -> None:
    inner = byte_level()
    inner.add_tokens([AddedToken(content, normalized=False) for content in contents])
    added = list(inner.get_added_tokens_decoder().values())

    def is_reached(content: str) -> bool:
        return any(before.content.startswith(content, start) or content.startswith(before.content[start:])
                   for before in added for start in range(1, len(before.content)))

    expected = [token.content for token in added if not token.normalized and not token.content[0].isspace()
                and not is_reached(token.content)]
    assert [one for one in _dividing(added, inner) if one in contents] == [one for one in expected if one in contents]
    if expected:
        assert [found.start() for found in re.finditer(f"(?={_any_of(expected)})", text)] == [
            place for place in range(len(text)) if text.startswith(tuple(expected), place)]


def test_thousands_of_added_tokens_take_as_long_each_as_hundreds() -> None:
    """Gemma 3 has 6,415, of which 6,242 begin alike."""
    seconds = []
    for count in (300, 6000):
        inner = byte_level()
        inner.add_special_tokens([*[f"<unused{number}>" for number in range(count)], "[multimodal]", "<eos>"])
        began = time.process_time()
        boundaries = Boundaries(inner)
        seconds.append((time.process_time() - began) / count)
        began = time.process_time()
        assert boundaries._mark is not None and boundaries._mark.search("<" * 100_000 + "<unused7>") is not None
        seconds.append(time.process_time() - began)
    assert seconds[2] < 4 * seconds[0] + 1e-4 and seconds[3] < 4 * seconds[1] + 0.05


def test_a_turn_is_encoded_alone_and_what_was_not_used_goes_first() -> None:
    inner = byte_level()
    cache = TokenCache(Boundaries(inner), segment=8, max_bytes=30_000, max_bytes_of_one=20_000)

    def sent(holder: str, text: str) -> list[str]:
        missing = cache.missing(holder, text)
        cache.add(holder, missing, [inner.encode(one, add_special_tokens=False).ids for one in missing.segments])
        return missing.segments

    turns = ["<s>first question", "</s>and an answer", "<s>second question"]
    assert sent("a", "".join(turns[:2])) == turns[:2]
    assert sent("a", "".join(turns)) == turns[1:]
    assert sent("a", "".join(turns)) == turns[2:]
    assert sent("b", "".join(turns)) == turns  # another client's
    for number in range(100):
        sent("a", "<s>first question" + f"</s>{number} is another answer<s>{number}<s>" * 3)
        assert cache.num_bytes <= 30_000
    assert sent("a", "<s>first question</s>99") == ["</s>99"]  # what stands before all of them was used last
    assert sent("a", "".join(turns)) == turns[1:]
    assert sent("b", "".join(turns)) == turns[2:]
    for holder in range(100):
        sent(str(holder), "".join(turns))
        assert cache.num_bytes <= 30_000
    assert sent("b", "".join(turns)) == turns


def test_what_was_dropped_meanwhile_is_not_kept_below() -> None:
    inner = byte_level()
    cache = TokenCache(Boundaries(inner), segment=8, max_bytes=4_000)
    text = "<s>first question</s>and an answer<s>second question"
    for part in (text[:30], text):  # both are encoded while others come
        missing = cache.missing("a", part)
        for number in range(9):
            other = cache.missing("b", f"<s>number {number} of b</s>")
            cache.add("b", other, [inner.encode(one, add_special_tokens=False).ids for one in other.segments])
        ids = cache.add("a", missing, [inner.encode(one, add_special_tokens=False).ids for one in missing.segments])
        assert ids == inner.encode(part, add_special_tokens=False).ids
        assert 0 < cache.num_bytes <= 4_000
