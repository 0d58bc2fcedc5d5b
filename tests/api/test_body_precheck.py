"""What it costs to read the largest bodies, generated: every shape of junk in every field.

The costs are counted, not timed: the memory of all that is built, as a ratio to that of a body of the same size that is
right, a prompt of token ids; and calls of functions.
"""

from __future__ import annotations

import json
import sys
import tracemalloc
from collections.abc import Callable
from functools import cache
from itertools import zip_longest
from typing import NamedTuple

import pytest

from slotwise.api.http.api_errors import ApiError
from slotwise.api.limits.bodies import unknown_fields
from slotwise.api.limits.server_settings import ServerSettings
from slotwise.api.protocol.admin_protocol import AbortRequest, DetokenizeRequest, TokenizeRequest
from slotwise.api.protocol.decoding import MAX_ELEMENTS, decode, decode_object
from slotwise.api.protocol.protocol import ChatRequest, CompletionRequest

LARGEST = ServerSettings("toy").max_body_bytes
LARGE = LARGEST // 4  # already far above what the look at a body's shape costs
MOST = 2.5  # times the memory of the body that is right; 3 to 8 times without a look at a body's shape
MOST_CALLS = 40 * MAX_ELEMENTS  # and returns


def filled(item: str, opening: str = "[", closing: str = "]", first: str = "") -> Callable[[int], str]:
    """As many of `item` as fit; a number counts up where it has a #."""
    def build(size: int) -> str:
        count = max(1, (size - len(first) - 2) // (len(item.replace("#", "1000000")) + 1))
        items = [item.replace("#", str(1_000_000 + i)) for i in range(count)] if "#" in item else [item] * count
        return opening + first + ",".join(items) + closing
    return build


def repeated(item: str, opening: str = "", closing: str = "") -> Callable[[int], str]:
    return lambda size: opening + item * ((size - len(opening) - len(closing)) // len(item)) + closing


SHAPES: dict[str, Callable[[int], str]] = {
    "lists": filled("[]"), "objects": filled("{}"), "nested lists": filled("[[],[[]]]"), "digits": filled("5"),
    "texts": filled('"a"'), "empty texts": filled('""'), "nothings": filled("null"), "fractions": filled("1.5"),
    "a text, then lists": filled("[]", first='"a",'), "a text, then objects": filled("{}", first='"a",'),
    "a list, then texts": filled('"a"', first="[2],"), "lists of ids": filled("[2]"), "tiny objects": filled('{"a":1}'),
    "keys": filled('"k#":1', "{", "}"), "one key": filled('"k":[]', "{", "}"),
    "deep lists": repeated("["), "deep objects": repeated('{"a":'),
    "many as deep as they may be": filled("[" * 400 + "]" * 400), "a huge number": repeated("9"),
    "a long exponent": repeated("9", "1e"), "huge numbers": filled("9" * 19),
    "escapes": repeated("\\u00e9", '"', '"'), "pairs": repeated("\\ud83d\\ude00", '"', '"'),
    "quotes": repeated('\\"', '"', '"'), "backslashes": filled('"\\\\"'),
    "brackets in a text": repeated("[],{", '"', '"'),
    "roles": filled('{"role":"user","content":"x"}'), "parts": filled('{"type":"text","text":"x"}'),
    "messages of a part": filled('{"content":[{"text":"%s"}]}' % ("x" * 1000)),
    "wrong parts": filled('{"content":[[],[],[],[]]}'),
}
COMPLETION, CHAT = '{"prompt":[2],"max_tokens":1,%s}', '{"messages":[{"role":"user","content":"x"}],%s}'
MESSAGE = '{"messages":[{"role":"user",%s}]}'
PLACES: dict[str, tuple[str, str]] = {
    "prompt": ("completion", '{"prompt":%s}'),
    **{name: ("completion", COMPLETION % f'"{name}":%s') for name in (
        "stop", "stop_token_ids", "logit_bias", "response_format", "n", "temperature", "unknown", "stream_options",
        "bench_output_tokens", "user")},
    "said again": ("completion", '{"prompt":%s,"prompt":[2]}'),
    "messages": ("chat", '{"messages":%s}'), "message": ("chat", '{"messages":[%s]}'),
    "content": ("chat", MESSAGE % '"content":%s'), "junk": ("chat", MESSAGE % '"content":"x","junk":%s'),
    "name": ("chat", MESSAGE % '"name":%s,"content":"x"'),
    "content again": ("chat", MESSAGE % '"content":%s,"content":""'),
    "part": ("chat", MESSAGE % '"content":[%s]'),
    "part's junk": ("chat", MESSAGE % '"content":[{"type":"text","text":"x","junk":%s}]'),
    "part's content": ("chat", MESSAGE % '"content":[{"type":"text","content":%s}]'),
    "tools": ("chat", CHAT % '"tools":%s'), "variables": ("chat", CHAT % '"chat_template_kwargs":%s'),
    "tokenize": ("tokenize", '{"prompt":%s}'), "tokenized messages": ("tokenize", '{"messages":[{"role":%s}]}'),
    "detokenize": ("detokenize", '{"tokens":%s}'), "abort": ("abort", '{"request_ids":%s}'),
    "abort one": ("abort", '{"request_id":%s}'), "abort junk": ("abort", '{"request_id":"x","junk":%s}'),
}
READ: dict[str, Callable[[bytes], object]] = {
    "completion": lambda body: (decode(CompletionRequest, body), unknown_fields(CompletionRequest, body)),
    "chat": lambda body: (decode(ChatRequest, body), unknown_fields(ChatRequest, body)),
    "tokenize": lambda body: decode(TokenizeRequest, body), "detokenize": lambda body: decode(DetokenizeRequest, body),
    "abort": lambda body: decode(AbortRequest, body).names(),
}


class Cost(NamedTuple):
    memory: int  # bytes, of what there was at once: a decoder releases nothing before it ends
    calls: int  # of functions of Python and C, and returns


def cost(read: Callable[[bytes], object], body: bytes) -> Cost:
    calls = 0

    def count(frame: object, event: str, argument: object) -> None:
        nonlocal calls
        calls += 1

    tracemalloc.start()
    sys.setprofile(count)
    try:
        read(body)
    except ApiError as error:
        assert 400 <= error.status < 500 and len(error.message) < 1000
    finally:
        sys.setprofile(None)
        _, memory = tracemalloc.get_traced_memory()
        tracemalloc.stop()
    return Cost(memory, calls)


@cache
def right() -> int:
    """Memory of the largest body that is right."""
    return cost(READ["completion"], ('{"prompt":' + filled("5")(LARGEST - 12) + "}").encode()).memory


def assert_costs_little(place: str, shape: str, size: int) -> None:
    kind, frame = PLACES[place]
    body = (frame % SHAPES[shape](size - len(frame) - 2)).encode()
    assert size * 0.9 < len(body) <= size
    found = cost(READ[kind], body)
    assert found.memory < MOST * right() * size / LARGEST and found.calls < MOST_CALLS, (place, shape)


@pytest.mark.parametrize("place", PLACES)
def test_no_body_costs_much_more_than_one_that_is_right(place: str) -> None:
    for shape in SHAPES:
        assert_costs_little(place, shape, LARGE)


@pytest.mark.parametrize(("place", "shape"), [*zip_longest(PLACES, SHAPES, fillvalue="prompt")])
def test_nor_does_the_largest(place: str, shape: str) -> None:
    """Each shape and each place once: what grew faster than the body would show here."""
    assert_costs_little(place, shape, LARGEST)


@pytest.mark.parametrize("item", ['"k#":1', '"n":1', '"prompt":[2]', '"#":[]'])
def test_nor_do_many_fields(item: str) -> None:
    found = cost(READ["completion"], filled(item, "{", "}")(LARGEST).encode())
    assert found.memory < MOST * right() and found.calls < MOST_CALLS


@pytest.mark.parametrize("shape", SHAPES)
def test_nor_does_a_change_of_settings(shape: str) -> None:
    found = cost(decode_object, b'{"tiers":%b}' % SHAPES[shape](64 << 10).encode())
    assert found.memory < MOST * right() and found.calls < MOST_CALLS


def test_what_is_right_is_taken_however_large() -> None:
    text = '[],{"a":[1,2]},' * 20_000
    mixed = decode(CompletionRequest, json.dumps({"prompt": [text, [2, 3], "x\\", '"'] * 8}).encode())
    assert mixed.prompt == [text, [2, 3], "x\\", '"'] * 8
    prompts = ["a" * 30] * MAX_ELEMENTS
    assert decode(CompletionRequest, json.dumps({"prompt": prompts}).encode()).prompt == prompts
    parts = [{"type": "text", "text": text}, {"type": "text", "text": "x"}]
    calls = [{"id": "1", "type": "function", "function": {"name": "f", "arguments": text}}]
    messages = [{"role": "user", "content": text}, {"role": "assistant", "content": None, "tool_calls": calls},
                {"role": "user", "content": parts}, {"role": "tool", "content": "", "name": "n" * 100_000}]
    assert decode(ChatRequest, json.dumps({"messages": messages}).encode()).messages == messages
    names = ["é" * 20] * MAX_ELEMENTS
    assert decode(AbortRequest, json.dumps({"request_ids": names}).encode()).names() == names


@pytest.mark.parametrize(("kind", "body", "param"), [
    ("completion", {"prompt": ["a" * 30] * (MAX_ELEMENTS + 1)}, "prompt"),
    ("completion", {"prompt": ["a", *[[]] * 50_000]}, "prompt"),
    ("chat", {"messages": [{"role": "user", "content": "x"}] * (MAX_ELEMENTS + 1)}, "messages"),
    ("chat", {"messages": [{"role": "user", "content": [{"type": "text", "text": "x"}] * 3000}] * 2}, "messages"),
    ("chat", {"messages": [{"role": "user", "content": "x", "junk": [[]] * 140_000}]}, "messages"),
    ("abort", {"request_ids": ["a" * 30] * (MAX_ELEMENTS + 1)}, "request_ids"),
])
def test_what_is_too_much_is_named(kind: str, body: dict[str, object], param: str) -> None:
    with pytest.raises(ApiError) as caught:
        READ[kind](json.dumps(body, separators=(",", ":")).encode())
    assert caught.value.status == 400 and caught.value.param == param
