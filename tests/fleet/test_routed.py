"""What the door reads of a body: fields in any order, of any API, and of bodies that no replica will accept."""

from __future__ import annotations

import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

from slotwise.core.routing.prompt import PIECE
from slotwise.fleet.door import merged
from slotwise.fleet.upstream import RoutedPrompt, prompt_of

LONG = "the quick brown fox " * 40


def read(body: object, tenant: str = "", **headers: str) -> RoutedPrompt:
    content = body if isinstance(body, bytes) else json.dumps(body).encode()
    return prompt_of(content, tenant, {name.encode(): value.encode() for name, value in headers.items()})


def message(role: str, content: str) -> dict[str, str]:
    return {"role": role, "content": content}


def test_a_conversation_that_goes_on_begins_with_the_one_before() -> None:
    first = [message("system", LONG), message("user", LONG)]
    one = read({"messages": first, "temperature": 1})
    more = read({"temperature": 0, "messages": [*first, message("assistant", LONG), message("user", "and then?")]})
    assert len(one.pieces) > 4 and more.pieces[: len(one.pieces)] == one.pieces and len(more.pieces) > len(one.pieces)


@pytest.mark.parametrize("field", ["prompt", "input", "system", "instructions"])
def test_every_apis_prompt_is_read(field: str) -> None:
    one, other = read({field: LONG + "a", "max_tokens": 3}), read({field: LONG + "b", "stream": True})
    assert one.pieces and one.pieces[:3] == other.pieces[:3]
    assert len(one.pieces) == one.num_bytes // PIECE


def test_tenants_models_and_salts_share_nothing() -> None:
    body = {"prompt": LONG}
    all_pieces = [read(body), read(body, "one"), read(body, "other"), read(body | {"model": "m"}),
                  read(body | {"cache_salt": "s"})]
    assert len({prompt.pieces[0] for prompt in all_pieces}) == len(all_pieces)


def test_a_model_that_is_an_adapters_name_asks_for_it() -> None:
    body = {"prompt": LONG, "model": "poet"}
    assert read(body).request("a", 0.0, {"poet"}).adapter == "poet"
    assert read(body).request("a", 0.0, {"clerk"}).adapter == ""
    assert read({"prompt": LONG}).request("a", 0.0, {"poet", ""}).adapter == ""
    assert read(body | {"model": 7}).model == ""
    assert not {*read(body).pieces} & {*read(body | {"model": "clerk"}).pieces}


def test_a_session_is_the_headers_or_a_hint_of_the_body() -> None:
    assert read({"prompt": "x"}).session == ""
    assert read({"prompt": "x", "prompt_cache_key": "k"}, "t").session == "t:k"
    assert read({"prompt": "x", "session_id": "s", "prompt_cache_key": "k"}).session == ":s"
    assert read({"prompt": "x", "session_id": "s"}, **{"x-session-id": "h"}).session == ":h"
    assert read({"prompt": "x", "session_id": 7}).session == ""


@given(st.binary(max_size=60) | st.recursive(
    st.none() | st.integers() | st.text(), lambda inner: st.lists(inner) | st.dictionaries(st.text(), inner)))
def test_any_body_is_read_or_left_to_the_replica(body: object) -> None:
    prompt = read(body)
    assert prompt.num_bytes >= 0 and prompt.request("a", 0.0, ()).num_tokens >= 1


def test_a_body_that_is_nested_without_end_is_left_to_the_replica() -> None:
    assert read(b'{"prompt": ' + b"[" * 100_000).pieces == ()


def test_the_metrics_of_replicas_are_one_exposition() -> None:
    one = '# HELP a Of a.\n# TYPE a counter\na 1\n# HELP b Of b.\n# TYPE b histogram\nb_bucket{le="1"} 2\nb_sum 3\n'
    assert merged([("0", one), ("1", one)]) == (
        '# HELP a Of a.\n# TYPE a counter\na{replica="0"} 1\na{replica="1"} 1\n# HELP b Of b.\n# TYPE b histogram\n'
        'b_bucket{replica="0",le="1"} 2\nb_sum{replica="0"} 3\nb_bucket{replica="1",le="1"} 2\nb_sum{replica="1"} 3\n')
