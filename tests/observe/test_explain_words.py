"""The sentence of an explanation: every part and every reason has words, and the largest part comes first."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any, cast

import pytest

from slotwise.core import reasons
from slotwise.core.params import SamplingSpec
from slotwise.core.request import RequestSpec
from slotwise.observe.explain import PARTS, Explanation, Span
from slotwise.observe.explain_words import BECAUSE, sentence
from slotwise.observe.request_timeline import STEP_UNDER_WAY, RequestTimeline

MS = 1_000_000


def explanation(*spans: tuple[str, str, int], ended: bool = True, cached: int = 0, drafts: tuple[int, int] = (0, 0),
                num_received: int = 0) -> Explanation:
    """Args: spans: each a part, a reason and its milliseconds."""
    request = SimpleNamespace(num_prompt=100, spec=RequestSpec((), SamplingSpec()))
    timeline: Any = SimpleNamespace(request=request, num_output=7, num_received=num_received, ended=ended)
    return Explanation(cast(RequestTimeline, timeline), tuple([
        Span(part, reason, ms * MS, index) for index, (part, reason, ms) in enumerate(spans)]), cached, 0, *drafts)


def test_every_reason_has_words() -> None:
    assert BECAUSE.keys() == {*[value for name, value in vars(reasons).items() if name.isupper()], STEP_UNDER_WAY}


@pytest.mark.parametrize("part", PARTS)
def test_every_part_has_words(part: str) -> None:
    assert sentence(explanation((part, "", 5))).startswith("It took 5.0 ms: 5.0 ms ")


def test_the_largest_part_comes_first_and_small_ones_together() -> None:
    said = sentence(explanation(("tokenizing", "", 1), ("queue", reasons.NO_SLOT, 300), ("prefill", "", 100),
                                ("decode", "", 1600), ("sending", "", 2), cached=96))
    assert said == ("It took 2.00 s: 1.60 s computing 7 tokens of output; 300 ms waiting for a slot, because all slots "
                    "were taken; 100 ms computing 4 tokens of the prompt (the other 96 were in the cache); and 3.0 ms "
                    "for everything else.")


def test_tokens_that_another_engine_computed_are_not_computed_here() -> None:
    assert sentence(explanation(("prefill", "", 5), num_received=99)) == (
        "It took 5.0 ms: 5.0 ms computing 1 token of the prompt (the other 99 had been computed by another engine).")
    assert "(the other 16 were in the cache and 80 had been computed by another engine)" in sentence(
        explanation(("prefill", "", 5), cached=16, num_received=80))


def test_a_request_under_way_and_drafts() -> None:
    said = sentence(explanation(("decode", "", 1000), ended=False, drafts=(4, 3)))
    assert said == "So far it takes 1.00 s: 1.00 s computing 7 tokens of output. 3 of 4 drafts were right."
    assert "Nothing is known" in sentence(explanation())
