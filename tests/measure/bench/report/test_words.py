"""What the report says: numbers for people, and sentences that follow from them."""

from __future__ import annotations

from typing import Any

import pytest
from support.report_pages import RESULT, text_of, with_runs

from slotwise.measure.bench.report import data, words
from slotwise.measure.bench.report.comparison_page import render


@pytest.mark.parametrize(("value", "text"), [
    (0, "0"), (0.04561, "0.0456"), (1.7, "1.70"), (9.996, "10.0"), (12.34, "12.3"), (1234.5, "1,230"),
    (4_567_000, "4.57 M"), (None, "–"), (-2.5, "-2.50")])
def test_figures_have_three_digits(value, text):
    assert words.figure(value) == text


@pytest.mark.parametrize(("value", "text"), [
    (0, "0 s"), (0.000412, "412 µs"), (0.0310, "31.0 ms"), (0.9999, "1.00 s"), (1.234, "1.23 s"), (246, "4.10 min"),
    (9000, "2.50 h"), (None, "–")])
def test_durations_have_the_unit_that_suits_them(value, text):
    assert words.seconds(value) == text


@pytest.mark.parametrize(("value", "text"), [
    (0, "0%"), (0.0001, "<0.1%"), (0.034, "3.4%"), (0.905, "90%"), (1, "100%"), (None, "–")])
def test_shares_are_percentages(value, text):
    assert words.share(value) == text


@pytest.mark.parametrize(("values", "write", "text"), [
    ([0.464, 0.471, 0.468], words.seconds, "464–471 ms"), ([0.9, 1.2], words.seconds, "900 ms – 1.20 s"),
    ([2.25, 2.18], words.times, "2.18–2.25×"), ([1590.4, 1630.2], words.figure, "1,590–1,630"),
    ([2.0, 2.0], words.times, ""), ([2.0], words.times, ""), ([], words.times, "")])
def test_a_range_names_its_unit_once(values, write, text):
    assert words.span(values, write) == text


def headline_of(changed: dict[str, Any]) -> str:
    return ": ".join(words.headline(data.read(changed)))


def test_the_headline_compares_continuous_with_static():
    changed = with_runs("static", "orca", "continuous")
    changed["runs"][0] |= {"output_throughput": 100.0, "ttft": {"p50": 4.2, "p99": 9.0}}
    changed["runs"][2] |= {"output_throughput": 310.0, "ttft": {"p50": 1.0, "p99": 2.0}}
    assert headline_of(changed) == (
        "Continuous batching: 3.1× the tokens per second of static, first token 4.2× sooner")


def test_the_headline_says_when_continuous_loses():
    changed = with_runs("static", "continuous")
    changed["runs"][0] |= {"output_throughput": 100.0, "ttft": {"p50": 1.0}}
    changed["runs"][1] |= {"output_throughput": 50.0, "ttft": {"p50": 3.0}}
    assert headline_of(changed) == (
        "Continuous batching: 0.50× the tokens per second of static, first token 3.0× later")


def test_one_run_is_told_without_a_factor():
    changed = with_runs("orca")
    assert "tokens per second and first token after" in headline_of(changed)
    assert "the same" not in words.conditions(data.read(changed))


def test_different_tokens_are_not_passed_over():
    assert "All gave identical tokens" in text_of(render(RESULT))
    assert "not a comparison of like with like" in text_of(render(RESULT | {"identical_tokens": False}))
    assert "was not checked" in text_of(render(RESULT | {"identical_tokens": None}))


def test_an_interrupted_comparison_says_so():
    assert "interrupted" not in text_of(render(RESULT))
    assert "The comparison was interrupted" in text_of(render(RESULT | {"interrupted": True}))
