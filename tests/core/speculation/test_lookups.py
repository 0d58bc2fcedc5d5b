"""Where drafts come from: what a lookup says is in the text it may read, and it finds its way back into that text."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from slotwise.core.speculation import suffix
from slotwise.core.speculation.lookups import NgramLookup, PredictionLookup
from slotwise.core.speculation.suffix import END, INDEXED, SuffixIndex, SuffixLookup
from slotwise.core.speculation.token_text import NOT_FOUND, TextFollower, TokenText

# Ids whose bytes are alike, so that a search in bytes finds many that begin within a token.
ALIKE = st.sampled_from((0, 1, 256, 257, 65536, 65793, 16843009))
TEXT = st.lists(ALIKE, max_size=60)
FEW = st.lists(st.integers(1, 4), min_size=1, max_size=60)


@given(TEXT, st.lists(ALIKE, min_size=1, max_size=4), st.integers(0, 60), st.integers(0, 60))
def test_a_search_finds_whole_tokens_alone(ids, pattern, begin, end):
    """It may give up where many finds begin within a token, and never gives a wrong place."""
    text, size = TokenText(ids), len(pattern)
    places = [at for at in range(begin, min(end, len(ids)) - size + 1) if ids[at : at + size] == pattern]
    assert text.rfind(pattern, begin, end) in (places[-1] if places else NOT_FOUND, NOT_FOUND)
    assert text.find(pattern, begin, end) in (places[0] if places else NOT_FOUND, NOT_FOUND)


@given(st.lists(st.integers(0, 49_151), max_size=60), st.integers(0, 59), st.integers(1, 3))
def test_a_search_finds_what_is_there(ids, at, size):
    pattern = ids[at : at + size]
    if pattern:
        text = TokenText(ids)
        assert 0 <= text.find(pattern, 0, len(ids)) <= at <= text.rfind(pattern, 0, len(ids))


@given(FEW, st.integers(1, 4), st.integers(1, 4), st.integers(1, 9))
def test_prompt_lookup_repeats_what_followed_the_longest_earlier_match(ids, low, high, most):
    shortest, longest = min(low, high), max(low, high)
    tokens, match = NgramLookup(shortest, longest).guess(TokenText(ids), most)
    best = max((size for size in range(shortest, longest + 1) for at in range(len(ids) - size)
                if ids[at : at + size] == ids[-size:]), default=0)
    if not best:
        assert not tokens
        return
    size = len(ids)
    places = [at for at in range(best, size) if ids[at - best : at] == ids[size - best :]]
    place = places[-1]
    assert match >= best and list(tokens) == ((ids[place:] * most)[:most])


@given(FEW, st.integers(1, 20))
def test_a_lookup_that_is_asked_at_every_token_agrees_with_its_text(ids, most):
    """Guesses are made of tokens that the request has, and a match says how many of its last tokens agree."""
    known, lookup = TokenText(ids[:1]), NgramLookup(2, 4)
    for at in range(1, len(ids)):
        known.extend(ids[at : at + 1])
        tokens, match = lookup.guess(known, most)
        assert len(tokens) <= most and set(tokens) <= set(ids) and match <= at


@pytest.mark.parametrize(("edited", "within"), [
    ([1, 2, 3, 4, 99, 6, 7, 8, 9, 10], 0), ([1, 2, 3, 4, 98, 99, 5, 6, 7, 8, 9, 10], 2),
    ([1, 2, 3, 4, 7, 8, 9, 10], 1), ([99, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10], 2)],
    ids=["replaced", "inserted", "left out", "inserted before all"])
def test_a_prediction_is_followed_again_behind_a_change(edited, within):
    """Args: within: wrong guesses after the change, beside that of the changed token."""
    predicted = list(range(1, 41))
    output = edited + list(range(11, 41))
    known, lookup, wrong = TokenText([50, 51]), PredictionLookup(predicted, 2), 0
    for at, token in enumerate(output):
        tokens, _ = lookup.guess(known, 4)
        if list(tokens) != output[at : at + len(tokens)] or not tokens:
            wrong += not tokens or tokens[0] != token
        known.extend([token])
    assert wrong <= 1 + within + (edited.count(98) + edited.count(99) > 1)


def test_a_prediction_that_was_lost_is_found_again():
    predicted, noise = list(range(1, 100)), [200 + at for at in range(300)]
    known, lookup = TokenText([0]), PredictionLookup(predicted, 1)
    for token in [*noise, 60, 61, 62]:
        lookup.guess(known, 8)
        known.extend([token])
    assert list(lookup.guess(known, 8).tokens) == list(range(63, 71))


@given(st.lists(st.tuples(st.sampled_from(("a", "b")), FEW), max_size=6), FEW, st.integers(1, 8))
def test_an_output_is_found_under_its_own_salt_alone(outputs, ids, most):
    index = SuffixIndex()
    for salt, output in outputs:
        index.add(salt, [token + 10 * (salt == "b") for token in output])
    for salt, alien in (("a", range(11, 15)), ("b", range(1, 5)), ("c", range(1, 15))):
        known = TokenText(ids + [token + 10 for token in ids])
        tokens, _ = SuffixLookup(index, salt).guess(known, most)
        assert set(tokens).isdisjoint(alien) and END not in tokens


def test_the_longest_match_is_followed_and_of_equal_ones_the_continuation_that_most_have():
    index = SuffixIndex()
    for output in ([1, 2, 3, 7], [1, 2, 3, 8], [1, 2, 3, 7], [5, 1, 2, 3, 9, 6], [1, 2, 3, 8], [1, 2, 3, 7]):
        index.add("", output)
    assert list(SuffixLookup(index, "").guess(TokenText([4, 1, 2, 3]), 3).tokens) == [7]
    assert SuffixLookup(index, "").guess(TokenText([5, 1, 2, 3]), 3) == (TokenText([9, 6]).ids, 4)


def test_an_index_is_bounded_in_all_and_for_each_salt(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(suffix, "GENERATION", 100)
    monkeypatch.setattr(suffix, "MAX_TOKENS", 700)
    index = SuffixIndex()
    for number in range(80):
        salt = f"s{number % 9}"
        index.add(salt, range(1, 31))
        if number % 2:
            SuffixLookup(index, salt).guess(TokenText([1, 2, 3]), 4)
        assert index.num_tokens <= 700 and all(kept.num_tokens <= 300 for kept in index._salts.values())
        assert index.num_tokens == sum(kept.num_tokens for kept in index._salts.values())
    for _ in range(40):
        index.add("late", range(30))
    assert index._salts["late"].num_tokens <= 100, "nothing was looked up"
    assert list(index._salts)[-2:] == ["s7", "late"], "the salts used last are kept"


def test_outputs_are_indexed_a_part_at_each_look_up_and_all_in_the_end():
    index, output = SuffixIndex(), list(range(5 * INDEXED))
    index.add("", output)
    looks = [SuffixLookup(index, "").guess(TokenText(output[at : at + 3]), 2).tokens for at in [INDEXED] * 4]
    assert not len(looks[0]) and list(looks[-1]) == output[INDEXED + 3 : INDEXED + 5]


def test_a_follower_gives_up_a_text_that_it_no_longer_agrees_with():
    text = TokenText(range(100))
    follower = TextFollower(text, 0)
    known = TokenText([])
    for token in range(1000, 1200):
        known.extend([token])
        follower.advance(known)
    assert follower.is_lost and not follower.guess(known, 4).tokens
