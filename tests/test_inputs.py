"""Forms of prompts."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from slotwise.offline.inputs import UNSUPPORTED, ParsedPrompt, as_batch, parsed


@pytest.mark.parametrize(("prompts", "count"), [
    ("a", 1), (["a", "b"], 2), ([1, 2], 1), ([[1, 2], [3]], 2), ({"prompt": "a"}, 1), ([{"prompt": "a"}, "b", [1]], 3),
    ([], 0), (np.array([1, 2]), 1), ((1, 2), 1), ([np.int64(5), np.int64(6)], 1), ([[]], 1)])
def test_one_prompt_and_many(prompts: Any, count: int) -> None:
    assert len(as_batch(prompts)) == count


@pytest.mark.parametrize(("prompt", "found"), [
    ("a", ParsedPrompt("a", None)), ("", ParsedPrompt("", None)), ((1, 2), ParsedPrompt(None, [1, 2])),
    (np.array([3]), ParsedPrompt(None, [3])), ({"prompt": "a", "cache_salt": "s"}, ParsedPrompt("a", None, "s")),
    ({"prompt_token_ids": [1]}, ParsedPrompt(None, [1])),
    ({"prompt": None, "prompt_token_ids": [1]}, ParsedPrompt(None, [1])),
    ({"prompt": "a", "prompt_token_ids": [1], "cache_salt": None}, ParsedPrompt("a", [1])),
    ({"prompt": "a", "multi_modal_data": None, "mm_processor_kwargs": {}}, ParsedPrompt("a", None))])
def test_a_prompt_is_read(prompt: Any, found: ParsedPrompt) -> None:
    assert parsed(prompt) == found


@pytest.mark.parametrize("name", UNSUPPORTED)
def test_other_media_are_refused_by_name(name: str) -> None:
    with pytest.raises(ValueError, match=f"{name} is not supported: a prompt is a text or token ids"):
        parsed({"prompt": "a", name: {"image": object()}})
    assert parsed({"prompt": "a", name: None}) == ParsedPrompt("a", None)


@pytest.mark.parametrize(("prompt", "says"), [
    ({}, "needs prompt or prompt_token_ids"), ({"promt": "a"}, "no 'promt'; did you mean prompt?"),
    ({"text": "a"}, "it needs prompt or prompt_token_ids"), ({"prompt": 5}, "prompt must be a text, not 5"),
    ({"prompt": "a", "cache_salt": 5}, "cache_salt must be a text"), ({5: "a", "prompt": "b"}, "no 5"),
    (5, "a prompt must be a list of token ids, not 5"), (b"ab", "must be a list"), ([1, True], r"a prompt\[1\]"),
    (["a", "b"], r"a prompt\[0\] must be a token id"), ({"prompt_token_ids": "ab"}, "prompt_token_ids must be a list")])
def test_anything_else_is_refused(prompt: Any, says: str) -> None:
    with pytest.raises(ValueError, match=says):
        parsed(prompt)
