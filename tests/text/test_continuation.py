"""Stop strings that spell special tokens, which have no text of their own."""

from __future__ import annotations

import pytest
from tokenizers import AddedToken, decoders, models, pre_tokenizers
from tokenizers import Tokenizer as Inner

from slotwise.text.stop_strings import Continuation, VisibleTokens
from slotwise.text.tokenizer import Tokenizer

END, START = "<|im_end|>", "<|im_start|>"


@pytest.fixture(scope="module")
def tokenizer() -> Tokenizer:
    """One token a byte, and two special ones."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    inner = Inner(models.BPE(vocab={symbol: index for index, symbol in enumerate(alphabet)}, merges=[]))
    inner.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    inner.decoder = decoders.ByteLevel()
    inner.add_special_tokens([AddedToken(END, special=True), AddedToken(START, special=True)])
    return Tokenizer(inner)


def spelled(tokenizer: Tokenizer, text: str) -> list[int]:
    """The tokens of a text that has no special ones, whatever it spells."""
    return [token for character in text for token in tokenizer.encode(character, add_special_tokens=False)]


@pytest.mark.parametrize(("stops", "output", "expected", "reason"), [
    ([START], f"Hi.{START}user", "Hi.", START),
    ([f"{START}user"], f"Hi.{START}user", "Hi.", f"{START}user"),
    ([f"{START}user"], f"Hi.{START}assistant", "Hi.assistant", None),
    (["\n" + START], f"Hi.\n{START}", "Hi.", "\n" + START),
    (["\n" + START], f"Hi.{START}", "Hi.", None),
    ([END + START], f"a{END}b{END}{START}c", "ab", END + START),
    ([START], f"é{END}é{START}", "éé", START),
    (["|", "im", ">"], f"a{START}b", "ab", None),  # what no text shows is not found by its parts
    (["b", START], f"a{START}b", "a", START)])
def test_a_stop_string_that_spells_a_special_token_ends_where_that_is_generated(
        tokenizer: Tokenizer, stops: list[str], output: str, expected: str, reason: str | None) -> None:
    ids = tokenizer.encode(output, add_special_tokens=False)
    for size in (1, 2, len(ids)):
        continuation = Continuation(tokenizer, [], stops)
        text = "".join(continuation.read(ids[at : at + size], None)[0] for at in range(0, len(ids), size))
        text += continuation.end()
        assert (text, continuation.stop_reason) == (expected, reason)


def test_the_same_spelled_by_ordinary_tokens_ends_it_too(tokenizer: Tokenizer) -> None:
    continuation = Continuation(tokenizer, [], [START])
    assert continuation.feed(spelled(tokenizer, f"Hi.{START}user")) == "Hi." and continuation.stop_reason == START


def test_the_models_end_token_completes_a_stop_string(tokenizer: Tokenizer) -> None:
    ids = tokenizer.encode(f"Hi.{END}", add_special_tokens=False)
    continuation = Continuation(tokenizer, [], ["." + END])
    assert continuation.read(ids, "stop") == ("Hi", len(ids)) and continuation.stop_reason == "." + END


@pytest.mark.parametrize("shown", [VisibleTokens(stop=True), VisibleTokens(stop=True, special=True)])
def test_it_is_shown_where_stop_strings_are(tokenizer: Tokenizer, shown: VisibleTokens) -> None:
    ids = tokenizer.encode(f"Hi.{START}user", add_special_tokens=False)
    continuation = Continuation(tokenizer, [], [START], shown=shown)
    assert continuation.feed(ids) == f"Hi.{START}" and continuation.num_tokens == 4


def test_before_the_least_number_of_tokens_it_ends_nothing(tokenizer: Tokenizer) -> None:
    ids = tokenizer.encode(f"a{START}b{START}c", add_special_tokens=False)
    continuation = Continuation(tokenizer, [], [START], min_tokens=3)
    assert continuation.feed(ids) == "ab" and continuation.stop_reason == START


def test_a_token_that_a_parser_reads_is_found_and_stays_in_its_text(tokenizer: Tokenizer) -> None:
    marks = {tokenizer.special_by_text[START]: "\udc00"}
    ids = tokenizer.encode(f"a{START}b{START}c{END}", add_special_tokens=False)
    continuation = Continuation(tokenizer, [], [f"{START}c"], shown=VisibleTokens(marks=marks))
    assert continuation.feed(ids) == "a\udc00b" and continuation.stop_reason == f"{START}c"
