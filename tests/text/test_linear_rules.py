"""Tokenizers whose rules are known to take linear time, and all others."""

from __future__ import annotations

import json
import time
from pathlib import Path
from typing import Any

import pytest
import tokenizers
from tokenizers.pre_tokenizers import Split

from slotwise import builtin
from slotwise.text.linear_rules import REGEXES, is_linear
from slotwise.text.tokenizer import Tokenizer

RUNS = ("a", "A", " ", "\n", "1", "!", "'", "日", "あ", " a", "a'", " \n", "A\u0301", "!\r")
HOSTILE: dict[str, dict[str, Any]] = {
    "a split": {"pre_tokenizer": {"type": "Split", "pattern": {"Regex": "(a|a)*b"}}},
    "a split within": {"pre_tokenizer": {"type": "Sequence", "pretokenizers": [
        {"type": "Sequence", "pretokenizers": [{"type": "Split", "pattern": {"Regex": "a*a*b"}}]}]}},
    "a replacement": {"normalizer": {"type": "Sequence", "normalizers": [
        {"type": "Replace", "pattern": {"Regex": "(a|a)*b"}, "content": ""}]}},
    "a long string": {"normalizer": {"type": "Replace", "pattern": {"String": "a" * 99_999}, "content": ""}},
    "an unknown rule": {"pre_tokenizer": {"type": "Tomorrow"}},
    "a token that strips": {"added_tokens": [{"content": "a", "lstrip": True}]},
    "long words": {"model": {"type": "WordPiece", "max_input_chars_per_word": 1 << 40, "vocab": {"a": 0}}},
    "long tokens": {"model": {"type": "Unigram", "vocab": [["a" * 99_999, -1.0]]}},
    "an unknown model": {"model": {"type": "Tomorrow"}},
}  # fmt: skip


def described() -> dict[str, Any]:
    description: dict[str, Any] = json.loads((Path(builtin.path()) / "tokenizer.json").read_text())
    return description


def test_both_families_and_the_built_in_model_are_known(tokenizers_by_family: dict[str, Tokenizer]) -> None:
    assert all(is_linear(json.loads(tokenizer.inner.to_str())) for tokenizer in tokenizers_by_family.values())
    assert Tokenizer.load(builtin.path()).slow_folder is None


def test_a_line_break_may_be_written_either_way() -> None:
    regex = next(regex for regex in REGEXES if r"[\r\n]*" in regex)
    for written in (regex, regex.replace(r"\r", "\r").replace(r"\n", "\n")):
        assert is_linear(described() | {"pre_tokenizer": {"type": "Split", "pattern": {"Regex": written}}})


@pytest.mark.parametrize("name", HOSTILE)
def test_what_may_take_any_time_is_not(name: str) -> None:
    assert is_linear(described()) and not is_linear(described() | HOSTILE[name])


@pytest.mark.parametrize("regex", sorted(REGEXES))
def test_known_regular_expressions_take_linear_time(regex: str) -> None:
    split = Split(tokenizers.Regex(regex), "isolated")

    def seconds(run: str, times: int) -> float:
        begun = time.thread_time()
        split.pre_tokenize_str(run * times + "b")
        return time.thread_time() - begun

    for run in RUNS:  # quadratic time would be 64 times as much
        short, long = (min(seconds(run, times) for _ in range(2)) for times in (1000, 8000))
        assert long < 32 * short + 0.002, run
