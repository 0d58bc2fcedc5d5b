from __future__ import annotations

import sys
from types import FrameType
from typing import Any

from hypothesis import given
from hypothesis import strategies as st
from support.stop_automata import Automata

from slotwise.text.stop_strings import StopStrings

letters = st.text(alphabet="ab", min_size=1, max_size=6)
texts = st.lists(st.text(alphabet="abc", max_size=5), max_size=12)


def run(stops: list[str], parts: list[str]) -> tuple[list[str], str | None]:
    """What was shown after each piece, and the stop string found."""
    checker, shown = StopStrings(stops), []
    for part in parts:
        text, stop = checker.feed(part)
        shown.append(text)
        if stop is not None:
            return shown, stop
    return [*shown, checker.flush()], None


def by_definition(stops: list[str], text: str) -> tuple[str, str | None]:
    for end in range(len(text) + 1):
        found = [stop for stop in stops if text[:end].endswith(stop)]
        if found:
            longest = max(found, key=len)
            return text[: end - len(longest)], longest
    return text, None


@given(stops=st.lists(letters, max_size=4), parts=texts)
def test_the_text_ends_before_the_first_complete_stop(stops: list[str], parts: list[str]) -> None:
    shown, stop = run(stops, parts)
    assert ("".join(shown), stop) == by_definition(stops, "".join(parts))


@given(stops=st.lists(letters, min_size=1, max_size=4), parts=texts)
def test_only_what_could_begin_a_stop_is_held_back(stops: list[str], parts: list[str]) -> None:
    checker, shown, seen = StopStrings(stops), "", ""
    for part in parts:
        text, stop = checker.feed(part)
        shown, seen = shown + text, seen + part
        if stop is not None:
            return
        held = seen[len(shown) :]
        beginnings = [stop[:size] for stop in stops for size in range(len(stop)) if seen.endswith(stop[:size])]
        assert held == max(beginnings, key=len)


def test_a_stop_string_over_several_tokens() -> None:
    assert run(["\n\nHuman:"], ["Hello", ".\n", "\nHum", "ble", "\n\nHu", "man", ": hi"]) == (
        ["Hello", ".", "", "\n\nHumble", "", "", ""], "\n\nHuman:")


def test_without_stop_strings_everything_passes() -> None:
    assert run([], ["a", "b"]) == (["a", "b", ""], None)


def test_a_long_repetitive_stop_string_against_its_worst_text() -> None:
    """Quadratic searching would need 10**10 comparisons here."""
    stop = "a" * 1023 + "b"
    shown, found = run([stop], ["a" * 1000] * 100 + ["b"])
    assert found == stop and len("".join(shown)) == 100_000 - 1023


@given(stops=st.lists(st.text(alphabet="abé🙂", min_size=1, max_size=9), max_size=8),
       parts=st.lists(st.text(alphabet="abcé🙂", max_size=7), max_size=20), repeat=st.integers(1, 30))
def test_every_part_is_that_of_one_automaton_for_each_stop_string(stops: list[str], parts: list[str],
                                                                  repeat: int) -> None:
    stops += [stop[0] * repeat + stop for stop in stops]
    checker, automata = StopStrings(stops), Automata(stops)
    for part in parts * 3:
        checked = checker.feed(part)
        assert checked == automata.feed(part)
        if checked.stop is not None:
            break
    assert checker.flush() == automata.flush()


def num_calls(stops: list[str], parts: list[str]) -> int:
    """Functions called, of Python and of C, while the parts are fed."""
    calls = 0

    def count(frame: FrameType, event: str, argument: Any) -> None:
        nonlocal calls
        calls += event in ("call", "c_call")

    checker = StopStrings(stops)
    sys.setprofile(count)
    try:
        for part in parts:
            checker.feed(part)
    finally:
        sys.setprofile(None)
    return calls


def test_many_stop_strings_take_no_more_steps_than_one() -> None:
    stops = ["a" * 1023 + chr(200 + i) for i in range(64)]
    parts = (["aaaa"] * 300 + ["b"]) * 2
    assert num_calls(stops, parts) < 2 * num_calls(stops[:1], parts) < 40 * len("".join(parts))
