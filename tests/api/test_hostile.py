"""Bodies made to cost much: each is refused for little, and a stream beside them goes on.

What a refusal costs is counted in computing time of the API process, which does not depend on what else the machine
does.  On an idle machine each of these takes under 50 ms; the bound here leaves room for slower ones.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator

import pytest
from support.canary import Canary, singing
from support.live_server import JSON, Server, counted

from slotwise.text.tokenizer import Tokenizer

COMPLETIONS, CHAT = "/v1/completions", "/v1/chat/completions"
MB = 1 << 20
COST = 0.25  # seconds of computing
DEEP = 900  # within what the decoder follows


def listed(item: str, open_with: str = "[", close_with: str = "]") -> str:
    """As many of `item` as fit a megabyte; a number counts up where it has a #."""
    count = MB // (len(item.replace("#", "100000")) + 1)
    return open_with + ",".join(item.replace("#", str(i)) for i in range(count)) + close_with


def field(name: str, value: str) -> tuple[str, bytes]:
    return COMPLETIONS, f'{{"prompt":[2],"max_tokens":1,"{name}":{value}}}'.encode()


def chat(content: str, more: str = "") -> tuple[str, bytes]:
    return CHAT, f'{{"messages":[{{"role":"user","content":{content}}}]{more}}}'.encode()


def in_field(path: str, name: str, value: str) -> tuple[str, bytes]:
    return path, f'{{"{name}":{value}}}'.encode()


def prompt(value: str | bytes) -> tuple[str, bytes]:
    return COMPLETIONS, b'{"prompt":' + (value.encode() if isinstance(value, str) else value) + b',"max_tokens":1}'


