"""A request's spec crosses every layer whole: what a stream may not show is left out, and what is wrong is refused."""

from __future__ import annotations

from dataclasses import fields

import msgspec
import pytest

from slotwise.core.params import REGEX, Grammar, SamplingSpec
from slotwise.core.record import NewRequest
from slotwise.core.request import KVTransfer, Output, RequestSpec
from slotwise.core.scheduler_limits import SLO

SECRET = RequestSpec(
    (7, 8), SamplingSpec(grammar=Grammar(REGEX, "pepper"), max_tokens=5), 3, "alice:salt",
    SLO("alice", "gold", 4), adapter=2, adapter_name="poet", kv=KVTransfer("key", True, 1.0, "10.0.0.1", 9),
    prediction=(9, 9), forced_length=4, queue_timeout=1.5, stop_lengths=(300,))


def test_a_stream_shows_neither_texts_nor_whose_they_are() -> None:
    shown = SECRET.public()
    told = msgspec.json.encode(shown)
    assert not any(secret in told for secret in (b"pepper", b"alice", b"10.0.0.1", b"[7,8]", b"[9,9]"))
    hidden = {"prompt", "params", "salt", "slo", "kv", "prediction"}
    for name in {one.name for one in fields(SECRET)} - hidden:
        assert getattr(shown, name) == getattr(SECRET, name), name
    assert (shown.slo.tier, shown.slo.priority, shown.params.max_tokens) == ("gold", 4, 5)
    assert SECRET.without_texts().salt == SECRET.salt and SECRET.without_texts().slo == SECRET.slo


@pytest.mark.parametrize("kind", [msgspec.json, msgspec.msgpack])
def test_it_is_encoded_whole(kind: object) -> None:
    assert kind.decode(kind.encode(SECRET), type=RequestSpec) == SECRET  # type: ignore[attr-defined]


def test_a_list_that_changes_later_changes_no_prompt() -> None:
    ids = [1, 2]
    spec = RequestSpec(ids, SamplingSpec())  # type: ignore[arg-type]
    ids.append(3)
    assert spec.prompt == (1, 2)


@pytest.mark.parametrize("name", ["adapter", "forced_length", "queue_timeout"])
def test_what_is_wrong_is_named(name: str) -> None:
    with pytest.raises(ValueError, match=name):
        RequestSpec((1,), SamplingSpec(), **{name: -1})


def test_after_a_preemption_a_request_has_its_output() -> None:
    joins = NewRequest(0, 1, RequestSpec((1, 2), SamplingSpec(prompt_logprobs=0)), ())
    assert joins.tokens is joins.spec.prompt and joins.num_prompt == 2  # no copy
    again = joins._replace(sampled=(5,))
    assert again.tokens == (1, 2, 5) and again.num_prompt == 2 and again.spec.output is Output.PROMPT_LOGPROBS