BODIES: dict[str, Callable[[], tuple[str, bytes]]] = {
    "stop strings": lambda: field("stop", listed('"x"')),
    "500,000 stop strings": lambda: field("stop", "[" + ",".join(['""'] * 500_000) + "]"),
    "a long stop string": lambda: field("stop", '"' + "x" * MB + '"'),
    "stop token ids": lambda: field("stop_token_ids", listed("5")),
    "biases": lambda: field("logit_bias", listed('"#":1', "{", "}")),
    "100,000 biases": lambda: field("logit_bias", "{" + ",".join(f'"{i}":1' for i in range(100_000)) + "}"),
    "biases of one token": lambda: field("logit_bias", listed('"1":1', "{", "}")),
    "a huge n": lambda: field("n", "9" * MB),
    "n beyond numbers": lambda: field("n", "1e999"),
    "n just too large": lambda: field("n", "129"),
    "huge logprobs": lambda: field("logprobs", "9" * MB),
    "many logprobs": lambda: field("logprobs", "1000000"),
    "a number beyond numbers": lambda: field("temperature", "1e999"),
    "minus that": lambda: field("presence_penalty", "-1e999"),
    "a long number": lambda: field("temperature", "1" * MB),
    "a long exponent": lambda: field("top_p", "1e" + "9" * MB),
    "a long seed": lambda: field("seed", "1" * MB),
    "a long salt": lambda: field("cache_salt", '"' + "s" * MB + '"'),
    "a long id": lambda: field("request_id", '"' + "r" * MB + '"'),
    "tools": lambda: chat('"x"', ',"tools":' + listed("{}")),
    "a format": lambda: chat('"x"', ',"response_format":' + listed("[[]]")),
    "variables": lambda: chat('"x"', ',"chat_template_kwargs":' + listed('"k#":1', "{", "}")),
    "arrays, open": lambda: field("x", "[" * MB),
    "arrays, closed": lambda: field("x", "[" * (MB // 2) + "]" * (MB // 2)),
    "objects, open": lambda: field("x", '{"a":' * (MB // 5)),
    "a deep bias": lambda: field("logit_bias", "[" * DEEP + "]" * DEEP),
    "deep content": lambda: chat("[" * DEEP + "]" * DEEP),
    "token ids": lambda: prompt(listed("5")),
    "empty prompts": lambda: prompt(listed("[]")),
    "short prompts": lambda: prompt(listed("[2]")),
    "short texts": lambda: prompt(listed('"a"')),
    "escaped texts": lambda: prompt(listed('"\\""')),
    "a long text": lambda: prompt('"' + "x y " * (MB // 4) + '"'),
    "surrogates": lambda: prompt('"' + "\\ud800" * (MB // 6) + '"'),
    "pairs of them": lambda: prompt('"' + "\\ud83d\\ude00" * (MB // 12) + '"'),
    "not UTF-8": lambda: prompt(b'"' + b"\xff" * MB + b'"'),
    "not UTF-8 at the end": lambda: prompt(b'"' + b"a" * MB + b'\xff"'),
    "zeros": lambda: (COMPLETIONS, b"\0" * MB),
    "spaces": lambda: (COMPLETIONS, b" " * MB),
    "keys": lambda: field("x", '1,' + listed('"k#":1', "", "") + ',"n":0'),
    "one key": lambda: field("n", "0," + listed('"prompt":[2]', "", "")),
    "messages": lambda: in_field(CHAT, "messages", listed("{}")),
    "small messages": lambda: in_field(CHAT, "messages", listed('{"role":"user","content":"x"}')),
    "parts": lambda: chat(listed('{"type":"text","text":"x"}')),
    "a long message": lambda: chat('"' + "x y " * (MB // 4) + '"'),
    "tokens": lambda: in_field("/detokenize", "tokens", listed("5")),
    "a text": lambda: in_field("/tokenize", "prompt", '"' + "x y " * (MB // 4) + '"'),
    "names": lambda: in_field("/abort_requests", "request_ids", listed('"a"')),
}


@pytest.fixture(scope="module", autouse=True)
def canary(server: Server, tokenizer: Tokenizer) -> Iterator[Canary]:
    with singing(server, tokenizer.decode(counted(40, 200))) as singer:
        yield singer
    assert singer.gap < COST


@pytest.mark.parametrize("name", BODIES)
def test_a_hostile_body_is_refused_for_little(server: Server, canary: Canary, name: str) -> None:
    path, body = BODIES[name]()
    costs: list[float] = []
    while len(costs) < 3 and min(costs, default=COST) >= COST:  # on a busy machine much of the canary's falls within it
        before = canary.computed()
        answer = server.post(path, body)
        costs.append(canary.computed() - before)
        assert answer.status_code == 400, answer.text
        error = answer.json()["error"]
        assert error["type"] == "invalid_request_error" and 0 < len(error["message"]) < 1000
    assert min(costs) < COST


def test_a_long_name_is_not_told_back(server: Server) -> None:
    answer = server.post(*field("model", '"' + "m" * 50_000 + '"'))
    assert answer.status_code == 404 and len(answer.content) < 1000


def test_a_hostile_change_of_settings(server: Server) -> None:
    for body in (listed('"k#":1', "{", "}"), '{"batching":' + "[" * MB, '{"batching":"' + "x" * MB + '"}'):
        assert server.client.put(server.url + "/admin/scheduling", content=body, headers=JSON).status_code == 413


def test_a_large_body_that_is_right_is_served(server: Server) -> None:
    """What is not known, or said again, does not count."""
    body = b'{"prompt":[2],"max_tokens":1,"note":"%b","prompt":[40],"stop":["%b"]}' % (b"x" * MB, b"\\u0041" * 1024)
    (choice,) = server.post(COMPLETIONS, body).json()["choices"]
    assert choice["text"] and choice["finish_reason"] == "length"
    message = {"role": "user", "content": [{"type": "text", "text": "x"}], "name": "n" * 100_000}
    answer = server.post(CHAT, {"messages": [message], "max_tokens": 1})
    assert answer.status_code == 200 and answer.json()["usage"]["prompt_tokens"] < 100
